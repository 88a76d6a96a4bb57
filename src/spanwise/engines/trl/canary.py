"""The canary: does TRL still weigh the gradient of every token with that token's own advantage?

Nothing inside TRL uses (B, T) advantages any more, so a release could collapse them to one number per completion and training
would go on with wrong credit. The mixed derivative of the loss, by the log-probability of a token and by the advantage of a
token, shows it on the first micro-batch, whatever else is in the loss (KL, entropy bonus, auxiliary loss), and costs no
forward pass: it never reaches the model.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from spanwise.errors import SpanwiseError


def probe_like(values_bt: Float[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """Fixed weights in [1, 2) that differ from token to token, so that no average over tokens passes for the token itself.

    Example:
        >>> probe_like(torch.zeros(1, 3))
        tensor([[1.0000, 1.6180, 1.2361]])
    """
    index_t = torch.arange(values_bt.shape[1], device=values_bt.device, dtype=torch.float64)
    return (1 + (index_t * 0.6180339887) % 1).to(values_bt.dtype).expand_as(values_bt)


def surrogate_slope(
    ratio_bt: Float[Tensor, "b t"],
    advantages_bt: Float[Tensor, "b t"],
    *,
    loss_type: str,
    clip: tuple[float, float],
    delta: float | None = None,
    sapo_temperatures: tuple[float, float] = (1.0, 1.05),
) -> Float[Tensor, "b t"]:
    r"""How fast a token's surrogate grows with its log-probability, per unit of its advantage; NaN where the clip may be active.

    Equation
        clipped losses   rho inside the clip range
        cispo            min(rho, clip high)
        sapo             4 s (1 - s) rho,  s = sigmoid(tau (rho - 1)),  tau by the sign of the advantage

    Example:
        >>> ratio, advantages = torch.tensor([[1.0, 1.1, 1.5]]), torch.ones(1, 3)
        >>> surrogate_slope(ratio, advantages, loss_type="dr_grpo", clip=(0.2, 0.2))
        tensor([[1.0000, 1.1000,    nan]])
        >>> surrogate_slope(ratio, advantages, loss_type="cispo", clip=(0.2, 1.2))
        tensor([[1.0000, 1.1000, 1.2000]])
    """
    low, high = clip
    if loss_type == "cispo":
        return ratio_bt.clamp(max=high)
    if loss_type == "sapo":
        positive, negative = sapo_temperatures
        temperature_bt = torch.where(advantages_bt > 0, positive, negative)
        gate_bt = torch.sigmoid(temperature_bt * (ratio_bt - 1))
        return 4 * gate_bt * (1 - gate_bt) * ratio_bt
    inside_bt = (ratio_bt > 1 - low) & (ratio_bt < min(1 + high, float("inf") if delta is None else delta))
    return torch.where(inside_bt, ratio_bt, torch.nan)


def check_own_advantage(
    loss: Float[Tensor, ""],
    logps_bt: Float[Tensor, "b t"],
    advantages_bt: Float[Tensor, "b t"],
    mask_bt: Num[Tensor, "b t"] | Bool[Tensor, "b t"],
    *,
    factor_b1: Float[Tensor, "b 1"],
    accumulation: int,
    height_bt: Float[Tensor, "b t"] | None = None,
) -> None:
    r"""Raise unless the gradient of each trainable token is weighted with its own advantage, and with no other.

    Equation
        d/dA_t of sum_s probe_s dL/dlogp_s  =  -height_t probe_t mask_t / (b accumulation factor)

    for every loss that is a mean over b rows of a sum over tokens after the fold factor; height is `surrogate_slope`, NaN where
    nothing is looked at, None: 1. The loss stays usable for backward.

    Example:
        >>> logps, mask = torch.zeros(1, 2, requires_grad=True), torch.ones(1, 2)
        >>> advantages = torch.tensor([[2.0, -1.0]], requires_grad=True)
        >>> one = torch.ones(1, 1)
        >>> check_own_advantage(-(advantages * logps.exp()).sum(), logps, advantages, mask, factor_b1=one, accumulation=1)
        >>> collapsed = advantages.mean(dim=1, keepdim=True)
        >>> check_own_advantage(-(collapsed * logps.exp()).sum(), logps, advantages, mask, factor_b1=one, accumulation=1)
        Traceback (most recent call last):
        spanwise.errors.SpanwiseError: The gradient of token 0 of completion 0 ... weighs 1.309 and must weigh 1...
    """
    probe_bt = probe_like(advantages_bt)
    (by_logp_bt,) = torch.autograd.grad(loss, logps_bt, create_graph=True, allow_unused=True)
    found_bt = None
    if by_logp_bt is not None and by_logp_bt.requires_grad:
        weighed = (by_logp_bt * probe_bt).sum()
        (found_bt,) = torch.autograd.grad(weighed, advantages_bt, retain_graph=True, allow_unused=True)
    if found_bt is None:
        raise SpanwiseError(f"The loss does not depend on the advantage of any token. {_ADVICE}")
    rows = advantages_bt.shape[0]
    weight_bt = -found_bt * factor_b1 * rows * accumulation
    right_bt = probe_bt * mask_bt
    if height_bt is not None:
        right_bt = torch.where(mask_bt.bool(), right_bt * height_bt, 0.0)
    # Loose enough for log-probabilities in bfloat16; the probe differs by more between most tokens. NaN compares as fine.
    wrong_bt = (weight_bt - right_bt).abs() > 0.05
    if bool(wrong_bt.any()):
        row, token = (int(i) for i in wrong_bt.nonzero()[0])
        raise SpanwiseError(
            f"The gradient of token {token} of completion {row} is not weighted with its own advantage: on a probe it weighs "
            f"{float(weight_bt[row, token]):.4g} and must weigh {float(right_bt[row, token]):.4g}. {_ADVICE}"
        )


_ADVICE = (
    "Spans would not get their own credit. Use a TRL version that this release of spanwise lists, look at subclasses that "
    "override _compute_loss, or set canary=False in SpanGRPOConfig if you know better."
)
