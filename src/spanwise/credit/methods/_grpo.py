"""GRPO: one reward per completion, standardised inside its group."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.explained import Explained, explains
from spanwise.credit.registry import Preset
from spanwise.credit.strata import compare_in_strata, group_index
from spanwise.registry import register


@register(
    "grpo",
    kind="completion",
    paper="DeepSeekMath, arXiv 2402.03300",
    source="the paper, which leaves ddof open, and the code of verl, TRL, SkyRL and OpenRLHF",
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
        >>> import torch
        >>> grpo(torch.tensor([1., 0., 0., 1.]), torch.tensor([0, 0, 0, 0]))
        tensor([ 0.8660, -0.8660, -0.8660,  0.8660], dtype=torch.float64)

    Reference:
        Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300). Its text leaves ddof open.
    """
    return compare_in_strata(reward_n, group_index(group_n), scale="std", ddof=ddof, eps=eps, min_stratum=min_stratum)
