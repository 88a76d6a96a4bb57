"""The backward recursion of every temporal estimator: it skips masked tokens and never reads their values.

Fast because it works on blocks of tokens that stay in the cache, laid out time first, with one in-place operation per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit.spread import fresh
from spanwise.credit.strata import check_mask, check_rewards, check_shapes, first_of
from spanwise.errors import RecipeError, RewardError, check_known

_ROWS = 1024
_BLOCK = 1 << 18  # the number of elements in a block: one megabyte of float32


@torch.no_grad()
def lambda_advantage(
    reward_nt: Float[Tensor, "n t"],
    value_nt: Float[Tensor, "n t"] | None,
    mask_nt: Bool[Tensor, "n t"],
    *,
    gamma: float,
    lam: float | Float[Tensor, " n"],
    alpha: float | None = None,
    boundary_nt: Bool[Tensor, "n t"] | None = None,
    bootstrap_n: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, "n t"]:
    """Run the backward recursion of GAE (every token is a boundary) and SAE (some tokens are); masked tokens get 0.

    A[k] = r[k] - V[k] + gamma (V[k+1] + lam[k+1] A[k+1]) over the trainable tokens k, lam[k] = lam at a boundary, else 1
    """
    check_shapes(reward_nt=reward_nt, value_nt=value_nt, mask_nt=mask_nt, boundary_nt=boundary_nt)
    check_mask(mask_nt)
    lam = lam if alpha is None else length_adaptive_lambda(mask_nt.sum(dim=1), alpha=alpha)
    for name, number in (("gamma", gamma), ("lam", lam)):
        number = torch.as_tensor(number, dtype=torch.float64)
        bad_values = number[~((number >= 0) & (number <= 1))]  # this refuses NaN, too
        if len(bad_values):
            raise RecipeError(f"{name} is {float(bad_values[0]):g}; it must lie between 0 and 1.")
    dtype = reward_nt.dtype if value_nt is None else torch.promote_types(reward_nt.dtype, value_nt.dtype)
    advantage_nt = fresh(reward_nt.shape, dtype=dtype, device=reward_nt.device)
    exact = torch.promote_types(dtype, torch.float32)
    check_rewards(reward_nt)
    absent_n = torch.zeros(len(reward_nt), dtype=torch.bool, device=reward_nt.device)
    if not bool(reward_nt.sum().isfinite()):  # a finite sum proves quickly that no reward is absent
        absent_n |= (reward_nt.isnan() & mask_nt).any(dim=1)
        reward_nt = torch.where(reward_nt.isnan(), 0.0, reward_nt)
    # The loop carries Q backwards: Q[k] = gamma (V[k] + lam[k] A[k]), so that A[k] = r[k] - V[k] + Q[k+1] and
    # Q[k] = gamma ((1 - lam[k]) V[k] + lam[k] r[k]) + gamma lam[k] Q[k+1]. At a masked token Q[t] = r[t] + Q[t+1].
    ahead_n = torch.zeros(len(reward_nt), dtype=exact, device=reward_nt.device)
    if bootstrap_n is not None:
        absent_n |= bootstrap_n.isnan()
        ahead_n.copy_(bootstrap_n.nan_to_num(nan=0.0)).mul_(gamma)
    cut_n = gamma * (1 - torch.as_tensor(lam, dtype=exact, device=reward_nt.device).expand(len(reward_nt)))
    for rows, cols in _blocks(*reward_nt.shape):
        mask, reward = mask_nt[rows, cols], reward_nt[rows, cols].to(exact)
        live = mask.to(exact)
        share = (live if boundary_nt is None else (mask & boundary_nt[rows, cols]).to(exact)) * cut_n[rows, None]
        factor = (live * (gamma - 1)).sub_(share).add_(1.0)
        term = factor * reward
        value = None if value_nt is None else torch.where(mask, value_nt[rows, cols].to(exact), term.new_zeros(()))
        if value is not None:
            term.addcmul_(share, value)
        _carry(term, factor, ahead_n[rows]).add_(reward)
        if value is not None:
            term.sub_(value)
        torch.add(term.mul_(live), 0.0, out=advantage_nt[rows, cols])  # adding 0 turns -0 into 0
    _check_values(advantage_nt, value_nt, mask_nt)
    return advantage_nt.masked_fill_(absent_n[:, None], 0.0) if bool(absent_n.any()) else advantage_nt


def _blocks(n: int, t: int) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of completions and tokens that fit the cache, the last tokens first."""
    height = max(1, min(n, _ROWS))
    width = max(_BLOCK // height, 32)
    for first in range(0, n, height):
        for last in range(t, 0, -width):
            yield slice(first, first + height), slice(max(0, last - width), last)


def _carry(term: Tensor, factor: Tensor, ahead_n: Tensor) -> Tensor:
    """Compute Q[t] = term[t] + factor[t] Q[t+1] inside a block, in place; `ahead_n` gets the first Q."""
    carried_bn, factors = torch.cat([term.t(), ahead_n[None]]), factor.t().contiguous().unbind(0)
    carried = carried_bn.unbind(0)
    for t in reversed(range(len(factors))):
        carried[t].addcmul_(factors[t], carried[t + 1])
    ahead_n.copy_(carried[0])
    return term.copy_(carried_bn[1:].t())


def length_adaptive_lambda(length_n: Int[Tensor, " n"], *, alpha: float = 0.05) -> Float[Tensor, " n"]:
    r"""Return the lambda whose memory is a fixed share of the completion.

    Equation
        lam[i] = max(0, 1 - 1 / (alpha length[i]))

    Args:
        length_n: trainable tokens of each completion.
        alpha: the share (VAPO .05, BPCO .4); the completion's first token weighs about e^(-1/alpha) at its last one.

    Raises:
        RecipeError: alpha is not a positive number.

    Example:
        >>> length_adaptive_lambda(torch.tensor([0, 20, 100, 1000]))
        tensor([0.0000, 0.0000, 0.8000, 0.9800], dtype=torch.float64)

    Reference:
        Yue et al. 2025, "VAPO" (arXiv 2504.05118). The default of alpha and the clamp at 0 are not confirmed by its text.
    """
    if isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise RecipeError(f"length_adaptive_alpha is {alpha!r}; it must be a positive number, such as 0.05 (VAPO).")
    return (1 - 1 / (alpha * length_n.clamp(min=1).double())).clamp(min=0.0)


def bootstrap_values(
    truncated_n: Bool[Tensor, " n"],
    *,
    truncated: Literal["terminal", "bootstrap", "mask"] = "terminal",
    value_end_n: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, " n"]:
    """Return the value after the last token of each completion, for `bootstrap_n` of `gae` and `sae`.

    Args:
        truncated_n: the completions that ran out of tokens.
        truncated: what they are taken for: an end like any other (0), a state worth the critic's value (`value_end_n`), or
            something to learn nothing from (NaN).
        value_end_n: the critic's value after the last token; read where truncated and for "bootstrap" only.

    Example:
        >>> bootstrap_values(torch.tensor([True, False]), truncated="bootstrap", value_end_n=torch.tensor([.7, 9.]))
        tensor([0.7000, 0.0000])
    """
    if truncated == "bootstrap":
        if value_end_n is None:
            raise RecipeError("truncated='bootstrap' needs value_end_n, the value after the last token of each completion.")
        return torch.where(truncated_n, value_end_n, 0.0)
    check_known("way to take truncation", truncated, ("terminal", "bootstrap", "mask"))
    return torch.where(truncated_n, torch.nan if truncated == "mask" else 0.0, 0.0)


def _check_values(advantage_nt: Tensor, value_nt: Tensor | None, mask_nt: Tensor) -> None:
    """Refuse a value that is not finite at a trainable token; the sum tells quickly whether all are finite."""
    if value_nt is None or bool(advantage_nt.sum().isfinite()):
        return
    if bad_entry := first_of(mask_nt & ~value_nt.isfinite()):
        i, t = bad_entry
        raise RewardError(
            f"The value of completion {i} is {float(value_nt[i, t])} at trainable token {t}; the critic must give a finite value "
            f"to every token of the mask."
        )
