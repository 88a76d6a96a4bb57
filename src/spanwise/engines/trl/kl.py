"""The KL divergence from the reference policy, with one meaning whatever the `loss_type`."""

from __future__ import annotations

import torch
from jaxtyping import Float, Num
from torch import Tensor


def token_kl(
    logp_bt: Float[Tensor, "b t"],
    ref_bt: Float[Tensor, "b t"],
    mask_bt: Num[Tensor, "b t"],
    *,
    old_bt: Float[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b t"]:
    r"""Estimate the KL divergence of the policy from the reference at every sampled token: never negative, 0 where they agree.

    Equation
        d = ref - logp,  kl = exp(d) - d - 1, times exp(logp - old) where `old_bt` is given

    Args:
        logp_bt: log-probabilities under the policy.
        ref_bt: under the reference.
        mask_bt: 1 at the tokens that enter the loss; elsewhere nothing is read (0 times NaN is NaN) and the result is 0.
        old_bt: under the policy that sampled; TRL's `use_bias_correction_kl`.

    Example:
        >>> logp_bt, ref_bt = torch.tensor([[-1.0, -2.0, torch.nan]]), torch.tensor([[-1.0, -1.0, 0.0]])
        >>> token_kl(logp_bt, ref_bt, torch.tensor([[1, 1, 0]]))
        tensor([[0.0000, 0.7183, 0.0000]])

    Reference:
        Shao et al. 2024 (arXiv 2402.03300), equation 4; Schulman's k3.
    """
    behind_bt = torch.where(mask_bt.bool(), ref_bt - logp_bt, 0.0)
    kl_bt = behind_bt.exp() - behind_bt - 1
    return kl_bt if old_bt is None else kl_bt * torch.where(mask_bt.bool(), logp_bt - old_bt, 0.0).exp()


def kl_term(kl_bt: Float[Tensor, "b t"], mask_bt: Num[Tensor, "b t"]) -> Float[Tensor, ""]:
    r"""Average the divergence over the tokens of a completion, then over the completions.

    Equation
        (1/b) sum_i (1/n_i) sum_t kl[i, t],  n_i the tokens of completion i that enter the loss; without any it counts as 0

    Args:
        kl_bt: of every token; 0 where masked, as `token_kl` gives it.
        mask_bt: 1 at the tokens that enter the loss.

    Example:
        >>> kl_term(torch.tensor([[1.0, 3.0], [4.0, 0.0]]), torch.tensor([[1, 1], [1, 0]]))
        tensor(3.)

    Reference:
        Shao et al. 2024 (arXiv 2402.03300), equation 3.
    """
    return (kl_bt.sum(dim=1) / mask_bt.sum(dim=1).clamp(min=1)).mean()
