"""DPPO: a trust region in probability instead of in ratio."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.errors import RecipeError, unknown
from spanwise.losses.tokens import keep, read, weighted


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
    logp_nt, logp_old_nt, adv_nt = read(logp_nt, logp_old_nt, adv_nt, mask_nt)
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
    return keep(-adv_nt * weighted(weight_nt, logp_nt), mask_nt & keep_nt)
