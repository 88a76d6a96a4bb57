"""What a process read of its completions, each turn as a row of its own where it says so, and what all processes read together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import pad

from spanwise.batch import Batch, Steps, by_turn
from spanwise.credit.spread import completed
from spanwise.credit.trajectories.turns import Turns
from spanwise.errors import AlignmentError, DataError
from spanwise.pipeline import Reading
from spanwise.scheme import Scheme
from spanwise.types import Spans

#: The field of a rollout function's result that says what each turn is: for each completion a list with one mapping per turn.
TURNS = "turns"


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
        return value_nt if width is None else wider(value_nt, width)

    def repeat(self, values: Sequence[Any]) -> list[Any]:
        """One value per completion as one per row."""
        return list(values) if self.turns is None else self.turns.repeat(values)

    def worth_nm(self, scheme: Scheme) -> Float[Tensor, "n m"]:
        """The rewards of the completions as a trainer logs them, float32: what was left out counts as what it stands for.

        Of several turns it is the last one's, the mean where an objective is a fact of the turn.
        """
        worth_sm, steps = completed(self.reading.scores, scheme.objectives).float(), self.batch.steps
        if steps is None:
            return worth_sm
        worth_nm = torch.full((self.completions, worth_sm.shape[1]), torch.nan)
        for m, objective in enumerate(scheme.objectives):
            for n in range(self.completions):
                value_s = worth_sm[(steps.trajectory_s == n) & ~worth_sm[:, m].isnan(), m]
                if len(value_s):
                    worth_nm[n, m] = value_s.double().mean() if objective.scope == "turn" else value_s[-1]
        return worth_nm


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
    return torch.cat([wider(part, width) for part in parts])


def wider(value_nt: Tensor, width: int, *, fill: float = 0.0) -> Tensor:
    """With as many tokens, of which nothing is known."""
    return pad(value_nt, (*(0, 0) * (value_nt.dim() - 2), 0, width - value_nt.shape[1]), value=fill)


def says_turns(told: Any) -> bool:
    """Whether a rollout says of each of its turns what it is."""
    return isinstance(told, list | tuple) and all(isinstance(one, Mapping) for one in told)


def turn_rows(batch: Batch, scheme: Scheme) -> tuple[Batch, Turns]:
    """Each turn of a batch of completions as a row, with what the rollouts say of it.

    A turn is a run of tokens that the model wrote. Where the completions have a column `turns`, its mappings become columns of the
    rows (None where a turn does not have one), and their `anchor` is the state that the turn started from; where all completions
    are one turn, a column `anchor` will do.

    Args:
        batch: of completions, or of the outputs that a rollout became (`Batch.steps`); the group of each row is that of its
            completion.
        scheme: says whether anchors are needed.

    Raises:
        DataError: the column says more or fewer turns than a completion holds, or no anchors where the method needs them.
    """
    told = batch.columns.get(TURNS)
    bare = replace(batch, columns={name: column for name, column in batch.columns.items() if name != TURNS})
    rows, turns = by_turn(bare)
    alone = bool((turns.step_s == 0).all())
    if told is None:  # a completion of one turn may say its state itself
        own = rows.columns.get("anchor") if alone else None
        flat: list[Mapping[str, Any]] = [{}] * len(turns.row_s) if own is None else [{"anchor": state} for state in own]
    else:
        counts = turns.row_s.bincount(minlength=len(told)).tolist()
        for n, (one, count) in enumerate(zip(told, counts, strict=True)):
            if not says_turns(one):
                raise DataError(
                    f"Completion {n} has {TURNS}: {one!r:.80}; write a list with one mapping per turn, {{'anchor': ...}}."
                )
            if len(one) != count:
                raise AlignmentError(
                    f"Completion {n} has {len(one)} entries in '{TURNS}' and its mask has {count} runs of tokens that the model "
                    "wrote; give one entry to each turn, and let a token of the environment (mask 0) stand between two turns."
                )
        flat = [one for of_completion in told for one in of_completion]
    names = dict.fromkeys(name for one in flat for name in one)
    columns = {name: [one.get(name) for one in flat] for name in names if name != "anchor"}
    anchors = [one.get("anchor") for one in flat]
    if "anchor_s" in scheme.entry.needs and all(anchor is None for anchor in anchors):
        raise DataError(
            f"Method '{scheme.method}' compares turns that start from the same state, and no turn says its own. Let what plays "
            f"them give '{TURNS}': for each completion a list with one {{'anchor': STATE}} per turn."
        )
    steps = steps_of_turns(batch.steps, turns, anchors if any(anchor is not None for anchor in anchors) else None)
    return replace(rows, columns={**rows.columns, **columns}, steps=steps), turns


def steps_of_turns(outer: Steps | None, turns: Turns, anchor_s: Any) -> Steps:
    """Where the turns of rows stand in their rollouts; `outer` says it of the rows, None: each row is a rollout.

    >>> turns = Turns(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), torch.zeros(3, 1).long(), 4)
    >>> steps = steps_of_turns(Steps(torch.tensor([5, 5]), torch.tensor([1, 0])), turns, None)
    >>> steps.trajectory_s.tolist(), steps.step_s.tolist()
    ([5, 5, 5], [3, 4, 0])
    """
    if outer is None:
        return Steps(turns.row_s, turns.step_s, anchor_s)
    count = len(turns.row_s)
    return Steps(outer.trajectory_s[turns.row_s], outer.step_s[turns.row_s] * count + turns.step_s, anchor_s)
