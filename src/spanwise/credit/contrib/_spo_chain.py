"""SPO-chain: Monte Carlo values at cut points, and no credit for tokens that were all but certain."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.contrib._vineppo import vineppo
from spanwise.errors import AlignmentError, RecipeError
from spanwise.registry import register


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
    if logp_nt.shape != block_nt.shape:
        raise AlignmentError(f"block_nt is {tuple(block_nt.shape)} but logp_nt is {tuple(logp_nt.shape)}.")
    if threshold <= 0:
        raise RecipeError(f"threshold is {threshold:g}; it is a probability above 0, leave logp_nt out to keep every token.")
    return torch.where(logp_nt < math.log(threshold), advantage_nt, 0.0)
