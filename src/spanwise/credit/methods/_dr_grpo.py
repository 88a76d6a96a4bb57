"""Dr. GRPO: GRPO without the division by the group's standard deviation."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.explained import Explained, explains
from spanwise.credit.registry import Preset
from spanwise.credit.strata import compare_in_strata, group_index
from spanwise.registry import register


@register(
    "dr_grpo",
    kind="completion",
    paper="Understanding R1-Zero-Like Training, arXiv 2503.20783",
    source="the paper and the code of verl and TRL",
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
        reward_n: one reward per completion; NaN where absent (takes no part, gets 0).
        group_n: prompt ids, in any order, of any sizes.
        leave_one_out: leave the completion out of the mean.
        min_stratum: smaller groups get 0.

    Edge cases:
        A group of one and a constant group give exactly 0.

    Example:
        >>> import torch
        >>> dr_grpo(torch.tensor([1., 0., 0., 0.]), torch.tensor([7, 7, 7, 7]))
        tensor([ 0.7500, -0.2500, -0.2500, -0.2500], dtype=torch.float64)

    Reference:
        Liu et al. 2025, "Understanding R1-Zero-Like Training" (arXiv 2503.20783). Its loss divides by a constant length, here
        `spread(..., per=length)`.
    """
    return compare_in_strata(reward_n, group_index(group_n), leave_one_out=leave_one_out, min_stratum=min_stratum)
