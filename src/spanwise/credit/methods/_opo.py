"""OPO: the group's mean weighted by length, the baseline of least variance when gradients grow with length."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.explained import Explained, comparison_of, explains
from spanwise.credit.registry import Preset
from spanwise.credit.strata import compare_in_strata, group_index, weighted_mean
from spanwise.registry import register
from spanwise.types import Zero


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
    r"""Compare a completion with the mean of its group in which each completion counts as often as it has tokens.

    Equation
        A[i] = r[i] - (sum_g L r) / (sum_g L)

    Args:
        reward_n: one reward per completion; NaN where absent (takes no part, gets 0).
        group_n: prompt ids, in any order, of any sizes.
        length_n: trainable tokens of each completion.
        min_stratum: smaller groups get 0.

    Edge cases:
        A group of one, a constant group and a group without any token give exactly 0 (verl returns the raw reward for a group
        of one).

    Example:
        >>> import torch
        >>> opo(torch.tensor([1., 0.]), torch.tensor([0, 0]), length_n=torch.tensor([30, 10]))
        tensor([ 0.2500, -0.7500], dtype=torch.float64)

    Reference:
        Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline" (arXiv 2505.23585), as verl has it.
    """
    stratum_n = group_index(group_n)
    plain, worth_n = compare_in_strata(reward_n, stratum_n, min_stratum=min_stratum).comparison, reward_n.double()
    baseline_n = weighted_mean(reward_n, length_n.double(), stratum_n)
    alone_n, equal_n = ((plain.reason_nm == int(reason))[:, 0] for reason in (Zero.SINGLETON, Zero.ALL_EQUAL))
    advantage_n = torch.where(alone_n, 0.0, worth_n - baseline_n).nan_to_num(nan=0.0)
    return Explained(advantage_n, comparison_of(
        advantage_n, worth_n, baseline_n, torch.ones_like(worth_n), alone_n=alone_n, equal_n=equal_n,
        stratum_n=plain.stratum_nm[:, 0], members_n=plain.members_nm[:, 0],
    ))  # fmt: skip
