"""What an advantage is multiplied by so that SkyRL's loss reduction, which divides it, gives the mean over rollouts of sums."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor


def fold_factor(
    loss_mask_nt: Shaped[Tensor, "n t"],
    rollout_n: Int[Tensor, " n"],
    *,
    loss_reduction: str,
    mini_batches: Sequence[tuple[int, int]],
    prompts: Sequence[tuple[int, int]],
    max_seq_len: int | None = None,
) -> Float[Tensor, "n 1"]:
    r"""Undo the divisor of a loss reduction, and divide by the rollouts of the mini-batch instead.

    Equation
        factor[i] = D[i] / R,   R the rollouts of i's mini-batch of B rows and P prompts, L[i] its trained tokens
        D[i] = sum of L (token_mean), B L[i] (sequence_mean), B max_seq_len (seq_mean_token_sum_norm),
               P times the sum of L over i's prompt (prompt_mean)

    Edge cases:
        Where a divisor has no token SkyRL divides by 1, and so does this. Rows of no mini-batch get 1.

    Example:
        Three rows of two rollouts, one mini-batch: a mean over 4 tokens becomes a mean over 2 rollouts.

        >>> mask_nt, rollout_n = torch.tensor([[1, 1], [0, 1], [0, 1]]), torch.tensor([0, 0, 1])
        >>> fold_factor(mask_nt, rollout_n, loss_reduction="token_mean", mini_batches=[(0, 3)], prompts=[(0, 3)]).flatten()
        tensor([2., 2., 2.])
        >>> fold_factor(mask_nt, rollout_n, loss_reduction="sequence_mean", mini_batches=[(0, 3)], prompts=[(0, 3)]).flatten()
        tensor([3.0000, 1.5000, 1.5000])
    """
    length_n = loss_mask_nt.sum(dim=1).float()
    factor_n = torch.ones_like(length_n)
    for start, end in mini_batches:
        rows, size = slice(start, end), end - start
        inside = [(a, b) for a, b in prompts if start <= a < end]
        if loss_reduction == "token_mean":
            factor_n[rows] = length_n[rows].sum().clamp(min=1)
        elif loss_reduction == "sequence_mean":
            factor_n[rows] = size * length_n[rows].clamp(min=1)
        elif loss_reduction == "prompt_mean":
            for a, b in inside:
                factor_n[a:b] = len(inside) * length_n[a:b].sum().clamp(min=1)
        else:
            factor_n[rows] = float(size * (max_seq_len or 1))
        factor_n[rows] /= len(rollout_n[rows].unique())
    return factor_n[:, None]
