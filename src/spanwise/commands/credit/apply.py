"""One method over a whole rollout file: credit per block, advantages per token, strata without signal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.commands.credit.arms import Arm
from spanwise.commands.credit.score import AT_A_TIME, Marked
from spanwise.credit import advantage, assign, group_index, refine, spread
from spanwise.rollouts import RolloutTable
from spanwise.score import judged_column
from spanwise.types import Credit, Scores, Status


@dataclass(frozen=True)
class Applied:
    """What one arm credits the completions of a file with.

    Attributes:
        arm: the method.
        marked: the spans of its layout.
        credit: per block, of all completions. A method per token has the mean over the block's tokens.
        flat: advantages of a method per token, as the tokens of the table lie; None: `credit` is spread over the blocks.
        dead: objective -> share of its strata in which nobody gets any credit.
    """

    arm: Arm
    marked: Marked
    credit: Credit
    flat: np.ndarray | None
    dead: dict[str, float]

    def advantages(self, table: RolloutTable, first: int, last: int) -> Float[np.ndarray, " s"]:
        """The advantages of the tokens of the rows first..last - 1, end to end."""
        if self.flat is not None:
            return table.tokens.with_values(self.flat).slice(first, last)
        rows = slice(first, last)
        part = Credit(self.credit.block_nk[rows], self.credit.stop_n[rows], self.credit.singleton_m, self.credit.absent_m)
        spread_nt = spread(part, self.marked.spans(table, first, last), per=cast(Any, self.arm.plan.per))
        return spread_nt.numpy()[table.tokens.filled(first, last)]

    @property
    def by_block(self) -> dict[str, Float[Tensor, " n"]]:
        """The credit of each block; NaN where a completion does not have it."""
        held_nk = torch.where(self.marked.length_nk > 0, self.credit.block_nk, torch.nan)
        return {name: held_nk[:, k] for k, name in enumerate(self.marked.names)}

    @property
    def silent_n(self) -> Bool[Tensor, " n"]:
        """The completions none of whose blocks gets any credit."""
        return (self.credit.block_nk == 0).all(dim=1) & (self.credit.stop_n == 0)


def apply_arm(table: RolloutTable, arm: Arm, scores: Scores, marked: Marked, group_n: Int[Tensor, " n"]) -> Applied:
    """Turn the rewards of a file into credit, step by step: a batch is what was generated in one step.

    Args:
        table: N completions.
        arm: the method.
        scores: rewards of its objectives.
        marked: spans of its layout.
        group_n: the group of each completion.
    """
    if arm.per_token is not None:
        return _per_token(table, arm, scores, marked, group_n)
    present_nk = marked.length_nk > 0
    block_nk = torch.zeros(present_nk.shape, dtype=torch.float64)
    stop_n = torch.zeros(len(table), dtype=torch.float64)
    singleton_m = torch.zeros(len(scores.names), dtype=torch.long)
    strata = _Strata()
    for rows in steps(table.step_n):
        part = _take(scores, rows)
        credit = assign(
            part,
            group_n[rows],
            present_nk[rows],
            objectives=arm.plan.objectives,
            block_names=arm.plan.layout.names,
            estimator=arm.estimator,
            inputs={"length_n": marked.length_nk[rows].sum(dim=1)},
            **arm.options,
        )
        credit = replace(credit, stop_n=credit.stop_n.masked_fill(~present_nk[rows].any(dim=1), 0.0))  # no token carries it
        block_nk[rows], stop_n[rows] = credit.block_nk, credit.stop_n
        singleton_m += credit.singleton_m
        strata.count(arm, part, group_n[rows], credit)
    absent_m = scores.reward_nm.isnan().sum(dim=0)
    return Applied(arm, marked, Credit(block_nk, stop_n, singleton_m, absent_m), None, strata.shares())


def steps(step_n: Int[Tensor, " n"]) -> Iterator[Int[Tensor, " r"]]:
    """The rows of each step, in the order of the steps.

    >>> [rows.tolist() for rows in steps(torch.tensor([2, 1, 2]))]
    [[1], [0, 2]]
    """
    order = torch.argsort(step_n, stable=True)
    sizes = torch.unique_consecutive(step_n[order], return_counts=True)[1]
    yield from torch.split(order, sizes.tolist())


class _Strata:
    """Counts strata, and those in which nobody gets any credit, objective by objective."""

    def __init__(self) -> None:
        self.total: dict[str, int] = {}
        self.silent: dict[str, int] = {}

    def count(self, arm: Arm, scores: Scores, group_n: Tensor, credit: Credit) -> None:
        objectives = arm.plan.objectives
        if arm.plan.sum_first:
            stratum_n = torch.zeros_like(group_n) if objectives[0].baseline == "batch" else group_n
            moved_n = (credit.block_nk != 0).any(dim=1) | (credit.stop_n != 0)
            self._add(" + ".join(objective.name for objective in objectives), stratum_n, moved_n)
            return
        options = {key: arm.options[key] for key in ("leave_one_out", "min_stratum", "ddof", "eps") if key in arm.options}
        for m, objective in enumerate(objectives):
            if objective.baseline == "none":
                continue  # compared with nothing, it has no stratum
            reward_n = scores.reward_nm[:, m]
            outcome_no = torch.stack([scores.outcome(name) for name in objective.outcomes], 1) if objective.given else None
            judged = judged_column(objective)
            result = advantage(
                reward_n,
                group_n,
                baseline=objective.baseline or "group",
                outcome_no=outcome_no,
                by_outcome_n2=None if judged is None else scores.by_outcome_nmo[:, m],
                judged=judged,
                back_off=objective.back_off,
                scale=objective.scale or "none",
                **options,
            )
            stratum_n = torch.zeros_like(group_n) if objective.baseline == "batch" else group_n
            if objective.baseline in ("outcome", "blended") and outcome_no is not None:
                stratum_n = refine(group_n, outcome_no)
            held_n = ~reward_n.isnan() & (stratum_n >= 0)
            self._add(objective.name, stratum_n[held_n], result.advantage_n[held_n] != 0)

    def shares(self) -> dict[str, float]:
        return {name: self.silent[name] / total for name, total in self.total.items() if total}

    def _add(self, name: str, stratum_n: Tensor, moved_n: Tensor) -> None:
        dense_n = group_index(stratum_n)
        total = int(dense_n.max()) + 1 if len(dense_n) else 0
        moved = torch.zeros(total).index_add(0, dense_n, moved_n.float()) > 0
        self.total[name] = self.total.get(name, 0) + total
        self.silent[name] = self.silent.get(name, 0) + total - int(moved.sum())


def _take(scores: Scores, rows: Tensor) -> Scores:
    return scores.take(rows)


def _per_token(table: RolloutTable, arm: Arm, scores: Scores, marked: Marked, group_n: Tensor) -> Applied:
    """A method per token: the summed reward on the last trainable token; a token's share is 1 / tokens, as for grpo."""
    reward_n = _summed(arm, scores)
    flat = np.zeros(len(table.tokens.values), dtype=np.float32)
    for rows in steps(table.step_n):
        for part in _parts(table, rows, whole="split" in _exceptions(arm)):
            _fill(table, arm, reward_n, part, flat)
    counts = _row_sums(table, table.trainable.astype(np.float64))
    flat /= np.repeat(np.maximum(counts, 1), table.tokens.lengths).astype(np.float32)
    block_nk = torch.zeros(marked.length_nk.shape, dtype=torch.float64)
    for k in range(len(marked.names)):
        total_n = torch.from_numpy(_row_sums(table, np.where(marked.block == k, flat, 0.0).astype(np.float64)))
        block_nk[:, k] = total_n * torch.from_numpy(counts) / marked.length_nk[:, k].clamp(min=1)
    credit = Credit(
        block_nk,
        torch.zeros(len(table), dtype=torch.float64),
        torch.zeros(len(scores.names), dtype=torch.long),
        scores.reward_nm.isnan().sum(dim=0),
    )
    strata = _Strata()
    strata.count(arm, scores, group_n, credit)
    return Applied(arm, marked, credit, flat, strata.shares())


def _summed(arm: Arm, scores: Scores) -> Tensor:
    stand_in_m = torch.tensor([torch.nan if o.if_missing is None else o.if_missing for o in arm.plan.objectives]).double()
    left_out_nm = (scores.status_nm == int(Status.ABSENT)) | (scores.status_nm == int(Status.UNPARSABLE))
    return torch.where(left_out_nm, stand_in_m, scores.reward_nm).sum(dim=1)


def _exceptions(arm: Arm) -> tuple[str, ...]:
    from spanwise.credit import METHODS

    return tuple(METHODS[arm.name].exceptions)


def _parts(table: RolloutTable, rows: Tensor, *, whole: bool) -> Iterator[list[int]]:
    """Rows that are worked on together: all of a step where the method compares them, else as many as fit."""
    listed = rows.tolist()
    if whole:
        yield listed
        return
    lengths, part, widest = table.tokens.lengths, [], 0
    for n in listed:
        widest = max(widest, int(lengths[n]))
        if part and widest * (len(part) + 1) > AT_A_TIME:
            yield part
            part, widest = [], int(lengths[n])
        part.append(n)
    if part:
        yield part


def _fill(table: RolloutTable, arm: Arm, reward_n: Tensor, rows: list[int], flat: np.ndarray) -> None:
    """Run the estimator on some rows and put what it gives where their tokens lie."""
    lengths = table.tokens.lengths[rows]
    filled = np.arange(lengths.max(initial=0)) < lengths[:, None]
    places = np.concatenate([np.arange(table.tokens.offsets[n], table.tokens.offsets[n + 1]) for n in rows])

    def padded(values: np.ndarray) -> Tensor:
        out = np.zeros(filled.shape, dtype=values.dtype)
        out[filled] = values[places]
        return torch.from_numpy(out)

    mask_nt = padded(table.trainable)
    reward_nt = torch.zeros(mask_nt.shape)
    has_n = mask_nt.any(dim=1)
    last_n = mask_nt.shape[1] - 1 - mask_nt.flip(dims=(1,)).int().argmax(dim=1)
    reward_nt[has_n, last_n[has_n]] = reward_n[rows].float()[has_n]
    inputs = {"mask_nt": mask_nt} | {f"{name}_nt": padded(values) for name, values in table.token_values.items()}
    assert arm.per_token is not None, "only methods per token are run here"
    advantage_nt = arm.per_token(reward_nt, **{name: inputs[name] for name in arm.needs})
    flat[places] = advantage_nt.numpy()[filled]


def _row_sums(table: RolloutTable, values: np.ndarray) -> np.ndarray:
    return np.diff(np.concatenate(([0.0], np.cumsum(values)))[table.tokens.offsets])
