"""What every estimator refuses about rewards, masks and spans, in one place."""

from __future__ import annotations

import torch
from torch import Tensor

from spanwise.errors import AlignmentError, RewardError
from spanwise.types import Spans


def first_of(wrong: Tensor) -> list[int]:
    """The place of the first entry that is wrong; empty if none is.

    >>> first_of(torch.tensor([[False, False], [False, True]]))
    [1, 1]
    """
    return wrong.nonzero()[:1].flatten().tolist()


def check_rewards(reward: Tensor, *, row: str = "completion", column: str = "token") -> None:
    """Refuse an infinite reward, before a sum or a mean makes something else of it; NaN is an absent one.

    >>> check_rewards(torch.tensor([1., float("nan"), float("-inf")]))
    Traceback (most recent call last):
    spanwise.errors.RewardError: The reward of completion 2 is -inf; a reward must be finite, or NaN where it is absent.
    """
    if bool(reward.sum().isfinite()):  # one cheap look: a sum is finite only if no member is NaN or infinite
        return
    if first := first_of(reward.isinf()):
        place = f" at {column} {first[1]}" if len(first) > 1 else ""
        raise RewardError(
            f"The reward of {row} {first[0]} is {float(reward[tuple(first)])}{place}; a reward must be finite, or NaN where it is "
            f"absent."
        )


def check_mask(mask_nt: Tensor) -> None:
    """Refuse a mask that is not boolean: as an index or a condition, 0 and 1 mean something else.

    >>> check_mask(torch.tensor([[1, 0]]))
    Traceback (most recent call last):
    spanwise.errors.AlignmentError: mask_nt holds torch.int64; a mask is boolean, pass mask_nt.bool().
    """
    if mask_nt.dtype != torch.bool:
        raise AlignmentError(f"mask_nt holds {mask_nt.dtype}; a mask is boolean, pass mask_nt.bool().")


def check_block_numbers(block_nt: Tensor, blocks: int) -> None:
    """Refuse a token of a span that does not exist, and spans that do not lie in order."""
    if not block_nt.numel():
        return
    if place := first_of((block_nt >= blocks) | (block_nt < -1)):
        n, t = place
        raise AlignmentError(
            f"Token {t} of completion {n} belongs to span {int(block_nt[n, t])}, but there are {blocks} spans, 0 to {blocks - 1} "
            f"(-1: none)."
        )
    so_far_nt = block_nt.long().cummax(dim=1).values
    if place := first_of((block_nt >= 0) & (block_nt < so_far_nt)):
        n, t = place
        raise AlignmentError(
            f"The spans of completion {n} are not in order: token {t} belongs to span {int(block_nt[n, t])} and stands behind a "
            f"token of span {int(so_far_nt[n, t])}. Number spans in the order of their tokens."
        )


def check_intervals(spans: Spans) -> None:
    """Refuse intervals that run backwards or leave the completion; blocks in several pieces may lie in one another.

    >>> spans = Spans(("a",), torch.tensor([[0]]), torch.tensor([[4]]), torch.tensor([[0, 0, 0]]), torch.tensor([0]))
    >>> check_intervals(spans)
    Traceback (most recent call last):
    spanwise.errors.AlignmentError: Block 'a' of completion 0 is [0, 4), but the completion has 3 tokens.
    """
    start_nk, end_nk = spans.start_nk, spans.end_nk
    width = spans.block_nt.shape[1]
    if place := first_of((end_nk != start_nk) & ((end_nk < start_nk) | (end_nk > width) | (start_nk < 0))):
        n, k = place
        start, end = int(start_nk[n, k]), int(end_nk[n, k])
        name = f"Block '{spans.names[k]}' of completion {n} is [{start}, {end})"
        if end < start or start < 0:
            raise AlignmentError(f"{name}, which is no interval of tokens.")
        raise AlignmentError(f"{name}, but the completion has {width} tokens.")
