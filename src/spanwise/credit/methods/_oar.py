"""OAR: tokens that matter for the answer take a larger share of the advantage."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.credit.checks import check_mask
from spanwise.errors import AlignmentError, RecipeError, RewardError
from spanwise.registry import register


@register(
    "oar", kind="refinement", paper="Outcome-Grounded Advantage Reshaping, arXiv 2601.07408", source="the authors' code"
)
def oar(
    adv_nt: Float[Tensor, "n t"],
    importance_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    quantile: float = 0.25,
    beta: float = 1.0,
    floor: float = 0.1,
    sum_to_length: bool = False,
    eps: float = 1e-8,
) -> Float[Tensor, "n t"]:
    r"""Multiply any method's advantages by a weight that grows with the token's importance for the answer.

    Equation
        m[t] = (log1p(imp[t]) - min) / (max - min) over the trainable tokens of the completion, q = their quantile
        w[t] = max(m[t] / (q + eps), floor) if m[t] < q, else 1 + beta (m[t] - q) / (1 - q + eps);  A[t] <- w[t] A[t]

    Args:
        adv_nt: advantages of any method.
        importance_nt: how much each token matters for the answer, >= 0 (a divergence, a gradient norm). Under `Scheme.refine` it is
            the surprise of the token, -logp: the paper's own take further passes of the model, which no trainer here makes.
        mask_nt: the tokens to reshape; the others get 0 and are not read.
        quantile: the share of tokens whose advantage shrinks.
        beta: the most important token gets 1 + beta.
        floor: the smallest weight.
        sum_to_length: scale the weights of a completion so that their mean is 1.
        eps: added to both divisors.

    Returns:
        (N, T) in the dtype of `adv_nt`; exactly 0 at masked tokens.

    Edge cases:
        Equal importance everywhere gives weight 1 everywhere. Weights are positive: signs never change.

    Example:
        >>> imp_nt = torch.tensor([[0., .2, .5, 1., 3.]])
        >>> oar(torch.ones(1, 5), imp_nt, torch.ones(1, 5, dtype=torch.bool))
        tensor([[0.1000, 1.0000, 1.1853, 1.4243, 2.0000]])

    Reference:
        "OAR" 2026 (arXiv 2601.07408). Its code weights the reasoning only and leaves the answer at 1; here that is the caller's
        mask.
    """
    if not adv_nt.shape == importance_nt.shape == mask_nt.shape:
        raise AlignmentError(
            f"adv_nt is {tuple(adv_nt.shape)}, importance_nt {tuple(importance_nt.shape)}, mask_nt {tuple(mask_nt.shape)}."
        )
    check_mask(mask_nt)
    if not 0 <= quantile <= 1:
        raise RecipeError(f"quantile is {quantile:g}; it is the share of tokens that shrink, between 0 and 1.")
    reshaped_nt = torch.zeros_like(adv_nt)
    for i in range(len(adv_nt)):
        mask_t = mask_nt[i]
        importance_u = importance_nt[i, mask_t].double()
        if not len(importance_u):
            continue
        if not bool((importance_u >= 0).all()):
            raise RewardError(f"An importance of completion {i} is {float(importance_u.amin()):g}; it must be 0 or more.")
        weight_u = _weights(importance_u, quantile, beta, floor, eps)
        if sum_to_length:
            weight_u = weight_u / weight_u.mean()
        reshaped_nt[i, mask_t] = (adv_nt[i, mask_t] * weight_u).to(adv_nt.dtype)
    return reshaped_nt


def _weights(importance_u: Tensor, quantile: float, beta: float, floor: float, eps: float) -> Tensor:
    level_u = importance_u.log1p()
    low, high = level_u.aminmax()
    level_u = (level_u - low) / (high - low if high > low else 1.0)
    rank = quantile * (len(level_u) - 1)  # linear between neighbours, as torch.quantile, which refuses long inputs
    ordered_u, below = level_u.sort().values, int(rank)
    cut = torch.lerp(ordered_u[below], ordered_u[min(below + 1, len(level_u) - 1)], rank - below)
    shrunk_u, grown_u = (level_u / (cut + eps)).clamp(min=floor), 1 + beta * (level_u - cut) / (1 - cut + eps)
    return torch.where(level_u < cut, shrunk_u, grown_u)
