"""What a process read of its completions, and what all processes of a training read together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import pad

from spanwise.batch import Batch, Steps
from spanwise.credit.spread import completed
from spanwise.credit.trajectories.turns import Turns
from spanwise.pipeline import Reading
from spanwise.scheme import Scheme
from spanwise.step.turns import of_completions
from spanwise.types import Spans


@dataclass(frozen=True)
class Ranks:
    """The processes of a training; each holds as many completions.

    Attributes:
        rank: of this process.
        gather: gives what each process has, in the order of ranks; all of them call it alike.
    """

    rank: int
    gather: Callable[[Any], list[Any]]


@dataclass(frozen=True)
class ReadBatch:
    """Completions and what was read of them.

    Attributes:
        batch: a row is what was read as one: a completion, or a turn of it.
        reading: of the rows; of other processes without text, and without spans where no token is needed.
        completions: how many there are.
        turns: where the rows lie in the completions; None: each row is one.
        gathered: the rows of all processes; None: there is no other process.
        here: the own rows among them.
    """

    batch: Batch
    reading: Reading
    completions: int
    turns: Turns | None = None
    gathered: ReadBatch | None = None
    here: slice = field(default_factory=lambda: slice(None))

    @property
    def everyone(self) -> ReadBatch:
        """All rows that are compared."""
        return self if self.gathered is None else self.gathered

    @property
    def spans(self) -> Spans:
        """Where the blocks of the rows lie."""
        assert self.reading.spans is not None, "what a process reads itself has spans"
        return self.reading.spans

    def take(self, value_nt: Shaped[Tensor, "n t"]) -> Shaped[Tensor, "s u"]:
        """What the tokens of completions hold, laid out as the rows are."""
        return value_nt if self.turns is None else self.turns.take(value_nt)

    def put(self, value_su: Shaped[Tensor, "s u"], *, width: int | None = None) -> Shaped[Tensor, "n t"]:
        """What the tokens of the rows hold, at their places in the completions; 0 at every other one."""
        value_nt = value_su if self.turns is None else self.turns.put(value_su, rows=self.completions)
        return value_nt if width is None else pad(value_nt, (0, width - value_nt.shape[1]))

    def repeat(self, values: Sequence[Any]) -> list[Any]:
        """One value per completion as one per row."""
        return list(values) if self.turns is None else self.turns.repeat(values)

    def worth_nm(self, scheme: Scheme) -> Float[Tensor, "n m"]:
        """The rewards of the completions as a trainer logs them, float32: what was left out counts as what it stands for."""
        worth = completed(self.reading.scores, scheme.objectives).float()
        steps = self.batch.steps
        return worth if steps is None else of_completions(worth, steps.trajectory_s, scheme, completions=self.completions)


def gathered(own: ReadBatch, scheme: Scheme, ranks: Ranks) -> ReadBatch:
    """What is known of the rows of all processes when they are read; a group may lie on several, states may be anything."""
    steps = own.batch.steps
    where = None if steps is None else (steps.trajectory_s.cpu(), steps.step_s.cpu(), steps.anchor_s)
    parts = ranks.gather((own.reading.pack(), own.batch.group_n.cpu(), where))
    sizes = [len(part[0]) for part in parts]
    reading = Reading.unpack(torch.cat([part[0] for part in parts]), scheme)
    batch = Batch(torch.cat([part[1] for part in parts]))
    if steps is not None:
        trajectory_s = torch.cat([part[2][0] + rank * own.completions for rank, part in enumerate(parts)])
        anchors = [part[2][2] or [None] * size for part, size in zip(parts, sizes, strict=True)]
        known = any(part[2][2] is not None for part in parts)
        states = [state for part in anchors for state in part] if known else None
        batch = replace(batch, steps=Steps(trajectory_s, torch.cat([part[2][1] for part in parts]), states))
    whole = ReadBatch(batch, reading, len(parts) * own.completions)
    first = sum(sizes[: ranks.rank])
    return replace(own, gathered=whole, here=slice(first, first + len(own.reading)))


def with_tokens(own: ReadBatch, scheme: Scheme, ranks: Ranks) -> ReadBatch:
    """The rows of all processes with what a scheme needs of their tokens: blocks, values, log-probabilities."""
    whole = own.everyone
    if whole.batch.steps is not None or "mask_nt" not in scheme.needs:
        return own
    known = {name: getattr(own.batch, name) for name in ("value_nt", "logp_nt", "bootstrap_n", "ids_nt")}
    parts = ranks.gather((own.spans.block_nt + 1, known))  # padding is 0, and so is a token of no block
    block_nt = _wide([block_nt for block_nt, _ in parts]) - 1
    shared = {name: _wide([fields[name] for _, fields in parts]) for name, value in known.items() if value is not None}
    spans = Spans.of_blocks(scheme.layout.names, block_nt, whole.reading.fault_n)
    batch = replace(whole.batch, mask_nt=block_nt >= 0, **shared)
    return replace(own, gathered=replace(whole, reading=replace(whole.reading, spans=spans), batch=batch))


def _wide(parts: Sequence[Tensor]) -> Tensor:
    """What processes have of their tokens, whose number differs, as one table; 0 behind what is shorter."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (*(0, 0) * (part.dim() - 2), 0, width - part.shape[1])) for part in parts])
