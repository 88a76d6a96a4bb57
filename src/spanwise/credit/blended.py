"""The blended baseline: the outcome-conditioned mean without the sample itself, helped by what else the batch knows."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.checks import check_rewards
from spanwise.credit.strata import Moments, as_columns, moments, refine
from spanwise.errors import RecipeError


def blended_baseline(
    reward_n: Float[Tensor, " n"],
    group_n: Int[Tensor, " n"],
    outcome_no: Float[Tensor, " n *o"],
    by_outcome_n2: Float[Tensor, "n 2"] | None = None,
    *,
    judged: int | None = None,
) -> Float[Tensor, " n"]:
    r"""Estimate E[reward | prompt, outcomes] for each completion from the other completions of the batch.

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
    a proper score keeps its fixed point (plain outcome means extremise it at small groups). A completion alone in its
    stratum falls back on x and mu.

    Args:
        reward_n: reward; NaN where absent. Such a completion joins no mean but is given a baseline too.
        group_n: integer id of the prompt.
        outcome_no: the discrete outcomes; a vector is one outcome; NaN where unknown (baseline NaN).
        by_outcome_n2: the reward had the outcome been 0 or 1; None or NaN where it is no function of a binary outcome
            (then x takes no part).
        judged: the column of `outcome_no` that `by_outcome_n2` is about; None: the only one.

    Edge cases:
        t2 and d2 need two other prompts; with one, mu serves only where nothing else is known, and x takes no part.
        Without two completions of one outcome in any other prompt, s2 counts as 0: `ml`, where there is one, stands alone.

    Returns:
        float64 baseline; NaN where nothing is known (no other reward of the batch has the same outcomes).

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
    column = None if by_outcome_n2 is None else _judged(judged, outcome_no.shape[1])
    baseline_n = torch.full((len(reward_n),), torch.nan, dtype=torch.float64, device=reward_n.device)
    code_n = refine(
        torch.zeros_like(group_n), outcome_no
    )  # a number for every tuple, -1 where one of its outcomes is unknown
    for code in code_n[code_n >= 0].unique().tolist():
        here_n = code_n == code
        verdict = None if column is None else float(outcome_no[here_n, column][0])
        rescored_n = by_outcome_n2[:, int(verdict)].double() if by_outcome_n2 is not None and verdict in (0.0, 1.0) else None
        baseline_n[here_n] = _for_outcome(reward_n.double(), group_n, code_n >= 0, here_n, rescored_n)[here_n]
    return baseline_n


def _judged(judged: int | None, columns: int) -> int:
    if judged is None and columns > 1:
        raise RecipeError(f"There are {columns} outcomes and rewards by one of them; say with 'judged' which column it is.")
    if judged is not None and not 0 <= judged < columns:
        raise RecipeError(f"There is no outcome {judged} by which the rewards could be judged; there are {columns}.")
    return judged or 0


def _for_outcome(reward_n: Tensor, group_n: Tensor, known_n: Tensor, here_n: Tensor, rescored_n: Tensor | None) -> Tensor:
    """The baseline of the completions `here_n`, which share their outcomes."""
    present = reward_n[here_n & ~reward_n.isnan()]
    low = present.min() if len(present) else 0.0  # sums of equal numbers must stay exact
    own_n = torch.where(here_n, reward_n - low, torch.nan)
    stratum_n = torch.unique(group_n, return_inverse=True)[1]
    own = moments(own_n, stratum_n)  # of this outcome, by prompt
    usable_n = ~here_n & known_n & ~reward_n.isnan()
    other_n = None if rescored_n is None else torch.where(usable_n, rescored_n - low, torch.nan)
    # A variance of 0 would be an infinite weight, and one that is 0 but for rounding must not count as less than another such.
    squares = [part.nan_to_num().square().mean() for part in (own_n, other_n) if part is not None]
    tiny = 1e-12 * float(sum(squares)) + 1e-24
    noise_s = own.pooled_variance_elsewhere().nan_to_num(nan=0.0)

    others_n = own.count_n() - own.member_n.double()
    own_sum_n = (own.mean_n() * own.count_n()).nan_to_num()
    ml_n = torch.where(others_n > 0, (own_sum_n - own_n.nan_to_num()) / others_n.clamp(min=1.0), torch.nan)
    ml_variance_n = noise_s[stratum_n] / others_n.clamp(min=1.0)

    elsewhere_n = own.count_s.sum() - own.count_n()
    total = (own.mean_s * own.count_s).nansum()
    mu_n = torch.where(elsewhere_n > 0, (total - own_sum_n) / elsewhere_n.clamp(min=1.0), torch.nan)
    between_s = excess_variance_elsewhere(own.mean_s, noise_s[:, None], own.count_s[:, None])
    mu_variance_n = between_s[stratum_n] + noise_s[stratum_n] / elsewhere_n.clamp(min=1.0)

    estimates, variances = [ml_n, mu_n], [ml_variance_n, mu_variance_n]
    if other_n is not None:
        x_n, x_variance_n = _rescored(own, moments(other_n, stratum_n), noise_s)
        estimates.append(x_n)
        variances.append(x_variance_n)
    mixed_n = precision_mean(torch.stack(estimates), torch.stack(variances).clamp(min=tiny))
    return torch.where(mixed_n.isnan(), mu_n, mixed_n) + low


def _rescored(own: Moments, other: Moments, noise_s: Tensor) -> tuple[Tensor, Tensor]:
    """The estimate `x` and its variance: the prompt's other-outcome completions, judged by this outcome."""
    other_noise_s = other.pooled_variance_elsewhere()
    other_noise_s = torch.where(other_noise_s.isnan(), noise_s, other_noise_s)
    gap_s = own.mean_s - other.mean_s  # NaN where the prompt lacks one of the outcomes
    both_elsewhere_s = (~gap_s.isnan()).sum() - (~gap_s.isnan()).double()
    # The shift of a prompt comes from the other prompts, or it would smuggle the sample's own reward back in.
    shift_s = (gap_s.nansum() - gap_s.nan_to_num()) / both_elsewhere_s.clamp(min=1.0)
    noise_sa, count_sa = torch.stack([noise_s, other_noise_s], dim=1), torch.stack([own.count_s, other.count_s], dim=1)
    drift_s = excess_variance_elsewhere(gap_s, noise_sa, count_sa)
    stratum_n = own.stratum_n
    variance_n = drift_s[stratum_n] + other_noise_s[stratum_n] / other.count_n().clamp(min=1.0)
    return other.mean_n() + shift_s[stratum_n], variance_n


def excess_variance_elsewhere(
    mean_s: Float[Tensor, " s"], noise_sa: Float[Tensor, "s a"], count_sa: Float[Tensor, "s a"]
) -> Float[Tensor, " s"]:
    r"""How far a new stratum's mean lies from the average of the P other ones, sampling noise left out, for each stratum.

    Equation
        t2[s] (1 + 1/P),  t2[s] = max(0, var(means of the others, ddof 1) - sum_a noise[s, a] average(1 / count[., a]))

    Each mean is made of `a` parts with a sampling variance of noise / count each. A NaN mean takes no part; NaN where fewer than
    two others are left.

    >>> excess_variance_elsewhere(torch.tensor([9., 1., 3.]), torch.full((3, 1), .5), torch.full((3, 1), 2.))
    tensor([ 2.6250, 26.6250, 47.6250])
    """
    known_s = ~mean_s.isnan()
    others_s = known_s.sum() - known_s.to(mean_s.dtype)
    centred_s = torch.where(known_s, mean_s - mean_s.nanmean(), 0.0)
    inverse_sa = torch.where(known_s[:, None], 1.0 / count_sa.clamp(min=1.0), 0.0)
    sum_s, square_s = centred_s.sum() - centred_s, centred_s.square().sum() - centred_s.square()
    variance_s = (square_s - sum_s.square() / others_s.clamp(min=1.0)) / (others_s - 1).clamp(min=1.0)
    noise_s = (noise_sa * (inverse_sa.sum(dim=0) - inverse_sa)).sum(dim=1) / others_s.clamp(min=1.0)
    excess_s = (variance_s - noise_s).clamp(min=0.0) * (1 + 1 / others_s.clamp(min=1.0))
    return torch.where(others_s >= 2, excess_s, torch.nan)


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
