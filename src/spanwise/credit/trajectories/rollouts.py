"""Credit where every row is a turn of a rollout: one vote per rollout, and credit on each turn's own tokens.

Index letters: s turns (rows), j rollouts, m objectives, k blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from spanwise.credit.assign import assign, completed, paid_blocks, summed
from spanwise.credit.reasons import sum_reasons
from spanwise.credit.registry import Method
from spanwise.credit.registry import method as find
from spanwise.credit.strata import compare_in_strata, group_index
from spanwise.credit.trajectories.steps import Timeline, timeline
from spanwise.errors import RecipeError
from spanwise.objective import Objective, ScopeName
from spanwise.types import Credit, Scores, Status


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
    chosen = find(method) if isinstance(method, str) else method
    line = timeline(trajectory_s, step_s)
    group_j = group_index(line.groups(group_s, trajectory_s))
    length_jk = torch.zeros((len(group_j), length_sk.shape[1]), dtype=length_sk.dtype, device=length_sk.device)
    length_jk.index_add_(0, line.index_s, length_sk)
    data = dict(inputs or {})
    cut_s = data.get("truncated_n")
    cut_j = None if cut_s is None else _count(cut_s, line) > 0
    rule: dict[str, Any] = {"block_names": block_names, "method": chosen, **options}
    if chosen.kind in ("token", "step"):
        steps = chosen.kind == "step"
        if steps:
            data |= {"trajectory_s": line.index_s, "step_s": step_s}
        else:
            _refuse_split(line, chosen)
        at_turns = _step_scores(scores, line, objectives) if steps else scores
        found = assign(at_turns, group_s, length_sk > 0, objectives=objectives, inputs=data, **rule)
        found = _reasons_of_rollouts(found, scores, group_j, line, objectives, cut_j) if steps else found
    else:
        turn_m = torch.tensor([o.scope == "turn" and chosen.kind == "block" for o in objectives])
        at_rollouts = rollout_scores(scores, line, objectives, summed=chosen.kind == "completion")
        data = {"length_n": length_jk.sum(dim=1), "truncated_n": cut_j}
        found_j = assign(at_rollouts, group_j, length_jk > 0, objectives=_weighing(objectives, ~turn_m), inputs=data, **rule)
        found = replace(_on_turns(found_j, line, length_sk), count_m=torch.full(turn_m.shape, len(group_j)))
        if bool(turn_m.any()):
            at_turns = turn_scores(scores, at_rollouts, line, turn_m)
            data = {"voter_n": line.index_s, "truncated_n": cut_s}
            own = assign(at_turns, group_s, length_sk > 0, objectives=_weighing(objectives, turn_m), inputs=data, **rule)
            found = _added(found, own, turn_m)
    mean_length = length_jk.sum(dim=1).double().mean()
    return replace(found, length_nk=length_jk[line.index_s], mean_length_n=mean_length.expand(len(group_s)))


def _added(rollouts: Credit, turns: Credit, turn_m: Bool[Tensor, " m"]) -> Credit:
    """The credit of objectives of rollouts and of those of turns, `turn_m`."""
    columns = ("adv_nm", "singleton_m", "absent_m", "coarser_m", "weight_m")
    picked: dict[str, Any] = {name: torch.where(turn_m, getattr(turns, name), getattr(rollouts, name)) for name in columns}
    assert turns.comparison is not None, "it was credited here"
    assert rollouts.comparison is not None, "it was credited here"
    assert rollouts.count_m is not None, "it was counted here"
    return replace(
        rollouts,
        block_nk=rollouts.block_nk + turns.block_nk,
        stop_n=rollouts.stop_n + turns.stop_n,
        count_m=torch.where(turn_m, len(turns.stop_n), rollouts.count_m),
        comparison=turns.comparison.where(turn_m, rollouts.comparison),
        **picked,
    )


def _reasons_of_rollouts(
    found: Credit, scores: Scores, group_j: Tensor, line: Timeline, objectives: Sequence[Objective], cut_j: Tensor | None
) -> Credit:
    """The credit of steps, which get nothing because of what their rollouts are worth."""
    at_rollouts = rollout_scores(scores, line, objectives, summed=True)
    whole = compare_in_strata(summed(at_rollouts, objectives), group_j).comparison
    reasons = sum_reasons(
        whole, at_rollouts, objectives, completed(at_rollouts, objectives), group_j, grouped=True, truncated_n=cut_j
    ).take(line.index_s)
    assert found.comparison is not None, "it was credited here"
    assert found.adv_nm is not None, "it was credited here"
    comparison = replace(found.comparison, reason_nm=reasons.reason_nm, about_nm=reasons.about_nm)
    return replace(found, comparison=comparison.fitting(found.adv_nm))


def _weighing(objectives: Sequence[Objective], kept_m: Tensor) -> list[Objective]:
    """The objectives, those that are not kept without a weight."""
    return [o if kept else replace(o, weight=0.0) for o, kept in zip(objectives, kept_m.tolist(), strict=True)]


def _on_turns(found: Credit, line: Timeline, length_sk: Tensor) -> Credit:
    """The credit of rollouts on each of their turns; that of the decision to stop on the last turn that has a token."""
    rows = found.take(line.index_s)
    filled_s = length_sk.sum(dim=1) > 0
    last_s = torch.zeros_like(filled_s).index_fill(0, _last_of(filled_s, line), True) & filled_s
    return replace(
        rows, block_nk=torch.where(length_sk > 0, rows.block_nk, 0.0), stop_n=torch.where(last_s, rows.stop_n, 0.0)
    )


def _last_of(flag_s: Bool[Tensor, " s"], line: Timeline) -> Int[Tensor, " j"]:
    """The row of each rollout's last turn with the flag; its last turn where none has it."""
    worst = int(line.left_s.max()) + 1 if len(flag_s) else 0
    rank_s = torch.where(flag_s, 0, worst) + line.left_s
    row_j = torch.zeros_like(line.last_j)
    least_j = torch.full_like(row_j, 2 * worst + 1).scatter_reduce(0, line.index_s, rank_s, "amin")
    rows = torch.nonzero(rank_s == least_j[line.index_s]).squeeze(1)
    return row_j.scatter(0, line.index_s[rows], rows)


def rollout_scores(scores: Scores, line: Timeline, objectives: Sequence[Objective], *, summed: bool) -> Scores:
    """One row per rollout: of each reward its last turn that has it, or (`summed`) the sum where it is a reward of turns."""
    columns = [_last_of(~_not_here(scores.status_nm[:, m]), line) for m in range(len(objectives))]
    taken = {
        name: torch.stack([table[rows, m] for m, rows in enumerate(columns)], dim=1)
        for name, table in _tables(scores).items()
    }
    for m, objective in enumerate(objectives):
        if summed and objective.scope == "turn":
            value_s = completed(scores, objectives)[:, m]
            held_s = ~(_not_here(scores.status_nm[:, m]) & value_s.isnan())
            total_j = line.totals(torch.where(held_s, value_s, 0.0))
            held_j = _count(held_s, line) > 0
            taken["reward_nm"][:, m] = torch.where(held_j, total_j, taken["reward_nm"][:, m])
            taken["status_nm"][held_j & ~total_j.isnan(), m] = int(Status.OK)
    outcome_jo = None
    if scores.outcome_no is not None:
        outcome_jo = torch.stack([column[_last_of(~column.isnan(), line)] for column in scores.outcome_no.T], dim=1)
    return Scores(scores.names, **taken, outcome_names=scores.outcome_names, outcome_no=outcome_jo)


def turn_scores(scores: Scores, at_rollouts: Scores, line: Timeline, turn_m: Bool[Tensor, " m"]) -> Scores:
    """One row per turn; what is a fact of the rollout is the same at all of its turns, as an outcome may be asked for it."""
    spread = at_rollouts.take(line.index_s)
    wide = {"reward_nm": turn_m, "status_nm": turn_m, "by_outcome_nmo": turn_m[:, None], "stated_nm": turn_m}
    own = {name: torch.where(wide[name], table, getattr(spread, name)) for name, table in _tables(scores).items()}
    return replace(spread, **own)


def _step_scores(scores: Scores, line: Timeline, objectives: Sequence[Objective]) -> Scores:
    """One row per turn that adds up over a rollout: a turn without the reward adds 0, a reward of the rollout stands at its end."""
    value_sm, status_sm = completed(scores, objectives), scores.status_nm.clone()
    last_s = line.left_s == 0
    for m, objective in enumerate(objectives):
        stand_s = value_sm[:, m].clone()
        row_s = _last_of(~_not_here(status_sm[:, m]), line)[line.index_s]
        if objective.scope == "rollout":
            value_sm[:, m], status_sm[:, m] = torch.where(last_s, stand_s[row_s], 0.0), status_sm[row_s, m]
        else:  # where no turn has it, the last one says so
            silent_s = _not_here(status_sm[:, m]) & (stand_s.isnan() | (objective.scope is None))
            some_s = (_count(~silent_s, line) > 0)[line.index_s]
            value_sm[:, m] = torch.where(silent_s & (some_s | ~last_s), 0.0, stand_s)
    return replace(scores, reward_nm=value_sm, status_nm=torch.where(value_sm.isnan(), status_sm, int(Status.OK)))


def _refuse_split(line: Timeline, chosen: Method) -> None:
    """A method that runs over tokens needs every rollout as one row."""
    split_s = line.left_s > 0
    if bool(split_s.any()):
        index = int(line.index_s[split_s][0])
        rows = torch.nonzero(line.index_s == index).squeeze(1).tolist()
        raise RecipeError(
            f"Method '{chosen.name}' runs over the tokens of a rollout from its end, and rows {rows[:6]} are turns of one; "
            f"each would end where its turn ends. Merge the turns of a rollout into one row, or use an outcome method or 'gigpo'."
        )


def _tables(scores: Scores) -> dict[str, Tensor]:
    """The tables of one column per objective."""
    names = ("reward_nm", "status_nm", "by_outcome_nmo", "stated_nm")
    return {name: getattr(scores, name) for name in names if getattr(scores, name) is not None}


def _not_here(status_s: Tensor) -> Bool[Tensor, " s"]:
    """Whether a turn does not hold the reward at all; another turn of its rollout may."""
    return (status_s == int(Status.ABSENT)) | (status_s == int(Status.UNSCORED))


def _count(flag_s: Tensor, line: Timeline) -> Int[Tensor, " j"]:
    """How many turns of each rollout have the flag."""
    return torch.zeros(len(line.last_j), dtype=torch.long, device=flag_s.device).index_add(0, line.index_s, flag_s.long())


def keep_for_rollouts(
    scores: Scores,
    present_sk: Bool[Tensor, "s k"],
    trajectory_s: Int[Tensor, " s"],
    *,
    objectives: Sequence[Objective],
    block_names: Sequence[str],
    scope: ScopeName = "rollout",
) -> Scores:
    """Give a turn back the number that was set aside because it has no paid block, where its rollout has one.

    Where rows are turns, the completion is the whole rollout: its outcome may stand at a last turn that says goodbye, and the block
    that it pays in the turn before. `scope` is that of objectives that name none; those of a turn keep to their turn.

    >>> nan = torch.nan
    >>> scores = Scores(("won",), torch.full((3, 1), nan).double(), torch.ones(3, 1).to(torch.int8),
    ...                 torch.full((3, 1, 2), nan).double(), unused_nm=torch.tensor([[nan], [1.], [0.]]).double())
    >>> present_sk, trajectory_s = torch.tensor([[True], [False], [False]]), torch.tensor([0, 0, 1])
    >>> won = Objective("correct", name="won", pays="all")
    >>> keep_for_rollouts(scores, present_sk, trajectory_s, objectives=[won], block_names=["all"]).reward_nm.flatten()
    tensor([nan, 1., nan], dtype=torch.float64)
    """
    if scores.unused_nm is None or not len(trajectory_s):
        return scores
    index_s = group_index(trajectory_s)
    whole_m = torch.tensor([(objective.scope or scope) == "rollout" for objective in objectives], device=present_sk.device)
    pays_mk = paid_blocks(objectives, block_names, present_sk.device) & whole_m[:, None]
    paid_sm = (present_sk[:, None] & pays_mk).any(dim=2)
    paid_jm = torch.zeros((int(index_s.max()) + 1, paid_sm.shape[1]), dtype=torch.long, device=paid_sm.device)
    paid_jm.index_add_(0, index_s, paid_sm.long())
    back_sm = ~scores.unused_nm.isnan() & (paid_jm[index_s] > 0)
    return replace(
        scores,
        reward_nm=torch.where(back_sm, scores.unused_nm, scores.reward_nm),
        status_nm=scores.status_nm.masked_fill(back_sm, int(Status.OK)),
        unused_nm=scores.unused_nm.masked_fill(back_sm, torch.nan),
    )
