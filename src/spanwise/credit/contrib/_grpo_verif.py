"""GRPO-Verif: a solution and the verification of it, each standardised over the group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.methods._bae import dcpo
from spanwise.credit.registry import Preset
from spanwise.credit.strata import Explained, call_explained, explains
from spanwise.registry import register


@register(
    "grpo_verif",
    kind="block",
    paper="GRPO-Verif, arXiv 2511.15137",
    source="notes; neither the full paper nor code was read",
    preset=Preset(),
)
@explains
def grpo_verif(
    reward_nk: Float[Tensor, "n k"],
    group_n: Int[Tensor, " n"],
    *,
    weight: float = 0.2,
    if_missing_k: Sequence[float | Float[Tensor, " n"] | None] | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    min_stratum: int = 2,
) -> Explained:
    r"""Standardise the rewards of solution and verification over the group; the verification weighs less.

    Equation
        A[i, 0] = (r[i, 0] - mean_g r[:, 0]) / (std_g r[:, 0] + eps)
        A[i, k] = weight (r[i, k] - mean_g r[:, k]) / (std_g r[:, k] + eps)    for the blocks after the first

    The same as `dcpo` with less weight on the blocks after the first. The preset puts the confidence and its score in the place
    of the verification.

    Args:
        reward_nk: rewards of the solution and of the judgement on it (paper: 1 right, -1 wrong, -1.5 no valid output); NaN
            where the block is absent (takes no part, gets 0).
        group_n: prompt ids, in any order, of any sizes.
        weight: of the blocks after the first (alpha in the paper).
        if_missing_k: per block, what an absent reward stands for: it joins the deviation and not the mean, see `advantage`.
        ddof: of the standard deviations.
        eps: added to them.
        min_stratum: smaller groups get 0.

    Edge cases:
        A group of one and a block whose reward is constant in the group give exactly 0. Right and wrong solutions share one
        baseline for their verifications, so on easy prompts always saying "correct" pays; `bae` does without that.

    Example:
        >>> rewards = torch.tensor([[1., 1.], [-1., 1.], [1., -1.], [-1.5, -1.]])
        >>> grpo_verif(rewards, torch.zeros(4, dtype=torch.long), ddof=0)
        tensor([[ 0.9879,  0.2000],
                [-0.7683,  0.2000],
                [ 0.9879, -0.2000],
                [-1.2074, -0.2000]], dtype=torch.float64)

    Reference:
        "GRPO-Verif" (arXiv 2511.15137). Its alpha stands in the loss, here in the advantage, which is the same for clipped
        losses. ddof and eps are not verified.
    """
    options = {"ddof": ddof, "eps": eps, "min_stratum": min_stratum}
    inner: Explained = call_explained(dcpo, reward_nk, group_n, if_missing_k=if_missing_k, **options)
    weight_k = torch.full((reward_nk.shape[1],), weight, dtype=torch.float64, device=reward_nk.device)
    weight_k[:1] = 1.0
    adv_nk, told_k = inner.advantages * weight_k, weight_k != 0
    comparison = inner.comparison.rescaled(divisor=1 / torch.where(told_k, weight_k, torch.nan)).fitting(adv_nk)
    return Explained(adv_nk, comparison)
