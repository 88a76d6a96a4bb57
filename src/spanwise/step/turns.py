"""Completions that hold several turns: each turn as a row of its own, and what the turns say of their completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.batch import Batch, Steps, by_turn
from spanwise.credit import restrict
from spanwise.credit.trajectories.turns import Turns
from spanwise.errors import AlignmentError, DataError
from spanwise.pipeline import Reading
from spanwise.scheme import Scheme
from spanwise.types import Credit, Spans

#: The field of a rollout function's result that says what each turn is: for each completion a list with one mapping per turn.
TURNS = "turns"


def has_turns(batch: Batch, scheme: Scheme) -> bool:
    """Whether a batch of completions is read turn by turn: the scheme needs it, or the rollouts say what each turn is.

    A method that runs over tokens takes a conversation as the one sequence that it is.
    """
    told = batch.columns.get(TURNS)
    says = told is not None and all(_is_told(turns) for turns in told)
    return "steps" in scheme.needs or (says and scheme.entry.kind != "token")


def turn_rows(batch: Batch, scheme: Scheme) -> tuple[Batch, Turns]:
    """Each turn of a batch of completions as a row, with what the rollouts say of it.

    A turn is a run of tokens that the model wrote. Where the completions have a column `turns`, its mappings become columns of the
    rows (None where a turn does not have one), and their `anchor` is the state that the turn started from; where all completions
    are one turn, a column `anchor` will do.

    Args:
        batch: of completions, or of the outputs that a rollout became (`Batch.steps`); the group of each row is that of its
            completion.
        scheme: says whether anchors are needed.

    Raises:
        DataError: the column says more or fewer turns than a completion holds, or no anchors where the method needs them.
    """
    told = batch.columns.get(TURNS)
    bare = replace(batch, columns={name: column for name, column in batch.columns.items() if name != TURNS})
    rows, turns = by_turn(bare)
    alone = bool((turns.step_s == 0).all())
    if told is None:  # a completion of one turn may say its state itself
        own = rows.columns.get("anchor") if alone else None
        flat: list[Mapping[str, Any]] = [{}] * len(turns.row_s) if own is None else [{"anchor": state} for state in own]
    else:
        _check_told(told, turns)
        flat = [one for of_completion in told for one in of_completion]
    names = dict.fromkeys(name for one in flat for name in one)
    columns = {name: [one.get(name) for one in flat] for name in names if name != "anchor"}
    anchors = [one.get("anchor") for one in flat]
    if "anchor_s" in scheme.entry.needs and all(anchor is None for anchor in anchors):
        raise DataError(
            f"Method '{scheme.method}' compares turns that start from the same state, and no turn says its own. Let what plays "
            f"them give '{TURNS}': for each completion a list with one {{'anchor': STATE}} per turn."
        )
    steps = steps_of_turns(batch.steps, turns, anchors if any(anchor is not None for anchor in anchors) else None)
    return replace(rows, columns={**rows.columns, **columns}, steps=steps), turns


def steps_of_turns(outer: Steps | None, turns: Turns, anchor_s: Any) -> Steps:
    """Where the turns of rows stand in their rollouts; `outer` says it of the rows, None: each row is a rollout.

    >>> turns = Turns(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), torch.zeros(3, 1).long(), 4)
    >>> steps = steps_of_turns(Steps(torch.tensor([5, 5]), torch.tensor([1, 0])), turns, None)
    >>> steps.trajectory_s.tolist(), steps.step_s.tolist()
    ([5, 5, 5], [3, 4, 0])
    """
    if outer is None:
        return Steps(turns.row_s, turns.step_s, anchor_s)
    count = len(turns.row_s)
    return Steps(outer.trajectory_s[turns.row_s], outer.step_s[turns.row_s] * count + turns.step_s, anchor_s)


def _is_told(turns: Any) -> bool:
    return isinstance(turns, list | tuple) and all(isinstance(one, Mapping) for one in turns)


def _check_told(told: Sequence[Any], turns: Turns) -> None:
    count_n = turns.row_s.bincount(minlength=len(told)).tolist()
    for n, (one, count) in enumerate(zip(told, count_n, strict=True)):
        if not _is_told(one):
            raise DataError(
                f"Completion {n} has {TURNS}: {one!r:.80}; write a list with one mapping per turn, {{'anchor': ...}}."
            )
        if len(one) != count:
            raise AlignmentError(
                f"Completion {n} has {len(one)} entries in '{TURNS}' and its mask has {count} runs of tokens that the model wrote; "
                f"give one entry to each turn, and let a token of the environment (mask 0) stand between two turns."
            )


def restrict_turns(spans: Spans, mask_nt: Bool[Tensor, "n t"], turns: Turns) -> Spans:
    """The spans of turns without those of completions that the trainer left out of the loss, see `spanwise.credit.restrict`."""
    mask_su = turns.take(mask_nt[:, : turns.width])
    if int(mask_su.sum()) != int(mask_nt.sum()):
        raise AlignmentError(
            f"The trainer trains on {int(mask_nt.sum())} tokens, and {int(mask_su.sum())} of them belong to a turn; its mask "
            f"changed after the turns were found."
        )
    return restrict(spans, mask_su)


def of_completions(
    value_sm: Float[Tensor, "s m"], row_s: Int[Tensor, " s"], scheme: Scheme, *, completions: int
) -> Float[Tensor, "n m"]:
    """The reward of each completion: the last one of its turns, the mean where an objective is a fact of the turn.

    >>> from spanwise import Layout, Objective
    >>> objectives = [Objective("correct", pays="all"), Objective("format", pays="all", scope="turn")]
    >>> scheme = Scheme("rloo", Layout({"all": ["answer"]}), objectives)
    >>> of_completions(torch.tensor([[0., 1.], [1., 0.], [0., 1.]]), torch.tensor([0, 0, 1]), scheme, completions=2)
    tensor([[1.0000, 0.5000],
            [0.0000, 1.0000]])
    """
    value_nm = torch.full((completions, value_sm.shape[1]), torch.nan, dtype=value_sm.dtype)
    for m, objective in enumerate(scheme.objectives):
        by_row: dict[int, list[float]] = {}
        for row, value in zip(row_s.tolist(), value_sm[:, m].tolist(), strict=True):
            if value == value:
                by_row.setdefault(row, []).append(value)
        for row, values in by_row.items():
            value_nm[row, m] = sum(values) / len(values) if objective.scope == "turn" else values[-1]
    return value_nm


def mean_credit(found: Credit, reading: Reading, row_s: Int[Tensor, " s"], *, completions: int) -> tuple[Credit, Tensor]:
    """The credit of each completion's blocks, the mean over the turns that have the block, and which blocks it has."""
    present_sk = reading.present_nk.to(found.block_nk.dtype)
    count_nk = found.block_nk.new_zeros((completions, present_sk.shape[1])).index_add(0, row_s, present_sk)
    total_nk = torch.zeros_like(count_nk).index_add(0, row_s, found.block_nk * present_sk)
    stop_n = found.stop_n.new_zeros(completions).index_add(0, row_s, found.stop_n)
    return Credit(total_nk / count_nk.clamp(min=1), stop_n, found.singleton_m, found.absent_m), count_nk > 0
