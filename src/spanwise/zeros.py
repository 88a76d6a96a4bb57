"""Why a token trains with exactly 0: one reason for every such token, so that the counts add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit import compare_in_strata, group_index, moments
from spanwise.errors import AlignmentError
from spanwise.scheme import Scheme
from spanwise.types import Credit, Zero

__all__ = ["Count", "Zero", "Zeros", "key_of", "reason_of", "recorded_reasons", "tally_zeros", "zero_reasons"]

#: A key is a reason times this number, plus the number of its objective from 1 on (0: none), so that keys sort as reasons do.
_OBJECTIVES = 4096


def key_of(reason: Zero, objective: int = -1) -> int:
    """Return the key of a reason about the objective with the given number, -1 for none.

    Example:
        >>> reason_of(key_of(Zero.ABSENT, 2)).name
        'ABSENT'
    """
    return int(reason) * _OBJECTIVES + objective + 1


def reason_of(key: int) -> Zero:
    """Return the reason that a key stands for.

    Example:
        >>> reason_of(key_of(Zero.UNPAID)).words
        'no objective pays the block'
    """
    return Zero(key // _OBJECTIVES)


@dataclass(frozen=True)
class Count:
    """The number of tokens and completions that have one reason.

    Attributes:
        reason: why.
        objective: which reward it is about; empty where it is about none.
        tokens: with this reason.
        completions: none of whose tokens gets anything, and most of whose tokens have this reason.
        rows: the first of these completions; where there is none, the first that have such a token.
    """

    reason: Zero
    objective: str
    tokens: int
    completions: int
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Zeros:
    """The reason of every token of N completions; tokens lie end to end.

    Attributes:
        names: the objectives.
        key_v: reason of each token, and the objective that it is about; see `reason_of` and `objective`.
        row_v: the completion of each token.
        key_n: of each completion: CREDITED where any token gets something, else the reason of most of its tokens.
    """

    names: tuple[str, ...]
    key_v: Int[Tensor, " v"]
    row_v: Int[Tensor, " v"]
    key_n: Int[Tensor, " n"]

    def objective(self, key: int) -> str:
        """Return the name of the objective that a key is about; an empty text if there is none."""
        return self.names[key % _OBJECTIVES - 1] if key % _OBJECTIVES else ""

    def counts(self, examples: int = 3) -> list[Count]:
        """Count each reason, in the order of `Zero`: tokens add up to all tokens, completions to all completions."""
        counts = []
        for key in torch.cat([self.key_v, self.key_n]).unique().tolist():
            has_key_v, has_key_n = self.key_v == key, self.key_n == key
            rows = has_key_n.nonzero().flatten() if bool(has_key_n.any()) else self.row_v[has_key_v].unique()
            examples_i = tuple(rows[:examples].tolist())
            counts.append(Count(reason_of(key), self.objective(key), int(has_key_v.sum()), int(has_key_n.sum()), examples_i))
        return counts


def zero_reasons(found: Credit, scheme: Scheme) -> Int[Tensor, "n k"]:
    """Say why a token of each block would get nothing, if it does.

    Of several objectives that pay a block the reason is the first one in the order of `Zero`, then of the objectives.

    Example:
        >>> from spanwise import Batch, Layout, Vocabulary, credit_batch, read
        >>> vocabulary = Vocabulary((b"<answer>", b"4", b"5", b"</answer>"))
        >>> batch = Batch.jagged([[0, 1, 3], [0, 1, 3], [0, 2, 3]], [0, 0, 1], columns={"answer": ["4", "4", "4"]})
        >>> scheme = Scheme.preset("grpo", Layout({"all": ["answer"]}))
        >>> reasons = zero_reasons(credit_batch(read(batch, scheme, vocabulary), batch, scheme), scheme)
        >>> [reason_of(key).name for key in reasons.flatten().tolist()]
        ['ALL_RIGHT', 'ALL_RIGHT', 'SINGLETON']
    """
    comparison, cancelled = found.explained[1], key_of(Zero.CANCELLED)
    # A block with credit gets 0 in the sum because another objective takes the credit away again.
    key_nm = torch.where(
        comparison.reason_nm == int(Zero.CREDITED), cancelled, comparison.reason_nm * _OBJECTIVES + comparison.about_nm + 1
    )
    key_nm = key_nm.expand(-1, len(scheme.objectives))
    result_nk = torch.full((len(key_nm), len(scheme.layout.names)), key_of(Zero.UNPAID), dtype=torch.long)
    for k, name in enumerate(scheme.layout.names):
        columns = [m for m, objective in enumerate(scheme.objectives) if name in objective.pays and objective.weight != 0]
        if columns:
            reason_nm = key_nm[:, columns]
            result_nk[:, k] = torch.where((reason_nm == cancelled).any(dim=1), cancelled, reason_nm.amin(dim=1))
    return result_nk


def recorded_reasons(
    credit_nk: Float[Tensor, "n k"],
    group_n: Int[Tensor, " n"],
    *,
    reward_n: Float[Tensor, " n"] | None = None,
    rollout_n: Int[Tensor, " n"] | None = None,
) -> Int[Tensor, "n k"]:
    """Say why a trainer gave a token nothing, as far as what it recorded shows that.

    `credit_nk` is NaN where it recorded nothing; `reward_n`, if there is one, says what is right.

    Example:
        >>> keys = recorded_reasons(torch.zeros(3, 1), torch.tensor([0, 0, 1]), reward_n=torch.tensor([0.0, 0.0, 1.0]))
        >>> [reason_of(key).name for key in keys.flatten().tolist()]
        ['ALL_WRONG', 'ALL_WRONG', 'SINGLETON']
    """
    moved_n = credit_nk.nan_to_num().abs().amax(dim=1) if credit_nk.shape[1] else torch.zeros(len(group_n))
    group_n = group_index(group_n)
    all_members = compare_in_strata(torch.ones_like(group_n).double(), group_n, voter_n=rollout_n).comparison
    size_n = all_members.members_nm[:, 0]
    key_n = torch.full_like(group_n, key_of(Zero.ALL_EQUAL), dtype=torch.long)
    if reward_n is not None:
        reward_n = reward_n.double().where(reward_n.isfinite(), torch.nan)
        groups, known_n = moments(reward_n, group_n), ~reward_n.isnan()
        comparison = compare_in_strata(reward_n, group_n, voter_n=rollout_n).comparison
        agree_n = groups.constant_n() & (comparison.members_nm[:, 0] == size_n)
        verdict_n = torch.where(groups.mean_n() == 1, key_of(Zero.ALL_RIGHT, 0), key_of(Zero.ALL_WRONG, 0))
        if not bool(((reward_n == 0) | (reward_n == 1) | ~known_n).all()):
            verdict_n = torch.full_like(key_n, key_of(Zero.ALL_EQUAL, 0))
        key_n = torch.where(agree_n, verdict_n, key_n)
    key_n = torch.where(moments(moved_n, group_n).mean_n() > 0, key_of(Zero.RECORDED), key_n)
    key_n = torch.where(size_n < 2, key_of(Zero.SINGLETON), key_n)
    return torch.where(credit_nk.isnan(), key_of(Zero.UNSCORED), key_n[:, None])


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
    """Give every token its reason, and every completion the reason of most of its tokens.

    Args:
        block_nk: what a token of block k of completion n would have as its reason, see `zero_reasons`.
        advantage_v, block_v, row_v: of each token what it trains with, its block (-1 where it has none) and its completion.
        trainable_v: whether the model sampled it; None: whatever has a block.
        learned_n: False at completions that the trainer left out of the loss; None: it left out none.

    Example:
        Two completions of one prompt, both wrong; the first one's last token is a tool's.

        >>> wrong = torch.full((2, 1), key_of(Zero.ALL_WRONG, 0))
        >>> block_v, row_v = torch.tensor([0, -1, 0]), torch.tensor([0, 0, 1])
        >>> found = tally_zeros(wrong, torch.zeros(3), block_v, row_v, names=["correct"])
        >>> [(count.reason.name, count.objective, count.tokens, count.completions) for count in found.counts()]
        [('MASKED', '', 1, 0), ('ALL_WRONG', 'correct', 2, 2)]
    """
    if not len(advantage_v) == len(block_v) == len(row_v):
        raise AlignmentError(f"There are {len(advantage_v)} advantages for {len(block_v)} blocks and {len(row_v)} rows.")
    trainable_v = block_v >= 0 if trainable_v is None else trainable_v
    of_block_v = block_nk[row_v, block_v.long().clamp(min=0)] if block_nk.shape[1] else torch.zeros_like(row_v)
    key_v = torch.where(block_v >= 0, of_block_v, key_of(Zero.UNPAID))
    for applies_v, reason in (
        (advantage_v.isnan(), Zero.UNSCORED),
        (None if learned_n is None else ~learned_n[row_v], Zero.LEFT_OUT),
        (~trainable_v, Zero.MASKED),
        ((advantage_v != 0) & ~advantage_v.isnan(), Zero.CREDITED),
    ):
        key_v = key_v if applies_v is None else torch.where(applies_v, key_of(reason), key_v)
    key_n = torch.full((len(block_nk),), key_of(Zero.EMPTY), dtype=torch.long)
    if len(key_v):  # a completion has the reason of most of its tokens; CREDITED if any token has credit
        pair_p, count_p = torch.unique(torch.stack([row_v, key_v], dim=1), dim=0, return_counts=True)
        row_p, key_p = pair_p.T
        # A tool's tokens count only if the model wrote nothing.
        rank_p = torch.where(key_p == key_of(Zero.MASKED), 0, count_p)
        rank_p = torch.where(key_p == key_of(Zero.CREDITED), len(key_v) + 1, rank_p)
        most_n = torch.zeros_like(key_n).scatter_reduce(0, row_p, rank_p, "amax")
        wins_p = rank_p == most_n[row_p]
        key_n = key_n.scatter_reduce(0, row_p[wins_p], key_p[wins_p], "amin", include_self=False)
    return Zeros(tuple(names), key_v, row_v, key_n)
