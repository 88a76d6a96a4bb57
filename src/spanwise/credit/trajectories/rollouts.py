"""Compute credit for rollouts that are stored as one row per turn. Each rollout counts once in its group.

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

from spanwise.credit.assign import assign, explain_sum
from spanwise.credit.registry import Method
from spanwise.credit.registry import method as find
from spanwise.credit.spread import fill_missing, lacks_all, left_out, paid_blocks, sum_rewards
from spanwise.credit.strata import (
    check_counts,
    check_rewards,
    check_shapes,
    compare_in_strata,
    first_of,
    group_index,
    list_ids,
)
from spanwise.errors import AlignmentError, RecipeError, check_known
from spanwise.objective import Objective, ScopeName
from spanwise.score.reward import Reward
from spanwise.types import Credit, Scores, Status

OutcomeName = Literal["last", "sum"]


@dataclass(frozen=True)
class Timeline:
    """The trajectory of each row, and the order of the rows in it."""

    index_s: Int[Tensor, " s"]  # The number of each row's trajectory, in the order of `trajectory_s.unique()`.
    next_s: Int[Tensor, " s"]  # The row of the trajectory's next step; -1 at its last step.
    left_s: Int[Tensor, " s"]  # How many steps of the trajectory come after the row.
    names: Sequence[Hashable]  # What error messages call the trajectory of each row.

    @property
    def last_j(self) -> Int[Tensor, " j"]:
        """The row of each trajectory's last step."""
        return self.last_with(self.left_s == 0)

    def last_with(self, flag_s: Bool[Tensor, " s"]) -> Int[Tensor, " j"]:
        """Return the row of each trajectory's last step with a true `flag_s`, or of its last step if no flag is true."""
        # Sort rows with a true flag first, and later steps before earlier ones. Each trajectory's first row is the result.
        flag_order = (self.left_s + torch.where(flag_s, 0, len(flag_s))).argsort(stable=True)
        row_order = flag_order[self.index_s[flag_order].argsort(stable=True)]
        step_count_j = self.index_s.bincount()
        return row_order[step_count_j.cumsum(dim=0) - step_count_j]

    def backward_sum(self, value_s: Float[Tensor, " s"], *, decay: float) -> Float[Tensor, " s"]:
        """Sum the values from each step to the trajectory's end, weighted by decay^distance. NaN makes earlier sums NaN."""
        discounted_sum_s = value_s.double().clone()
        rows_per_steps_left = self.left_s.bincount().tolist()  # how many rows have 0, 1, ... steps left
        for row_indices in self.left_s.argsort(stable=True).split(rows_per_steps_left)[1:]:
            # A fused operation would round differently, so that equal returns could differ.
            discounted_next_sum = decay * discounted_sum_s[self.next_s[row_indices]]
            discounted_sum_s[row_indices] = discounted_sum_s[row_indices] + discounted_next_sum
        return discounted_sum_s

    def add_up(self, value_s: Tensor) -> Tensor:
        """Add up whole numbers or flags over the rows of each trajectory."""
        zero_j = value_s.new_zeros((len(self.index_s.unique()), *value_s.shape[1:]), dtype=torch.long)
        return zero_j.index_add(0, self.index_s, value_s.long())

    def outcome(self, reward_s: Float[Tensor, " s"], reward: OutcomeName) -> Float[Tensor, " j"]:
        """Return the reward of each trajectory's last step, or the sum over its steps."""
        check_known("trajectory reward", reward, ("last", "sum"))
        return reward_s[self.last_j].double() if reward == "last" else self.sum_exactly(reward_s)

    def sum_exactly(self, value_s: Tensor) -> Float[Tensor, " j"]:
        """Add up each trajectory's numbers without rounding errors."""
        value_lists_j: list[list[float]] = [[] for _ in self.last_j]
        for j, value in zip(self.index_s.tolist(), value_s.tolist(), strict=True):
            value_lists_j[j].append(value)
        return torch.tensor([math.fsum(values) for values in value_lists_j], dtype=torch.float64, device=value_s.device)

    def groups(self, group_s: Int[Tensor, " s"] | Sequence[Hashable]) -> Int[Tensor, " j"]:
        """Return the number of each trajectory's group. Refuse a trajectory with rows of two groups."""
        group_index_s = group_index(group_s)
        last_row_s = self.last_j[self.index_s]
        if bad_entry := first_of(group_index_s != group_index_s[last_row_s]):
            bad_row = bad_entry[0]
            group_ids = list_ids(group_s)
            raise AlignmentError(
                f"The trajectory id {self.names[bad_row]!r} occurs with prompt {group_ids[bad_row]!r} and with prompt "
                f"{group_ids[int(last_row_s[bad_row])]!r}. A trajectory has only one prompt. Give each trajectory its own id."
            )
        return group_index_s[self.last_j]


def build_timeline(
    trajectory_s: Int[Tensor, " s"] | Sequence[Hashable],
    step_s: Int[Tensor, " s"],
    **rows: Float[Tensor, " s"] | Int[Tensor, " s"],
) -> Timeline:
    """Order the rows of each trajectory by their step numbers, which may have gaps."""
    if rows and isinstance(trajectory_s, Tensor):
        check_shapes(**rows, trajectory_s=trajectory_s)
        check_rewards(rows["reward_s"], row="row")
    check_counts(
        trajectory_s, "trajectory ids", step_s, "step numbers", advice="give every row one trajectory id and one step number"
    )
    trajectory_index_s = group_index(trajectory_s)
    trajectory_ids = list_ids(trajectory_s)
    rows_in_step_order = step_s.argsort(stable=True)
    row_order = rows_in_step_order[trajectory_index_s[rows_in_step_order].argsort(stable=True)]
    sorted_trajectory_s, sorted_step_s = trajectory_index_s[row_order], step_s[row_order]
    is_same_trajectory = sorted_trajectory_s[1:] == sorted_trajectory_s[:-1]
    if repeated_step := first_of(is_same_trajectory & (sorted_step_s[1:] == sorted_step_s[:-1])):
        earlier_index, later_index = sorted(row_order[repeated_step[0] : repeated_step[0] + 2].tolist())
        raise AlignmentError(
            f"Rows {earlier_index} and {later_index} are both step {int(step_s[earlier_index])} of trajectory "
            f"{trajectory_ids[earlier_index]!r}. Give each step of a trajectory a number of its own. Give trajectories of "
            "different prompts different ids."
        )
    next_row_s = torch.full_like(row_order, -1)
    next_row_s[row_order[:-1][is_same_trajectory]] = row_order[1:][is_same_trajectory]
    end_position_j = trajectory_index_s.bincount().cumsum(dim=0)
    steps_left_s = torch.empty_like(row_order)
    steps_left_s[row_order] = end_position_j[sorted_trajectory_s] - 1 - torch.arange(len(row_order), device=row_order.device)
    return Timeline(trajectory_index_s, next_row_s, steps_left_s, trajectory_ids)


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
        A rollout is one member of its group, however many turns it has. An outcome function's value for a turn is that turn's
        own in scope turn; where it is unknown, and in scope rollout, it is that of the last turn that knows it. A turn that does
        not hold a reward (it is absent there) adds nothing; a reward that no turn holds is absent, and `if_missing` stands for
        it, once per rollout. Credit of the decision to stop lies on the rollout's last turn that has a trainable token.

    Raises:
        AlignmentError: turns of one rollout in two groups, or one turn twice.
        RecipeError: a method that runs over the tokens of a rollout, and a rollout in several rows.

    Example:
        Two rollouts of one prompt; the first has two turns and is right at its second. Both turns get its credit.

        >>> nan = torch.nan
        >>> scores = Scores(("correct",), torch.tensor([[nan], [1.], [0.]]).double(), torch.tensor([[1], [0], [0]]).to(torch.int8),
        ...                 torch.full((3, 1, 2), nan).double())
        >>> zeros, ones = torch.zeros(3).long(), torch.ones(3, 1).long()
        >>> credit = assign_turns(scores, zeros, ones, trajectory_s=torch.tensor([0, 0, 1]), step_s=torch.tensor([0, 1, 0]),
        ...                      objectives=[Objective("correct", pays="all")], block_names=["all"])
        >>> credit.block_nk.flatten(), credit.length_nk.flatten()
        (tensor([ 0.5000,  0.5000, -0.5000], dtype=torch.float64), tensor([2, 2, 1]))
    """
    method_entry = find(method) if isinstance(method, str) else method
    timeline = build_timeline(trajectory_s, step_s)
    present_sk = length_sk > 0
    group_j = timeline.groups(group_s)
    length_jk = timeline.add_up(length_sk)
    method_inputs = dict(inputs or {})
    options = {"block_names": block_names, "method": method_entry, **options}
    is_truncated_s = method_inputs.get("truncated_n")
    is_truncated_j = None if is_truncated_s is None else timeline.add_up(is_truncated_s) > 0
    is_paid_k = paid_blocks(objectives, block_names, length_sk.device).any(dim=0)
    pays_stop_j = lacks_all(timeline.add_up(~left_out(scores)) == 0, objectives, length_jk[:, is_paid_k] > 0)
    if method_entry.kind == "token":
        _refuse_split(timeline, method_entry)
        credit = assign(scores, group_s, present_sk, objectives=objectives, inputs=method_inputs, **options)
    elif method_entry.kind == "step":
        method_inputs |= {"trajectory_s": timeline.index_s, "step_s": step_s}
        turn_scores = _score_steps(scores, timeline, objectives)
        credit = assign(turn_scores, group_s, present_sk, objectives=objectives, inputs=method_inputs, **options)
        # Compare the summed rewards of whole rollouts, to find why a turn's credit is 0.
        rollout_scores = _score_rollouts(scores, timeline, objectives, add_turns=True)
        comparison = compare_in_strata(sum_rewards(rollout_scores, objectives), group_j).comparison
        comparison = explain_sum(comparison, rollout_scores, objectives, group_j, in_groups=True, truncated_n=is_truncated_j)
        rollout_comparison = comparison.take(timeline.index_s)
        step_adv_nm, step_comparison = credit.explained
        rollout_reasons = {"reason_nm": rollout_comparison.reason_nm, "about_nm": rollout_comparison.about_nm}
        credit = replace(credit, comparison=replace(step_comparison, **rollout_reasons).fitting(step_adv_nm))
        # If a rollout lacks all rewarded blocks, credit the last token of its last turn for the reward `if_missing`.
        stop_row_i = timeline.last_with(length_sk.sum(dim=1) > 0)[pays_stop_j]
        credit = replace(credit, stop_n=credit.stop_n.index_put((stop_row_i,), step_adv_nm[stop_row_i, 0]))
    else:
        credits_turns = method_entry.kind == "block"
        is_turn_objective_m = torch.tensor([credits_turns and objective.scope == "turn" for objective in objectives])
        rollout_scores = _score_rollouts(scores, timeline, objectives, add_turns=method_entry.kind == "completion")
        method_inputs = {"length_n": length_jk.sum(dim=1), "truncated_n": is_truncated_j}
        rollout_objectives = _zero_other_weights(objectives, ~is_turn_objective_m)
        credit = assign(
            rollout_scores, group_j, length_jk > 0, objectives=rollout_objectives, inputs=method_inputs, **options
        )
        if not credits_turns:  # `if_missing` fills the sum, so `assign` does not credit the decision to stop
            credit = replace(credit, stop_n=torch.where(pays_stop_j, credit.explained[0][:, 0], 0.0))
        credit = credit.take(timeline.index_s)
        has_tokens_s = length_sk.sum(dim=1) > 0
        carries_stop_credit_s = torch.zeros_like(has_tokens_s)
        carries_stop_credit_s[timeline.last_with(has_tokens_s)] = True
        credit = replace(
            credit,
            block_nk=torch.where(present_sk, credit.block_nk, 0.0),
            stop_n=torch.where(carries_stop_credit_s & has_tokens_s, credit.stop_n, 0.0),
            count_m=torch.full(is_turn_objective_m.shape, len(group_j)),
        )
        if bool(is_turn_objective_m.any()):
            scores_by_turn = rollout_scores.take(timeline.index_s)  # a turn's baseline may depend on its rollout's outcome
            score_tables: dict[str, Any] = {}
            for name, table in _objective_tables(scores).items():
                score_tables[name] = getattr(scores_by_turn, name).clone()
                score_tables[name][:, is_turn_objective_m] = table[:, is_turn_objective_m]
            turn_outcome_so, rollout_outcome_so = scores.outcome_no, scores_by_turn.outcome_no
            if turn_outcome_so is not None and rollout_outcome_so is not None:  # use the turn's outcome if known
                score_tables["outcome_no"] = torch.where(turn_outcome_so.isnan(), rollout_outcome_so, turn_outcome_so)
            turn_scores = replace(scores_by_turn, **score_tables)
            turn_objectives = _zero_other_weights(objectives, is_turn_objective_m)
            turn_inputs = {"voter_n": timeline.index_s, "truncated_n": is_truncated_s}
            turn_credit = assign(turn_scores, group_s, present_sk, objectives=turn_objectives, inputs=turn_inputs, **options)
            completion_count_m = torch.where(is_turn_objective_m, len(group_s), len(group_j))
            credit = replace(_add_credits(credit, turn_credit, is_turn_objective_m), count_m=completion_count_m)
    mean_length = length_jk.sum(dim=1).double().mean()
    return replace(credit, length_nk=length_jk[timeline.index_s], mean_length_n=mean_length.expand(len(group_s)))


def _refuse_split(timeline: Timeline, entry: Method) -> None:
    """Refuse a method that credits tokens if a rollout has more than one row."""
    earlier_row_i = (timeline.left_s > 0).nonzero().squeeze(1)
    if len(earlier_row_i):
        turn_rows = (timeline.index_s == timeline.index_s[earlier_row_i[0]]).nonzero().squeeze(1).tolist()
        raise RecipeError(
            f"Method '{entry.name}' needs all tokens of a rollout in one row, but rows {turn_rows[:6]} are turns of one rollout. "
            "Use a method that credits whole rollouts, such as 'grpo'. If you build the batch, you can also merge the turns of a "
            "rollout into one row."
        )


def _add_credits(rollouts: Credit, turns: Credit, is_turn_m: Bool[Tensor, " m"]) -> Credit:
    """Add up the credit for whole rollouts and the credit for single turns."""
    credit_tables: dict[str, Any] = {}
    for name in ("adv_nm", "singleton_m", "absent_m", "coarser_m", "weight_m"):
        credit_tables[name] = torch.where(is_turn_m, getattr(turns, name), getattr(rollouts, name))
    return replace(
        rollouts,
        block_nk=rollouts.block_nk + turns.block_nk,
        stop_n=rollouts.stop_n + turns.stop_n,
        comparison=turns.explained[1].where(is_turn_m, rollouts.explained[1]),
        **credit_tables,
    )


def _zero_other_weights(objectives: Sequence[Objective], has_weight_m: Tensor) -> list[Objective]:
    """Set the weight of each objective to 0 unless its entry in `has_weight_m` is True."""
    return [
        objective if has_weight else replace(objective, weight=0.0)
        for objective, has_weight in zip(objectives, has_weight_m.tolist(), strict=True)
    ]


def _score_rollouts(scores: Scores, timeline: Timeline, objectives: Sequence[Objective], *, add_turns: bool) -> Scores:
    """Return one score per rollout: its last reward, or the sum over its turns."""
    is_checked_sm = _mark_checked(scores.status_nm)
    reward_row_jm = torch.stack([timeline.last_with(is_checked_s) for is_checked_s in is_checked_sm.T], dim=1)
    index_m = torch.arange(len(objectives), device=reward_row_jm.device)
    tables: dict[str, Any] = {name: table[reward_row_jm, index_m] for name, table in _objective_tables(scores).items()}
    filled_reward_sm = fill_missing(scores, objectives)
    for m, objective in enumerate(objectives):
        if add_turns and objective.scope == "turn":
            reward_s = filled_reward_sm[:, m]
            is_counted_s = is_checked_sm[:, m] | ~reward_s.isnan()
            reward_sum_j = timeline.sum_exactly(torch.where(is_counted_s, reward_s, 0.0))
            is_counted_j = timeline.add_up(is_counted_s) > 0
            tables["reward_nm"][:, m] = torch.where(is_counted_j, reward_sum_j, tables["reward_nm"][:, m])
            # If a turn's check failed, the rollout gets the status of that turn.
            failed_status_j = scores.status_nm[timeline.last_with(is_checked_sm[:, m] & reward_s.isnan()), m]
            rollout_status_j = torch.where(reward_sum_j.isnan(), failed_status_j, int(Status.OK))
            tables["status_nm"][:, m] = torch.where(is_counted_j, rollout_status_j, tables["status_nm"][:, m])
    outcome_jo = None
    if scores.outcome_no is not None:
        last_outcomes = [outcome_s[timeline.last_with(~outcome_s.isnan())] for outcome_s in scores.outcome_no.T]
        outcome_jo = torch.stack(last_outcomes, dim=1)
    return Scores(scores.names, **tables, outcome_names=scores.outcome_names, outcome_no=outcome_jo)


def _score_steps(scores: Scores, timeline: Timeline, objectives: Sequence[Objective]) -> Scores:
    """Return the scores of turns for a method that adds up rewards. The last turn gets the whole rollout's rewards."""
    reward_sm = fill_missing(scores, objectives)
    status_sm = scores.status_nm.clone()
    is_checked_sm = _mark_checked(scores.status_nm)
    is_last_turn_s = timeline.left_s == 0
    for m, objective in enumerate(objectives):
        turn_reward_s = reward_sm[:, m].clone()
        if objective.scope == "rollout":
            reward_row_s = timeline.last_with(is_checked_sm[:, m])[timeline.index_s]
            reward_sm[:, m] = torch.where(is_last_turn_s, turn_reward_s[reward_row_s], 0.0)
            status_sm[:, m] = status_sm[reward_row_s, m]
        else:  # If no turn has a reward, the last turn gets NaN and the others get 0.
            # If an objective has no `scope`, a rollout gets the reward `if_missing` at most once, at its last turn.
            lacks_reward_s = ~is_checked_sm[:, m]
            if objective.scope is not None:
                lacks_reward_s &= turn_reward_s.isnan()
            rollout_has_reward_s = (timeline.add_up(~lacks_reward_s) > 0)[timeline.index_s]
            reward_sm[:, m] = torch.where(lacks_reward_s & (rollout_has_reward_s | ~is_last_turn_s), 0.0, turn_reward_s)
    return replace(scores, reward_nm=reward_sm, status_nm=torch.where(reward_sm.isnan(), status_sm, int(Status.OK)))


def worth_of_turns(
    scores: Scores,
    trajectory_s: Int[Tensor, " s"],
    step_s: Int[Tensor, " s"],
    *,
    objectives: Sequence[Objective],
    kind: str,
) -> tuple[Float[Tensor, "s m"], Float[Tensor, "s m"]]:
    """Return the reward that a method of `kind` compares at each turn, and a copy with NaN for rewards that do not count.

    A reward of scope rollout stands at each turn of its rollout and counts once. So do the turns of a rollout in scope turn,
    but for a method that credits steps, whose turns count one by one.
    """
    timeline = build_timeline(trajectory_s, step_s)
    rollout_scores = _score_rollouts(scores, timeline, objectives, add_turns=kind == "completion")
    compared_reward_sm = fill_missing(rollout_scores, objectives)[timeline.index_s]
    turn_reward_sm = fill_missing(scores, objectives)
    is_counted_reward_sm = torch.zeros_like(compared_reward_sm, dtype=torch.bool)
    is_checked_sm = _mark_checked(scores.status_nm)
    for m, objective in enumerate(objectives):
        credits_steps = kind == "step" and objective.scope != "rollout"
        if credits_steps or (kind == "block" and objective.scope == "turn"):
            compared_reward_sm[:, m] = turn_reward_sm[:, m]
        if credits_steps and objective.scope is None:
            # As in `_score_steps`, `if_missing` counts at the last step of a rollout without any checked reward.
            uses_if_missing_s = (timeline.left_s == 0) & (timeline.add_up(is_checked_sm[:, m]) == 0)[timeline.index_s]
            compared_reward_sm[:, m] = compared_reward_sm[:, m].where(is_checked_sm[:, m] | uses_if_missing_s, torch.nan)
        counted_row_index = slice(None) if credits_steps else timeline.last_with(~compared_reward_sm[:, m].isnan())
        is_counted_reward_sm[counted_row_index, m] = True
    return compared_reward_sm, torch.where(is_counted_reward_sm, compared_reward_sm, torch.nan)


def _objective_tables(scores: Scores) -> dict[str, Tensor]:
    """Return the tables in `Scores` that have one column per objective."""
    table_names = ("reward_nm", "status_nm", "by_outcome_nmo", "stated_nm")
    return {name: getattr(scores, name) for name in table_names if getattr(scores, name) is not None}


def _mark_checked(status: Int[Tensor, " s *m"]) -> Bool[Tensor, " s *m"]:
    """Mark rewards that a reward function tried to compute: their status is neither ABSENT nor UNSCORED."""
    return (status != int(Status.ABSENT)) & (status != int(Status.UNSCORED))


def settle_turns(
    timeline: Timeline,
    present_sk: Bool[Tensor, "s k"],
    objective: Objective,
    reward: Reward,
    *,
    block_names: Sequence[str],
    scope: ScopeName,
) -> tuple[Reward, Reward]:
    """Return each turn's own reward, and the reward that counts for the turn: its own or that of its whole rollout."""
    if (objective.scope or scope) == "turn":
        return reward, reward
    if reward.unused_n is not None:
        # An earlier turn may hold the credited block while the last turn holds the reward.
        is_paid_s = (present_sk & paid_blocks([objective], block_names, present_sk.device)).any(dim=1)
        rollout_is_paid_s = (timeline.add_up(is_paid_s) > 0)[timeline.index_s]
        has_unused_reward_s = rollout_is_paid_s & (reward.status_n == int(Status.ABSENT)) & ~reward.unused_n.isnan()
        reward = replace(
            reward,
            value_n=torch.where(has_unused_reward_s, reward.unused_n, reward.value_n),
            status_n=reward.status_n.masked_fill(has_unused_reward_s, int(Status.OK)),
            unused_n=reward.unused_n.masked_fill(rollout_is_paid_s, torch.nan),
        )
    return reward, reward.take(timeline.last_with(_mark_checked(reward.status_n))[timeline.index_s])


def step_returns(
    reward_s: Float[Tensor, " s"], trajectory_s: Int[Tensor, " s"], step_s: Int[Tensor, " s"], *, gamma: float = 0.95
) -> Float[Tensor, " s"]:
    r"""Add up the rewards at and after each step, discounted by their distance.

    Equation
        R[t] = sum over the steps k >= t of the trajectory of gamma^(k - t) r[k]

    Args:
        reward_s, trajectory_s, step_s, gamma: as for `gigpo`; a gap between step numbers costs one gamma.

    Edge cases:
        The return of a step is absent (NaN) if its own reward or a later one of its trajectory is.

    Example:
        >>> step_returns(torch.tensor([10., 0., 0., 3.]), torch.tensor([0, 0, 0, 1]), torch.tensor([2, 0, 1, 0]))
        tensor([10.0000,  9.0250,  9.5000,  3.0000], dtype=torch.float64)

    Reference:
        Feng et al. 2025, "Group-in-Group Policy Optimization" (arXiv 2505.10978), equation 5.
    """
    return build_timeline(trajectory_s, step_s, reward_s=reward_s).backward_sum(reward_s, decay=gamma)
