"""VinePPO and SPO-chain: the value at the start of each span, measured by running on from there."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.strata import check_rewards, check_shapes, first_of
from spanwise.errors import AlignmentError, RecipeError
from spanwise.registry import register


@register("vineppo", kind="token", paper="VinePPO, arXiv 2410.01679", source="the authors' code")
def vineppo(
    value_nk: Float[Tensor, "n k"], reward_n: Float[Tensor, " n"], block_nt: Int[Tensor, "n t"]
) -> Float[Tensor, "n t"]:
    r"""A function to call from Python: credit each span with the change of the reward that is expected at its two ends.

    No trainer here samples again from the start of every span, which measures it.

    Equation
        A[i, k] = V[i, k+1] - V[i, k] over the spans k that i has; V after the last one is the reward
        A[i, t] = A[i, k] at every token of span k, so that the spans of a completion add up to r[i] - V[i, first]

    Args:
        value_nk: mean reward of the completions sampled from the start of each span; NaN where none was. Not read where the
            completion lacks the span.
        reward_n: the reward at the end; NaN where absent (the completion gets 0).
        block_nt: the span of each trainable token, -1 elsewhere; spans lie in order.

    Returns:
        (N, T) in the dtype of values and rewards; exactly 0 at tokens of no span.

    Edge cases:
        A span without a value takes the value at its end, and so gets exactly 0.

    Example:
        >>> value_nk = torch.tensor([[.5, .25, .75]])
        >>> vineppo(value_nk, torch.tensor([1.]), torch.tensor([[0, 0, 1, -1, 2]]))
        tensor([[-0.2500, -0.2500,  0.5000,  0.0000,  0.2500]])

    Reference:
        Kazemnejad et al. 2024, "VinePPO" (arXiv 2410.01679). Its code takes a span from which nothing was sampled to be worth 0.
    """
    check_shapes(value_nk=value_nk, reward_n=reward_n, block_nt=block_nt)
    k = value_nk.shape[1]
    if place := first_of((block_nt >= k) | (block_nt < -1)):
        i, t = place
        raise AlignmentError(
            f"Token {t} of completion {i} belongs to span {int(block_nt[i, t])}, but there are {k} spans, 0 to {k - 1} "
            f"(-1: none)."
        )
    so_far_nt = block_nt.long().cummax(dim=1).values if block_nt.numel() else block_nt
    if place := first_of((block_nt >= 0) & (block_nt < so_far_nt)):
        i, t = place
        raise AlignmentError(
            f"The spans of completion {i} are not in order: token {t} belongs to span {int(block_nt[i, t])} and stands behind a "
            f"token of span {int(so_far_nt[i, t])}. Number spans in the order of their tokens."
        )
    check_rewards(reward_n)
    absent_n = reward_n.isnan()
    after_n = torch.where(absent_n, 0.0, reward_n.to(torch.promote_types(value_nk.dtype, reward_n.dtype)))
    # Column 0 serves the tokens of no span (block -1).
    advantage_nk = after_n.new_zeros(len(value_nk), k + 1)
    for j in reversed(range(k)):
        known_n = (block_nt == j).any(dim=1) & ~value_nk[:, j].isnan() & ~absent_n
        advantage_nk[:, j + 1] = torch.where(known_n, after_n - value_nk[:, j], 0.0)
        after_n = torch.where(known_n, value_nk[:, j].to(after_n), after_n)
    return advantage_nk.gather(1, block_nt.clamp(min=-1).long() + 1)


@register(
    "spo_chain",
    kind="token",
    paper="Segment Policy Optimization, arXiv 2505.23564",
    source="the paper and the authors' code",
)
def spo_chain(
    value_nk: Float[Tensor, "n k"],
    reward_n: Float[Tensor, " n"],
    block_nt: Int[Tensor, "n t"],
    *,
    logp_nt: Float[Tensor, "n t"] | None = None,
    threshold: float = 0.9,
) -> Float[Tensor, "n t"]:
    r"""A function to call from Python: credit uncertain tokens with the change of the measured value over their segment.

    No trainer here samples again from the start of every segment, which measures it.

    Equation
        A[i, t] = (V[i, k+1] - V[i, k]) * 1{p[i, t] < threshold} for t in segment k; V after the last one is the reward

    Args:
        value_nk, reward_n, block_nt: as for `vineppo`; the segments end every few cut points (tokens with p < threshold).
        logp_nt: log-probability of each sampled token under the policy that sampled it; None: all tokens of a segment share.
        threshold: tokens at least this probable get 0 (`logp_nt` given).

    Returns:
        (N, T) in the dtype of values and rewards; exactly 0 at tokens of no segment and at masked-out probable ones.

    Edge cases:
        A segment without a value (NaN) gets exactly 0; so does a completion with no cut point, whose one segment has none.

    Example:
        >>> logp_nt = torch.tensor([[.5, .95, .3, .99]]).log()
        >>> spo_chain(torch.tensor([[.5, .25]]), torch.tensor([1.]), torch.tensor([[0, 0, 1, 1]]), logp_nt=logp_nt)
        tensor([[-0.2500,  0.0000,  0.7500,  0.0000]])

    Reference:
        Guo et al. 2025, "Segment Policy Optimization" (arXiv 2505.23564); not Single-stream Policy Optimization. There the loss
        is divided by the number of tokens with p < threshold.
    """
    advantage_nt = vineppo(value_nk, reward_n, block_nt)
    if logp_nt is None:
        return advantage_nt
    check_shapes(block_nt=block_nt, logp_nt=logp_nt)
    if threshold <= 0:
        raise RecipeError(f"threshold is {threshold:g}; it is a probability above 0, leave logp_nt out to keep every token.")
    return torch.where(logp_nt < math.log(threshold), advantage_nt, 0.0)
