"""Find one reason for every token that trains with advantage 0. The reasons' counts add up to all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit import group_index, moments
from spanwise.credit.strata import compare_in_strata
from spanwise.errors import AlignmentError
from spanwise.scheme import Scheme
from spanwise.types import Credit, Zero

__all__ = ["Zero", "reason_of", "zero_reasons"]

#: A key is a reason's number times this factor, plus an objective's number, so that keys sort in the order of `Zero`.
_OBJECTIVES = 4096


def key_of(reason: Zero, objective: int = -1) -> int:
    """Encode why an advantage is 0 (`reason`) and the objective's index as one integer, the key. -1 is no objective."""
    return reason * _OBJECTIVES + objective + 1


def reason_of(key: int) -> Zero:
    """Return the reason why an advantage is 0 from a key that `key_of` made."""
    return Zero(key // _OBJECTIVES)


@dataclass(frozen=True)
class Count:
    """How many tokens and completions have the same reason (`Zero`) for their credit."""

    reason: Zero
    objective: str  # the objective that `reason` is about; empty if there is none
    tokens: int
    completions: int  # How many completions have the reason as a whole (`Zeros.key_n`).
    rows: tuple[int, ...] = ()  # A few completions with the reason; if there are none, completions with tokens that have it.
    has_more_rows: bool = False  # Whether `rows` leaves out completions with the reason.


@dataclass(frozen=True)
class Zeros:
    """The reasons why tokens of N completions have the advantage 0. All completions' tokens form one list."""

    names: tuple[str, ...]  # The names of the objectives, to which keys (`key_of`) refer by index.
    key_v: Int[Tensor, " v"]  # Why each token has credit or none, as a key that `key_of` makes.
    row_v: Int[Tensor, " v"]  # The row number of each token's completion.
    key_n: Int[Tensor, " n"]  # Each completion's key: CREDITED if a token is, MASKED if all are, else the commonest other.

    def objective(self, key: int) -> str:
        """Return the name of the objective in a key, which `key_of` makes. Return "" if the key contains no objective."""
        return self.names[key % _OBJECTIVES - 1] if key % _OBJECTIVES else ""

    def counts(self, examples: int) -> list[Count]:
        """Count tokens and completions by reason (credited, or why not), with a few rows as examples."""
        counts: list[Count] = []
        for key in torch.cat([self.key_v, self.key_n]).unique().tolist():
            has_key_v, has_key_n = self.key_v == key, self.key_n == key
            example_rows = has_key_n.nonzero().flatten() if has_key_n.any() else self.row_v[has_key_v].unique()
            first_rows = tuple(example_rows[:examples].tolist())
            token_row_counts = int(has_key_v.sum()), int(has_key_n.sum())
            has_more_rows = len(first_rows) < len(example_rows)
            counts.append(Count(reason_of(key), self.objective(key), *token_row_counts, first_rows, has_more_rows))
        return counts


def zero_reasons(credit: Credit, scheme: Scheme) -> Int[Tensor, "n k"]:
    """Return why the tokens of each block have the advantage 0, if they do. The reasons are keys (`key_of`).

    If several objectives pay a block, the reason is the first in the order of `Zero`, then in the order of the objectives. Reasons
    from ALL_RIGHT to AT_BASELINE rank alike: answers that are all wrong count before the tags, all right, of a later objective.
    """
    _, comparison = credit.explained
    cancelled_key = key_of(Zero.CANCELLED)
    reason_key_nm = comparison.reason_nm * _OBJECTIVES + comparison.about_nm + 1  # the formula of `key_of`, for tensors
    # If an objective gives credit but the advantage is 0, the credits of several objectives cancel each other.
    reason_key_nm = torch.where(comparison.reason_nm == int(Zero.CREDITED), cancelled_key, reason_key_nm)
    reason_key_nm = reason_key_nm.expand(-1, len(scheme.objectives))
    is_compared_nm = (reason_key_nm >= key_of(Zero.ALL_RIGHT)) & (reason_key_nm < cancelled_key)
    rank_key_nm = torch.where(is_compared_nm, key_of(Zero.ALL_RIGHT) + reason_key_nm % _OBJECTIVES, reason_key_nm)
    block_key_nk = torch.full((len(reason_key_nm), len(scheme.layout.names)), key_of(Zero.UNPAID), dtype=torch.long)
    for k, name in enumerate(scheme.layout.names):
        paying_indices = [m for m, o in enumerate(scheme.objectives) if name in o.pays and o.weight != 0]
        if paying_indices:
            is_cancelled_n = (reason_key_nm[:, paying_indices] == cancelled_key).any(dim=1)
            first_column_n1 = rank_key_nm[:, paying_indices].argmin(dim=1, keepdim=True)
            first_key_n = reason_key_nm[:, paying_indices].gather(1, first_column_n1).squeeze(1)
            block_key_nk[:, k] = torch.where(is_cancelled_n, cancelled_key, first_key_n)
    return block_key_nk


def recorded_reasons(
    credit_nk: Float[Tensor, "n k"],
    group_n: Int[Tensor, " n"],
    *,
    reward_n: Float[Tensor, " n"] | None = None,
    rollout_n: Int[Tensor, " n"] | None = None,
) -> Int[Tensor, "n k"]:
    """Return why each block's tokens have the advantage 0, as far as a trainer's records show. Reasons are keys (`key_of`).

    `credit_nk` is NaN where the trainer recorded no credit; `reward_n`, if given, shows which completions are right.
    """
    largest_credit_n = credit_nk.nan_to_num().abs().amax(dim=1)
    group_n = group_index(group_n)
    placeholder_reward_n = torch.ones_like(group_n).double()  # any rewards would do, because only group sizes are used
    group_size_n = compare_in_strata(placeholder_reward_n, group_n, voter_n=rollout_n).comparison.members_nm[:, 0]
    reason_key_n = torch.full_like(group_n, key_of(Zero.ALL_EQUAL))
    if reward_n is not None:
        reward_n = torch.where(reward_n.isfinite(), reward_n.double(), torch.nan)
        reward_moments = moments(reward_n, group_n)
        has_reward_n = ~reward_n.isnan()
        reward_comparison = compare_in_strata(reward_n, group_n, voter_n=rollout_n).comparison
        is_unanimous_n = reward_moments.constant_n() & (reward_comparison.members_nm[:, 0] == group_size_n)
        unanimous_key_n = torch.where(reward_moments.mean_n() == 1, key_of(Zero.ALL_RIGHT, 0), key_of(Zero.ALL_WRONG, 0))
        if not bool(((reward_n == 0) | (reward_n == 1) | ~has_reward_n).all()):
            unanimous_key_n = torch.full_like(reason_key_n, key_of(Zero.ALL_EQUAL, 0))
        reason_key_n = torch.where(is_unanimous_n, unanimous_key_n, reason_key_n)
    reason_key_n = torch.where(moments(largest_credit_n, group_n).mean_n() > 0, key_of(Zero.RECORDED), reason_key_n)
    reason_key_n = torch.where(group_size_n < 2, key_of(Zero.SINGLETON), reason_key_n)
    return torch.where(credit_nk.isnan(), key_of(Zero.UNSCORED), reason_key_n[:, None])


def tally_zeros(
    block_nk: Int[Tensor, "n k"],
    advantage_v: Float[Tensor, " v"],
    block_v: Int[Tensor, " v"],
    row_v: Int[Tensor, " v"],
    *,
    names: Sequence[str] = (),
    trainable_v: Bool[Tensor, " v"] | None = None,
    learned_n: Bool[Tensor, " n"] | None = None,
) -> Zeros:
    """Find the reason of every token that gets 0. A completion gets the reason that most of its tokens have.

    `block_nk` is what `zero_reasons` returns; a token has the block -1 if it has none. `trainable_v` are the tokens that the model
    sampled (None: all in blocks); `learned_n` is False for completions that the trainer left out of the loss.
    """
    if not len(advantage_v) == len(block_v) == len(row_v):
        raise AlignmentError(
            f"advantage_v, block_v and row_v have {len(advantage_v)}, {len(block_v)} and {len(row_v)} entries; "
            "give one entry to each token."
        )
    trainable_v = block_v >= 0 if trainable_v is None else trainable_v
    block_key_v = block_nk[row_v, block_v.long().clamp(min=0)]  # tokens without a block (-1) get UNPAID below
    reason_key_v = torch.where(block_v >= 0, block_key_v, key_of(Zero.UNPAID))
    for has_reason_v, reason in (
        (advantage_v.isnan(), Zero.UNSCORED),
        (None if learned_n is None else ~learned_n[row_v], Zero.LEFT_OUT),
        (~trainable_v, Zero.MASKED),
        ((advantage_v != 0) & ~advantage_v.isnan(), Zero.CREDITED),
    ):
        if has_reason_v is not None:
            reason_key_v = torch.where(has_reason_v, key_of(reason), reason_key_v)
    reason_key_n = torch.full((len(block_nk),), key_of(Zero.EMPTY), dtype=torch.long)
    if len(reason_key_v):
        row_key_pair_p, count_p = torch.unique(torch.stack([row_v, reason_key_v], dim=1), dim=0, return_counts=True)
        row_p, key_p = row_key_pair_p.T
        # A completion is MASKED if all tokens are, and CREDITED if any token is.
        priority_p = torch.where(key_p == key_of(Zero.MASKED), 0, count_p)
        priority_p = torch.where(key_p == key_of(Zero.CREDITED), len(reason_key_v) + 1, priority_p)
        highest_priority_n = torch.zeros_like(reason_key_n).scatter_reduce(0, row_p, priority_p, "amax")
        is_highest_p = priority_p == highest_priority_n[row_p]
        reason_key_n = reason_key_n.scatter_reduce(0, row_p[is_highest_p], key_p[is_highest_p], "amin", include_self=False)
    return Zeros(tuple(names), reason_key_v, row_v, reason_key_n)
