"""What the losses share: reading without the masked tokens, the clipped surrogate, a weighted log-likelihood."""

from __future__ import annotations

import torch
from torch import Tensor

from spanwise.credit.strata import check_mask
from spanwise.errors import AlignmentError


def read(logp_nt: Tensor, logp_old_nt: Tensor, adv_nt: Tensor, mask_nt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three inputs of a policy loss, as `inside` gives them; gradients flow through the first only."""
    logp_nt, logp_old_nt, adv_nt = inside(mask_nt, logp_nt=logp_nt, logp_old_nt=logp_old_nt.detach(), adv_nt=adv_nt.detach())
    return logp_nt, logp_old_nt, adv_nt


def inside(mask_nt: Tensor, **inputs: Tensor) -> list[Tensor]:
    """The inputs with 0 at masked tokens, so that neither values nor gradients there can be NaN."""
    for name, value in inputs.items():
        if value.shape != mask_nt.shape:
            raise AlignmentError(f"mask_nt is {tuple(mask_nt.shape)} but {name} is {tuple(value.shape)}.")
    check_mask(mask_nt)
    return [torch.where(mask_nt, value, 0.0) for value in inputs.values()]


def keep(loss_nt: Tensor, mask_nt: Tensor) -> Tensor:
    """The loss inside the mask, exactly 0 (and without gradient) elsewhere."""
    return torch.where(mask_nt, loss_nt, 0.0)


def weighted(weight_nt: Tensor, logp_nt: Tensor) -> Tensor:
    """Has the value `weight_nt` and the gradient `weight_nt` times that of `logp_nt`."""
    return weight_nt * (logp_nt - logp_nt.detach()).exp()
