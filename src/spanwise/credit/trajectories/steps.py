"""Steps of trajectories: their order, what follows each of them, one reward per trajectory, and which start from the same state.

Index letters: s step rows, j trajectories. Rows come in any order; a trajectory is what shares an id.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.checks import check_rewards, first_of
from spanwise.credit.strata import group_index
from spanwise.errors import AlignmentError, RecipeError, check_known

OutcomeName = Literal["last", "sum"]
Anchors = Sequence[Hashable] | Int[Tensor, " s"]


@dataclass(frozen=True)
class Timeline:
    """Where each step row stands in its trajectory.

    Attributes:
        index_s: dense trajectory of each row, 0..J-1 in the order of `trajectory_s.unique()`.
        next_s: the row that holds the next step of the same trajectory; -1 at its last step.
        left_s: how many steps of the trajectory come after this one.

    >>> times = timeline(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]))
    >>> times.backward_sum(torch.tensor([1.0, 2.0, 3.0]), decay=0.5).tolist()  # 1 + .5 x 2, 2, 3
    [2.0, 2.0, 3.0]
    """

    index_s: Int[Tensor, " s"]
    next_s: Int[Tensor, " s"]
    left_s: Int[Tensor, " s"]

    @property
    def last_j(self) -> Int[Tensor, " j"]:
        """The row of each trajectory's last step."""
        last_j = torch.nonzero(self.left_s == 0).squeeze(1)
        return last_j[self.index_s[last_j].argsort()]

    def backward_sum(self, value_s: Float[Tensor, " s"], *, decay: float) -> Float[Tensor, " s"]:
        """Float64 sum of the values from each step to the end of its trajectory, weighted by decay^distance; NaN spreads back."""
        total_s = value_s.double().clone()
        by_left_s, count_w = self.left_s.argsort(stable=True), self.left_s.bincount()
        for rows in by_left_s.split(count_w.tolist())[1:]:
            # Two roundings, as in a plain loop: a step that repeats gives exactly 0.
            later = decay * total_s[self.next_s[rows]]
            total_s[rows] = total_s[rows] + later
        return total_s

    def totals(self, value_s: Tensor) -> Float[Tensor, " j"]:
        """Exactly rounded sums: equal totals stay equal whatever the order of their parts, so constant groups stay constant."""
        parts: list[list[float]] = [[] for _ in self.last_j]
        for j, value in zip(self.index_s.tolist(), value_s.tolist(), strict=True):
            parts[j].append(value)
        return torch.tensor([math.fsum(values) for values in parts], dtype=torch.float64, device=value_s.device)

    def groups(self, group_s: Int[Tensor, " s"], trajectory_s: Int[Tensor, " s"]) -> Int[Tensor, " j"]:
        """The group of each trajectory, each of which has one."""
        group_j = group_s[self.last_j]
        if stray := first_of(group_j[self.index_s] != group_s):
            (row,) = stray
            raise AlignmentError(
                f"Trajectory {int(trajectory_s[row])} has rows of prompt {int(group_s[row])} and of prompt "
                f"{int(group_j[self.index_s[row]])}; give the trajectories of different prompts different ids."
            )
        return group_j


def timeline(trajectory_s: Int[Tensor, " s"], step_s: Int[Tensor, " s"]) -> Timeline:
    """Order the rows of each trajectory by their step number; numbers may have gaps and start anywhere."""
    if trajectory_s.shape != step_s.shape:
        raise AlignmentError(
            f"There are {len(trajectory_s)} trajectory ids for {len(step_s)} step numbers; give one of each to every row."
        )
    index_s = group_index(trajectory_s)
    order = step_s.argsort(stable=True)
    order = order[index_s[order].argsort(stable=True)]
    index_o, step_o = index_s[order], step_s[order]
    follows_o = index_o[1:] == index_o[:-1]
    if twice := first_of(follows_o & (step_o[1:] == step_o[:-1])):
        row, other = sorted(order[twice[0] : twice[0] + 2].tolist())
        raise AlignmentError(
            f"Rows {row} and {other} are both step {int(step_s[row])} of trajectory {int(trajectory_s[row])}; number the steps of "
            f"a trajectory differently, and give the trajectories of different prompts different ids."
        )
    next_s = torch.full_like(order, -1)
    next_s[order[:-1][follows_o]] = order[1:][follows_o]
    end_j = index_s.bincount().cumsum(dim=0)
    left_s = torch.empty_like(order)
    left_s[order] = end_j[index_o] - 1 - torch.arange(len(order), device=order.device)
    return Timeline(index_s, next_s, left_s)


def step_returns(
    reward_s: Float[Tensor, " s"], trajectory_s: Int[Tensor, " s"], step_s: Int[Tensor, " s"], *, gamma: float = 0.95
) -> Float[Tensor, " s"]:
    r"""Add up the rewards that follow each step, discounted by their distance.

    Equation
        R[t] = sum over the steps k >= t of the trajectory of gamma^(k - t) r[k]

    Args:
        reward_s: one reward per step row; NaN where absent.
        trajectory_s: trajectory ids, in any order, of any sizes.
        step_s: step numbers; only their order counts, a gap costs one gamma.
        gamma: discount per step.

    Edge cases:
        The return of a step is absent (NaN) if its own reward or a later one of its trajectory is. A step that pays nothing has
        reward 0.

    Example:
        >>> step_returns(torch.tensor([10., 0., 0., 3.]), torch.tensor([0, 0, 0, 1]), torch.tensor([2, 0, 1, 0]))
        tensor([10.0000,  9.0250,  9.5000,  3.0000], dtype=torch.float64)

    Reference:
        Feng et al. 2025, "Group-in-Group Policy Optimization" (arXiv 2505.10978), equation 5.
    """
    _check_sizes(reward_s, trajectory_s)
    return timeline(trajectory_s, step_s).backward_sum(reward_s, decay=gamma)


class Outcomes(NamedTuple):
    """One reward and one prompt of each trajectory, in the order of `trajectory_s.unique()`, and where its steps stand."""

    reward_j: Float[Tensor, " j"]
    group_j: Int[Tensor, " j"]
    line: Timeline


def trajectory_outcomes(
    reward_s: Float[Tensor, " s"],
    group_s: Int[Tensor, " s"],
    trajectory_s: Int[Tensor, " s"],
    step_s: Int[Tensor, " s"],
    *,
    reward: OutcomeName = "last",
) -> Outcomes:
    """Give each trajectory the reward of its last step, or the sum over its steps, however these are laid out in rows.

    >>> steps = torch.tensor([1., 5., 2.]), torch.tensor([0, 0, 0]), torch.tensor([4, 4, 9]), torch.tensor([0, 1, 0])
    >>> trajectory_outcomes(*steps).reward_j, trajectory_outcomes(*steps, reward="sum").reward_j
    (tensor([5., 2.], dtype=torch.float64), tensor([6., 2.], dtype=torch.float64))
    """
    _check_sizes(reward_s, trajectory_s)
    _check_sizes(group_s, trajectory_s, "prompt ids")
    check_known("trajectory reward", reward, ("last", "sum"))
    line = timeline(trajectory_s, step_s)
    reward_j = reward_s[line.last_j].double() if reward == "last" else line.totals(reward_s)
    return Outcomes(reward_j, line.groups(group_s, trajectory_s), line)


def _check_sizes(value_s: Tensor, trajectory_s: Tensor, words: str = "rewards") -> None:
    if value_s.shape != trajectory_s.shape:
        raise AlignmentError(
            f"There are {len(value_s)} {words} for {len(trajectory_s)} trajectory ids; give one of each to every row."
        )
    check_rewards(value_s, row="row")


def anchor_groups(group_s: Int[Tensor, " s"], anchor_s: Anchors, *, similarity: float | None = None) -> Int[Tensor, " s"]:
    """Put the rows of one prompt that stand in the same state into one stratum; -1 for a row whose state is not known (None).

    With a `similarity` states are texts: row by row, one joins the first stratum whose first member it resembles by `difflib`, or
    else opens a stratum of its own. This is the one place where the order of rows matters.

    >>> anchor_groups(torch.tensor([0, 0, 0, 1]), ["door", "key", "door", "door"])
    tensor([0, 1, 0, 2])
    >>> anchor_groups(torch.tensor([0, 0, 0]), ["a red door", "a key", "a red door."], similarity=0.9)
    tensor([0, 1, 0])
    """
    if len(anchor_s) != len(group_s):
        raise AlignmentError(
            f"There are {len(anchor_s)} anchor states for {len(group_s)} prompt ids; give one of each to every row."
        )
    if similarity is not None and not 0.0 < similarity < 1.0:
        raise RecipeError(f"similarity={similarity} must lie between 0 and 1; use None to compare states exactly.")
    states: list[Any] = anchor_s.tolist() if isinstance(anchor_s, Tensor) else list(anchor_s)
    places: list[Any] = list(zip(group_s.tolist(), states, strict=True))
    firsts: dict[int, list[SequenceMatcher]] = {}
    numbers: dict[tuple[int, Any], int] = {}  # a text met before goes where it went before
    for row, (prompt, state) in enumerate(places):
        if state is not None and not isinstance(state, Hashable if similarity is None else str):
            advice = "which cannot be compared by equality; turn it into a string or a tuple"
            advice = advice if similarity is None else "and only texts have a similarity; use similarity=None"
            raise RecipeError(f"The anchor state of row {row} is a {type(state).__name__}, {advice}.")
        if similarity is not None and state is not None and (prompt, state) not in numbers:
            numbers[prompt, state] = _nearest(str(state), firsts.setdefault(prompt, []), similarity)
    names = places if similarity is None else [(prompt, numbers.get((prompt, state), -1)) for prompt, state in places]
    known_s = torch.tensor([state is not None for state in states], dtype=torch.bool, device=group_s.device)
    return torch.where(known_s, group_index(names).to(group_s.device), -1)


def _nearest(state: str, firsts: list[SequenceMatcher], similarity: float) -> int:
    """The number of the first text that this one resembles; a new one if there is none."""
    for number, matcher in enumerate(firsts):
        matcher.set_seq1(state)
        # Two cheap upper bounds of the ratio come first.
        if min(matcher.real_quick_ratio(), matcher.quick_ratio()) >= similarity and matcher.ratio() >= similarity:
            return number
    firsts.append(SequenceMatcher(None, "", state))
    return len(firsts) - 1
