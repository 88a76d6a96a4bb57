"""The factor that turns verl's reduction of a loss into the mean over rollouts of a sum over tokens.

Every token-level loss of verl depends on the advantage as A f(sign A, ratio), so a positive factor on A is a factor on the token's
loss, and what `actor.loss_agg_mode` divides by can be undone in the advantage, without a copy of verl's loss.
"""

from __future__ import annotations

from jaxtyping import Float, Shaped
from torch import Tensor

from spanwise.errors import RecipeError

#: The values of `actor.loss_agg_mode` that can be undone.
MODES = ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-mean", "token-sum")
#: What to write instead of one that cannot.
USE = f"Use actor_rollout_ref.actor.loss_agg_mode={MODES[0]}."


def loss_factor(
    mask_nt: Shaped[Tensor, "n t"],
    *,
    mode: str,
    rollouts: int,
    mini_batch: int,
    tokens: int,
    horizon: int | float | None = None,
) -> Float[Tensor, "n 1"]:
    r"""What to multiply advantages with, so that verl's loss is the mean over rollouts of the sum over tokens.

    Equation
        seq-mean-token-sum       rows / rollouts
        seq-mean-token-mean      rows / rollouts * |row|
        seq-mean-token-sum-norm  rows / rollouts * horizon
        token-sum                rows / rollouts / mini_batch
        token-mean               tokens / rollouts, where the batch is one mini-batch

    verl divides by a fixed number of rows (`ppo_mini_batch_size` times `rollout.n`), whatever these are; rows / rollouts counts
    padding and the several rows of one rollout out again, on average over the mini-batches.

    Example:
        >>> import torch
        >>> mask_nt = torch.tensor([[1, 1, 1], [1, 0, 0]])
        >>> loss_factor(mask_nt, mode="seq-mean-token-mean", rollouts=2, mini_batch=2, tokens=4).flatten().tolist()
        [3.0, 1.0]
        >>> loss_factor(mask_nt, mode="token-mean", rollouts=2, mini_batch=2, tokens=4).flatten().tolist()
        [2.0, 2.0]
    """
    length_n1, rows = mask_nt.sum(dim=1, keepdim=True).float(), len(mask_nt)
    if mode == "token-mean" and rows > mini_batch:
        raise RecipeError(
            f"loss_agg_mode 'token-mean' divides each mini-batch by its own tokens, and this batch of {rows} rows makes "
            f"mini-batches of {mini_batch}, so the same credit would weigh differently in each. {USE}"
        )
    same_n1 = length_n1.new_full(length_n1.shape, rows / max(rollouts, 1))
    if mode == "token-sum":
        return same_n1 / mini_batch
    if mode == "token-mean":
        return same_n1 / rows * tokens
    return same_n1 * {"seq-mean-token-mean": length_n1, "seq-mean-token-sum-norm": float(horizon or 1)}.get(mode, 1.0)
