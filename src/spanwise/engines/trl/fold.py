"""The factor that turns TRL's reduction of a loss into the mean over completions of a sum over tokens.

Every surrogate that TRL offers depends on the advantage as A f(sign A, ratio). A positive factor on A is therefore a factor on
the token's loss, and the normaliser of each `loss_type` can be undone in the advantage, without a copy of TRL's loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from spanwise.errors import RecipeError, unknown

#: The values of `loss_type` that can be trained: TRL's, whose normaliser is undone exactly, and DPPO (`engines.trl.dppo`).
LOSS_TYPES: tuple[str, ...] = ("bnpo", "cispo", "dapo", "dppo_kl", "dppo_tv", "dr_grpo", "grpo", "luspo", "sapo")


def check_loss_type(loss_type: str) -> None:
    """Refuse a `loss_type` whose reduction cannot be undone exactly.

    Args:
        loss_type: the value of the TRL config.

    Raises:
        RecipeError: TRL does not know it, or (vespo) its weight of a token is not linear in the advantage of that token.

    Example:
        >>> check_loss_type("dr_grpo")
        >>> check_loss_type("vespo")
        Traceback (most recent call last):
        spanwise.errors.RecipeError: loss_type 'vespo' weighs a whole completion ... Use loss_type='dr_grpo'.
    """
    if loss_type == "vespo":
        raise RecipeError(
            "loss_type 'vespo' weighs a whole completion by the sign of its one advantage, which has no meaning when every "
            "span has its own. Use loss_type='dr_grpo'."
        )
    if loss_type not in LOSS_TYPES:
        raise RecipeError(unknown("loss_type", loss_type, LOSS_TYPES))


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

    Args:
        mask_bt: 1 at the tokens that enter the loss (completion mask times tool mask), any number or bool dtype.
        loss_type: one of `LOSS_TYPES`.
        max_completion_length: as in the config; read by `dr_grpo`.
        num_items: N, `num_items_in_batch` of TRL; read by `dapo` and `cispo`.
        processes: number of ranks.
        steps_per_generation: micro-batches that one generation batch is split into; 1 in evaluation.

    Returns:
        (b, 1) float32, positive; a row without tokens counts as one token, as in TRL.

    Raises:
        RecipeError: the loss_type is not one of `LOSS_TYPES`.

    Example:
        >>> mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
        >>> fold_factor(mask, loss_type="grpo", max_completion_length=8, num_items=4.0).flatten().tolist()
        [3.0, 1.0]
        >>> fold_factor(mask, loss_type="bnpo", max_completion_length=8, num_items=4.0).flatten().tolist()
        [2.0, 2.0]
        >>> fold_factor(mask, loss_type="dr_grpo", max_completion_length=8, num_items=4.0).flatten().tolist()
        [8.0, 8.0]
    """
    check_loss_type(loss_type)
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
