"""GDPO: every reward standardised in its group before they are added, then the sum scaled over the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.explained import Explained, explains
from spanwise.credit.registry import Preset
from spanwise.credit.strata import EpsAt, compare_in_strata, group_index, standardised_by, weighted
from spanwise.errors import AlignmentError
from spanwise.registry import register


@register(
    "gdpo",
    kind="completion",
    paper="GDPO, arXiv 2601.05242",
    source="the code of four implementations, the authors' among them; the paper through notes",
    preset=Preset(whole=True, per="completion"),
    exceptions={"split": "standardised over the batch"},
)
@explains
def gdpo(
    reward_nm: Float[Tensor, "n m"],
    group_n: Int[Tensor, " n"],
    *,
    weight_m: Float[Tensor, " m"] | None = None,
    length_n: Int[Tensor, " n"] | Float[Tensor, " n"] | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    eps_at: EpsAt = "std",
    min_stratum: int = 2,
) -> Explained:
    r"""Compare a completion with its group in each reward separately, and add the standardised results.

    Equation
        S[i] = sum_m w_m (r[i, m] - mean_g r[:, m]) / (std_g r[:, m] + eps)
        A[i] = (S[i] - mean S) / (std S + eps), mean and std over the batch

    Args:
        reward_nm: M rewards per completion; an absent one (NaN) adds nothing, a completion without any joins nothing, gets 0.
        group_n: prompt ids, in any order, of any sizes.
        weight_m: of the standardised rewards; None: 1 each.
        length_n: trainable tokens; given, each completion counts that often in the moments of the batch (verl). None: once
            (TRL, the authors' TRL code).
        ddof: of all standard deviations.
        eps: added to them (verl 1e-6, TRL and the authors 1e-4); of the last one see `eps_at`.
        eps_at: "std" for std S + eps, "variance" for sqrt(var S + eps) as verl has it, "floor" for sqrt(max(var S, eps)).
        min_stratum: smaller groups add nothing.

    Edge cases:
        A reward that is constant in a group, and a group of one, add exactly 0. Counted once each, completions have mean S = 0,
        so nothing is subtracted and a group without differences keeps exactly 0; counted by tokens, the mean is not 0 and such
        a group is credited with -mean/std. Rewards that contradict each other cancel. With a single prompt in the batch the last
        step undoes the differences in size that the first one kept.

    Example:
        >>> rewards = torch.tensor([[0., 0.], [1., 0.], [0., 0.], [1., 1.]])
        >>> gdpo(rewards, torch.tensor([0, 0, 1, 1]), eps=1e-4)
        tensor([-0.5477,  0.5477, -1.0954,  1.0954], dtype=torch.float64)

    Reference:
        Liu et al. 2026, "GDPO" (arXiv 2601.05242), after four implementations of it; `multi_objective_aggregation=
        "normalize_then_sum"` in TRL.
    """
    m = reward_nm.shape[1]
    weight_m = torch.ones(m, dtype=torch.float64) if weight_m is None else weight_m.double()
    if len(weight_m) != m:
        raise AlignmentError(f"There are {len(weight_m)} weights for {m} rewards; give one weight to each reward.")
    stratum_n, weight_m = group_index(group_n), weight_m.to(reward_nm.device)
    columns = [
        compare_in_strata(reward_nm[:, k], stratum_n, scale="std", ddof=ddof, eps=eps, min_stratum=min_stratum)
        for k in range(m)
    ]
    part_nm = torch.stack([one.advantages for one in columns], dim=1) * weight_m
    summed_n, size_n = part_nm.sum(dim=1), part_nm.abs().sum(dim=1)
    summed_n = torch.where(summed_n.abs() > 1e-12 * size_n, summed_n, 0.0)  # what cancels is 0, not its rounding error
    summed_n = torch.where(reward_nm.isnan().all(dim=1), torch.nan, summed_n)
    weight_n = None if length_n is None else length_n.double()
    options: dict[str, Any] = {"shift": length_n is not None, "ddof": ddof, "eps": eps, "eps_at": eps_at}
    adv_n, _, divisor = standardised_by(summed_n, weight_n=weight_n, **options)
    if m == 1 and divisor > 0 and length_n is None:  # the sum of one reward has its weight in it
        one = columns[0].comparison
        one = replace(one, worth_nm=weight_m * one.worth_nm, baseline_nm=weight_m * one.baseline_nm)
        return Explained(adv_n, one.rescaled(divisor=divisor).fitting(adv_n[:, None]))
    together = compare_in_strata(
        weighted(reward_nm.double(), weight_m).sum(dim=1), stratum_n, min_stratum=min_stratum
    ).comparison
    return Explained(adv_n, together.unexplained(adv_n[:, None]))
