"""Means, deviations and variances inside strata: the only place that divides by a group's moment.

A stratum is the set of completions that share what a baseline is given: nothing (the batch), the prompt (the group), the prompt
and an outcome. Everything here is float64, takes strata of any size in any order, and leaves NaN values out.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.errors import AlignmentError


def group_index(groups: Sequence[Hashable] | Tensor) -> Int[Tensor, " n"]:
    """Turn group ids of any kind (integers, strings, ...) into dense integers 0..G-1; equal ids get equal integers.

    >>> group_index(["b", "a", "b"])
    tensor([0, 1, 0])
    """
    if isinstance(groups, Tensor):
        return torch.unique(groups, return_inverse=True)[1]
    dense: dict[Hashable, int] = {}
    return torch.tensor([dense.setdefault(group, len(dense)) for group in groups], dtype=torch.long)


def refine(group_n: Int[Tensor, " n"], outcome_n: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Split groups by outcome: members of one group with equal outcomes share a stratum; an unknown (NaN) outcome gives -1.

    >>> refine(torch.tensor([0, 0, 0, 1]), torch.tensor([1., 0., 1., float("nan")]))
    tensor([ 1,  0,  1, -1])
    """
    known_n = ~outcome_n.isnan()
    values, outcome_id_n = torch.unique(torch.where(known_n, outcome_n, 0.0), return_inverse=True)
    stratum_n = group_index(group_n) * len(values) + outcome_id_n
    return torch.where(known_n, stratum_n, -1)


@dataclass(frozen=True)
class Moments:
    """First and second moments of a value inside each stratum, and where each completion stands.

    Attributes:
        stratum_n: dense stratum of each completion, also of those whose value is absent; -1 where it has no stratum.
        member_n: whether the value is present and in a stratum.
        deviation_n: value minus the mean of its stratum; exactly 0 in a constant stratum and at non-members.
        count_s, mean_s, square_s: members, mean and sum of squared deviations of each stratum (mean is NaN if empty).
    """

    stratum_n: Int[Tensor, " n"]
    member_n: Bool[Tensor, " n"]
    deviation_n: Float[Tensor, " n"]
    count_s: Float[Tensor, " s"]
    mean_s: Float[Tensor, " s"]
    square_s: Float[Tensor, " s"]

    def count_n(self) -> Float[Tensor, " n"]:
        """Members of each completion's stratum; 0 where it has none."""
        return torch.where(self.stratum_n >= 0, self.count_s[self.stratum_n], 0.0)

    def mean_n(self) -> Float[Tensor, " n"]:
        """Mean of each completion's stratum, itself included; NaN where the stratum has no member."""
        return torch.where(self.stratum_n >= 0, self.mean_s[self.stratum_n], torch.nan)

    def std_n(self, *, ddof: int) -> Float[Tensor, " n"]:
        """Standard deviation of each completion's stratum, sqrt(square / (count - ddof)); 0 where that is undefined."""
        free_s = self.count_s - ddof
        std_s = torch.where(free_s > 0, self.square_s / free_s.clamp(min=1.0), 0.0).sqrt()
        return torch.where(self.stratum_n >= 0, std_s[self.stratum_n], 0.0)

    def pooled_variance(self) -> float:
        """Variance inside strata, sum of squares over sum of (count - 1); NaN if every stratum has at most one member."""
        free = (self.count_s - 1).clamp(min=0.0).sum()
        return float(self.square_s.sum() / free) if free > 0 else float("nan")


def moments(value_n: Float[Tensor, " n"], stratum_n: Int[Tensor, " n"]) -> Moments:
    """Moments of `value_n` inside the strata `stratum_n` (any integer ids; negative: in no stratum; NaN values are left out).

    Values are shifted by their stratum's minimum before they are summed, so a constant stratum has deviation exactly 0.

    Example:
        >>> m = moments(torch.tensor([1., 0., 0., 5.]), torch.tensor([7, 7, 7, 2]))
        >>> m.deviation_n, m.count_n()
        (tensor([ 0.6667, -0.3333, -0.3333,  0.0000], dtype=torch.float64), tensor([3., 3., 3., 1.], dtype=torch.float64))
    """
    if value_n.shape != stratum_n.shape:
        raise AlignmentError(
            f"There are {len(value_n)} rewards for {len(stratum_n)} group ids; give one id to each completion."
        )
    dense_n = torch.full_like(stratum_n, -1, dtype=torch.long)
    placed_n = stratum_n >= 0
    ids, dense_n[placed_n] = torch.unique(stratum_n[placed_n], return_inverse=True)
    member_n = placed_n & ~value_n.isnan()
    value_i, stratum_i = value_n[member_n].double(), dense_n[member_n]

    def total_s(value_i: Tensor) -> Tensor:
        return torch.zeros(len(ids), dtype=torch.float64, device=value_n.device).index_add_(0, stratum_i, value_i)

    count_s = total_s(torch.ones_like(value_i))
    low_s = torch.zeros_like(count_s).scatter_reduce_(0, stratum_i, value_i, "amin", include_self=False)
    above_i = value_i - low_s[stratum_i]
    mean_above_s = total_s(above_i) / count_s.clamp(min=1.0)
    deviation_i = above_i - mean_above_s[stratum_i]
    deviation_n = torch.zeros(len(value_n), dtype=torch.float64, device=value_n.device)
    deviation_n[member_n] = deviation_i
    mean_s = torch.where(count_s > 0, low_s + mean_above_s, torch.nan)
    return Moments(dense_n, member_n, deviation_n, count_s, mean_s, total_s(deviation_i.square()))


def centred(
    value_n: Float[Tensor, " n"],
    stratum_n: Int[Tensor, " n"],
    *,
    leave_one_out: bool = False,
    min_stratum: int = 2,
    scale: str = "none",
    ddof: int = 1,
    eps: float = 0.0,
) -> Float[Tensor, " n"]:
    r"""Subtract the stratum mean, and divide by the stratum's standard deviation if asked.

    Equation
        A[i] = (v[i] - mean_S v) * (n/(n-1) if leave_one_out else 1) / (std_S + eps if scale == "std" else 1)

    n/(n-1) times the deviation is exactly v[i] minus the mean of the *other* members. Absent values, strata with fewer than
    `min_stratum` (at least 2) members and constant strata give exactly 0.

    Example:
        >>> centred(torch.tensor([1., 0., 0., 5.]), torch.tensor([0, 0, 0, 1]), leave_one_out=True)
        tensor([ 1.0000, -0.5000, -0.5000,  0.0000], dtype=torch.float64)
    """
    within = moments(value_n, stratum_n)
    count_n, advantage_n = within.count_n(), within.deviation_n
    if leave_one_out:
        advantage_n = advantage_n * count_n / (count_n - 1).clamp(min=1.0)
    if scale == "std":
        spread_n = within.std_n(ddof=ddof) + eps
        advantage_n = torch.where(spread_n > 0, advantage_n / torch.where(spread_n > 0, spread_n, 1.0), 0.0)
    return torch.where(within.member_n & (count_n >= max(min_stratum, 2)), advantage_n, 0.0)


def precision_mean(estimate_en: Float[Tensor, "e n"], variance_en: Float[Tensor, "e n"]) -> Float[Tensor, " n"]:
    """Mix E estimates of one quantity by their precisions 1/variance; a NaN estimate or variance takes no part.

    Returns NaN where no estimate takes part. Variances must be positive.

    >>> precision_mean(torch.tensor([[1., 1.], [4., float("nan")]]), torch.tensor([[1., 1.], [2., 1.]]))
    tensor([2., 1.])
    """
    weight_en = torch.where(estimate_en.isnan() | variance_en.isnan(), 0.0, 1.0 / variance_en)
    total_n = weight_en.sum(dim=0)
    mixed_n = (weight_en * estimate_en.nan_to_num(nan=0.0)).sum(dim=0) / torch.where(total_n > 0, total_n, 1.0)
    return torch.where(total_n > 0, mixed_n, torch.nan)
