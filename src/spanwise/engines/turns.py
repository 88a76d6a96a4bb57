"""Completions that hold several turns: each turn as a row of its own, with what the rollouts say of it. Any engine's business."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from spanwise.batch import Batch, Steps, by_turn
from spanwise.credit.trajectories.turns import Turns
from spanwise.errors import AlignmentError, DataError
from spanwise.scheme import Scheme

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
        batch: of completions; the group of each row is that of its completion.
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
    steps = Steps(turns.row_s, turns.step_s, anchors if "anchor" in names else None)
    return replace(rows, columns={**rows.columns, **columns}, steps=steps), turns


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
