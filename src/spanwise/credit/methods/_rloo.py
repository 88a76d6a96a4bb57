"""RLOO: one reward per completion, compared with the mean of the others in its group."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.explained import Explained, explains
from spanwise.credit.registry import Preset
from spanwise.credit.strata import compare_in_strata, group_index
from spanwise.registry import register


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
        reward_n: one reward per completion; NaN where absent (takes no part, gets 0).
        group_n: prompt ids, in any order, of any sizes.
        min_stratum: smaller groups get 0.

    Edge cases:
        A group of one and a constant group give exactly 0 (verl's `rloo` returns the raw reward for a group of one, its
        `rloo_vectorized` and SkyRL 0, OpenRLHF NaN).

    Example:
        >>> import torch
        >>> rloo(torch.tensor([1., 0., 0., 0.]), torch.tensor([7, 7, 7, 7]))
        tensor([ 1.0000, -0.3333, -0.3333, -0.3333], dtype=torch.float64)

    Reference:
        Ahmadian et al. 2024, "Back to Basics" (arXiv 2402.14740). The same as `dr_grpo(..., leave_one_out=True)`.
    """
    return compare_in_strata(reward_n, group_index(group_n), leave_one_out=True, min_stratum=min_stratum)
