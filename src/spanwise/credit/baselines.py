"""Subtract a baseline, such as the mean of a group, from each reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit.strata import (
    Explained,
    Moments,
    as_columns,
    check_counts,
    check_rewards,
    compare_in_strata,
    explain_advantages,
    group_index,
    moments,
    refine,
)
from spanwise.errors import RecipeError, check_known
from spanwise.objective import BASELINES, BaselineName
from spanwise.types import Comparison, Zero


class Advantage(NamedTuple):
    """The advantages that `advantage` returns for one objective.

    Attributes:
        advantage_n: float64 reward minus baseline; 0 where the reward is absent or has no other completion to compare with.
        missing_n: float64 `if_missing` minus baseline, scaled alike, where the reward is absent and `if_missing` given; else 0.
        alone_n: the reward is present and has no other completion to compare with.
        comparison: what each reward, or what stands for it, was compared with; one column.

    Example:
        The mean of the two rewards is .5, and what is absent counts as -1.

        >>> result = advantage(torch.tensor([1.0, 0.0, float("nan")]), torch.tensor([0, 0, 0]), if_missing=-1.0)
        >>> result.advantage_n.tolist(), result.missing_n.tolist()
        ([0.5, -0.5, 0.0], [0.0, 0.0, -1.5])
    """

    advantage_n: Float[Tensor, " n"]
    missing_n: Float[Tensor, " n"]
    alone_n: Bool[Tensor, " n"]
    comparison: Comparison


@torch.no_grad()
def advantage(
    reward_n: Float[Tensor, " n"],
    group_n: Int[Tensor, " n"],
    *,
    baseline: BaselineName = "group",
    outcome_no: Float[Tensor, " n *o"] | None = None,
    by_outcome_n2: Float[Tensor, "n 2"] | None = None,
    judged: int | None = None,
    back_off: bool | None = None,
    leave_one_out: bool = False,
    min_stratum: int = 2,
    scale: Literal["none", "std"] = "none",
    ddof: int = 1,
    eps: float = 0.0,
    if_missing: float | Float[Tensor, " n"] | None = None,
    voter_n: Int[Tensor, " n"] | None = None,
) -> Advantage:
    r"""Subtract a baseline from the rewards of one objective.

    Equation
        A[i] = r[i] - b[i], b[i] = 0 (none) or the mean of r over i's stratum:
        the batch, the group (same prompt), the outcome stratum (same prompt and outcomes), or the blended estimate.
        back_off: the stratum is that of the first level l = 0, 1, ..., O with at least `min_stratum` rewards, where level l takes
        all completions of the prompt that agree in the first O - l outcomes, whichever level they are compared at themselves
        scale "std": A[i] / (std + eps), std of the rewards of the stratum and of what stands for absent ones (`centred`)

    Args:
        reward_n: one reward per completion; NaN where absent (it joins no baseline).
        group_n: integer prompt ids, in any order, of any sizes.
        baseline: none, batch, group, outcome or blended.
        outcome_no: the O outcomes of the prefix, from coarse to fine, for `outcome` and `blended`; a vector is one; NaN: unknown.
        by_outcome_n2: the reward under outcome 0 and 1, for `blended`.
        judged: the column of `outcome_no` that `by_outcome_n2` is about; None: the only one.
        back_off: whether small strata back off to coarser ones, for `outcome`; None: where there are several outcomes.
        leave_one_out: leave the completion out of its own mean (`blended` always does).
        min_stratum: strata with fewer members give 0 and are counted in `alone_n`.
        scale: "std" divides by the stratum's standard deviation, which stand-ins join; not with none and blended.
        ddof, eps: as for `centred`.
        if_missing: the reward that an absent reward stands for, or one per completion, NaN where it stands for nothing (a check
            that failed). It joins no baseline; its own is the mean of the stratum's members, else of the group or the batch.
        voter_n: the rollout of each row, if rows are turns, as for `centred`; not with `blended`. None: no turns.

    Edge cases:
        A stratum of one and a constant stratum give exactly 0; `blended` never needs a second member. A completion of which an
        outcome is unknown is in no stratum that needs it: it backs off, or gets 0.

    Raises:
        AlignmentError: sizes differ.
        RewardError: an infinite reward.
        RecipeError: no outcomes for an outcome baseline, a `back_off` or scale that it does not take; see `blended_baseline`.

    Example:
        Four confidences .9 .7 .8 .1 of one prompt, scored by Brier; the first two answers are right.

        >>> reward_n = torch.tensor([-.01, -.09, -.64, -.01])
        >>> one_prompt, right_n = torch.tensor([0, 0, 0, 0]), torch.tensor([1., 1., 0., 0.])
        >>> advantage(reward_n, one_prompt, baseline="outcome", outcome_no=right_n).advantage_n
        tensor([ 0.0400, -0.0400, -0.3150,  0.3150], dtype=torch.float64)
        >>> advantage(reward_n, one_prompt, baseline="group").advantage_n
        tensor([ 0.1775,  0.0975, -0.4525,  0.1775], dtype=torch.float64)

        Without the last confidence, which counts as -1: the mean of the others is -.2467, the scale of all four .5173.

        >>> reward_n = torch.tensor([-.01, -.09, -.64, float("nan")])
        >>> result = advantage(reward_n, one_prompt, scale="std", if_missing=-1.0)
        >>> result.advantage_n + result.missing_n
        tensor([ 0.4575,  0.3029, -0.7604, -1.4563], dtype=torch.float64)

    Reference:
        Pavlenko et al. 2026, "Blockwise Advantage Estimation" (arXiv 2602.10231): none, batch, group, outcome (there with the
        completion inside its own mean: `leave_one_out=False`). Backing off is ours.
    """
    check_known("baseline", baseline, BASELINES)
    check_counts(reward_n, "rewards", group_n, "group ids", advice="give one group id to each completion")
    if back_off is not None and baseline != "outcome":
        raise RecipeError(f"back_off needs the baseline 'outcome', but the baseline is '{baseline}'; leave back_off out.")
    if scale != "none" and baseline in ("none", "blended"):
        raise RecipeError(
            f"Baseline '{baseline}' compares no rewards, so there is no standard deviation to divide by; use scale='none'."
        )
    lacks_reward_n = reward_n.isnan()
    stand_in_reward_n = torch.full_like(reward_n, torch.nan, dtype=torch.float64)
    if if_missing is not None:
        stand_in_reward_n = torch.where(lacks_reward_n, if_missing, stand_in_reward_n)
    worth_n = torch.where(lacks_reward_n, stand_in_reward_n, reward_n.double())
    outcome_no = _collect_outcomes(outcome_no, group_n, baseline)
    comparison_options: dict[str, Any] = {"leave_one_out": leave_one_out, "min_stratum": min_stratum, "voter_n": voter_n}
    comparison_options |= {"scale": scale, "ddof": ddof, "eps": eps, "stand_in_n": stand_in_reward_n}
    merged_result: Explained | None = None
    is_uncompared_n = torch.ones_like(lacks_reward_n)
    whole_batch_group_n = torch.zeros_like(group_n, dtype=torch.long)
    groupings: list[tuple[Tensor, int]] = []  # group ids, and the number of outcomes that split the groups further
    if baseline == "none":
        check_rewards(reward_n)  # all baselines but `none` check the rewards in `moments`
        advantage_n = worth_n.nan_to_num(nan=0.0)
        zeros_n = torch.zeros_like(worth_n)
        is_uncompared_n = torch.zeros_like(lacks_reward_n)
        merged_result = explain_advantages(
            advantage_n, worth_n, zeros_n, zeros_n + 1, alone_n=is_uncompared_n, equal_n=is_uncompared_n
        )
    elif baseline == "blended":
        if voter_n is not None:
            raise RecipeError("Baseline 'blended' does not work for turns; use 'outcome', 'group', 'batch' or 'none'.")
        baseline_n = blended_baseline(reward_n, group_n, outcome_no, by_outcome_n2, judged=judged)
        merged_result = _subtract_blend(reward_n, worth_n, baseline_n, group_n, outcome_no)
        is_uncompared_n = baseline_n.isnan() & ~stand_in_reward_n.isnan()
    else:
        outcome_count = outcome_no.shape[1]
        has_back_off = outcome_count > 1 if back_off is None else back_off
        outcome_counts_to_try = reversed(range(outcome_count + 1)) if has_back_off else [outcome_count]
        groupings = [(whole_batch_group_n if baseline == "batch" else group_n, count) for count in outcome_counts_to_try]
    last_level = len(groupings) - 1
    # If an `if_missing` reward has no reward with the same outcomes to compare with, try the group, and then the batch.
    groupings += [(group_n, 0), (whole_batch_group_n, 0)]
    for level, (grouping_n, used_outcome_count) in enumerate(groupings):
        if merged_result is not None and not bool(is_uncompared_n.any()):
            break
        stratum_n = refine(grouping_n, outcome_no[:, :used_outcome_count])
        # Two groupings may give the same number to different strata (compared sets), so add an offset for each grouping.
        stratum_n = stratum_n.where(stratum_n < 0, stratum_n + level * len(stratum_n) ** 2)
        level_result = compare_in_strata(reward_n, stratum_n, **comparison_options)
        if 0 < level <= last_level:
            level_nm = torch.full_like(level_result.comparison.level_nm, level)
            level_result = level_result._replace(comparison=replace(level_result.comparison, level_nm=level_nm))
        merged_result = level_result if merged_result is None else level_result.where(is_uncompared_n, merged_result)
        min_members = max(min_stratum, 2) if level < last_level else 1
        is_uncompared_n = is_uncompared_n & (level_result.comparison.members_nm[:, 0] < min_members)
        if level >= last_level:
            is_uncompared_n &= ~stand_in_reward_n.isnan()
    assert merged_result is not None, "there is a first level"
    adv_n = merged_result.advantages
    stratum_n = merged_result.comparison.stratum_nm[:, 0]
    # If there is a -1 (in no stratum), `group_index` turns it into 0 and adds 1 to all others. So subtract 1.
    renumbered_stratum_n = group_index(stratum_n) - (stratum_n < 0).any().long()
    comparison = replace(merged_result.comparison, stratum_nm=renumbered_stratum_n[:, None])
    is_singleton_n = ~lacks_reward_n & (comparison.reason_nm[:, 0] == int(Zero.SINGLETON))
    return Advantage(adv_n.where(~lacks_reward_n, 0.0), adv_n.where(lacks_reward_n, 0.0), is_singleton_n, comparison)


def compare_columns(
    reward_nm: Float[Tensor, "n m"],
    group_n: Int[Tensor, " n"],
    by_column: Mapping[str, Sequence[Any] | None],
    **options: Any,
) -> Explained:
    """Call `advantage` on each column of rewards, with the options of that column."""
    given_options = {name: values for name, values in by_column.items() if values is not None}
    column_advantages = [
        advantage(reward_nm[:, m], group_n, **{name: values[m] for name, values in given_options.items()}, **options)
        for m in range(reward_nm.shape[1])
    ]
    # `advantage_n` is 0 where the reward is missing, and `missing_n` is 0 where the reward is present.
    adv_nm = torch.stack([column.advantage_n + column.missing_n for column in column_advantages], dim=1)
    return Explained(adv_nm, Comparison.joined([column.comparison for column in column_advantages]))


def _collect_outcomes(outcome_no: Tensor | None, group_n: Tensor, baseline: str) -> Float[Tensor, "n o"]:
    """Return the outcomes as a table with one column per outcome."""
    if baseline in ("none", "batch", "group"):
        return torch.zeros((len(group_n), 0), dtype=torch.float64, device=group_n.device)
    if outcome_no is None or as_columns(outcome_no).shape[1] == 0:
        raise RecipeError(
            f"Baseline '{baseline}' needs an outcome for each completion; pass outcome_no or baseline 'group'."
        )
    check_counts(outcome_no, "outcomes", group_n, "completions", advice="give one outcome to each completion")
    return as_columns(outcome_no).double()


def _subtract_blend(reward_n: Tensor, worth_n: Tensor, baseline_n: Tensor, group_n: Tensor, outcome_no: Tensor) -> Explained:
    """Subtract `baseline_n`, a blend of the mean rewards for equal outcomes in the prompt and in the batch."""
    prompt_comparison = compare_in_strata(reward_n, refine(group_n, outcome_no)).comparison
    batch_comparison = compare_in_strata(reward_n, refine(torch.zeros_like(group_n), outcome_no)).comparison
    advantage_n = (worth_n - baseline_n).nan_to_num(nan=0.0)
    reason_nm = torch.where(prompt_comparison.members_nm > 1, prompt_comparison.reason_nm, batch_comparison.reason_nm)
    return explain_advantages(
        advantage_n, worth_n, baseline_n, torch.ones_like(baseline_n), alone_n=baseline_n.isnan(),
        equal_n=reason_nm[:, 0] == int(Zero.ALL_EQUAL), stratum_n=prompt_comparison.stratum_nm[:, 0],
        members_n=prompt_comparison.members_nm[:, 0],
    )  # fmt: skip


@torch.no_grad()
def blended_baseline(
    reward_n: Float[Tensor, " n"],
    group_n: Int[Tensor, " n"],
    outcome_no: Float[Tensor, " n *o"],
    by_outcome_n2: Float[Tensor, "n 2"] | None = None,
    *,
    judged: int | None = None,
) -> Float[Tensor, " n"]:
    r"""Estimate each completion's expected reward, given its prompt and outcomes. Only other completions are used.

    Equation
        b[i] = (ml/v_ml + x/v_x + mu/v_mu) / (1/v_ml + 1/v_x + 1/v_mu), separately for each tuple o of outcomes:

        ml  mean of the other members of i's stratum (same prompt, same outcomes);         v_ml = s2 / (n - 1)
        x   mean over the members of the *other* strata of the prompt, re-scored as if the outcome that judges them were the one in
            o, shifted by the mean difference (own - re-scored) of the P' other prompts that have both;
                                                                                           v_x  = d2 (1 + 1/P') + s2_x / n_x
        mu  mean of the same-outcomes completions of the P other prompts that have any;     v_mu = t2 (1 + 1/P) + s2 / n_mu

        s2, s2_x: pooled variances inside strata; t2: variance of the stratum means between prompts; d2: variance of
        (own - re-scored) between prompts; the last two by the method of moments (sampling noise subtracted, at least 0). All
        four are those of the *other* prompts.

    Neither an estimate nor its weight depends on completion i's own reward, so the advantage has no bias from self-inclusion:
    a proper score keeps its fixed point (plain outcome means extremise it). Alone in its stratum, i falls back on x and mu.

    Args:
        reward_n, group_n, outcome_no, judged: as for `advantage`. A completion without a reward is given a baseline too.
        by_outcome_n2: the reward had the outcome been 0 or 1; None or NaN: there is no such number, and x takes no part.

    Edge cases:
        t2 and d2 need two other prompts; with one, mu serves only where nothing else is known, and x takes no part.
        Without two completions of one outcome in any other prompt, s2 counts as 0: `ml`, where there is one, stands alone.

    Returns:
        float64 baseline; NaN where an outcome is unknown, or no other reward of the batch has the same outcomes.

    Raises:
        RecipeError: `judged` is no column, or rewards by outcome of one of several outcomes, without a word which.

    Example:
        >>> brier_n = torch.tensor([-.01, -.09, -.64, -.36])   # reports .9 .7 (both right) and .8 .6 (both wrong)
        >>> right_n = torch.tensor([1., 1., 0., 0.])
        >>> blended_baseline(brier_n, torch.tensor([0, 0, 0, 0]), right_n)  # one prompt: only `ml` is known
        tensor([-0.0900, -0.0100, -0.3600, -0.6400], dtype=torch.float64)

    Reference:
        Ours. It extends the outcome-conditioned baseline of Pavlenko et al. 2026, "Blockwise Advantage Estimation"
        (arXiv 2602.10231), which includes the sample itself and uses `ml` alone.
    """
    check_rewards(reward_n)
    outcome_no = as_columns(outcome_no)
    outcome_count = outcome_no.shape[1]
    if by_outcome_n2 is not None and judged is None and outcome_count > 1:
        raise RecipeError(
            f"outcome_no has {outcome_count} columns, and by_outcome_n2 belongs to one of them. Set 'judged' to the number "
            "of this column."
        )
    if by_outcome_n2 is not None and judged is not None and not 0 <= judged < outcome_count:
        raise RecipeError(f"outcome_no has no column {judged}. Set 'judged' to a number from 0 to {outcome_count - 1}.")
    baseline_n = torch.full((len(reward_n),), torch.nan, dtype=torch.float64, device=reward_n.device)
    outcome_code_n = refine(torch.zeros_like(group_n), outcome_no)  # equal outcomes get one number, an unknown outcome -1
    is_known_n = outcome_code_n >= 0
    for code in outcome_code_n[is_known_n].unique().tolist():
        has_outcome_n = outcome_code_n == code
        counterfactual_reward_n = None  # the reward of each completion if its outcome were `outcome_value`
        if by_outcome_n2 is not None and (outcome_value := float(outcome_no[has_outcome_n, judged or 0][0])) in (0.0, 1.0):
            counterfactual_reward_n = by_outcome_n2[:, int(outcome_value)].double()
        estimate_n = _estimate_for_outcome(reward_n.double(), group_n, is_known_n, has_outcome_n, counterfactual_reward_n)
        baseline_n[has_outcome_n] = estimate_n[has_outcome_n]
    return baseline_n


def _estimate_for_outcome(
    reward_n: Tensor, group_n: Tensor, is_known_n: Tensor, same_outcome_n: Tensor, counterfactual_n: Tensor | None
) -> Tensor:
    """Estimate the baseline `blended`, a weighted mean of several estimates, for completions with the same outcomes."""
    present_rewards = reward_n[same_outcome_n & ~reward_n.isnan()]
    # Subtracting the lowest reward first makes sums of equal rewards exact.
    lowest_reward = present_rewards.min() if len(present_rewards) else 0.0
    reward_above_lowest_n = torch.where(same_outcome_n, reward_n - lowest_reward, torch.nan)
    prompt_n = torch.unique(group_n, return_inverse=True)[1]
    prompt_stats = moments(reward_above_lowest_n, prompt_n)
    mean_square = reward_above_lowest_n.nan_to_num().square().mean()
    if counterfactual_n is not None:
        has_other_outcome_n = ~same_outcome_n & is_known_n & ~reward_n.isnan()
        counterfactual_n = torch.where(has_other_outcome_n, counterfactual_n - lowest_reward, torch.nan)
        mean_square = mean_square + counterfactual_n.nan_to_num().square().mean()
    # A variance below this limit differs from 0 only by rounding.
    min_variance = 1e-12 * float(mean_square) + 1e-24
    noise_variance_s = prompt_stats.pooled_variance_of_others().nan_to_num(nan=0.0)
    count_of_others_n = prompt_stats.count_n() - prompt_stats.member_n.double()
    prompt_sum_n = (prompt_stats.mean_n() * prompt_stats.count_n()).nan_to_num()
    # Start from the reward. The mean is then exact if all rewards of a prompt are equal, because the deviation is 0.
    reward_or_mean_n = torch.where(prompt_stats.member_n, reward_above_lowest_n, prompt_stats.mean_n())
    prompt_mean_n = reward_or_mean_n - prompt_stats.deviation_n * prompt_stats.count_n() / count_of_others_n.clamp(min=1.0)
    prompt_mean_n = torch.where(count_of_others_n > 0, prompt_mean_n, torch.nan)
    prompt_mean_variance_n = noise_variance_s[prompt_n] / count_of_others_n.clamp(min=1.0)
    other_prompts_count_n = prompt_stats.count_s.sum() - prompt_stats.count_n()
    other_prompts_sum_n = (prompt_stats.mean_s * prompt_stats.count_s).nansum() - prompt_sum_n
    batch_mean_n = torch.where(other_prompts_count_n > 0, other_prompts_sum_n / other_prompts_count_n, torch.nan)
    prompt_means_variance_s = excess_variance_of_others(
        prompt_stats.mean_s, noise_variance_s[:, None], prompt_stats.count_s[:, None]
    )
    batch_mean_variance_n = prompt_means_variance_s[prompt_n] + noise_variance_s[prompt_n] / other_prompts_count_n
    estimates = [prompt_mean_n, batch_mean_n]
    variances = [prompt_mean_variance_n, batch_mean_variance_n]
    if counterfactual_n is not None:
        counterfactual_stats = moments(counterfactual_n, prompt_n)
        counterfactual_mean_n, variance_n = _average_counterfactuals(prompt_stats, counterfactual_stats, noise_variance_s)
        estimates.append(counterfactual_mean_n)
        variances.append(variance_n)
    estimate_en, variance_en = torch.stack(estimates), torch.stack(variances)
    is_certain_en = (variance_en <= min_variance) & ~estimate_en.isnan()
    # An estimate of variance 0 has infinite weight. If a completion has such estimates, average only these.
    variance_en = torch.where(is_certain_en, 1.0, variance_en.masked_fill(is_certain_en.any(dim=0), torch.inf))
    combined_estimate_n = average_by_precision(estimate_en, variance_en)
    combined_estimate_n = torch.where(combined_estimate_n.isnan(), batch_mean_n, combined_estimate_n)
    is_own_reward_n = combined_estimate_n == reward_above_lowest_n  # adding `lowest_reward` may round
    return torch.where(is_own_reward_n, reward_n, combined_estimate_n + lowest_reward)


def _average_counterfactuals(actual: Moments, counterfactual: Moments, noise_variance_s: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate rewards, and the variance, from what completions of the same prompt would get with the same outcome."""
    counterfactual_variance_s = counterfactual.pooled_variance_of_others()
    counterfactual_variance_s = torch.where(counterfactual_variance_s.isnan(), noise_variance_s, counterfactual_variance_s)
    prompt_gap_s = actual.mean_s - counterfactual.mean_s  # NaN for prompts without rewards
    has_gap_s = ~prompt_gap_s.isnan()
    count_of_others_s = has_gap_s.sum() - has_gap_s.double()
    # Average the actual minus the counterfactual mean reward over the other prompts only.
    mean_gap_of_others_s = (prompt_gap_s.nansum() - prompt_gap_s.nan_to_num()) / count_of_others_s.clamp(min=1.0)
    noise_variance_sa = torch.stack([noise_variance_s, counterfactual_variance_s], dim=1)
    count_sa = torch.stack([actual.count_s, counterfactual.count_s], dim=1)
    gap_variance_s = excess_variance_of_others(prompt_gap_s, noise_variance_sa, count_sa)
    prompt_n = actual.stratum_n
    estimate_variance_n = gap_variance_s[prompt_n] + counterfactual_variance_s[prompt_n] / counterfactual.count_n()
    return counterfactual.mean_n() + mean_gap_of_others_s[prompt_n], estimate_variance_n


def excess_variance_of_others(
    mean_s: Float[Tensor, " s"], noise_sa: Float[Tensor, "s a"], count_sa: Float[Tensor, "s a"]
) -> Float[Tensor, " s"]:
    """For each stratum, estimate how much the means of the P other strata vary, without sampling noise. NaN if P < 2.

    t2[s] (1 + 1/P),  t2[s] = max(0, var(other means, ddof 1) - sum_a noise[s, a] average(1 / count[., a]))
    """
    has_mean_s = ~mean_s.isnan()
    count_of_others_s = has_mean_s.sum() - has_mean_s.to(mean_s.dtype)
    centred_mean_s = torch.where(has_mean_s, mean_s - mean_s.nanmean(), 0.0)
    inverse_count_sa = torch.where(has_mean_s[:, None], 1.0 / count_sa.clamp(min=1.0), 0.0)
    sum_of_others_s = centred_mean_s.sum() - centred_mean_s
    square_sum_of_others_s = centred_mean_s.square().sum() - centred_mean_s.square()
    variance_of_others_s = (square_sum_of_others_s - sum_of_others_s.square() / count_of_others_s) / (count_of_others_s - 1)
    sampling_noise_s = (noise_sa * (inverse_count_sa.sum(dim=0) - inverse_count_sa)).sum(dim=1) / count_of_others_s
    excess_variance_s = (variance_of_others_s - sampling_noise_s).clamp(min=0.0) * (1 + 1 / count_of_others_s)
    return torch.where(count_of_others_s >= 2, excess_variance_s, torch.nan)


def average_by_precision(estimate_en: Float[Tensor, "e n"], variance_en: Float[Tensor, "e n"]) -> Float[Tensor, " n"]:
    """Average estimates of the same quantity, weighted by 1/variance. Skip NaN, and return NaN if all are NaN."""
    weight_en = torch.where(estimate_en.isnan() | variance_en.isnan(), 0.0, 1.0 / variance_en)
    total_weight_n = weight_en.sum(dim=0)
    weighted_sum_n = (weight_en * estimate_en.nan_to_num(nan=0.0)).sum(dim=0)
    return torch.where(total_weight_n > 0, weighted_sum_n / total_weight_n, torch.nan)
