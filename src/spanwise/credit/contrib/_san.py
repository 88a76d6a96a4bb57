"""SAN: GRPO inside the strata of a group, blended with GRPO over the whole group."""

from __future__ import annotations

from jaxtyping import Float, Int, Shaped
from torch import Tensor

from spanwise.credit.strata import centred, group_index, refine
from spanwise.registry import register


@register(
    "san",
    kind="completion",
    paper="Stratified GRPO, arXiv 2510.06214",
    source="notes; the defaults are those of re-implementations",
)
def san(
    reward_n: Float[Tensor, " n"],
    group_n: Int[Tensor, " n"],
    *,
    stratum_n: Shaped[Tensor, " n"],
    alpha: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-8,
    min_stratum: int = 2,
) -> Float[Tensor, " n"]:
    r"""A function to call from Python: standardise a reward among the completions of its group with the same structure.

    No trainer here knows the structure, such as the number of tool calls.

    Equation
        A[i] = alpha (r[i] - mean_k r) / (std_k r + eps) + (1 - alpha) (r[i] - mean_g r) / (std_g r + eps)
        k: the completions of group g with the stratum of i

    Args:
        reward_n: one reward per completion; NaN where absent (takes no part, gets 0).
        group_n: prompt ids, in any order, of any sizes.
        stratum_n: what completions must share to be compared, any number; NaN: unknown, compared with the group only.
        alpha: weight of the comparison inside the stratum; 0 is GRPO.
        ddof: of both standard deviations.
        eps: added to both standard deviations.
        min_stratum: smaller strata and groups give 0.

    Edge cases:
        A stratum of one leaves the group's term, times 1 - alpha; a group of one and a constant group give exactly 0.
        The stratum is something the completion chose. Subtracting its mean removes what makes one structure better than
        another, which only the second term teaches; `baseline: outcome` of a later block does not have this bias.

    Example:
        >>> import torch
        >>> r, tools = torch.tensor([1., 0., 1., 1.]), torch.tensor([0, 0, 2, 2])
        >>> san(r, torch.zeros(4, dtype=torch.long), stratum_n=tools, alpha=0.5)
        tensor([ 0.6036, -1.1036,  0.2500,  0.2500], dtype=torch.float64)

    Reference:
        "Stratified GRPO" (arXiv 2510.06214). The values of alpha, ddof and the smallest stratum are not verified; alpha = 1 and
        eps = 1e-8 are those of a re-implementation.
    """
    own_n = group_index(stratum_n).double()  # every NaN is a stratum of its own
    options = {"scale": "std", "ddof": ddof, "eps": eps, "min_stratum": min_stratum}
    inside_n = centred(reward_n, refine(group_n, own_n), **options)
    return alpha * inside_n + (1 - alpha) * centred(reward_n, group_index(group_n), **options)
