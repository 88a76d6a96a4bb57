"""PPO's clipped surrogate, with clip-higher and dual clip."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.errors import RecipeError
from spanwise.losses.tokens import clipped, keep, read


def ppo_clip(
    logp_nt: Float[Tensor, "n t"],
    logp_old_nt: Float[Tensor, "n t"],
    adv_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    max_log_ratio: float = 20.0,
) -> Float[Tensor, "n t"]:
    r"""The clipped surrogate of PPO.

    Equation
        rho = exp(logp - logp_old);  loss = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))
        dual clip, where A < 0: loss = min(loss, -A dual_clip)

    Args:
        logp_nt: log-probabilities under the policy that is trained.
        logp_old_nt: log-probabilities under the policy that sampled.
        adv_nt: advantages.
        mask_nt: the trainable tokens.
        clip_low, clip_high: how far below and above 1 the ratio may move and still be followed (clip-higher of DAPO: clip_high
            .28).
        dual_clip: bound on the ratio where A < 0, above 1 (verl 3.0); None: unbounded.
        max_log_ratio: |logp - logp_old| is cut here, so that the ratio stays finite.

    Edge cases:
        A masked token has loss 0 and gradient 0, whatever it holds (NaN).

    Example:
        >>> import torch
        >>> ratio = torch.tensor([[1.5, .5, 1.5, 4.]])
        >>> adv_nt, mask_nt = torch.tensor([[1., 1., -1., -1.]]), torch.ones(1, 4, dtype=torch.bool)
        >>> ppo_clip(ratio.log(), torch.zeros(1, 4), adv_nt, mask_nt, dual_clip=3.0)
        tensor([[-1.2000, -0.5000,  1.5000,  3.0000]])

    Reference:
        Schulman et al. 2017 (arXiv 1707.06347); dual clip: Ye et al. 2020 (arXiv 1912.09729).
    """
    if dual_clip is not None and dual_clip <= 1:
        raise RecipeError(f"dual_clip is {dual_clip:g}; it bounds a ratio from above and must be more than 1.")
    logp_nt, logp_old_nt, adv_nt = read(logp_nt, logp_old_nt, adv_nt, mask_nt)
    ratio_nt = (logp_nt - logp_old_nt).clamp(-max_log_ratio, max_log_ratio).exp()
    return keep(clipped(ratio_nt, adv_nt, clip_low, clip_high, dual_clip), mask_nt)
