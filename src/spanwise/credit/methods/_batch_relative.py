"""Methods that standardise over the whole batch: GDPO, REINFORCE++ and REINFORCE++-baseline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit.baselines import compare_columns
from spanwise.credit.recursion import lambda_advantage
from spanwise.credit.registry import Preset
from spanwise.credit.strata import (
    EpsAt,
    Explained,
    compare_in_strata,
    explains,
    group_index,
    moments,
    standardise,
    standardise_tokens,
    weighted,
    weights_of,
)
from spanwise.registry import register
from spanwise.types import Zero


@register(
    "gdpo",
    kind="completion",
    paper="GDPO, arXiv 2601.05242",
    source="the authors' code, three other codebases and third-party summaries",
    preset=Preset(whole=True, per="completion"),
    exceptions={
        "split": "advantages are standardised over the batch",
        "monotone": (
            "a completion's sum is divided by the batch's standard deviation, and a higher reward can raise this deviation "
            "more than the sum"
        ),
    },
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
    conflict: float | None = None,
    min_stratum: int = 2,
) -> Explained:
    r"""Standardise each reward over the group, then the sums of each completion's rewards over the batch.

    Equation
        S[i] = sum_m w_m (r[i, m] - mean_g r[:, m]) / (std_g r[:, m] + eps)
        A[i] = (S[i] - mean S) / (std S + eps), mean and std over the batch
        with `conflict`, z[i, m] the terms of S[i]: i is left out, A[i] = 0, if some z[i, m] > 0, some z[i, m] < 0 and
        |sum_m z[i, m]| < conflict * (sum_m |z[i, m]| + 1e-6); every other S[i] is multiplied by the share of its group kept

    Args:
        reward_nm: M rewards per completion; an absent one (NaN) adds nothing, a completion without any joins nothing, gets 0.
        group_n, min_stratum: as for `grpo`.
        weight_m: of the standardised rewards; None: 1 each.
        length_n: trainable tokens; each completion counts that often in the moments of the batch (verl). None: once (TRL).
        ddof: of all standard deviations.
        eps: added to them (verl 1e-6, TRL and the authors 1e-4); of the last one see `eps_at`.
        eps_at: "std" for std S + eps, "variance" for sqrt(var S + eps) as verl has it, "floor" for sqrt(max(var S, eps)).
        conflict: leave out completions whose rewards contradict each other (GD2PO): 1 all of them, its "hard" mask; smaller
            numbers those that nearly cancel, its "SNR" mask (.2 in the authors' code). None: nobody.

    Edge cases:
        A reward that is constant in a group, and a group of one, add exactly 0. Counted once each, completions have mean S = 0,
        so nothing is subtracted and a group without differences keeps exactly 0; counted by tokens, the mean is not 0 and such
        a group is credited with -mean/std. With one prompt in the batch the last step undoes what the first one kept of sizes.

    Example:
        >>> rewards = torch.tensor([[0., 0.], [1., 0.], [0., 0.], [1., 1.]])
        >>> gdpo(rewards, torch.tensor([0, 0, 1, 1]), eps=1e-4)
        tensor([-0.5477,  0.5477, -1.0954,  1.0954], dtype=torch.float64)

    Reference:
        Liu et al. 2026, "GDPO" (arXiv 2601.05242). `conflict` is GD2PO (arXiv 2606.16771) as the authors' code has it.
    """
    weight_m = weights_of(reward_nm, weight_m)
    adv_nm, comparison = compare_columns(reward_nm, group_n, {}, min_stratum=min_stratum, scale="std", ddof=ddof, eps=eps)
    weighted_adv_nm = adv_nm * weight_m
    adv_sum_n, adv_abs_sum_n = weighted_adv_nm.sum(dim=1), weighted_adv_nm.abs().sum(dim=1)
    # If a completion's advantages cancel, their sum must be exactly 0, despite rounding errors.
    adv_sum_n = torch.where(adv_sum_n.abs() > 1e-12 * adv_abs_sum_n, adv_sum_n, 0.0)
    has_weight_m = weight_m != 0
    adv_sum_n = torch.where((reward_nm.isnan() | ~has_weight_m).all(dim=1), torch.nan, adv_sum_n)
    conflict_limit = conflict if conflict is not None and int(has_weight_m.sum()) > 1 else None
    if conflict_limit is not None:
        has_mixed_signs_n = (weighted_adv_nm > 1e-8).any(dim=1) & (weighted_adv_nm < -1e-8).any(dim=1)
        nearly_cancels_n = adv_sum_n.abs() < conflict_limit * (adv_abs_sum_n + 1e-6)
        is_kept_n = ~(has_mixed_signs_n & nearly_cancels_n)
        kept_flag_n = is_kept_n.double().where(~adv_sum_n.isnan(), torch.nan)
        kept_share_n = moments(kept_flag_n, group_index(group_n)).mean_n()
        adv_sum_n = torch.where(is_kept_n, adv_sum_n * kept_share_n, torch.nan)
    subtracts_mean = length_n is not None or conflict_limit is not None
    options: dict[str, Any] = {"shift": subtracts_mean, "ddof": ddof, "eps": eps, "eps_at": eps_at}
    adv_n, _, batch_divisor = standardise(adv_sum_n, weight_n=length_n, **options)
    if len(weight_m) == 1 and batch_divisor > 0 and length_n is None:
        # With a single reward, the advantage is the reward minus its baseline, divided by `batch_divisor`.
        weighted_reward_nm = weight_m * comparison.worth_nm
        weighted_baseline_nm = weight_m * comparison.baseline_nm
        comparison = replace(comparison, worth_nm=weighted_reward_nm, baseline_nm=weighted_baseline_nm)
        return Explained(adv_n, comparison.rescaled(divisor=batch_divisor).fitting(adv_n[:, None]))
    reward_sum_n = weighted(reward_nm.double(), weight_m).sum(dim=1)
    sum_comparison = compare_in_strata(reward_sum_n, group_index(group_n), min_stratum=min_stratum).comparison
    return Explained(adv_n, sum_comparison.unexplained(adv_n[:, None]))


@register(
    "reinforce++",
    kind="token",
    paper="REINFORCE++, arXiv 2501.03262",
    source="the code of verl and OpenRLHF",
    preset=Preset(per="length", calibrated=False),
    only_with={"ddof": ("whiten", (True,)), "eps": ("whiten", (True,)), "eps_at": ("whiten", (True,))},
    exceptions={
        "split": "advantages are standardised over the tokens of the batch",
        "monotone": "a higher reward at the last token also raises the returns of all tokens before it, and so the batch's mean",
    },
)
def reinforce_plus_plus(
    reward_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    gamma: float = 1.0,
    whiten: bool = True,
    ddof: int = 1,
    eps: float = 1e-8,
    eps_at: EpsAt = "variance",
) -> Float[Tensor, "n t"]:
    r"""Standardise the return of each token over all trainable tokens of the batch.

    Equation
        G[k] = r[k] + gamma G[k+1] over the trainable tokens k of a completion
        A[k] = (G[k] - mean G) / sqrt(var G + eps), moments over the trainable tokens of all completions

    Args:
        reward_nt: one reward per token, mostly 0; a penalty -beta kl per token belongs in here. NaN at a trainable token: the
            completion's reward is absent, it joins no moment and gets 0. The result has its dtype, or float32 if that is whole.
        mask_nt: the trainable tokens; the others get exactly 0.
        gamma: discount in [0, 1] from one trainable token to the next.
        whiten: standardise; False gives the returns.
        ddof: of the variance (verl and SkyRL 1, OpenRLHF 0).
        eps: see `eps_at`.
        eps_at: "variance" as verl and SkyRL have it, "floor" for max(var, eps) as OpenRLHF has it, "std" for std + eps.

    Edge cases:
        There is no group: a prompt that is always solved is credited for being easier than the others. Tokens count equally, so
        long completions dominate the moments. A batch whose returns are all equal gives exactly 0. Masked tokens are skipped, a
        reward on one of them counts for the last trainable token before it (verl drops it).

    Example:
        >>> reward_nt = torch.tensor([[0., 1.], [0., 0.]])
        >>> reinforce_plus_plus(reward_nt, torch.tensor([[True, True], [True, False]]), ddof=0)
        tensor([[ 0.7071,  0.7071],
                [-1.4142,  0.0000]])

    Reference:
        Hu 2025, "REINFORCE++" (arXiv 2501.03262), carried across masked tokens as verl does.
    """
    return_nt = lambda_advantage(reward_nt, None, mask_nt, gamma=gamma, lam=1.0)
    if not whiten:
        return return_nt
    if not bool(reward_nt.sum().isfinite()):  # a finite sum proves that no reward is NaN (absent)
        mask_nt = mask_nt & ~(reward_nt.isnan() & mask_nt).any(dim=1, keepdim=True)
    return standardise_tokens(return_nt, mask_nt, ddof=ddof, eps=eps, eps_at=eps_at, in_place=True)


@register(
    "reinforce++-baseline",
    kind="completion",
    paper="REINFORCE++, arXiv 2501.03262",
    source="the code of verl and OpenRLHF",
    preset=Preset(whole=True, per="length", calibrated=False),
    exceptions={
        "split": "advantages are standardised over the tokens of the batch",
        "constant": "the batch's mean is subtracted even from groups of equal rewards, unless zero_constant_groups is set",
        "monotone": "the batch's standard deviation can rise more than the completion's own difference from its group's mean",
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
    r"""Subtract the group's mean reward, then standardise over the batch, with completions weighted by length.

    Equation
        c[i] = r[i] - mean_g r
        A[i] = (c[i] - mean c) / sqrt(var c + eps), mean = sum L c / sum L, var = sum L (c - mean)^2 / (sum L - ddof)

    Args:
        reward_n, group_n: as for `grpo`.
        length_n: trainable tokens of each completion.
        ddof, eps, eps_at: as for `reinforce_plus_plus`.
        zero_constant_groups: leave constant groups out, as if they had been filtered before: they join no moment and get 0.
        min_stratum: smaller groups join no moment and get 0.

    Edge cases:
        A constant group has c = 0, but where right and wrong answers differ in length the mean of c over tokens is not 0, and
        the group is credited with -mean/std. That is the method; `zero_constant_groups` takes it away. A group of one, a batch of
        constant groups and a completion without tokens give exactly 0.

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
    group_moments = moments(reward_n, stratum_n)
    is_compared_n = group_moments.member_n & (group_moments.count_n() >= max(min_stratum, 2))
    if zero_constant_groups:
        is_compared_n &= group_moments.std_n(ddof=0) > 0
    centred_reward_n, comparison = compare_in_strata(reward_n, stratum_n, min_stratum=min_stratum)
    options: dict[str, Any] = {"weight_n": length_n, "ddof": ddof, "eps": eps, "eps_at": eps_at}
    adv_n, batch_mean, batch_divisor = standardise(torch.where(is_compared_n, centred_reward_n, torch.nan), **options)
    adv_n1 = adv_n[:, None]
    has_tokens_n1 = (length_n > 0)[:, None]
    scaled_comparison = comparison.rescaled(divisor=batch_divisor, shift=batch_mean).fitting(adv_n1)
    # The baseline is the group's mean plus the batch's mean, not the mean of one set of rewards, so `averaged_nm` is 0.
    scaled_comparison = replace(scaled_comparison, averaged_nm=torch.zeros_like(comparison.averaged_nm))
    unscaled_comparison = comparison.unexplained(adv_n1)  # completions that are not standardised get 0
    zero_reason_n1 = torch.where(has_tokens_n1, int(Zero.NO_SCALE), int(Zero.EMPTY))
    is_at_baseline_n1 = unscaled_comparison.reason_nm == int(Zero.AT_BASELINE)
    reason_nm = torch.where(is_at_baseline_n1, zero_reason_n1, unscaled_comparison.reason_nm)
    unscaled_comparison = replace(unscaled_comparison, reason_nm=reason_nm)
    is_scaled_n1 = is_compared_n[:, None] & has_tokens_n1 & (batch_divisor > 0)
    unscaled_comparison = comparison.where(centred_reward_n[:, None] == 0, unscaled_comparison)
    return Explained(adv_n, scaled_comparison.where(is_scaled_n1, unscaled_comparison))
