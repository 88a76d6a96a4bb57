"""Every token with its reason, and how often each reason holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.errors import AlignmentError
from spanwise.types import Zero

#: A key is a reason plus this times the objective that it is about, counted from 1; 0 is about none.
KEYS = 32


@dataclass(frozen=True)
class Count:
    """How often one reason holds.

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
        key_v: reason of each token, and the objective that it is about; see `reason` and `objective`.
        row_v: the completion of each token.
        key_n: of each completion: CREDITED where any token gets something, else the reason of most of its tokens.
    """

    names: tuple[str, ...]
    key_v: Int[Tensor, " v"]
    row_v: Int[Tensor, " v"]
    key_n: Int[Tensor, " n"]

    def reason(self, key: int) -> Zero:
        """The reason that a key stands for."""
        return Zero(key % KEYS)

    def objective(self, key: int) -> str:
        """The objective that a key is about; empty if it is about none."""
        return self.names[key // KEYS - 1] if key >= KEYS else ""

    def counts(self, examples: int = 3) -> list[Count]:
        """How often each reason holds, in the order of `Zero`: tokens add up to all tokens, completions to all completions."""
        found = []
        for key in sorted({*self.key_v.unique().tolist(), *self.key_n.unique().tolist()}, key=_place):
            here_v, here_n = self.key_v == key, self.key_n == key
            rows = here_n.nonzero().flatten() if bool(here_n.any()) else self.row_v[here_v].unique()
            shown = tuple(rows[:examples].tolist())
            found.append(Count(self.reason(key), self.objective(key), int(here_v.sum()), int(here_n.sum()), shown))
        return found


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
        advantage_v: what each token trains with.
        block_v: its block, -1 where it has none.
        row_v: its completion.
        names: the objectives that `block_nk` speaks of.
        trainable_v: whether the model sampled it; None: whatever has a block.
        learned_n: False at completions that the trainer left out of the loss; None: it left out none.

    Raises:
        AlignmentError: fields differ in size.

    Example:
        Two completions of one prompt, both wrong; the first one's last token is a tool's.

        >>> wrong = torch.full((2, 1), int(Zero.ALL_WRONG) + 32)
        >>> block_v, row_v = torch.tensor([0, -1, 0]), torch.tensor([0, 0, 1])
        >>> found = tally_zeros(wrong, torch.zeros(3), block_v, row_v, names=["correct"])
        >>> [(count.reason.name, count.objective, count.tokens, count.completions) for count in found.counts()]
        [('MASKED', '', 1, 0), ('ALL_WRONG', 'correct', 2, 2)]
    """
    if not len(advantage_v) == len(block_v) == len(row_v):
        raise AlignmentError(f"There are {len(advantage_v)} advantages for {len(block_v)} blocks and {len(row_v)} rows.")
    trainable_v = block_v >= 0 if trainable_v is None else trainable_v
    held = block_nk[row_v, block_v.long().clamp(min=0)] if block_nk.shape[1] else torch.zeros_like(row_v)
    key_v = torch.where(block_v >= 0, held, int(Zero.UNPAID))
    key_v = torch.where(advantage_v.isnan(), int(Zero.UNSCORED), key_v)
    if learned_n is not None:
        key_v = torch.where(learned_n[row_v], key_v, int(Zero.LEFT_OUT))
    key_v = torch.where(trainable_v, key_v, int(Zero.MASKED))
    key_v = torch.where((advantage_v != 0) & ~advantage_v.isnan(), int(Zero.CREDITED), key_v)
    return Zeros(tuple(names), key_v, row_v, _of_completions(key_v, row_v, len(block_nk)))


def _place(key: int) -> tuple[int, int]:
    return key % KEYS, key // KEYS


def places(key: Tensor) -> Tensor:
    """Keys in the order of their reasons, then of their objectives."""
    return key % KEYS * 4096 + key // KEYS


def _of_completions(key_v: Tensor, row_v: Tensor, completions: int) -> Tensor:
    """The reason of most tokens of each completion; CREDITED where any gets something, MASKED where none could."""
    key_n = torch.full((completions,), int(Zero.EMPTY), dtype=torch.long)
    if not len(key_v):
        return key_n
    largest = int(key_v.max()) + 1
    pairs, count_p = torch.unique(row_v * largest + key_v, return_counts=True)
    row_p, key_p = pairs // largest, pairs % largest
    rank_p = torch.where(key_p == int(Zero.MASKED), 0, count_p)  # a tool's tokens speak only where the model said nothing
    rank_p = torch.where(key_p == int(Zero.CREDITED), int(count_p.max()) + 1, rank_p)
    order = torch.argsort(places(key_p), stable=True)
    order = order[torch.argsort(rank_p[order], descending=True, stable=True)]
    order = order[torch.argsort(row_p[order], stable=True)]
    row_p, key_p = row_p[order], key_p[order]
    first_p = torch.ones_like(row_p, dtype=torch.bool)
    first_p[1:] = row_p[1:] != row_p[:-1]
    key_n[row_p[first_p]] = key_p[first_p]
    return key_n
