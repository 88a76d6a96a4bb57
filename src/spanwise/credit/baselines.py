"""The baselines none, batch, group, outcome and blended: what is subtracted from one reward."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit.blended import blended_baseline
from spanwise.credit.checks import check_rewards
from spanwise.credit.strata import centred, group_index, moments, refine
from spanwise.errors import AlignmentError, RecipeError, unknown
from spanwise.objective import BASELINES, BaselineName


class Advantage(NamedTuple):
    """Advantages of one reward.

    Attributes:
        advantage_n: float64 reward minus baseline; 0 where the reward is absent or has nobody to be compared with.
        missing_n: float64 `if_missing` minus baseline where the reward is absent and `if_missing` was given; else 0.
        alone_n: the reward is present and has nobody to be compared with.
    """

    advantage_n: Float[Tensor, " n"]
    missing_n: Float[Tensor, " n"]
    alone_n: Bool[Tensor, " n"]


def advantage(
    reward_n: Float[Tensor, " n"],
    group_n: Int[Tensor, " n"],
    *,
    baseline: BaselineName = "group",
    outcome_n: Float[Tensor, " n"] | None = None,
    by_outcome_n2: Float[Tensor, "n 2"] | None = None,
    leave_one_out: bool = False,
    min_stratum: int = 2,
    scale: Literal["none", "std"] = "none",
    ddof: int = 1,
    eps: float = 0.0,
    if_missing: float | None = None,
) -> Advantage:
    r"""Subtract a baseline from one reward.

    Equation
        A[i] = r[i] - b[i], b[i] = 0 (none) or the mean of r over i's stratum:
        the batch, the group (same prompt), the outcome stratum (same prompt and outcome), or the blended estimate.

    Args:
        reward_n: one reward per completion; NaN where absent (it joins no baseline).
        group_n: integer prompt ids, in any order, of any sizes.
        baseline: none, batch, group, outcome or blended.
        outcome_n: the outcome of the completion's prefix, for `outcome` and `blended`; NaN where unknown.
        by_outcome_n2: the reward under outcome 0 and 1, for `blended`.
        leave_one_out: leave the completion out of its own mean (`blended` always does).
        min_stratum: strata with fewer members give 0 and are counted in `alone_n`.
        scale: "std" divides by the stratum's standard deviation; not with none and blended.
        ddof: of the standard deviation.
        eps: added to the standard deviation.
        if_missing: the reward that an absent reward stands for; its baseline is the mean of the stratum's present members,
            of the group or the batch where the stratum has none.

    Edge cases:
        A stratum of one and a constant stratum give exactly 0; `blended` never needs a second member.

    Raises:
        AlignmentError: sizes differ.
        RewardError: an infinite reward.
        RecipeError: an outcome baseline without outcomes, a scale that does not go with the baseline.

    Example:
        Four confidences .9 .7 .8 .1 of one prompt, scored by Brier; the first two answers are right.

        >>> reward_n = torch.tensor([-.01, -.09, -.64, -.01])
        >>> one_prompt, right_n = torch.tensor([0, 0, 0, 0]), torch.tensor([1., 1., 0., 0.])
        >>> advantage(reward_n, one_prompt, baseline="outcome", outcome_n=right_n).advantage_n
        tensor([ 0.0400, -0.0400, -0.3150,  0.3150], dtype=torch.float64)
        >>> advantage(reward_n, one_prompt, baseline="group").advantage_n
        tensor([ 0.1775,  0.0975, -0.4525,  0.1775], dtype=torch.float64)

    Reference:
        Pavlenko et al. 2026, "Blockwise Advantage Estimation" (arXiv 2602.10231): none, batch, group, outcome (there with the
        completion inside its own mean: `leave_one_out=False`).
    """
    if len(reward_n) != len(group_n):
        raise AlignmentError(
            f"There are {len(reward_n)} rewards for {len(group_n)} group ids; give one id to each completion."
        )
    absent_n = reward_n.isnan()
    nothing_n = torch.zeros(len(reward_n), dtype=torch.float64, device=reward_n.device)
    if baseline == "none":  # the only one without a stratum, whose moments would look
        check_rewards(reward_n)
        _refuse_scale(baseline, scale)
        missing_n = nothing_n if if_missing is None else torch.where(absent_n, float(if_missing), nothing_n)
        return Advantage(torch.where(absent_n, 0.0, reward_n.double()), missing_n, torch.zeros_like(absent_n))
    if baseline == "blended":
        _refuse_scale(baseline, scale)
        baseline_n = blended_baseline(reward_n, group_n, _outcomes(outcome_n, baseline), by_outcome_n2)
        alone_n = baseline_n.isnan() & ~absent_n
        advantage_n = (reward_n.double() - baseline_n).nan_to_num(nan=0.0)
        return Advantage(advantage_n, _missing(reward_n, group_n, baseline_n, if_missing), alone_n)
    stratum_n = _stratum(group_n, outcome_n, baseline)
    advantage_n = centred(
        reward_n, stratum_n, leave_one_out=leave_one_out, min_stratum=min_stratum, scale=scale, ddof=ddof, eps=eps
    )
    within = moments(reward_n, stratum_n)
    missing_n = _missing(reward_n, group_n, within.mean_n(), if_missing)
    if scale == "std":
        std_n = within.std_n(ddof=ddof)
        missing_n = torch.where(std_n > 0, missing_n / torch.where(std_n > 0, std_n + eps, 1.0), missing_n)
    return Advantage(advantage_n, missing_n, ~absent_n & (within.count_n() < max(min_stratum, 2)))


def _stratum(group_n: Tensor, outcome_n: Tensor | None, baseline: str) -> Tensor:
    if baseline == "batch":
        return torch.zeros_like(group_n, dtype=torch.long)
    if baseline == "group":
        return group_index(group_n)
    if baseline == "outcome":
        return refine(group_n, _outcomes(outcome_n, baseline).double())
    raise RecipeError(unknown("baseline", baseline, BASELINES))


def _outcomes(outcome_n: Tensor | None, baseline: str) -> Tensor:
    if outcome_n is None:
        raise RecipeError(f"Baseline '{baseline}' needs an outcome for each completion; pass outcome_n or use 'group'.")
    return outcome_n


def _refuse_scale(baseline: str, scale: str) -> None:
    if scale != "none":
        raise RecipeError(
            f"Baseline '{baseline}' has no stratum whose standard deviation could be divided by; use scale='none'."
        )


def _missing(reward_n: Tensor, group_n: Tensor, baseline_n: Tensor, if_missing: float | None) -> Tensor:
    """`if_missing` minus the baseline at absent rewards, falling back on the group's, then the batch's mean."""
    if if_missing is None:
        return torch.zeros(len(reward_n), dtype=torch.float64, device=reward_n.device)
    group_mean_n = moments(reward_n, group_index(group_n)).mean_n()
    batch_mean_n = moments(reward_n, torch.zeros_like(group_n, dtype=torch.long)).mean_n()
    level_n = torch.where(baseline_n.isnan(), torch.where(group_mean_n.isnan(), batch_mean_n, group_mean_n), baseline_n)
    return torch.where(reward_n.isnan(), float(if_missing) - level_n, 0.0).nan_to_num(nan=0.0)
