"""The terms of the loss: a factor that turns TRL's reduction into the mean over completions of a sum over tokens, DPPO and KL.

Every surrogate that TRL offers depends on the advantage as A f(sign A, ratio). A positive factor on A is therefore a factor on
the token's loss, and the normaliser of each `loss_type` can be undone in the advantage, without a copy of TRL's loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from spanwise.losses import dppo

#: The values of `loss_type` that are DPPO, which TRL lacks, as verl calls them -> its divergence. The trainer adds it to a loss of
#: TRL's whose policy term is 0.
DPPO: Mapping[str, Any] = {"dppo_tv": "tv", "dppo_kl": "kl"}
#: The values of `loss_type` that can be trained: TRL's, whose normaliser is undone exactly, and DPPO.
LOSS_TYPES: tuple[str, ...] = ("bnpo", "cispo", "dapo", "dppo_kl", "dppo_tv", "dr_grpo", "grpo", "luspo", "sapo")


def loss_mask(inputs: Mapping[str, Any]) -> Int[Tensor, "n t"]:
    """1 at the tokens that enter TRL's loss: its completion mask, times its tool mask if there are tools."""
    tool_mask = inputs.get("tool_mask")
    return inputs["completion_mask"] if tool_mask is None else inputs["completion_mask"] * tool_mask


def fold_factor(
    mask_bt: Num[Tensor, "b t"] | Bool[Tensor, "b t"],
    *,
    loss_type: str,
    max_completion_length: int,
    num_items: Float[Tensor, ""] | Int[Tensor, ""] | float,
    processes: int = 1,
    steps_per_generation: int = 1,
) -> Float[Tensor, "b 1"]:
    """What to multiply the advantages of a micro-batch with, so that TRL's loss is a mean over rows of a sum over tokens.

    With n_i the trainable tokens of row i, b the rows of the micro-batch and N the trainable tokens of the generation batch
    (all ranks), TRL divides token losses by b n_i (`grpo`, `sapo`), sum of n_i (`bnpo`), b max_completion_length (`dr_grpo`),
    N / processes / steps_per_generation (`dapo`, `cispo`) or b (`luspo`). The factor is that divisor over b. DPPO is ours and is
    divided by b.

    Example:
        >>> mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
        >>> fold_factor(mask, loss_type="grpo", max_completion_length=8, num_items=4.0).flatten().tolist()
        [3.0, 1.0]
        >>> fold_factor(mask, loss_type="bnpo", max_completion_length=8, num_items=4.0).flatten().tolist()
        [2.0, 2.0]
        >>> fold_factor(mask, loss_type="dr_grpo", max_completion_length=8, num_items=4.0).flatten().tolist()
        [8.0, 8.0]
    """
    rows = mask_bt.shape[0]
    tokens_b1 = mask_bt.sum(dim=1, keepdim=True).clamp(min=1).to(torch.float32)
    ones_b1 = torch.ones_like(tokens_b1)
    if loss_type in ("grpo", "sapo"):
        return tokens_b1
    if loss_type == "bnpo":
        return ones_b1 * mask_bt.sum().clamp(min=1) / rows
    if loss_type == "dr_grpo":
        return ones_b1 * max_completion_length
    if loss_type in ("dapo", "cispo"):
        return ones_b1 * torch.as_tensor(num_items).clamp(min=1) / (processes * steps_per_generation * rows)
    return ones_b1


def dppo_term(
    logps_bt: Float[Tensor, "b t"],
    inputs: Mapping[str, Any],
    mask_bt: Num[Tensor, "b t"],
    *,
    loss_type: str,
    deltas: tuple[float, float],
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The mean over the rows of a micro-batch of the sum over tokens of `dppo`, and the share of tokens that it leaves out."""
    sampled_bt = inputs.get("sampling_per_token_logps")
    sampled_bt = inputs.get("old_per_token_logps") if sampled_bt is None else sampled_bt
    sampled_bt = logps_bt.detach() if sampled_bt is None else sampled_bt
    there_bt, advantages_bt = mask_bt.bool(), inputs["advantages"]
    loss_bt = dppo(
        logps_bt,
        sampled_bt,
        advantages_bt,
        there_bt,
        delta_low=deltas[0],
        delta_high=deltas[1],
        divergence=DPPO[loss_type],
    )
    dropped_bt = there_bt & (advantages_bt != 0) & (loss_bt == 0)
    return loss_bt.sum() / len(loss_bt), dropped_bt.sum() / there_bt.sum().clamp(min=1)


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

    Example:
        >>> kl_term(torch.tensor([[1.0, 3.0], [4.0, 0.0]]), torch.tensor([[1, 1], [1, 0]]))
        tensor(3.)

    Reference:
        Shao et al. 2024 (arXiv 2402.03300), equation 3.
    """
    return (kl_bt.sum(dim=1) / mask_bt.sum(dim=1).clamp(min=1)).mean()
