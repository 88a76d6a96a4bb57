"""REINFORCE++-baseline: rewards minus the group's mean, standardised over all tokens of the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.explained import Explained, explains
from spanwise.credit.registry import Preset
from spanwise.credit.strata import EpsAt, compare_in_strata, group_index, moments, standardised_by
from spanwise.registry import register
from spanwise.types import Zero


@register(
    "reinforce++-baseline",
    kind="completion",
    paper="REINFORCE++, arXiv 2501.03262",
    source="the code of verl and OpenRLHF",
    preset=Preset(whole=True, per="length", calibrated=False),
    exceptions={
        "split": "standardised over the tokens of the batch",
        "constant": "the mean over tokens is subtracted from every group, unless zero_constant_groups",
    },
)
@explains
def reinforce_plus_plus_baseline(
    reward_n: Float[Tensor, " n"],
    group_n: Int[Tensor, " n"],
    *,
    length_n: Int[Tensor, " n"] | Float[Tensor, " n"],
    ddof: int = 1,
    eps: float = 1e-8,
    eps_at: EpsAt = "variance",
    zero_constant_groups: bool = False,
    min_stratum: int = 2,
) -> Explained:
    r"""Compare a completion with its group, in units of the batch, in which each completion counts as often as it has tokens.

    Equation
        c[i] = r[i] - mean_g r
        A[i] = (c[i] - mean c) / sqrt(var c + eps), mean = sum L c / sum L, var = sum L (c - mean)^2 / (sum L - ddof)

    Args:
        reward_n: one reward per completion; NaN where absent (takes no part, gets 0).
        group_n: prompt ids, in any order, of any sizes.
        length_n: trainable tokens of each completion.
        ddof: of the variance (verl 1, OpenRLHF 0).
        eps: see `eps_at`.
        eps_at: "variance" as verl has it, "floor" for max(var, eps) as OpenRLHF has it, "std" for std + eps.
        zero_constant_groups: leave constant groups out, as if they had been filtered before: they join no moment and get 0.
        min_stratum: smaller groups join no moment and get 0.

    Edge cases:
        A constant group has c = 0, but where right and wrong answers differ in length the mean of c over tokens is not 0, and
        the group is credited with -mean/std. That is the method; `zero_constant_groups` takes it away. A group of one, a batch of
        constant groups and a completion without tokens give exactly 0 (verl lets a group of one keep its raw reward as c).

    Example:
        >>> r, g, length = torch.tensor([1., 0., 1., 1.]), torch.tensor([0, 0, 1, 1]), torch.tensor([30, 10, 20, 20])
        >>> reinforce_plus_plus_baseline(r, g, length_n=length, ddof=0)
        tensor([ 1.1339, -1.8898, -0.3780, -0.3780], dtype=torch.float64)
        >>> reinforce_plus_plus_baseline(r, g, length_n=length, ddof=0, zero_constant_groups=True)
        tensor([ 0.5774, -1.7321,  0.0000,  0.0000], dtype=torch.float64)

    Reference:
        Hu 2025, "REINFORCE++" (arXiv 2501.03262), as verl and OpenRLHF (`reinforce_baseline`) have it.
    """
    stratum_n = group_index(group_n)
    within = moments(reward_n, stratum_n)
    joins_n = within.member_n & (within.count_n() >= max(min_stratum, 2))
    if zero_constant_groups:
        joins_n &= within.std_n(ddof=0) > 0
    centred_n, comparison = compare_in_strata(reward_n, stratum_n, min_stratum=min_stratum)
    options: dict[str, Any] = {"weight_n": length_n.double(), "ddof": ddof, "eps": eps, "eps_at": eps_at}
    adv_n, mean, divisor = standardised_by(torch.where(joins_n, centred_n, torch.nan), **options)
    counts_n1 = (joins_n & (length_n > 0))[:, None] & (divisor > 0)
    scaled = replace(comparison.rescaled(divisor=divisor, shift=mean), averaged_nm=torch.zeros_like(comparison.averaged_nm))
    nothing = comparison.unexplained(adv_n[:, None])
    why = torch.where((length_n > 0)[:, None], int(Zero.NO_SCALE), int(Zero.EMPTY))
    nothing = replace(nothing, reason_nm=torch.where(nothing.reason_nm == int(Zero.AT_BASELINE), why, nothing.reason_nm))
    return Explained(
        adv_n, scaled.fitting(adv_n[:, None]).where(counts_n1, comparison.where(centred_n[:, None] == 0, nothing))
    )
