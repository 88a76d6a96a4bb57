"""ASPO: inverted importance weights for good tokens."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.losses.tokens import keep, read, weighted


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
    logp_nt, logp_old_nt, adv_nt = read(logp_nt, logp_old_nt, adv_nt, mask_nt)
    drift_nt = (logp_nt - logp_old_nt).clamp(-20.0, 20.0)
    ratio_nt = drift_nt.detach().exp()
    drop_nt = torch.where(adv_nt > 0, ratio_nt > 1 + clip_high, ratio_nt < 1 - clip_low)
    good_nt = weighted((-drift_nt.detach()).exp().clamp(max=cap), logp_nt)
    weight_nt = torch.where(adv_nt > 0, good_nt, drift_nt.exp().clamp(max=cap))
    return keep(-adv_nt * weight_nt, mask_nt & ~drop_nt)
