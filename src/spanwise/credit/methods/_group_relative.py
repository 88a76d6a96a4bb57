"""Methods that compare one number per completion with its group: GRPO, DrGRPO, RLOO, MaxRL, OPO and RLCR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.registry import Preset
from spanwise.credit.strata import (
    Explained,
    check_rewards,
    compare_in_strata,
    explain_advantages,
    explains,
    first_of,
    group_index,
    moments,
    weighted,
    weights_of,
)
from spanwise.errors import RewardError
from spanwise.registry import register
from spanwise.types import Zero


@register(
    "grpo",
    kind="completion",
    paper="DeepSeekMath, arXiv 2402.03300",
    source="its paper, with the ddof of verl, TRL, SkyRL and OpenRLHF",
    preset=Preset(whole=True, per="completion", calibrated=False),
)
@explains
def grpo(
    reward_n: Float[Tensor, " n"], group_n: Int[Tensor, " n"], *, ddof: int = 1, eps: float = 1e-6, min_stratum: int = 2
) -> Explained:
    r"""Compare a completion with its group, in units of the group's standard deviation.

    Equation
        A[i] = (r[i] - mean_g r) / (std_g r + eps)

    Args:
        reward_n: one reward per completion; NaN where absent (takes no part, gets 0).
        group_n: prompt ids, in any order, of any sizes.
        ddof: 1 divides the squares by G - 1 (verl, TRL, SkyRL, OpenRLHF), 0 by G.
        eps: added to the standard deviation (verl and SkyRL 1e-6, TRL 1e-4).
        min_stratum: smaller groups get 0.

    Edge cases:
        A group of one and a constant group give exactly 0 (verl returns the raw reward for a group of one).

    Example:
        >>> grpo(torch.tensor([1., 0., 0., 1.]), torch.tensor([0, 0, 0, 0]))
        tensor([ 0.8660, -0.8660, -0.8660,  0.8660], dtype=torch.float64)

    Reference:
        Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300). Its text leaves ddof open.
    """
    return compare_in_strata(reward_n, group_index(group_n), scale="std", ddof=ddof, eps=eps, min_stratum=min_stratum)


@register(
    "dr_grpo",
    kind="completion",
    paper="Understanding R1-Zero-Like Training, arXiv 2503.20783",
    source="its paper and the code of verl and TRL",
    preset=Preset(whole=True, per="length", calibrated=False),
)
@explains
def dr_grpo(
    reward_n: Float[Tensor, " n"], group_n: Int[Tensor, " n"], *, leave_one_out: bool = False, min_stratum: int = 2
) -> Explained:
    r"""Compare a completion with the mean of its group.

    Equation
        A[i] = r[i] - mean_g r          (leave_one_out: times G/(G-1), which is RLOO)

    Args:
        reward_n, group_n, min_stratum: as for `grpo`.
        leave_one_out: leave the completion out of the mean.

    Edge cases:
        A group of one and a constant group give exactly 0.

    Example:
        >>> dr_grpo(torch.tensor([1., 0., 0., 0.]), torch.tensor([7, 7, 7, 7]))
        tensor([ 0.7500, -0.2500, -0.2500, -0.2500], dtype=torch.float64)

    Reference:
        Liu et al. 2025, "Understanding R1-Zero-Like Training" (arXiv 2503.20783). Its loss divides by a constant length, here
        `spread(..., per=length)`.
    """
    return compare_in_strata(reward_n, group_index(group_n), leave_one_out=leave_one_out, min_stratum=min_stratum)


@register(
    "rloo",
    kind="completion",
    paper="Back to Basics, arXiv 2402.14740",
    source="the code of verl, SkyRL and OpenRLHF",
    preset=Preset(whole=True, per="length", calibrated=False),
)
@explains
def rloo(reward_n: Float[Tensor, " n"], group_n: Int[Tensor, " n"], *, min_stratum: int = 2) -> Explained:
    r"""Compare a completion with the mean of the other completions of its group.

    Equation
        A[i] = r[i] - mean of r over g without i = (r[i] - mean_g r) G/(G-1)

    Args:
        reward_n, group_n, min_stratum: as for `grpo`.

    Edge cases:
        A group of one and a constant group give exactly 0; docs/compat.md has what other frameworks give.

    Example:
        >>> rloo(torch.tensor([1., 0., 0., 0.]), torch.tensor([7, 7, 7, 7]))
        tensor([ 1.0000, -0.3333, -0.3333, -0.3333], dtype=torch.float64)

    Reference:
        Ahmadian et al. 2024, "Back to Basics" (arXiv 2402.14740). The same as `dr_grpo(..., leave_one_out=True)`.
    """
    return compare_in_strata(reward_n, group_index(group_n), leave_one_out=True, min_stratum=min_stratum)


@register(
    "maxrl",
    kind="completion",
    paper="Maximum Likelihood Reinforcement Learning, arXiv 2602.02710",
    source="SkyRL's and prime-rl's code and third-party summaries",
    preset=Preset(whole=True, per="length", calibrated=False),
    exceptions={
        "negative": "rewards are divided by their group's mean, and a reward of 0 stands for failure",
        "shift": "the reward is divided by the mean reward",
    },
)
@explains
def maxrl(
    reward_n: Float[Tensor, " n"], group_n: Int[Tensor, " n"], *, eps: float = 1e-6, min_stratum: int = 2
) -> Explained:
    r"""Compare a completion with its group, in units of the group's mean: rare successes weigh more.

    Equation
        A[i] = (r[i] - mean_g r) / (mean_g r + eps)

    Args:
        reward_n: as for `grpo`, and 0 or more.
        group_n, min_stratum: as for `grpo`.
        eps: added to the mean (SkyRL 1e-6, prime-rl 0).

    Edge cases:
        A group of one and a constant group, all-wrong or all-right, give exactly 0. A constant added to all rewards changes A.

    Raises:
        RewardError: a negative reward; the mean would no longer be a rate of success, and signs could flip.

    Example:
        >>> maxrl(torch.tensor([1., 0., 0., 0.]), torch.tensor([0, 0, 0, 0]), eps=0.0)
        tensor([ 3., -1., -1., -1.], dtype=torch.float64)

    Reference:
        "Maximum Likelihood Reinforcement Learning" (arXiv 2602.02710), after its implementations. With K successes in G samples
        the paper's weight of a completion is (r - K/G) / K, which is A/G; the mean over the batch supplies the 1/G.
    """
    check_rewards(reward_n)
    if bad_entry := first_of(reward_n < 0):
        (row,) = bad_entry
        raise RewardError(
            f"The reward of completion {row} is {float(reward_n[row]):g}. maxrl divides by the mean reward of the group, so "
            f"rewards must be 0 (failure) or more. Use rewards from 0 to 1, or another method, such as rloo."
        )
    return compare_in_strata(reward_n, group_index(group_n), scale="mean", eps=eps, min_stratum=min_stratum)


@register(
    "opo",
    kind="completion",
    paper="On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585",
    source="verl's code",
    preset=Preset(whole=True, per="length", calibrated=False),
)
@explains
def opo(
    reward_n: Float[Tensor, " n"],
    group_n: Int[Tensor, " n"],
    *,
    length_n: Int[Tensor, " n"] | Float[Tensor, " n"],
    min_stratum: int = 2,
) -> Explained:
    r"""Subtract the group's mean reward, with completions weighted by length.

    Equation
        A[i] = r[i] - (sum_g L r) / (sum_g L)

    Args:
        reward_n, group_n, min_stratum: as for `grpo`.
        length_n: trainable tokens of each completion.

    Edge cases:
        A group of one, a constant group and a group without any token give exactly 0.

    Example:
        >>> opo(torch.tensor([1., 0.]), torch.tensor([0, 0]), length_n=torch.tensor([30, 10]))
        tensor([ 0.2500, -0.7500], dtype=torch.float64)

    Reference:
        Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline" (arXiv 2505.23585), as verl has it.
    """
    reward_n = reward_n.double()
    stratum_n = group_index(group_n)
    unweighted_comparison = compare_in_strata(reward_n, stratum_n, min_stratum=min_stratum).comparison
    baseline_n = moments(reward_n, stratum_n, weight_n=length_n.double()).mean_n()
    reason_n = unweighted_comparison.reason_nm[:, 0]
    is_alone_n = reason_n == int(Zero.SINGLETON)
    is_all_equal_n = reason_n == int(Zero.ALL_EQUAL)
    advantage_n = torch.where(is_alone_n, 0.0, reward_n - baseline_n).nan_to_num(nan=0.0)
    return explain_advantages(
        advantage_n, reward_n, baseline_n, torch.ones_like(reward_n), alone_n=is_alone_n, equal_n=is_all_equal_n,
        stratum_n=unweighted_comparison.stratum_nm[:, 0], members_n=unweighted_comparison.members_nm[:, 0],
    )  # fmt: skip


_RLCR: Mapping[str, Any] = {
    "kind": "completion",
    "paper": "Beyond Binary Rewards, arXiv 2507.16806",
    "source": "the authors' code and third-party summaries",
}


@register("rlcr_paper", preset=Preset(), **_RLCR)
@register("rlcr", preset=Preset(format=0.25), **_RLCR)
@explains
def rlcr(
    reward_nm: Float[Tensor, "n m"],
    group_n: Int[Tensor, " n"],
    *,
    weight_m: Float[Tensor, " m"] | None = None,
    leave_one_out: bool = False,
    min_stratum: int = 2,
) -> Explained:
    r"""Compare a completion's correctness plus calibration score with its group. All tokens share one number.

    Equation
        R[i] = c[i] + w s[i],  s = -(q - c)^2 for Brier;   A[i] = R[i] - mean_g R

    Args:
        reward_nm: columns of correctness (1 or 0) and of a score of the confidence, or any others; with a NaN the sum is absent.
        group_n, min_stratum: as for `grpo`.
        weight_m: of each column; None: 1 each.
        leave_one_out: leave the completion out of its own mean.

    Edge cases:
        A group of one and a constant group give exactly 0. With the log score, refusing with a confidence of 0 beats honest
        answers while fewer than about two thirds of them are right, and training can collapse.

    Example:
        >>> rlcr(torch.tensor([[1., -.01], [0., -.81]]), torch.tensor([0, 0]))  # R = .99, -.81
        tensor([ 0.9000, -0.9000], dtype=torch.float64)

    Reference:
        Damani et al. 2025, "Beyond Binary Rewards" (arXiv 2507.16806). The authors' code uses an affine map of R and pays the
        format too, at the weight of correctness; the preset pays it a quarter of that (`rlcr_paper`: R alone). The preset shares
        credit `per: block`, as that of `bae` does, so that the two differ in the credit alone.
    """
    check_rewards(reward_nm, column="reward")  # inf - inf would be NaN, as if a reward were missing
    reward_sum_n = weighted(reward_nm.double(), weights_of(reward_nm, weight_m)).sum(dim=1)
    return compare_in_strata(reward_sum_n, group_index(group_n), leave_one_out=leave_one_out, min_stratum=min_stratum)
