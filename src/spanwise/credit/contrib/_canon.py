"""CANON: the group cut into halves by a metric, each completion compared with the other half."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.checks import check_rewards
from spanwise.credit.strata import group_index, moments, weighted_mean
from spanwise.errors import AlignmentError
from spanwise.registry import register


@register("canon", kind="completion", paper="CANON, arXiv 2509.23962", source="the authors' code; the paper through notes")
def canon(
    reward_n: Float[Tensor, " n"],
    group_n: Int[Tensor, " n"],
    *,
    metric_n: Float[Tensor, " n"] | Int[Tensor, " n"],
    mu: float = 1.0,
    alpha: float = 1.0,
    favoured: Literal["high", "low"] = "high",
    ties: Literal["share", "order"] = "share",
    divide_by: float | int = 1.0,
    min_stratum: int = 2,
) -> Float[Tensor, " n"]:
    r"""A function to call from Python: compare a completion with the other half of its group, cut by a metric.

    No trainer here has the metric.

    Equation
        low: the n//2 completions of smallest metric, high: the others
        A[i] = (mu (r[i] - mean of the other half) + (1 - mu) (r[i] - mean of its own half)) / divide_by
        alpha multiplies r[i] in the favoured half, and the mean of the favoured half where the other half is compared with it

    Args:
        reward_n: one reward per completion; NaN where absent (in no half, gets 0).
        group_n: prompt ids, in any order, of any sizes.
        metric_n: what the group is cut by, such as length or mean entropy; NaN where unknown (in no half, gets 0).
        mu: 1 compares between halves, 0 inside them; halves of one size and mu = .5 are Dr. GRPO.
        alpha: below 1 the favoured half must be better to be credited; in the authors' code lengths use favoured="high" (the
            long half), entropies "low".
        favoured: the half that alpha acts on.
        ties: "share" lets completions of one metric across the cut belong to both halves in part, so that their order does not
            matter; "order" cuts them in the order they come in (the authors' code).
        divide_by: a constant; the authors' code divides by 8192, the greatest length (here `spread(..., per=length)`).
        min_stratum: smaller groups get 0.

    Edge cases:
        In a group of odd size the high half has one more. A group of one gives exactly 0 (the authors' code: its raw reward), so
        does a constant group while alpha is 1; otherwise it gets (alpha - 1) r. With mu > .5 credit does not sum to 0.

    Example:
        >>> r, length = torch.tensor([1., 1., 0., 1., 0., 0., 0., 0.]), torch.tensor([8., 7., 6., 5., 4., 3., 2., 1.])
        >>> canon(r, torch.zeros(8, dtype=torch.long), metric_n=length)
        tensor([ 1.0000,  1.0000,  0.0000,  1.0000, -0.7500, -0.7500, -0.7500, -0.7500],
               dtype=torch.float64)

    Reference:
        "CANON" (arXiv 2509.23962) and its code, where mu is `_lambda` with a default of 1.
    """
    stratum_n = group_index(group_n)
    if len(metric_n) != len(reward_n):
        raise AlignmentError(f"There are {len(metric_n)} metrics for {len(reward_n)} rewards; give one to each completion.")
    check_rewards(reward_n)
    metric_n = metric_n.double()
    reward_n = torch.where(metric_n.isnan(), torch.nan, reward_n.double())
    high_n = _high(metric_n, torch.where(reward_n.isnan(), -1, stratum_n), ties)
    weight_high, weight_low = (alpha, 1.0) if favoured == "high" else (1.0, alpha)
    mean_high_n = weighted_mean(reward_n, high_n, stratum_n)
    mean_low_n = weighted_mean(reward_n, 1 - high_n, stratum_n)
    in_high_n = mu * (weight_high * reward_n - weight_low * mean_low_n) + (1 - mu) * (reward_n - mean_high_n)
    in_low_n = mu * (weight_low * reward_n - weight_high * mean_high_n) + (1 - mu) * (reward_n - mean_low_n)
    advantage_n = (high_n * in_high_n + (1 - high_n) * in_low_n) / divide_by
    count_n = moments(reward_n, stratum_n).count_n()
    return torch.where(count_n >= max(min_stratum, 2), advantage_n, 0.0).nan_to_num(nan=0.0)


def _high(metric_n: Tensor, stratum_n: Tensor, ties: str) -> Tensor:
    """How far each completion belongs to the high half of its group: 0 or 1, between them where ties straddle the cut."""
    order = torch.argsort(metric_n, stable=True)
    order = order[torch.argsort(stratum_n[order], stable=True)]
    sorted_stratum = stratum_n[order]
    _, group_i, size_g = torch.unique_consecutive(sorted_stratum, return_inverse=True, return_counts=True)
    rank_i = torch.arange(len(order), device=order.device) - (size_g.cumsum(0) - size_g)[group_i]
    high_i = (rank_i >= size_g[group_i] // 2).double()
    if ties == "share":
        pairs = torch.stack([sorted_stratum.double(), metric_n[order]], dim=1)
        _, block_i, size_b = torch.unique_consecutive(pairs, dim=0, return_inverse=True, return_counts=True)
        high_b = torch.zeros(len(size_b), dtype=torch.float64, device=order.device).index_add_(0, block_i, high_i)
        high_i = (high_b / size_b)[block_i]
    return torch.empty_like(high_i).index_copy_(0, order, high_i)
