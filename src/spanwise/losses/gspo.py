"""GSPO: one ratio per completion."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.losses.tokens import clipped, keep, read


def gspo(
    logp_nt: Float[Tensor, "n t"],
    logp_old_nt: Float[Tensor, "n t"],
    adv_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    max_log_ratio: float = 10.0,
) -> Float[Tensor, "n t"]:
    r"""PPO's clipped surrogate with one ratio per completion, the geometric mean of its tokens'.

    Equation
        s[i] = exp(mean_t (logp - logp_old)[i, t]);  s[i, t] = sg(s[i]) pi / sg(pi)
        loss = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))

    Args:
        logp_nt, logp_old_nt, adv_nt, mask_nt: as for `ppo_clip`; advantages may differ between tokens.
        clip_low, clip_high: the ratio of a whole completion moves little, so these are small.
        max_log_ratio: the log ratio is cut here from above (verl).

    Edge cases:
        With one advantage per completion and `sequence-mean-token-mean`, value and gradient are those of the sequence surrogate.

    Example:
        >>> import torch
        >>> logp_nt, old_nt = torch.tensor([[-1., -2.]]), torch.tensor([[-1., -2.2]])
        >>> gspo(logp_nt, old_nt, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), clip_high=1.0)
        tensor([[-1.1052, -1.1052]])

    Reference:
        Zheng et al. 2025, "GSPO" (arXiv 2507.18071), the token form GSPO-token.
    """
    logp_nt, logp_old_nt, adv_nt = read(logp_nt, logp_old_nt, adv_nt, mask_nt)
    length_n1 = mask_nt.sum(dim=1, keepdim=True).clamp(min=1)
    mean_n1 = (logp_nt - logp_old_nt).detach().sum(dim=1, keepdim=True) / length_n1
    ratio_nt = (mean_n1 + logp_nt - logp_nt.detach()).clamp(max=max_log_ratio).exp()
    return keep(clipped(ratio_nt, adv_nt, clip_low, clip_high, None), mask_nt)
