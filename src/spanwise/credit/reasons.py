"""Why an advantage is exactly 0, where statuses and verdicts tell more than the comparison: missing, all right, all wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit.strata import moments
from spanwise.objective import Objective
from spanwise.score import judge_of
from spanwise.types import Comparison, Scores, Status, Zero

_MISSING = {
    Status.UNPARSABLE: Zero.UNPARSABLE,
    Status.UNSCORED: Zero.UNSCORED,
    Status.TIMEOUT: Zero.FAILED,
    Status.ERROR: Zero.FAILED,
}


def objective_reasons(
    comparison: Comparison,
    scores: Scores,
    objectives: Sequence[Objective],
    value_nm: Float[Tensor, "n m"],
    *,
    truncated_n: Bool[Tensor, " n"] | None,
) -> Comparison:
    """The comparison of each objective by itself, with its reasons as exact as statuses, verdicts and weights make them.

    `value_nm` is what was compared, without stand-ins; `truncated_n` are the completions in which a part opens and never closes.
    """
    reason_nm = torch.where(comparison.reason_nm == int(Zero.ABSENT), _missing(scores, truncated_n), comparison.reason_nm)
    for m, objective in enumerate(objectives):
        if _is_verdict(objective, value_nm[:, m]):
            reason_nm[:, m] = _verdict(reason_nm[:, m], comparison.worth_nm[:, m])
        if objective.weight == 0:
            reason_nm[:, m] = int(Zero.NO_WEIGHT)
    about_nm = torch.arange(len(objectives), device=reason_nm.device).expand_as(reason_nm)
    return replace(comparison, reason_nm=reason_nm, about_nm=about_nm)


def sum_reasons(
    comparison: Comparison,
    scores: Scores,
    objectives: Sequence[Objective],
    value_nm: Float[Tensor, "n m"],
    set_n: Int[Tensor, " n"],
    *,
    grouped: bool,
    truncated_n: Bool[Tensor, " n"] | None,
) -> Comparison:
    """The comparison of the sum of all objectives, with the objective that its reasons are about, if it is one.

    `value_nm` are the rewards of the sum, with stand-ins; `set_n` says who is compared with whom. Without `grouped` the batch is
    one set, in which nobody is alone.
    """
    reason_n, about_n = comparison.reason_nm[:, 0], comparison.about_nm[:, 0]
    everyone = moments(comparison.worth_nm[:, 0], set_n)
    size_n = everyone.count_n()
    if not grouped:
        still_n = torch.where(everyone.constant_n(), int(Zero.ALL_EQUAL), int(Zero.AT_BASELINE))
        reason_n = torch.where(reason_n == int(Zero.CREDITED), reason_n, still_n)
    equal_n = reason_n == int(Zero.ALL_EQUAL)
    for m in reversed(range(len(objectives))):  # a verdict on which all agree says more than an equal sum
        own = moments(scores.reward_nm[:, m], set_n)
        if _is_verdict(objectives[m], scores.reward_nm[:, m]):
            agree_n = equal_n & own.constant_n() & (own.count_n() == size_n)
            reason_n = torch.where(agree_n, _verdict(torch.full_like(reason_n, int(Zero.ALL_EQUAL)), own.mean_n()), reason_n)
            about_n = torch.where(agree_n, m, about_n)
    missing_nm, column_m = _missing(scores, truncated_n), torch.arange(len(objectives), device=reason_n.device)
    weighs_m = torch.tensor([objective.weight != 0 for objective in objectives], device=reason_n.device)
    rank_nm = torch.where(value_nm.isnan() & weighs_m, missing_nm * len(objectives) + column_m, len(Zero) * len(objectives))
    first_n = rank_nm.argmin(dim=1)
    # What is there may be credited alone (GDPO).
    gone_n = comparison.worth_nm[:, 0].isnan() & (reason_n != int(Zero.CREDITED))
    reason_n = torch.where(gone_n, missing_nm.gather(1, first_n[:, None])[:, 0], reason_n)
    return replace(comparison, reason_nm=reason_n[:, None], about_nm=torch.where(gone_n, first_n, about_n)[:, None])


def _missing(scores: Scores, truncated_n: Tensor | None) -> Int[Tensor, "n m"]:
    """Why each reward would not be there."""
    reason_nm = torch.full(scores.status_nm.shape, int(Zero.ABSENT), device=scores.status_nm.device)
    if truncated_n is not None:
        reason_nm[truncated_n] = int(Zero.TRUNCATED)
    for status, reason in _MISSING.items():
        reason_nm[scores.status_nm == int(status)] = int(reason)
    return reason_nm


def _verdict(reason_n: Tensor, value_n: Tensor) -> Tensor:
    """All right or all wrong, where all are equally right or wrong."""
    reasons = torch.where(value_n == 1, int(Zero.ALL_RIGHT), int(Zero.ALL_WRONG))
    return torch.where((reason_n == int(Zero.ALL_EQUAL)) & ((value_n == 0) | (value_n == 1)), reasons, reason_n)


def _is_verdict(objective: Objective, value_n: Tensor) -> bool:
    """Whether a reward says right and wrong: 1 and 0, and it is not judged by another one."""
    return judge_of(objective) is None and bool(((value_n == 0) | (value_n == 1) | value_n.isnan()).all())
