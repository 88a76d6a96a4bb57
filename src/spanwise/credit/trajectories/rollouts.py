"""Credit for rows that are turns: each rollout has one vote, and each turn is paid on its own tokens.

A reward is a fact of the rollout, which all its turns share, or of one turn; see `Objective.scope`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit.assign import assign, sum_reasons
from spanwise.credit.registry import Method
from spanwise.credit.registry import method as find
from spanwise.credit.spread import completed, paid_blocks, summed
from spanwise.credit.strata import check_counts, check_rewards, check_shapes, compare_in_strata, first_of, group_index
from spanwise.errors import AlignmentError, RecipeError, check_known
from spanwise.objective import Objective, ScopeName
from spanwise.types import Credit, Scores, Status

OutcomeName = Literal["last", "sum"]


@dataclass(frozen=True)
class Timeline:
    """The place of each row in its trajectory."""

    index_s: Int[Tensor, " s"]  # dense trajectory number, in the order of `trajectory_s.unique()`
    next_s: Int[Tensor, " s"]  # row of the trajectory's next step; -1 at its last step
    left_s: Int[Tensor, " s"]  # how many steps of the trajectory are left
    names: Sequence[Hashable]  # what error messages call each row's trajectory

    @property
    def last_j(self) -> Int[Tensor, " j"]:
        """Return the row of each trajectory's last step."""
        return self.last_with(self.left_s == 0)

    def last_with(self, flag_s: Bool[Tensor, " s"]) -> Int[Tensor, " j"]:
        """Return the row of each trajectory's last flagged step, or of its last step if no step is flagged."""
        order = (self.left_s + torch.where(flag_s, 0, len(flag_s))).argsort(stable=True)
        order = order[self.index_s[order].argsort(stable=True)]
        size_j = self.index_s.bincount()
        return order[size_j.cumsum(dim=0) - size_j]

    def backward_sum(self, value_s: Float[Tensor, " s"], *, decay: float) -> Float[Tensor, " s"]:
        """Sum the values from each step to the end in float64, weighted by decay^distance; NaN spreads backwards."""
        total_s = value_s.double().clone()
        by_left_s, count_w = self.left_s.argsort(stable=True), self.left_s.bincount()
        for rows in by_left_s.split(count_w.tolist())[1:]:
            # This rounds twice, as a plain loop does, so a repeated step gives exactly 0.
            later = decay * total_s[self.next_s[rows]]
            total_s[rows] = total_s[rows] + later
        return total_s

    def added(self, value_s: Tensor) -> Tensor:
        """Sum the whole numbers or flags of each trajectory, for one column or several."""
        total_j = torch.zeros((len(self.index_s.unique()), *value_s.shape[1:]), dtype=torch.long, device=value_s.device)
        return total_j.index_add(0, self.index_s, value_s.long())

    def outcome(self, reward_s: Float[Tensor, " s"], reward: OutcomeName) -> Float[Tensor, " j"]:
        """Return the reward of each trajectory's last step, or the sum over its steps."""
        check_known("trajectory reward", reward, ("last", "sum"))
        return reward_s[self.last_j].double() if reward == "last" else self.totals(reward_s)

    def totals(self, value_s: Tensor) -> Float[Tensor, " j"]:
        """Sum exactly, so that equal totals stay equal in any order and constant groups stay constant."""
        parts: list[list[float]] = [[] for _ in self.last_j]
        for j, value in zip(self.index_s.tolist(), value_s.tolist(), strict=True):
            parts[j].append(value)
        return torch.tensor([math.fsum(values) for values in parts], dtype=torch.float64, device=value_s.device)

    def groups(self, group_s: Int[Tensor, " s"] | Sequence[Hashable]) -> Int[Tensor, " j"]:
        """Return the dense group of each trajectory."""
        index_s, names = group_index(group_s), _plain(group_s)
        last_s = self.last_j[self.index_s]
        if row_at := first_of(index_s != index_s[last_s]):
            (row,) = row_at
            raise AlignmentError(
                f"Trajectory {self.names[row]!r} has rows of prompt {names[row]!r} and of prompt {names[int(last_s[row])]!r}; "
                f"give the trajectories of different prompts different ids."
            )
        return index_s[self.last_j]


def timeline(
    trajectory_s: Int[Tensor, " s"] | Sequence[Hashable],
    step_s: Int[Tensor, " s"],
    **rows: Float[Tensor, " s"] | Int[Tensor, " s"],
) -> Timeline:
    """Order the rows of each trajectory by step number, with gaps allowed; refuse infinite rewards and uneven `rows`."""
    if rows and isinstance(trajectory_s, Tensor):
        check_shapes(**rows, trajectory_s=trajectory_s)
        check_rewards(rows["reward_s"], row="row")
    check_counts(trajectory_s, "trajectory ids", step_s, "step numbers", advice="one of each to every row")
    index_s, names = group_index(trajectory_s), _plain(trajectory_s)
    order = step_s.argsort(stable=True)
    order = order[index_s[order].argsort(stable=True)]
    index_o, step_o = index_s[order], step_s[order]
    follows_o = index_o[1:] == index_o[:-1]
    if repeated_step := first_of(follows_o & (step_o[1:] == step_o[:-1])):
        row, later_row = sorted(order[repeated_step[0] : repeated_step[0] + 2].tolist())
        raise AlignmentError(
            f"Rows {row} and {later_row} are both step {int(step_s[row])} of trajectory {names[row]!r}; number the steps of a "
            f"trajectory differently, and give the trajectories of different prompts different ids."
        )
    next_s = torch.full_like(order, -1)
    next_s[order[:-1][follows_o]] = order[1:][follows_o]
    end_j = index_s.bincount().cumsum(dim=0)
    left_s = torch.empty_like(order)
    left_s[order] = end_j[index_o] - 1 - torch.arange(len(order), device=order.device)
    return Timeline(index_s, next_s, left_s, names)


def _plain(ids: Tensor | Sequence[Hashable]) -> Sequence[Hashable]:
    return ids.tolist() if isinstance(ids, Tensor) else ids


def assign_turns(
    scores: Scores,
    group_s: Int[Tensor, " s"],
    length_sk: Int[Tensor, "s k"],
    *,
    trajectory_s: Int[Tensor, " s"],
    step_s: Int[Tensor, " s"],
    objectives: Sequence[Objective],
    block_names: Sequence[str],
    method: str | Method = "bae",
    inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Credit:
    r"""Turn the rewards of turns and rollouts into the credit of every block of every turn.

    Equation
        scope rollout:  R[j, m] = r[s, m], s the last turn of j that has the reward;   credit[s, k] += w_m A[j(s), m]
        scope turn:     credit[s, k] += w_m A[s, m], A compared with one vote per rollout (see `advantage`, voter_n)
        a completion method:  A = method(sum over m of w_m R[j, m]), where R of scope turn is the sum over the turns that have it
        a step method:        A = method(r_s), where a reward of scope rollout stands at the last turn
        for the blocks k that m pays and turn s has; length_nk[s, k] is the number of tokens of k in all turns of j(s)

    Args:
        scores: rewards (S, M), one row per turn.
        group_s: prompt ids; all turns of a rollout share one.
        length_sk: trainable tokens of each block of each turn, 0 where it is absent.
        trajectory_s: the rollout of each turn.
        step_s: number of the turn; only its order counts.
        objectives, block_names, method, inputs, options: see `assign`.

    Edge cases:
        A rollout is one member of its group, however many turns it has. A turn that does not hold a reward (it is absent there)
        adds nothing; a reward that no turn holds is absent, and `if_missing` stands for it, once per rollout. Credit of the
        decision to stop lies on the rollout's last turn that has a trainable token.

    Raises:
        AlignmentError: turns of one rollout in two groups, or one turn twice.
        RecipeError: a method that runs over the tokens of a rollout, and a rollout in several rows.

    Example:
        Two rollouts of one prompt; the first has two turns and is right at its second. Both turns get its credit.

        >>> nan = torch.nan
        >>> scores = Scores(("correct",), torch.tensor([[nan], [1.], [0.]]).double(), torch.tensor([[1], [0], [0]]).to(torch.int8),
        ...                 torch.full((3, 1, 2), nan).double())
        >>> zeros, ones = torch.zeros(3).long(), torch.ones(3, 1).long()
        >>> found = assign_turns(scores, zeros, ones, trajectory_s=torch.tensor([0, 0, 1]), step_s=torch.tensor([0, 1, 0]),
        ...                      objectives=[Objective("correct", pays="all")], block_names=["all"])
        >>> found.block_nk.flatten(), found.length_nk.flatten()
        (tensor([ 0.5000,  0.5000, -0.5000], dtype=torch.float64), tensor([2, 2, 1]))
    """
    entry = find(method) if isinstance(method, str) else method
    line = timeline(trajectory_s, step_s)
    group_j = line.groups(group_s)
    length_jk, present_sk = line.added(length_sk), length_sk > 0
    data = dict(inputs or {})
    cut_s = data.get("truncated_n")
    cut_j = None if cut_s is None else line.added(cut_s) > 0
    rule: dict[str, Any] = {"block_names": block_names, "method": entry, **options}
    if entry.kind == "token":
        _refuse_split(line, entry)
        credit = assign(scores, group_s, present_sk, objectives=objectives, inputs=data, **rule)
    elif entry.kind == "step":
        data |= {"trajectory_s": line.index_s, "step_s": step_s}
        at_turns = _step_scores(scores, line, objectives)
        credit = assign(at_turns, group_s, present_sk, objectives=objectives, inputs=data, **rule)
        # The rollout's advantage is the reason if a step gets 0.
        at_rollouts = _rollout_scores(scores, line, objectives, add_turns=True)
        whole = compare_in_strata(summed(at_rollouts, objectives), group_j).comparison
        whole = sum_reasons(whole, at_rollouts, objectives, group_j, grouped=True, truncated_n=cut_j).take(line.index_s)
        adv_nm, comparison = credit.explained
        comparison = replace(comparison, reason_nm=whole.reason_nm, about_nm=whole.about_nm)
        credit = replace(credit, comparison=comparison.fitting(adv_nm))
    else:
        turn_m = torch.tensor([o.scope == "turn" and entry.kind == "block" for o in objectives])
        at_rollouts = _rollout_scores(scores, line, objectives, add_turns=entry.kind == "completion")
        data = {"length_n": length_jk.sum(dim=1), "truncated_n": cut_j}
        credit = assign(at_rollouts, group_j, length_jk > 0, objectives=_weighing(objectives, ~turn_m), inputs=data, **rule)
        credit, filled_s = credit.take(line.index_s), length_sk.sum(dim=1) > 0
        last_s = torch.zeros_like(filled_s).index_fill(0, line.last_with(filled_s), True) & filled_s  # the decision to stop
        credit = replace(
            credit,
            block_nk=torch.where(present_sk, credit.block_nk, 0.0),
            stop_n=torch.where(last_s, credit.stop_n, 0.0),
            count_m=torch.full(turn_m.shape, len(group_j)),
        )
        if bool(turn_m.any()):
            shared = at_rollouts.take(line.index_s)  # an objective of a turn may be given an outcome of the rollout
            masks = {name: turn_m.view(-1, *(1 for _ in table.shape[2:])) for name, table in _tables(scores).items()}
            own_tables = {name: torch.where(m, getattr(scores, name), getattr(shared, name)) for name, m in masks.items()}
            at_turns = replace(shared, **own_tables)
            data = {"voter_n": line.index_s, "truncated_n": cut_s}
            turn_credit = assign(
                at_turns, group_s, present_sk, objectives=_weighing(objectives, turn_m), inputs=data, **rule
            )
            counts = torch.where(turn_m, len(group_s), len(group_j))
            credit = replace(_added(credit, turn_credit, turn_m), count_m=counts)
    mean_length = length_jk.sum(dim=1).double().mean()
    return replace(credit, length_nk=length_jk[line.index_s], mean_length_n=mean_length.expand(len(group_s)))


def _refuse_split(line: Timeline, entry: Method) -> None:
    """Refuse a method over tokens if a rollout is more than one row."""
    split_s = line.left_s > 0
    if bool(split_s.any()):
        rows = torch.nonzero(line.index_s == line.index_s[split_s][0]).squeeze(1).tolist()
        raise RecipeError(
            f"Method '{entry.name}' runs over the tokens of a rollout from its end, and rows {rows[:6]} are turns of one; "
            f"each would end where its turn ends. Merge the turns of a rollout into one row, or use an outcome method or 'gigpo'."
        )


def _added(rollouts: Credit, turns: Credit, turn_m: Bool[Tensor, " m"]) -> Credit:
    """Add the credit of rollouts' objectives to that of turns' objectives, `turn_m`."""
    columns = ("adv_nm", "singleton_m", "absent_m", "coarser_m", "weight_m")
    picked: dict[str, Any] = {name: torch.where(turn_m, getattr(turns, name), getattr(rollouts, name)) for name in columns}
    return replace(
        rollouts,
        block_nk=rollouts.block_nk + turns.block_nk,
        stop_n=rollouts.stop_n + turns.stop_n,
        comparison=turns.explained[1].where(turn_m, rollouts.explained[1]),
        **picked,
    )


def _weighing(objectives: Sequence[Objective], kept_m: Tensor) -> list[Objective]:
    """Return the objectives, with weight 0 for each that `kept_m` leaves out."""
    return [o if keeps else replace(o, weight=0.0) for o, keeps in zip(objectives, kept_m.tolist(), strict=True)]


def _rollout_scores(scores: Scores, line: Timeline, objectives: Sequence[Objective], *, add_turns: bool) -> Scores:
    """Return one row per rollout: the last turn that has the reward, or with `add_turns` the sum of turns' rewards."""
    rows_jm = torch.stack([line.last_with(~gone_s) for gone_s in _not_here(scores).T], dim=1)
    columns = torch.arange(len(objectives), device=rows_jm.device)
    last_tables: dict[str, Any] = {name: table[rows_jm, columns] for name, table in _tables(scores).items()}
    whole_sm = completed(scores, objectives)
    for m, objective in enumerate(objectives):
        if add_turns and objective.scope == "turn":
            value_s = whole_sm[:, m]
            here_s = ~(_not_here(scores)[:, m] & value_s.isnan())
            total_j, here_j = line.totals(torch.where(here_s, value_s, 0.0)), line.added(here_s) > 0
            last_tables["reward_nm"][:, m] = torch.where(here_j, total_j, last_tables["reward_nm"][:, m])
            # The sum would hide the failure of one turn.
            failed_j = scores.status_nm[line.last_with(here_s & value_s.isnan()), m]
            status_j = torch.where(total_j.isnan(), failed_j, int(Status.OK))
            last_tables["status_nm"][:, m] = torch.where(here_j, status_j, last_tables["status_nm"][:, m])
    outcome_jo = None
    if scores.outcome_no is not None:
        outcome_jo = torch.stack([column[line.last_with(~column.isnan())] for column in scores.outcome_no.T], dim=1)
    return Scores(scores.names, **last_tables, outcome_names=scores.outcome_names, outcome_no=outcome_jo)


def _step_scores(scores: Scores, line: Timeline, objectives: Sequence[Objective]) -> Scores:
    """Return one row per turn whose rewards add up over a rollout; a rollout's reward stands at its end."""
    value_sm, status_sm, gone_sm = completed(scores, objectives), scores.status_nm.clone(), _not_here(scores)
    last_s = line.left_s == 0
    for m, objective in enumerate(objectives):
        stand_s = value_sm[:, m].clone()
        if objective.scope == "rollout":
            row_s = line.last_with(~gone_sm[:, m])[line.index_s]
            value_sm[:, m], status_sm[:, m] = torch.where(last_s, stand_s[row_s], 0.0), status_sm[row_s, m]
        else:  # if no turn has the reward, it is absent at the last turn
            is_silent_s = gone_sm[:, m] & (stand_s.isnan() | (objective.scope is None))
            some_s = (line.added(~is_silent_s) > 0)[line.index_s]
            value_sm[:, m] = torch.where(is_silent_s & (some_s | ~last_s), 0.0, stand_s)
    return replace(scores, reward_nm=value_sm, status_nm=torch.where(value_sm.isnan(), status_sm, int(Status.OK)))


def _tables(scores: Scores) -> dict[str, Tensor]:
    """Return the tables with one column per objective."""
    names = ("reward_nm", "status_nm", "by_outcome_nmo", "stated_nm")
    return {name: getattr(scores, name) for name in names if getattr(scores, name) is not None}


def _not_here(scores: Scores) -> Bool[Tensor, "s m"]:
    """Mark the turns that cannot hold a reward, though another turn of the rollout may."""
    return (scores.status_nm == int(Status.ABSENT)) | (scores.status_nm == int(Status.UNSCORED))


def keep_for_rollouts(
    scores: Scores,
    present_sk: Bool[Tensor, "s k"],
    trajectory_s: Int[Tensor, " s"],
    *,
    objectives: Sequence[Objective],
    block_names: Sequence[str],
    scope: ScopeName = "rollout",
) -> Scores:
    """Restore a reward that was set aside because its turn has no paid block, if another turn of the rollout has one."""
    if scores.unused_nm is None or not len(trajectory_s):
        return scores
    line, device = timeline(trajectory_s, torch.arange(len(trajectory_s))), present_sk.device
    is_rollout_m = torch.tensor([(objective.scope or scope) == "rollout" for objective in objectives], device=device)
    paid_sm = (present_sk[:, None] & paid_blocks(objectives, block_names, device)).any(dim=2) & is_rollout_m
    # The outcome may be recorded at a last turn that only says goodbye, after the turn that wrote the block.
    is_restored_sm = ~scores.unused_nm.isnan() & (line.added(paid_sm) > 0)[line.index_s]
    return replace(
        scores,
        reward_nm=torch.where(is_restored_sm, scores.unused_nm, scores.reward_nm),
        status_nm=scores.status_nm.masked_fill(is_restored_sm, int(Status.OK)),
        unused_nm=scores.unused_nm.masked_fill(is_restored_sm, torch.nan),
    )


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
    return timeline(trajectory_s, step_s, reward_s=reward_s).backward_sum(reward_s, decay=gamma)
