"""The order of steps inside trajectories, and what follows each step: discounted returns and one outcome per trajectory.

Index letters: s step rows, j trajectories. Rows come in any order; a trajectory is what shares an id.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.checks import check_rewards
from spanwise.credit.strata import group_index
from spanwise.errors import AlignmentError, RecipeError, unknown

OutcomeName = Literal["last", "sum"]


@dataclass(frozen=True)
class Timeline:
    """Where each step row stands in its trajectory.

    Attributes:
        index_s: dense trajectory of each row, 0..J-1 in the order of `trajectory_s.unique()`.
        next_s: the row that holds the next step of the same trajectory; -1 at its last step.
        left_s: how many steps of the trajectory come after this one.

    Example:
        >>> times = timeline(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]))
        >>> times.next_s.tolist(), times.left_s.tolist()
        ([1, -1, -1], [1, 0, 0])
        >>> times.backward_sum(torch.tensor([1.0, 2.0, 3.0]), decay=0.5).tolist()  # 1 + .5 x 2, 2, 3
        [2.0, 2.0, 3.0]
    """

    index_s: Int[Tensor, " s"]
    next_s: Int[Tensor, " s"]
    left_s: Int[Tensor, " s"]

    def backward_sum(self, value_s: Float[Tensor, " s"], *, decay: float) -> Float[Tensor, " s"]:
        """Float64 sum of the values from each step to the end of its trajectory, weighted by decay^distance; NaN spreads back."""
        total_s = value_s.double().clone()
        by_left_s, count_w = self.left_s.argsort(stable=True), self.left_s.bincount()
        for rows in by_left_s.split(count_w.tolist())[1:]:
            later = (
                decay * total_s[self.next_s[rows]]
            )  # two roundings, as in a plain loop: a step that repeats gives exactly 0
            total_s[rows] = total_s[rows] + later
        return total_s


def timeline(trajectory_s: Int[Tensor, " s"], step_s: Int[Tensor, " s"]) -> Timeline:
    """Order the rows of each trajectory by their step number; numbers may have gaps and start anywhere.

    Raises:
        AlignmentError: sizes differ, or a trajectory has one step twice.

    Example:
        >>> timeline(torch.tensor([7, 5, 7]), torch.tensor([2, 0, 1])).next_s
        tensor([-1, -1,  0])
    """
    if trajectory_s.shape != step_s.shape:
        raise AlignmentError(
            f"There are {len(trajectory_s)} trajectory ids for {len(step_s)} step numbers; give one of each to every row."
        )
    index_s = group_index(trajectory_s)
    order = step_s.argsort(stable=True)
    order = order[index_s[order].argsort(stable=True)]
    index_o, step_o = index_s[order], step_s[order]
    follows_o = index_o[1:] == index_o[:-1]
    twice_o = torch.nonzero(follows_o & (step_o[1:] == step_o[:-1]))
    if len(twice_o):
        row, other = sorted(order[int(twice_o[0]) : int(twice_o[0]) + 2].tolist())
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
    if reward_s.shape != trajectory_s.shape:
        raise AlignmentError(
            f"There are {len(reward_s)} rewards for {len(trajectory_s)} trajectory ids; give one of each to every row."
        )
    check_rewards(reward_s, row="row")
    return timeline(trajectory_s, step_s).backward_sum(reward_s, decay=gamma)


class Outcomes(NamedTuple):
    """What outcome methods need of a batch of step rows.

    Attributes:
        reward_j: float64 reward of each trajectory, in the order of `trajectory_s.unique()`; NaN where absent.
        group_j: its prompt id.
        index_s: the position in `reward_j` of each row's trajectory.

    Example:
        Two trajectories of one prompt, of two steps and of one; the last reward of each counts.

        >>> reward_s, trajectory_s = torch.tensor([0.0, 1.0, 0.5]), torch.tensor([0, 0, 1])
        >>> found = trajectory_outcomes(reward_s, torch.tensor([7, 7, 7]), trajectory_s, torch.tensor([0, 1, 0]))
        >>> found.reward_j.tolist(), found.group_j.tolist(), found.index_s.tolist()
        ([1.0, 0.5], [7, 7], [0, 0, 1])
    """

    reward_j: Float[Tensor, " j"]
    group_j: Int[Tensor, " j"]
    index_s: Int[Tensor, " s"]


def trajectory_outcomes(
    reward_s: Float[Tensor, " s"],
    group_s: Int[Tensor, " s"],
    trajectory_s: Int[Tensor, " s"],
    step_s: Int[Tensor, " s"],
    *,
    reward: OutcomeName = "last",
) -> Outcomes:
    r"""Give each trajectory one reward, which is the same however its steps are laid out in rows.

    Equation
        R(j) = r[last step of j]   (reward="last")        R(j) = sum over the steps of j of r[t]   (reward="sum")

    Args:
        reward_s: one reward per step row; NaN where absent.
        group_s: prompt ids; all rows of a trajectory share one.
        trajectory_s: trajectory ids.
        step_s: step numbers.
        reward: "last" reads the last step alone, whatever the others hold; a "sum" with an absent part is absent.

    Raises:
        AlignmentError: sizes differ, a trajectory with two prompts or with one step twice.
        RewardError: an infinite reward, at the last step or not.

    Example:
        >>> steps = torch.tensor([1., 5., 2.]), torch.tensor([0, 0, 0]), torch.tensor([4, 4, 9]), torch.tensor([0, 1, 0])
        >>> trajectory_outcomes(*steps).reward_j, trajectory_outcomes(*steps, reward="sum").reward_j
        (tensor([5., 2.], dtype=torch.float64), tensor([6., 2.], dtype=torch.float64))
    """
    if not reward_s.shape == group_s.shape == trajectory_s.shape:
        raise AlignmentError(
            f"There are {len(reward_s)} rewards, {len(group_s)} prompt ids and {len(trajectory_s)} trajectory ids; "
            f"give one of each to every row."
        )
    refuse_unknown("trajectory reward", reward, ("last", "sum"))
    check_rewards(reward_s, row="row")
    line = timeline(trajectory_s, step_s)
    group_j = groups_of(line, group_s, trajectory_s)
    reward_j = reward_s[last_rows(line)].double() if reward == "last" else exact_totals(reward_s, line.index_s)
    return Outcomes(reward_j, group_j, line.index_s)


def last_rows(line: Timeline) -> Int[Tensor, " j"]:
    """The row of each trajectory's last step."""
    last_j = torch.nonzero(line.left_s == 0).squeeze(1)
    return last_j[line.index_s[last_j].argsort()]


def groups_of(line: Timeline, group_s: Int[Tensor, " s"], trajectory_s: Int[Tensor, " s"]) -> Int[Tensor, " j"]:
    """The group of each trajectory.

    Raises:
        AlignmentError: a trajectory whose steps are of two groups.
    """
    group_j = group_s[last_rows(line)]
    stray = torch.nonzero(group_j[line.index_s] != group_s)
    if len(stray):
        row = int(stray[0])
        raise AlignmentError(
            f"Trajectory {int(trajectory_s[row])} has rows of prompt {int(group_s[row])} and of prompt "
            f"{int(group_j[line.index_s[row]])}; give the trajectories of different prompts different ids."
        )
    return group_j


def refuse_unknown(option: str, value: str, known: tuple[str, ...]) -> None:
    """A RecipeError if an option has a value that is not known; no option is ever read as something else."""
    if value not in known:
        raise RecipeError(unknown(option, value, known))


def exact_totals(reward_s: Tensor, index_s: Tensor) -> Float[Tensor, " j"]:
    """Exactly rounded sums: equal totals stay equal whatever the order of their parts, so constant groups stay constant."""
    parts: list[list[float]] = [[] for _ in range(int(index_s.max()) + 1 if len(index_s) else 0)]
    for j, value in zip(index_s.tolist(), reward_s.tolist(), strict=True):
        parts[j].append(value)
    return torch.tensor([math.fsum(values) for values in parts], dtype=torch.float64, device=reward_s.device)
