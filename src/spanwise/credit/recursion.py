"""Run the backward recursion of GAE and SAE, which skips masked tokens.

It is fast because blocks of tokens stay in the cache, laid out time first, with one operation in place per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit.spread import allocate
from spanwise.credit.strata import check_mask, check_rewards, check_shapes, first_of
from spanwise.errors import RecipeError, RewardError, check_known

#: GAE's recursion processes at most this many completions, and this many tokens (padding included), at a time.
_ROWS, _BLOCK = 1024, 1 << 18


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
    """Compute advantages by GAE, or by SAE (segmental GAE) if `boundary_nt` marks segments. Masked tokens get 0.

    A[k] = r[k] - V[k] + gamma (V[k+1] + lam[k+1] A[k+1]) over the trainable tokens k, lam[k] = lam at a boundary, else 1
    """
    check_shapes(reward_nt=reward_nt, value_nt=value_nt, mask_nt=mask_nt, boundary_nt=boundary_nt, bootstrap_n=bootstrap_n)
    check_mask(mask_nt)
    lam = lam if alpha is None else length_adaptive_lambda(mask_nt.sum(dim=1), alpha=alpha)
    for name, option in (("gamma", gamma), ("lam", lam)):
        option_values = torch.as_tensor(option, dtype=torch.float64)
        is_valid = (option_values >= 0) & (option_values <= 1)  # a comparison with NaN is false, so NaN is refused
        if not bool(is_valid.all()):
            raise RecipeError(f"{name} is {float(option_values[~is_valid][0]):g}; it must lie between 0 and 1.")
    dtype = reward_nt.dtype if value_nt is None else torch.promote_types(reward_nt.dtype, value_nt.dtype)
    dtype = dtype if dtype.is_floating_point else torch.float32  # rewards may be whole numbers
    advantage_nt = allocate(reward_nt.shape, dtype=dtype, device=reward_nt.device)
    exact_dtype = torch.promote_types(dtype, torch.float32)
    check_rewards(reward_nt)
    lacks_reward_n = torch.zeros(len(reward_nt), dtype=torch.bool, device=reward_nt.device)
    if not bool(reward_nt.sum().isfinite()):  # a finite sum proves that no reward is NaN (absent)
        lacks_reward_n |= (reward_nt.isnan() & mask_nt).any(dim=1)
        reward_nt = torch.where(reward_nt.isnan(), 0.0, reward_nt)
    # Token k gets the advantage A[k] = r[k] - V[k] + c[k+1], and passes the return c[k] to the token before:
    # c[k] = gamma ((1 - lam[k]) V[k] + lam[k] (r[k] + c[k+1])). At a masked token, c[k] = r[k] + c[k+1].
    carry_after_last_token_n = torch.zeros(len(reward_nt), dtype=exact_dtype, device=reward_nt.device)
    if bootstrap_n is not None:
        for n in first_of(bootstrap_n.isinf()):
            raise RewardError(
                f"The value after the last token of completion {n} is {float(bootstrap_n[n])}; the critic must give a finite "
                f"value, or NaN if the value is unknown."
            )
        lacks_reward_n |= bootstrap_n.isnan()
        carry_after_last_token_n.copy_(bootstrap_n.nan_to_num(nan=0.0)).mul_(gamma)
    lam_n = torch.as_tensor(lam, dtype=exact_dtype, device=reward_nt.device).expand(len(reward_nt))
    value_factor_n = gamma * (1 - lam_n)
    for row_slice, cols in _cut_blocks(*reward_nt.shape):
        mask_tile, reward_tile = mask_nt[row_slice, cols], reward_nt[row_slice, cols].to(exact_dtype)
        mask_factor = mask_tile.to(exact_dtype)
        boundary_factor = mask_factor if boundary_nt is None else (mask_tile & boundary_nt[row_slice, cols]).to(exact_dtype)
        value_factor_tile = boundary_factor * value_factor_n[row_slice, None]
        carry_factor = (mask_factor * (gamma - 1)).sub_(value_factor_tile).add_(1.0)
        reward_term = carry_factor * reward_tile
        value_tile = None if value_nt is None else torch.where(mask_tile, value_nt[row_slice, cols].to(exact_dtype), 0.0)
        if value_tile is not None:
            reward_term.addcmul_(value_factor_tile, value_tile)
        _carry_back(reward_term, carry_factor, carry_after_last_token_n[row_slice]).add_(reward_tile)
        if value_tile is not None:
            reward_term.sub_(value_tile)
        torch.add(reward_term.mul_(mask_factor), 0.0, out=advantage_nt[row_slice, cols])  # turns -0 into 0
    _check_finite(advantage_nt, value_nt, mask_nt)
    return advantage_nt.masked_fill_(lacks_reward_n[:, None], 0.0) if bool(lacks_reward_n.any()) else advantage_nt


def _cut_blocks(completions: int, tokens: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices (rows, tokens) of pieces that fit into the processor's cache, the last tokens of a row first."""
    tile_height = max(1, min(completions, _ROWS))
    tile_width = max(_BLOCK // tile_height, 32)
    for first_row_index in range(0, completions, tile_height):
        for end_column in range(tokens, 0, -tile_width):
            yield slice(first_row_index, first_row_index + tile_height), slice(max(0, end_column - tile_width), end_column)


def _carry_back(term: Tensor, factor: Tensor, next_carry_n: Tensor) -> Tensor:
    """Compute carry[t] = term[t] + factor[t] carry[t+1] from the last token to the first. Return carry[t+1] in `term`."""
    carry_tn = torch.cat([term.t(), next_carry_n[None]])
    carry_by_token = carry_tn.unbind(0)
    factor_by_token = factor.t().contiguous().unbind(0)
    for t in reversed(range(len(factor_by_token))):
        carry_by_token[t].addcmul_(factor_by_token[t], carry_by_token[t + 1])
    next_carry_n.copy_(carry_by_token[0])  # the next call, for the tokens further left, continues from `next_carry_n`
    return term.copy_(carry_tn[1:].t())


def length_adaptive_lambda(length_n: Int[Tensor, " n"], *, alpha: float = 0.05) -> Float[Tensor, " n"]:
    r"""Return a lambda for each completion that grows with its length. GAE then looks ahead over a fixed share of it.

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
    """Return the value after the last token of each completion (`bootstrap_n`), for GAE and SAE.

    Args:
        truncated_n: the completions that ran out of tokens.
        truncated: what they count as: an end like any other (0), a state worth `value_end_n`, or nothing to learn from (NaN).
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


def _check_finite(advantage_nt: Tensor, value_nt: Tensor | None, mask_nt: Tensor) -> None:
    """Refuse a critic's value that is not finite at a trainable token. It would make the advantages infinite or NaN."""
    if value_nt is None or bool(advantage_nt.sum().isfinite()):
        return
    if bad_entry := first_of(mask_nt & ~value_nt.isfinite()):
        n, t = bad_entry
        raise RewardError(
            f"The value of completion {n} is {float(value_nt[n, t])} at trainable token {t}; the critic must give a "
            f"finite value to every token of the mask."
        )
