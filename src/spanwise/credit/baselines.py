"""The baselines none, batch, group, outcome and blended: what is subtracted from one reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit.blended import blended_baseline
from spanwise.credit.checks import check_rewards
from spanwise.credit.explained import Explained, comparison_of
from spanwise.credit.strata import as_columns, compare_in_strata, group_index, member_counts, refine
from spanwise.errors import AlignmentError, RecipeError, check_known
from spanwise.objective import BASELINES, BaselineName
from spanwise.types import Comparison, Zero


class Advantage(NamedTuple):
    """Advantages of one reward.

    Attributes:
        advantage_n: float64 reward minus baseline; 0 where the reward is absent or has nobody to be compared with.
        missing_n: float64 `if_missing` minus baseline, scaled like the rest, where the reward is absent and `if_missing` was
            given; else 0.
        alone_n: the reward is present and has nobody to be compared with.
        comparison: what each reward, or what stands for it, was compared with; one column.

    Example:
        The mean of the two rewards is .5, and what is absent counts as -1.

        >>> found = advantage(torch.tensor([1.0, 0.0, float("nan")]), torch.tensor([0, 0, 0]), if_missing=-1.0)
        >>> found.advantage_n.tolist(), found.missing_n.tolist()
        ([0.5, -0.5, 0.0], [0.0, 0.0, -1.5])
    """

    advantage_n: Float[Tensor, " n"]
    missing_n: Float[Tensor, " n"]
    alone_n: Bool[Tensor, " n"]
    comparison: Comparison


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
    r"""Subtract a baseline from one reward.

    Equation
        A[i] = r[i] - b[i], b[i] = 0 (none) or the mean of r over i's stratum:
        the batch, the group (same prompt), the outcome stratum (same prompt and outcomes), or the blended estimate.
        back_off: the stratum is that of the first level l = 0, 1, ..., O with at least `min_stratum` rewards, where level l takes
        all completions of the prompt that agree in the first O - l outcomes, whichever level they are compared at themselves
        scale "std": A[i] / (std + eps), and where r[i] is absent and stands for u[i]: (u[i] - b[i]) / (std + eps), both with
            std^2 = (sum of (r[j] - m)^2 + sum of (u[j] - m)^2) / (n + k - ddof) over the n rewards and the k stand-ins of the
            stratum, m the mean of the n rewards

    Args:
        reward_n: one reward per completion; NaN where absent (it joins no baseline).
        group_n: integer prompt ids, in any order, of any sizes.
        baseline: none, batch, group, outcome or blended.
        outcome_no: the O outcomes of the completion's prefix, from coarse to fine, for `outcome` and `blended`; a vector is one
            outcome; NaN where unknown.
        by_outcome_n2: the reward under outcome 0 and 1, for `blended`.
        judged: the column of `outcome_no` that `by_outcome_n2` is about; None: the only one.
        back_off: whether small strata back off to coarser ones, for `outcome`; None: where there are several outcomes.
        leave_one_out: leave the completion out of its own mean (`blended` always does).
        min_stratum: strata with fewer members give 0 and are counted in `alone_n`.
        scale: "std" divides by the stratum's standard deviation, which stand-ins join; not with none and blended.
        ddof: of the standard deviation.
        eps: added to the standard deviation.
        if_missing: the reward that an absent reward stands for, or one per completion, NaN where it stands for nothing (a check
            that failed). Its baseline is the mean of the stratum's present members, of the group or the batch where the stratum
            has none; it joins no baseline.
        voter_n: whose each row is, where several rows (turns) are one rollout: in each stratum they are one member, with the mean
            of its rows; each row is compared with the mean over members. Not with `blended`, nor with a scale. None: each row is
            a member.

    Edge cases:
        A stratum of one and a constant stratum give exactly 0; `blended` never needs a second member. A completion of which an
        outcome is unknown is in no stratum that needs it: it backs off, or gets 0. Scaled, k of G rewards that are missing get at
        most sqrt((G - ddof) / k) each, and that where the others are all equal; the others are scaled by the same number.

    Raises:
        AlignmentError: sizes differ.
        RewardError: an infinite reward.
        RecipeError: an outcome baseline without outcomes, `back_off` or a scale that does not go with the baseline, `judged`
            that is no column, or rewards by outcome of one of several outcomes, without a word which.

    Example:
        Four confidences .9 .7 .8 .1 of one prompt, scored by Brier; the first two answers are right.

        >>> reward_n = torch.tensor([-.01, -.09, -.64, -.01])
        >>> one_prompt, right_n = torch.tensor([0, 0, 0, 0]), torch.tensor([1., 1., 0., 0.])
        >>> advantage(reward_n, one_prompt, baseline="outcome", outcome_no=right_n).advantage_n
        tensor([ 0.0400, -0.0400, -0.3150,  0.3150], dtype=torch.float64)
        >>> advantage(reward_n, one_prompt, baseline="group").advantage_n
        tensor([ 0.1775,  0.0975, -0.4525,  0.1775], dtype=torch.float64)

        The last of the wrong ones gave no answer: alone of its kind, it is compared with both wrong ones, the others as before.

        >>> right_complete_n2 = torch.tensor([[1., 1.], [1., 1.], [0., 1.], [0., 0.]])
        >>> advantage(reward_n, one_prompt, baseline="outcome", outcome_no=right_complete_n2).advantage_n
        tensor([ 0.0400, -0.0400, -0.3150,  0.3150], dtype=torch.float64)

        Without the last confidence, which counts as -1: the mean of the others is -.2467, the scale of all four .5173.

        >>> reward_n = torch.tensor([-.01, -.09, -.64, float("nan")])
        >>> found = advantage(reward_n, one_prompt, scale="std", if_missing=-1.0)
        >>> found.advantage_n + found.missing_n
        tensor([ 0.4575,  0.3029, -0.7604, -1.4563], dtype=torch.float64)

    Reference:
        Pavlenko et al. 2026, "Blockwise Advantage Estimation" (arXiv 2602.10231): none, batch, group, outcome (there with the
        completion inside its own mean: `leave_one_out=False`). Backing off is ours.
    """
    _check(reward_n, group_n, baseline, back_off)
    absent_n = reward_n.isnan()
    stand_in_n = torch.full_like(reward_n, torch.nan, dtype=torch.float64)
    if if_missing is not None:
        stand_in_n = torch.where(absent_n, if_missing, stand_in_n)
    if baseline in ("none", "blended"):
        _refuse_scale(baseline, scale)
    if baseline == "none":  # the only one without a stratum, whose moments would look
        check_rewards(reward_n)
        worth_n = torch.where(absent_n, stand_in_n, reward_n.double())
        advantage_n, nothing_n = worth_n.nan_to_num(nan=0.0), torch.zeros_like(worth_n)
        explained = Explained(advantage_n, comparison_of(advantage_n, worth_n, nothing_n, nothing_n + 1))
        return _advantage(explained, absent_n)
    scaling: dict[str, Any] = {"scale": scale, "ddof": ddof, "eps": eps, "voter_n": voter_n}
    strata = _strata(group_n, outcome_no, baseline, back_off)
    if baseline == "blended":
        if voter_n is not None:
            raise RecipeError("Turns of trajectories have no baseline 'blended'; use 'outcome', 'group', 'batch' or 'none'.")
        outcome_no = _outcomes(outcome_no, group_n, baseline)
        baseline_n = blended_baseline(reward_n, group_n, outcome_no, by_outcome_n2, judged=judged)
        explained = _blended(reward_n, stand_in_n, baseline_n, strata[0], refine(torch.zeros_like(group_n), outcome_no))
        explained = _wider(explained, ~baseline_n.isnan(), reward_n, group_n, stand_in_n, {})
        return _advantage(explained, absent_n)
    level_n = _levels(~absent_n, strata, min_stratum, voter_n)
    options: dict[str, Any] = {
        "leave_one_out": leave_one_out,
        "min_stratum": min_stratum,
        "stand_in_n": stand_in_n,
        **scaling,
    }
    explained = _at_level([compare_in_strata(reward_n, stratum_n, **options) for stratum_n in strata], strata, level_n)
    somebody_n = _at([member_counts(stratum_n, ~absent_n) for stratum_n in strata], level_n) > 0
    explained = _wider(explained, somebody_n, reward_n, group_n, stand_in_n, scaling)
    return _advantage(explained, absent_n)


def _advantage(explained: Explained, absent_n: Tensor) -> Advantage:
    """The advantages of rewards and of what stands for absent ones, apart."""
    adv_n, comparison = explained
    alone_n = ~absent_n & (comparison.reason_nm[:, 0] == int(Zero.SINGLETON))
    return Advantage(adv_n.where(~absent_n, 0.0), adv_n.where(absent_n, 0.0), alone_n, comparison)


def _blended(reward_n: Tensor, stand_in_n: Tensor, baseline_n: Tensor, stratum_n: Tensor, everywhere_n: Tensor) -> Explained:
    """Rewards and stand-ins minus the blended baseline; who is alone in its prompt borrows from the same outcomes of others."""
    own, all_ = compare_in_strata(reward_n, stratum_n).comparison, compare_in_strata(reward_n, everywhere_n).comparison
    worth_n = torch.where(reward_n.isnan(), stand_in_n, reward_n.double())
    advantage_n = (worth_n - baseline_n).nan_to_num(nan=0.0)
    reason_n = torch.where(own.members_nm > 1, own.reason_nm, all_.reason_nm)[:, 0]
    return Explained(advantage_n, comparison_of(
        advantage_n, worth_n, baseline_n, torch.ones_like(baseline_n), alone_n=baseline_n.isnan(),
        equal_n=reason_n == int(Zero.ALL_EQUAL), stratum_n=own.stratum_nm[:, 0], members_n=own.members_nm[:, 0],
    ))  # fmt: skip


def _check(reward_n: Tensor, group_n: Tensor, baseline: str, back_off: bool | None) -> None:
    if len(reward_n) != len(group_n):
        raise AlignmentError(
            f"There are {len(reward_n)} rewards for {len(group_n)} group ids; give one id to each completion."
        )
    if back_off is not None and baseline != "outcome":
        raise RecipeError(
            f"Only the baseline 'outcome' has coarser strata to back off to; leave back_off out of '{baseline}'."
        )


def _levels(present_n: Tensor, strata: Sequence[Tensor], min_stratum: int, voter_n: Tensor | None) -> Tensor:
    """The first of the strata that holds enough rewards, the last one where none does."""
    counts = [member_counts(stratum_n, present_n, voter_n=voter_n) for stratum_n in strata]
    enough_ln = torch.stack([count_n >= max(min_stratum, 2) for count_n in counts])
    return torch.where(enough_ln.any(dim=0), enough_ln.int().argmax(dim=0), len(strata) - 1)


def _strata(group_n: Tensor, outcome_no: Tensor | None, baseline: str, back_off: bool | None) -> list[Tensor]:
    """The strata that completions may be compared in, the finest first."""
    if baseline == "batch":
        return [torch.zeros_like(group_n, dtype=torch.long)]
    if baseline == "group":
        return [group_index(group_n)]
    check_known("baseline", baseline, BASELINES)
    outcome_no = _outcomes(outcome_no, group_n, baseline)
    several = outcome_no.shape[1] > 1
    if baseline == "outcome" and (several if back_off is None else back_off):
        return [refine(group_n, outcome_no[:, :count]) for count in range(outcome_no.shape[1], -1, -1)]
    return [refine(group_n, outcome_no)]


def _outcomes(outcome_no: Tensor | None, group_n: Tensor, baseline: str) -> Tensor:
    if outcome_no is None or as_columns(outcome_no).shape[1] == 0:
        raise RecipeError(f"Baseline '{baseline}' needs an outcome for each completion; pass outcome_no or use 'group'.")
    if len(outcome_no) != len(group_n):
        raise AlignmentError(f"There are {len(outcome_no)} outcomes for {len(group_n)} completions.")
    return as_columns(outcome_no).double()


def _at(values: Sequence[Tensor], level_n: Tensor) -> Tensor:
    """The value of each completion at its own level."""
    if len(values) == 1:
        return values[0]
    return torch.stack(tuple(values)).gather(0, level_n[None])[0]


def _refuse_scale(baseline: str, scale: str) -> None:
    if scale != "none":
        raise RecipeError(
            f"Baseline '{baseline}' has no stratum whose standard deviation could be divided by; use scale='none'."
        )


def _at_level(levels: Sequence[Explained], strata: Sequence[Tensor], level_n: Tensor) -> Explained:
    """What each completion is given at its own level; strata of different levels have different numbers."""
    if len(levels) == 1:
        return levels[0]
    comparison = levels[-1].comparison
    for level in reversed(range(len(levels) - 1)):
        comparison = levels[level].comparison.where((level_n == level)[:, None], comparison)
    member_n = comparison.stratum_nm[:, 0] >= 0
    id_n, stratum_n = _at(strata, level_n) * len(strata) + level_n, torch.full_like(level_n, -1)
    stratum_n[member_n] = group_index(id_n[member_n])
    comparison = replace(comparison, stratum_nm=stratum_n[:, None], level_nm=level_n[:, None])
    return Explained(_at([one.advantages for one in levels], level_n), comparison)


def _wider(
    explained: Explained,
    somebody_n: Tensor,
    reward_n: Tensor,
    group_n: Tensor,
    stand_in_n: Tensor,
    scaling: Mapping[str, Any],
) -> Explained:
    """What is missing, compared with the group, then with the batch, where nobody is there to compare it with."""
    for wider_n in (group_index(group_n), torch.zeros_like(group_n, dtype=torch.long)):
        kept_n = somebody_n | stand_in_n.isnan()
        if bool(kept_n.all()):
            break
        instead = compare_in_strata(reward_n, wider_n, stand_in_n=stand_in_n, **scaling)
        explained = Explained(
            explained.advantages.where(kept_n, instead.advantages),
            explained.comparison.where(kept_n[:, None], instead.comparison),
        )
        somebody_n = somebody_n | (member_counts(wider_n, ~reward_n.isnan()) > 0)
    return explained
