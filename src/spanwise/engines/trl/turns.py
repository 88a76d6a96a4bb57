"""Completions that hold several turns: a rollout function that plays them, each turn as a row of its own, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate.utils import gather_object
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from spanwise.batch import Batch, Steps
from spanwise.credit import restrict
from spanwise.credit.trajectories.turns import Turns
from spanwise.engines.play import Environment, play
from spanwise.engines.turns import TURNS
from spanwise.errors import AlignmentError
from spanwise.pipeline import Reading
from spanwise.scheme import Scheme
from spanwise.types import Credit, Spans


@runtime_checkable
class TurnEnvironment(Environment, Protocol):
    """An environment that says of every turn what credit needs."""

    @property
    def turns(self) -> Sequence[Mapping[str, Any]]:
        """One mapping per turn: its `anchor` (the state it started from), and whatever rewards read of it."""
        ...


def conversations(
    environment: Callable[[Any], TurnEnvironment], *, max_turn_tokens: int
) -> Callable[[list[Any], Any], dict[str, Any]]:
    """A rollout function for TRL that plays one conversation for each prompt.

    Args:
        environment: makes the environment of a prompt, such as the class `spanwise.tasks.agent.Episode`.
        max_turn_tokens: longest turn of the model.

    Returns:
        The `rollout_func` of `SpanGRPOTrainer`.
    """

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        environments = [environment(prompt) for prompt in prompts]
        model = trainer.accelerator.unwrap_model(trainer.model)
        options = {"max_turn_tokens": max_turn_tokens, "temperature": trainer.temperature}
        played = play(model, trainer.processing_class, environments, **options)
        return {
            "prompt_ids": [one.prompt_ids for one in played],
            "completion_ids": [one.completion_ids for one in played],
            "logprobs": None,
            "env_mask": [one.env_mask for one in played],
            TURNS: [list(one.turns) for one in environments],
        }

    return rollout


def gathered_turns(rows: Batch, reading: Reading, scheme: Scheme, *, completions: int, size: int, rank: int) -> Any:
    """The turns of all processes in their order, which of them are this process's own, and the groups of their rollouts.

    Processes have different numbers of turns and states may be anything, so objects are gathered and no padded table.

    Args:
        rows: the turns of this process.
        reading: of them.
        scheme: the rule.
        completions: of each process.
        size: completions per prompt; a group may lie on several processes.
        rank: of this process.

    Returns:
        The reading, the batch of groups and steps, the slice of this process's rows.
    """
    steps = rows.steps
    assert steps is not None, "the rows are turns"
    anchors = [None] * len(reading) if steps.anchor_s is None else list(steps.anchor_s)
    own = (reading.pack(), steps.trajectory_s.cpu() + rank * completions, steps.step_s.cpu(), anchors)
    parts = gather_object([own])
    table_sc, trajectory_s, step_s = (torch.cat([part[i] for part in parts]) for i in range(3))
    states = [state for part in parts for state in part[3]]
    known = any(state is not None for state in states)
    first = sum(len(part[0]) for part in parts[:rank])
    whole = Batch(trajectory_s // size, steps=Steps(trajectory_s, step_s, states if known else None))
    everyone = reading if len(parts) == 1 else Reading.unpack(table_sc, scheme)
    return everyone, whole, slice(first, first + len(reading))


def restrict_turns(spans: Spans, mask_nt: Bool[Tensor, "n t"], turns: Turns) -> Spans:
    """The spans of turns without those of completions that the trainer left out of the loss, see `spanwise.credit.restrict`.

    Raises:
        AlignmentError: a completion has other tokens in the loss than in its turns.
    """
    mask_su = turns.take(mask_nt[:, : turns.width])
    if int(mask_su.sum()) != int(mask_nt.sum()):
        raise AlignmentError(
            f"The trainer trains on {int(mask_nt.sum())} tokens, and {int(mask_su.sum())} of them belong to a turn; its mask "
            f"changed after the turns were found."
        )
    return restrict(spans, mask_su)


def put(advantages_su: Float[Tensor, "s u"], turns: Turns, *, like: Bool[Tensor, "n t"]) -> Float[Tensor, "n t"]:
    """The advantages of turns at their tokens in the trainer's completions, 0 at what lies between."""
    advantages_nt = turns.put(advantages_su, rows=len(like))
    return pad(advantages_nt, (0, like.shape[1] - turns.width))


def of_completions(
    value_sm: Float[Tensor, "s m"], row_s: Int[Tensor, " s"], scheme: Scheme, *, completions: int
) -> Float[Tensor, "n m"]:
    """What TRL logs as the reward of a completion: the last one of its turns, the mean where an objective is a fact of the turn.

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
    mean = Credit(total_nk / count_nk.clamp(min=1), stop_n, found.singleton_m, found.absent_m)
    rows = torch.arange(len(row_s), device=row_s.device)
    first_n = torch.full((completions,), len(row_s), device=row_s.device).scatter_reduce(0, row_s, rows, "amin")
    if found.adv_nm is None or bool((first_n == len(row_s)).any()):
        return mean, count_nk > 0
    whole = found.take(first_n)  # what all turns were compared with, where that is the same
    if whole.adv_nm is None or not torch.equal(whole.adv_nm[row_s], found.adv_nm):
        return mean, count_nk > 0
    told = {name: getattr(whole, name) for name in ("adv_nm", "comparison", "weight_m", "names")}
    return replace(mean, **told), count_nk > 0
