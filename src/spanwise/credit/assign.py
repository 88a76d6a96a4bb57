"""`assign`: objectives x blocks x baselines, the one mechanism behind BAE, RLCR, GRPO and their relatives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit.baselines import Advantage, advantage
from spanwise.credit.strata import group_index, moments, unit_scale
from spanwise.errors import AlignmentError, RecipeError, RewardError
from spanwise.objective import Objective
from spanwise.score.outcomes import check_discrete, judged_column
from spanwise.types import Credit, Scores, Status


def assign(
    scores: Scores,
    group_n: Int[Tensor, " n"],
    present_nk: Bool[Tensor, "n k"],
    *,
    objectives: Sequence[Objective],
    block_names: Sequence[str],
    sum_first: bool = False,
    leave_one_out: bool = False,
    min_stratum: int = 2,
    ddof: int = 1,
    eps: float = 1e-6,
    whiten: bool = False,
    estimator: Callable[..., Tensor] | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Credit:
    r"""Turn the rewards of every objective into the credit of every block.

    Equation
        credit[i, k] = sum over the objectives m that pay block k of  weight_m * A_m[i],   A_m from the baseline of m
        where r_m is left out: A_m[i] = if_missing_m - b_m[i], credited to the paid blocks that i has; if it has none of them,
        to stop[i], the decision to end the completion without them
        sum_first:     one reward sum_m weight_m r_m (what is left out stands for `if_missing`), one A, paid to every paid block
        estimator:     that A is estimator(sum_m weight_m r_m, group, ...)
        whiten:        credit[i, k] / (std of credit[:, k] over the completions that have block k + eps)

    Left out means that the completion does not hold what the reward reads, or holds it unreadably. A check that failed (a
    timeout, an error) is not the completion's doing: its reward is absent and costs nothing.

    Whitening scales and does not shift: relative to a group the mean of credit is 0 already, and a shift would give credit to
    groups without differences. What is paid to stop is scaled as the first block it was meant for.

    Args:
        scores: rewards (N, M) of the objectives, in order.
        group_n: prompt ids.
        present_nk: which blocks each completion has; an absent block gets 0.
        objectives: what each reward pays and what its baseline is.
        block_names: the K names that `pays` refers to.
        sum_first: add the rewards before the baseline is taken (RLCR, GRPO), instead of giving each its own.
        leave_one_out, min_stratum, ddof, eps: see `spanwise.credit.baselines.advantage`.
        whiten: scale the credit of each block to a standard deviation of 1 over the batch (GDPO), with `ddof` and `eps`.
        estimator: what turns the summed reward into advantages, instead of the objectives' baseline; with `sum_first` only.
        inputs: what an estimator may ask for by name (`length_n`, ...); it gets those of them that its signature has, beside
            `leave_one_out` and `min_stratum`.

    Raises:
        AlignmentError: sizes differ.
        RewardError: a reward that should be there is not finite.
        RecipeError: an objective names a block or an outcome that does not exist; `sum_first` with different baselines,
            an estimator without `sum_first`.

    Example:
        Two completions of one prompt, `correct` pays the solution and `brier` the confidence.

        >>> scores = Scores(("correct", "brier"), torch.tensor([[1., -.01], [0., -.64]]).double(),
        ...                 torch.zeros(2, 2, dtype=torch.int8), torch.full((2, 2, 2), torch.nan).double())
        >>> objectives = [Objective("correct", pays=("solution",)), Objective("brier", pays=("confidence",))]
        >>> assign(scores, torch.tensor([0, 0]), torch.ones(2, 2).bool(), objectives=objectives,
        ...        block_names=("solution", "confidence")).block_nk
        tensor([[ 0.5000,  0.3150],
                [-0.5000, -0.3150]], dtype=torch.float64)
    """
    _check_sizes(scores, group_n, present_nk, objectives, block_names)
    objectives = [replace(o, baseline=o.baseline or "group", scale=o.scale or "none") for o in objectives]
    options = {"leave_one_out": leave_one_out, "min_stratum": min_stratum, "ddof": ddof, "eps": eps}
    if sum_first:
        credit = _summed(scores, group_n, present_nk, objectives, block_names, options, estimator, inputs or {})
        return _whitened(credit, torch.zeros_like(credit.block_nk), present_nk, ddof, eps) if whiten else credit
    if estimator is not None:
        raise RecipeError("An estimator takes one reward per completion; give it the sum of the objectives: sum_first=True.")
    block_nk = torch.zeros(present_nk.shape, dtype=torch.float64, device=group_n.device)
    stop_nk = torch.zeros_like(block_nk)
    alone_m, left_out_nm = [], _left_out(scores)
    for m, objective in enumerate(objectives):
        outcome_no, judged = _outcomes(scores, objective), judged_column(objective)
        by_outcome_n2 = None if judged is None else scores.by_outcome_nmo[:, m]
        result = _advantage(objective, scores.reward_nm[:, m], group_n, outcome_no, by_outcome_n2, judged, options)
        paid = [_position(name, block_names, objective) for name in objective.pays]
        missing_n = torch.where(left_out_nm[:, m], result.missing_n, 0.0)
        block_nk[:, paid] += objective.weight * (result.advantage_n + missing_n)[:, None]
        stop_nk[:, paid[0]] += objective.weight * torch.where(present_nk[:, paid].any(dim=1), 0.0, missing_n)
        alone_m.append(result.alone_n.sum())
    absent_m = scores.reward_nm.isnan().sum(dim=0)
    credit = Credit(torch.where(present_nk, block_nk, 0.0), stop_nk.sum(dim=1), torch.stack(alone_m), absent_m)
    return _whitened(credit, stop_nk, present_nk, ddof, eps) if whiten else credit


def _advantage(
    objective: Objective,
    reward_n: Tensor,
    group_n: Tensor,
    outcome_no: Tensor | None,
    by_outcome_n2: Tensor | None,
    judged: int | None,
    options: dict,
) -> Advantage:
    return advantage(
        reward_n,
        group_n,
        baseline=objective.baseline or "group",
        outcome_no=outcome_no,
        by_outcome_n2=by_outcome_n2,
        judged=judged,
        back_off=objective.back_off,
        scale=objective.scale or "none",
        if_missing=objective.if_missing,
        **options,
    )


def _summed(
    scores: Scores,
    group_n: Tensor,
    present_nk: Tensor,
    objectives: Sequence[Objective],
    block_names: Sequence[str],
    options: dict,
    estimator: Callable[..., Tensor] | None,
    inputs: Mapping[str, Any],
) -> Credit:
    first = objectives[0]
    for objective in objectives:
        if (objective.baseline, objective.scale) != (first.baseline, first.scale) or objective.baseline in (
            "outcome",
            "blended",
        ):
            raise RecipeError(
                f"Rewards that are summed first share one baseline: '{first.name}' has {first.baseline}, "
                f"'{objective.name}' has {objective.baseline}. Use none, batch or group for all of them, or sum_first: false."
            )
    stand_in_m = scores.reward_nm.new_tensor([torch.nan if o.if_missing is None else o.if_missing for o in objectives])
    weight_m = scores.reward_nm.new_tensor([objective.weight for objective in objectives])
    reward_nm = torch.where(_left_out(scores), stand_in_m, scores.reward_nm)
    summed_n = (reward_nm * weight_m).sum(dim=1)
    if estimator is None:
        result = advantage(summed_n, group_n, baseline=first.baseline or "group", scale=first.scale or "none", **options)
        advantage_n, alone_n = result.advantage_n, result.alone_n
    else:
        shared = {name: options[name] for name in ("leave_one_out", "min_stratum")}
        advantage_n = estimator(summed_n, group_n, **accepted(estimator, shared | dict(inputs))).double()
        within = moments(summed_n, group_index(group_n))
        alone_n = within.member_n & (within.count_n() < max(options["min_stratum"], 2))
    paid_k = torch.zeros(len(block_names), dtype=torch.float64, device=group_n.device)
    for objective in objectives:
        for name in objective.pays:
            paid_k[_position(name, block_names, objective)] = 1.0
    block_nk = torch.where(present_nk, advantage_n[:, None] * paid_k, 0.0)
    alone_m = alone_n.sum().repeat(len(objectives))
    return Credit(block_nk, torch.zeros_like(summed_n), alone_m, scores.reward_nm.isnan().sum(dim=0))


def accepted(estimator: Callable[..., Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `inputs` that the signature of an estimator has, without what a `functools.partial` has fixed.

    >>> accepted(lambda reward_n, group_n, *, length_n: reward_n, {"length_n": 1, "metric_n": 2})
    {'length_n': 1}
    """
    parameters = inspect.signature(estimator).parameters
    fixed = getattr(estimator, "keywords", {})
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in inputs.items() if name not in fixed and (everything or name in parameters)}


def _whitened(credit: Credit, stop_nk: Tensor, present_nk: Tensor, ddof: int, eps: float) -> Credit:
    """Scale the credit of each block over the completions that have it; `stop_nk` goes along with its block."""
    held_nk = torch.where(present_nk, credit.block_nk, torch.nan)
    scale_k = torch.tensor([unit_scale(held_n, ddof=ddof, eps=eps) for held_n in held_nk.T], dtype=torch.float64)
    scale_k = scale_k.to(stop_nk.device)
    return replace(credit, block_nk=credit.block_nk * scale_k, stop_n=(stop_nk * scale_k).sum(dim=1))


def _left_out(scores: Scores) -> Bool[Tensor, "n m"]:
    """Where the completion itself left out what the reward needs."""
    return (scores.status_nm == int(Status.ABSENT)) | (scores.status_nm == int(Status.UNPARSABLE))


def _outcomes(scores: Scores, objective: Objective) -> Float[Tensor, "n o"] | None:
    columns = []
    for name in objective.outcomes:
        if name not in (*scores.names, *scores.outcome_names):
            known = ", ".join((*scores.names, *scores.outcome_names))
            raise RecipeError(f"Objective '{objective.name}' is given '{name}', which is no objective; known: {known}.")
        columns.append(scores.outcome(name))
        if objective.baseline in ("outcome", "blended"):
            check_discrete(columns[-1][~columns[-1].isnan()].unique().tolist(), name)
    return torch.stack(columns, dim=1) if columns else None


def _position(name: str, block_names: Sequence[str], objective: Objective) -> int:
    if name not in block_names:
        raise RecipeError(
            f"Objective '{objective.name}' pays '{name}', which is no block; there are {', '.join(block_names)}."
        )
    return list(block_names).index(name)


def _check_sizes(
    scores: Scores, group_n: Tensor, present_nk: Tensor, objectives: Sequence[Objective], block_names: Sequence[str]
) -> None:
    n, m, k = len(group_n), len(objectives), len(block_names)
    if scores.reward_nm.shape != (n, m) or present_nk.shape != (n, k):
        raise AlignmentError(
            f"{n} group ids, {m} objectives and {k} blocks, but rewards are {tuple(scores.reward_nm.shape)} and block presence "
            f"is {tuple(present_nk.shape)}."
        )
    bad_nm = (scores.status_nm == int(Status.OK)) & ~scores.reward_nm.isfinite()
    if bool(bad_nm.any()):
        i, j = (int(x) for x in torch.nonzero(bad_nm)[0])
        raise RewardError(
            f"Reward '{scores.names[j]}' of completion {i} is {float(scores.reward_nm[i, j])} with status OK; "
            f"a reward must be finite, or absent with a status that says why."
        )
