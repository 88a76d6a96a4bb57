"""CISPO: clipped importance weights on an unclipped gradient."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.losses.tokens import keep, read, weighted


def cispo(
    logp_nt: Float[Tensor, "n t"],
    logp_old_nt: Float[Tensor, "n t"],
    adv_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Float[Tensor, "n t"]:
    r"""Clip the importance weight, not the gradient: every token keeps learning.

    Equation
        w = sg(clip(rho, 1 - clip_low, 1 + clip_high));  loss = -w A pi / sg(pi), whose gradient is -w A grad log pi

    Args:
        logp_nt, logp_old_nt, adv_nt, mask_nt: as for `ppo_clip`.
        clip_low, clip_high: the weight lies between 1 - clip_low and 1 + clip_high (verl's clip_ratio_low and clip_ratio_high;
            TRL's epsilon_high is the upper bound itself, 1 + `clip_high`). A clip_low of 1 or more bounds nothing.

    Example:
        >>> import torch
        >>> ratio = torch.tensor([[1.5, 8.]])
        >>> cispo(ratio.log(), torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))
        tensor([[-1.5000, -5.0000]])

    Reference:
        MiniMax 2025, "MiniMax-M1" (arXiv 2506.13585). There the loss is -w A log pi: another value, the same gradient.
    """
    logp_nt, logp_old_nt, adv_nt = read(logp_nt, logp_old_nt, adv_nt, mask_nt)
    weight_nt = (logp_nt - logp_old_nt).detach().exp().clamp(1 - clip_low, 1 + clip_high)
    return keep(-adv_nt * weighted(weight_nt, logp_nt), mask_nt)
