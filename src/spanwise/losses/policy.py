"""What a policy is trained with, per token, where a trainer lacks it: ASPO and DPPO."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.credit.strata import check_mask
from spanwise.errors import AlignmentError, RecipeError, unknown


def inside(mask_nt: Tensor, **inputs: Tensor) -> list[Tensor]:
    """The inputs with 0 at masked tokens, so that neither values nor gradients there can be NaN."""
    for name, value in inputs.items():
        if value.shape != mask_nt.shape:
            raise AlignmentError(f"mask_nt is {tuple(mask_nt.shape)} but {name} is {tuple(value.shape)}.")
    check_mask(mask_nt)
    return [torch.where(mask_nt, value, 0.0) for value in inputs.values()]


def aspo(
    logp_nt: Float[Tensor, "n t"],
    logp_old_nt: Float[Tensor, "n t"],
    adv_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float = 3.0,
) -> Float[Tensor, "n t"]:
    r"""Turn the ratio of good tokens upside down, so that those which have not grown yet weigh most.

    Equation
        drop where A > 0 and rho > 1 + clip_high, or A < 0 and rho < 1 - clip_low
        A > 0: loss = -sg(min(1 / rho, cap)) A pi / sg(pi);   A < 0: loss = -A min(rho, cap)

    Args:
        logp_nt, logp_old_nt: log-probabilities under the policy that is trained, and under the one that sampled.
        adv_nt, mask_nt: advantages, and the tokens that count.
        clip_low, clip_high: of the usual ratio, from which tokens are dropped.
        cap: largest weight; where A > 0 the gradient stays, where A < 0 it ends there.

    Edge cases:
        The drop looks at rho, the weight is 1 / rho. It is no importance-sampling estimator any more.

    Example:
        >>> ratio = torch.tensor([[.5, 1.1, 1.5, .1]])
        >>> aspo(ratio.log(), torch.zeros(1, 4), torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bool))
        tensor([[-2.0000, -0.9091,  0.0000, -3.0000]])

    Reference:
        "ASPO" 2025 (arXiv 2510.06062). The values of clip_low, clip_high and cap are not confirmed by its text.
    """
    logp_nt, logp_old_nt, adv_nt = inside(mask_nt, logp_nt=logp_nt, logp_old_nt=logp_old_nt.detach(), adv_nt=adv_nt.detach())
    drift_nt = (logp_nt - logp_old_nt).clamp(-20.0, 20.0)
    ratio_nt = drift_nt.detach().exp()
    drop_nt = torch.where(adv_nt > 0, ratio_nt > 1 + clip_high, ratio_nt < 1 - clip_low)
    good_nt = (-drift_nt.detach()).exp().clamp(max=cap) * (logp_nt - logp_nt.detach()).exp()
    weight_nt = torch.where(adv_nt > 0, good_nt, drift_nt.exp().clamp(max=cap))
    return torch.where(mask_nt & ~drop_nt, -adv_nt * weight_nt, 0.0)


def dppo(
    logp_nt: Float[Tensor, "n t"],
    logp_old_nt: Float[Tensor, "n t"],
    adv_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    delta_low: float = 0.2,
    delta_high: float = 0.2,
    divergence: Literal["tv", "kl"] = "tv",
    cap: float = 20.0,
    eps: float = 1e-8,
) -> Float[Tensor, "n t"]:
    r"""Follow a token as long as its probability, not its ratio, has moved little.

    Equation
        tv: keep where (A > 0: p - p_old <= delta_high), (A < 0: p_old - p <= delta_low)
        kl: d = p_old (log p_old - log p) + (1 - p_old) log((1 - p_old + eps) / (1 - p + eps)); keep where d <= delta of A's sign,
            or where the step leads back towards p_old
        loss = -keep sg(min(rho, cap)) A pi / sg(pi)

    Args:
        logp_nt, adv_nt, mask_nt: as for `aspo`.
        logp_old_nt: log-probabilities from the sampler itself; recomputed ones hide the mismatch this is to bound.
        delta_low, delta_high: largest divergence where A < 0 and where A > 0 (verl, SkyRL .2 for tv; .05 suggested for kl).
        divergence: of the two-way distribution "this token or another".
        cap: largest importance weight.
        eps: inside the logarithm of kl.

    Example:
        >>> p_old, p = torch.tensor([[.01, .01, .9, .5]]), torch.tensor([[.05, .2, .6, .36]])
        >>> adv_nt, mask_nt = torch.tensor([[1., 1., -1., -1.]]), torch.ones(1, 4, dtype=torch.bool)
        >>> dppo(p.log(), p_old.log(), adv_nt, mask_nt, delta_low=.15, delta_high=.15)
        tensor([[-5.0000,  0.0000,  0.0000,  0.7200]])

    Reference:
        "Rethinking the Trust Region in LLM RL" 2026 (arXiv 2602.04879), from three implementations; which delta the paper uses is
        not confirmed.
    """
    logp_nt, logp_old_nt, adv_nt = inside(mask_nt, logp_nt=logp_nt, logp_old_nt=logp_old_nt.detach(), adv_nt=adv_nt.detach())
    now_nt = logp_nt.detach()
    p_nt, p_old_nt, delta_nt = now_nt.exp(), logp_old_nt.exp(), torch.where(adv_nt > 0, delta_high, delta_low)
    away_nt = (p_nt - p_old_nt) * adv_nt.sign()
    if divergence == "tv":
        keep_nt = away_nt <= delta_nt
    elif divergence == "kl":
        others_nt = (1 - p_old_nt) * ((1 - p_old_nt + eps) / (1 - p_nt + eps)).log()
        keep_nt = (p_old_nt * (logp_old_nt - now_nt) + others_nt <= delta_nt) | (away_nt < 0)
    else:
        raise RecipeError(unknown("divergence", divergence, ("tv", "kl")))
    weight_nt = (now_nt - logp_old_nt).exp().clamp(max=cap)
    return torch.where(mask_nt & keep_nt, -adv_nt * (weight_nt * (logp_nt - now_nt).exp()), 0.0)
