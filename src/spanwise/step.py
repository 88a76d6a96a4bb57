"""`Step`: the credit of one training step. Every engine drives it in two calls, `read` and `finish`.

The engine fills in a batch before them, and puts the advantages where its trainer reads them afterwards.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from spanwise.batch import Batch, Steps, by_turn
from spanwise.credit import restrict
from spanwise.credit.spread import completed
from spanwise.credit.trajectories.turns import Turns
from spanwise.errors import AlignmentError, DataError
from spanwise.explain.remarks import Watch
from spanwise.pipeline import Reading, advantages, credit_batch, locate, metrics, read
from spanwise.rollouts import Rollouts
from spanwise.scheme import Scheme
from spanwise.score.score import await_rewards, waits
from spanwise.segment import Vocabulary
from spanwise.types import Credit, Spans

__all__ = ["TURNS", "Ranks", "ReadBatch", "Step", "StepResult", "steps_of_turns", "turn_rows"]

#: The field of a rollout function's result that describes turns: for each completion a list with one mapping per turn.
TURNS = "turns"


@dataclass(frozen=True)
class Ranks:
    """The processes of a training; each holds the same number of completions.

    Attributes:
        rank: number of this process.
        gather: returns the objects of all processes, in the order of ranks; every process has to call it.
    """

    rank: int
    gather: Callable[[Any], list[Any]]


@dataclass(frozen=True)
class ReadBatch:
    """A batch with its reading: blocks, rewards and outcomes.

    Attributes:
        batch: one row per completion, or one row per turn of a completion.
        reading: the reading of the rows. For rows of other processes it has no text, and no spans unless the method needs tokens.
        completions: number of completions.
        turns: where the rows lie in the completions; None: each row is a completion.
        gathered: the rows of all processes; None: there is one process.
        here: the rows of this process among `gathered`.
    """

    batch: Batch
    reading: Reading
    completions: int
    turns: Turns | None = None
    gathered: ReadBatch | None = None
    here: slice = field(default_factory=lambda: slice(None))

    @property
    def everyone(self) -> ReadBatch:
        """The rows of all processes, which are compared with each other."""
        return self if self.gathered is None else self.gathered

    @property
    def spans(self) -> Spans:
        """The spans of the rows' blocks."""
        assert self.reading.spans is not None, "what a process reads itself has spans"
        return self.reading.spans

    def take(self, value_nt: Shaped[Tensor, "n t"]) -> Shaped[Tensor, "s u"]:
        """Cut a table of the completions' tokens into the rows."""
        return value_nt if self.turns is None else self.turns.take(value_nt)

    def put(self, value_su: Shaped[Tensor, "s u"], *, width: int | None = None) -> Shaped[Tensor, "n t"]:
        """Put a table of the rows' tokens back at their places in the completions, with 0 elsewhere."""
        value_nt = value_su if self.turns is None else self.turns.put(value_su, rows=self.completions)
        return value_nt if width is None else wider(value_nt, width)

    def repeat(self, values: Sequence[Any]) -> list[Any]:
        """Repeat the value of each completion for each of its rows."""
        return list(values) if self.turns is None else self.turns.repeat(values)

    def worth_nm(self, scheme: Scheme) -> Float[Tensor, "n m"]:
        """Return the float32 rewards that a trainer logs, with `if_missing` for rewards that a completion left out.

        A completion of several turns has the reward of its last turn, or the mean of its turns for an objective of scope "turn".
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


def in_useful_groups(credit: Credit, group_n: Shaped[Tensor, " n"], *, tolerance: float = 0.0) -> Bool[Tensor, " n"]:
    """Mark the rows of groups in which some completion has credit beyond the tolerance; the other groups teach nothing.

    >>> nothing = torch.zeros(4)
    >>> credit = Credit(torch.tensor([[0.5], [0.0], [0.0], [0.0]]), nothing, nothing[:1].long(), nothing[:1].long())
    >>> in_useful_groups(credit, torch.tensor([3, 3, -1, -1])).tolist()
    [True, True, False, False]
    """
    return torch.isin(group_n, group_n[credit.signal_n(tolerance=tolerance)])


def gathered(own: ReadBatch, scheme: Scheme, ranks: Ranks) -> ReadBatch:
    """Gather the readings, groups and turns of all processes, since a group may lie on several of them."""
    steps = own.batch.steps
    where = None if steps is None else (steps.trajectory_s.cpu(), steps.step_s.cpu(), steps.anchor_s)
    parts = ranks.gather((own.reading.pack(), own.batch.group_n.cpu(), where))
    sizes = [len(part[0]) for part in parts]
    reading = Reading.unpack(torch.cat([part[0] for part in parts]), scheme)
    batch = Batch(torch.cat([part[1] for part in parts]))
    if steps is not None:
        trajectory_s = torch.cat([part[2][0] + rank * own.completions for rank, part in enumerate(parts)])
        anchors = [part[2][2] or [None] * size for part, size in zip(parts, sizes, strict=True)]
        some_known = any(part[2][2] is not None for part in parts)
        states = [state for part in anchors for state in part] if some_known else None
        batch = replace(batch, steps=Steps(trajectory_s, torch.cat([part[2][1] for part in parts]), states))
    whole = ReadBatch(batch, reading, len(parts) * own.completions)
    first = sum(sizes[: ranks.rank])
    return replace(own, gathered=whole, here=slice(first, first + len(own.reading)))


def with_tokens(own: ReadBatch, scheme: Scheme, ranks: Ranks) -> ReadBatch:
    """Gather blocks, values and log-probabilities of all processes' tokens, if the scheme needs them."""
    whole = own.everyone
    if whole.batch.steps is not None or "mask_nt" not in scheme.needs:
        return own
    tokens = {name: getattr(own.batch, name) for name in ("value_nt", "logp_nt", "bootstrap_n", "ids_nt")}
    parts = ranks.gather((own.spans.block_nt + 1, tokens))  # block number 0 stands for padding and for tokens of no block
    block_nt = _wide([block_nt for block_nt, _ in parts]) - 1
    shared = {name: _wide([fields[name] for _, fields in parts]) for name, value in tokens.items() if value is not None}
    spans = Spans.of_blocks(scheme.layout.names, block_nt, whole.reading.fault_n)
    batch = replace(whole.batch, mask_nt=block_nt >= 0, **shared)
    return replace(own, gathered=replace(whole, reading=replace(whole.reading, spans=spans), batch=batch))


def _wide(parts: Sequence[Tensor]) -> Tensor:
    """Stack tables of different widths, padded with 0 on the right."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([wider(part, width) for part in parts])


def wider(value_nt: Tensor, width: int, *, fill: float = 0.0) -> Tensor:
    """Pad a table on the right to `width` tokens."""
    return pad(value_nt, (*(0, 0) * (value_nt.dim() - 2), 0, width - value_nt.shape[1]), value=fill)


def says_turns(entry: Any) -> bool:
    """Return whether an entry of the column `turns` is a list with one mapping per turn."""
    return isinstance(entry, list | tuple) and all(isinstance(turn, Mapping) for turn in entry)


def turn_rows(batch: Batch, scheme: Scheme) -> tuple[Batch, Turns]:
    """Split each completion of a batch into its turns, one row per turn.

    A turn is a run of tokens that the model wrote. The mappings of a column `turns` become columns of the rows (None if a turn
    lacks a key); their `anchor` is the state that the turn started from. If every completion is a single turn, a column `anchor`
    will do.

    Args:
        batch: one row per completion, or per output of a rollout (`Batch.steps`). A turn keeps its completion's group.
        scheme: its method may need anchors.

    Raises:
        DataError: the column does not describe turns, or lacks the anchors that the method needs.
        AlignmentError: the column describes more or fewer turns than a completion has.
    """
    turns_of_rows = batch.columns.get(TURNS)
    bare = replace(batch, columns={name: column for name, column in batch.columns.items() if name != TURNS})
    rows, turns = by_turn(bare)
    is_single = bool((turns.step_s == 0).all())
    if turns_of_rows is None:  # the state of a completion of one turn may be its own column
        states = rows.columns.get("anchor") if is_single else None
        flat: list[Mapping[str, Any]] = [{"anchor": state} for state in states or [None] * len(turns.row_s)]
    else:
        counts = turns.row_s.bincount(minlength=len(turns_of_rows)).tolist()
        for n, (entry, count) in enumerate(zip(turns_of_rows, counts, strict=True)):
            if not says_turns(entry):
                raise DataError(
                    f"Completion {n} has {TURNS}: {entry!r:.80}; write a list with one mapping per turn, {{'anchor': ...}}."
                )
            if len(entry) != count:
                raise AlignmentError(
                    f"Completion {n} has {len(entry)} entries in '{TURNS}' and its mask has {count} runs of tokens that the "
                    "model wrote; give one entry to each turn, and let a token of the environment (mask 0) stand between two turns."
                )
        flat = [turn for of_completion in turns_of_rows for turn in of_completion]
    names = dict.fromkeys(name for turn in flat for name in turn)
    columns = {name: [turn.get(name) for turn in flat] for name in names if name != "anchor"}
    anchors = [turn.get("anchor") for turn in flat]
    if "anchor_s" in scheme.entry.needs and all(anchor is None for anchor in anchors):
        raise DataError(
            f"Method '{scheme.method}' compares turns that start from the same state, but no turn names its state. Let your "
            f"environment give '{TURNS}': for each completion a list with one {{'anchor': STATE}} per turn."
        )
    steps = steps_of_turns(
        batch.steps, turns.row_s, turns.step_s, anchors if any(anchor is not None for anchor in anchors) else None
    )
    return replace(rows, columns={**rows.columns, **columns}, steps=steps), turns


def steps_of_turns(outer: Steps | None, row_s: Int[Tensor, " s"], step_s: Int[Tensor, " s"], anchor_s: Any) -> Steps:
    """Number the turns of rows within their rollouts; `outer` numbers the rows, None: each row is a rollout.

    >>> outer, row_s, step_s = Steps(torch.tensor([5, 5]), torch.tensor([1, 0])), torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0])
    >>> steps = steps_of_turns(outer, row_s, step_s, None)
    >>> steps.trajectory_s.tolist(), steps.step_s.tolist()
    ([5, 5, 5], [3, 4, 0])
    """
    if outer is None:
        return Steps(row_s, step_s, anchor_s)
    return Steps(outer.trajectory_s[row_s], outer.step_s[row_s] * len(row_s) + step_s, anchor_s)


class BatchCredit(NamedTuple):
    """The credit of the rows of all processes, with the metrics and the new warnings of the batch."""

    credits: Credit
    metrics: dict[str, float]
    warnings: list[str]


@dataclass(frozen=True)
class StepResult:
    """The advantages of this process's rows, and the metrics and warnings of the batch.

    Attributes:
        own: the rows of this process; `own.put` takes numbers of rows to the completions.
        advantages_nt: the advantage of each token of the rows.
        spans: the blocks of the rows, without those of completions that the trainer left out.
        credit: the credit of the rows; its counters cover all processes.
        metrics: over the rows of all processes.
        warnings: sentences that were not issued before.
        credits: the credit of the rows of all processes.
    """

    own: ReadBatch
    advantages_nt: Float[Tensor, "n t"]
    spans: Spans
    credit: Credit
    metrics: dict[str, float]
    warnings: list[str]
    credits: Credit

    @property
    def blocks_nt(self) -> Int[Tensor, "n t"]:
        """The block of each token of the completions, from 1 and different for every turn; 0 at tokens of no block."""
        block_su, turns = self.spans.block_nt, self.own.turns
        if turns is not None:
            block_su = torch.where(block_su >= 0, block_su + len(self.spans.names) * turns.step_s[:, None], -1)
        return self.own.put(block_su + 1)

    def by_completion(self) -> tuple[Credit, Bool[Tensor, "n k"]]:
        """Return the credit of all completions (the mean over their turns), and which blocks each has."""
        whole = self.own.everyone
        if whole.batch.steps is None:
            return self.credits, whole.reading.present_nk
        row_s, credits = whole.batch.steps.trajectory_s, self.credits
        present_sk = whole.reading.present_nk.to(credits.block_nk.dtype)
        count_nk = present_sk.new_zeros((whole.completions, present_sk.shape[1])).index_add(0, row_s, present_sk)
        total_nk = torch.zeros_like(count_nk).index_add(0, row_s, credits.block_nk * present_sk)
        stop_n = credits.stop_n.new_zeros(whole.completions).index_add(0, row_s, credits.stop_n)
        mean = Credit(total_nk / count_nk.clamp(min=1), stop_n, credits.singleton_m, credits.absent_m)
        return mean, count_nk > 0


class Step:
    """The credit of one training step, the same for every engine: read, credit, advantages, metrics, warnings, rollouts.

    Args:
        scheme: the rule of credit.
        vocabulary: the bytes of every token id; None: another process reads the completions.
        ranks: the processes of a training; None: there is one.

    Attributes:
        zero_batches: number of training batches whose credit was all 0.

    Example:
        >>> from spanwise import Layout
        >>> vocabulary = Vocabulary((b"<answer>", b"4", b"5", b"</answer>"))
        >>> step = Step(Scheme.preset("rloo", Layout({"all": ["answer"]}), per="completion"), vocabulary)
        >>> own = step.read(Batch.jagged([[0, 1, 3], [0, 2, 3]], ["a", "a"], columns={"answer": ["4", "4"]}))
        >>> result = step.finish(own)
        >>> result.advantages_nt.sum(dim=1).tolist(), result.metrics["credit/malformed"], result.warnings
        ([1.0, -1.0], 0.0, [])
    """

    def __init__(self, scheme: Scheme, vocabulary: Vocabulary | None = None, *, ranks: Ranks | None = None) -> None:
        self.scheme, self.vocabulary, self.ranks = scheme, vocabulary, ranks
        self.zero_batches = 0
        self._watch = Watch(scheme)
        self._noted: dict[str, float] = {}

    def note(self, metrics: Mapping[str, float]) -> None:
        """Keep metrics that modes log after a batch was credited, to check them for alarms with the next batch."""
        self._noted.update(metrics)

    def read(self, batch: Batch) -> ReadBatch:
        """Read completions, turn by turn if the scheme or the rollouts ask for it.

        Args:
            batch: the completions of this process; group ids are shared by all processes.

        Raises:
            SpanwiseError: see `turn_rows` and `pipeline.read`.
        """
        assert self.vocabulary is not None, "a process that reads has a vocabulary"
        rows, turns = self._rows(batch)
        read_batch = ReadBatch(rows, read(rows, self.scheme, self.vocabulary), len(batch.group_n), turns)
        return read_batch if self.ranks is None else gathered(read_batch, self.scheme, self.ranks)

    async def read_waiting(self, batch: Batch, in_thread: Callable[..., Awaitable[Any]]) -> ReadBatch:
        """Read completions as `read` does, on the event loop that runs, where rewards of other batches wait as well.

        Args:
            batch: the completions.
            in_thread: awaits a function and its arguments in a thread, for the work that does not wait.
        """
        assert self.vocabulary is not None, "a process that reads has a vocabulary"
        waiting = [objective for objective in self.scheme.objectives if waits(objective)]
        if not waiting:
            return await in_thread(self.read, batch)
        rows, turns = self._rows(batch)
        located = await in_thread(locate, rows, self.scheme, self.vocabulary)
        recorded = await await_rewards(waiting, located[1], {**rows.columns, **rows.extras})
        rest = partial(read, rows, self.scheme, self.vocabulary, recorded=recorded, located=located)
        return ReadBatch(rows, await in_thread(rest), len(batch.group_n), turns)

    def _rows(self, batch: Batch) -> tuple[Batch, Turns | None]:
        """Return one row per turn if the scheme or the rollouts ask for it, else the completions."""
        described = batch.columns.get(TURNS)
        # A method that runs over tokens credits a whole conversation as one sequence.
        by_turns = described is not None and self.scheme.entry.kind != "token" and all(map(says_turns, described))
        return turn_rows(batch, self.scheme) if "steps" in self.scheme.needs or by_turns else (batch, None)

    def finish(
        self,
        own: ReadBatch,
        *,
        mask_nt: Bool[Tensor, "n t"] | None = None,
        learn: bool = True,
        number: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> StepResult:
        """Credit the rows that `read` returned, once values, log-probabilities and the final mask are known.

        Args:
            own: result of `read`, with the values and log-probabilities that the scheme needs filled into its batch.
            mask_nt: the trainer's final mask over the completions (`credit.restrict`); None: it trains on every sampled token.
            learn: False for an evaluation: estimators and warnings then remember nothing of the batch.
            number: number of the step, for warnings.
            dtype: dtype of the advantages.

        Raises:
            SpanwiseError: see `pipeline.credit_batch` and `pipeline.advantages`.
        """
        own = own if self.ranks is None else with_tokens(own, self.scheme, self.ranks)
        batch = self.credit(own, learn=learn, number=number)
        own_credit, spans = batch.credits.take(own.here), own.spans
        if mask_nt is not None:
            mask_su = own.take(mask_nt)
            if int(mask_su.sum()) != int(mask_nt.sum()):
                raise AlignmentError(
                    f"The trainer trains on {int(mask_nt.sum())} tokens, and {int(mask_su.sum())} of them belong to a turn; its "
                    "mask changed after the turns were found."
                )
            spans = restrict(spans, mask_su)
        adv_nt = advantages(own_credit, spans, self.scheme, dtype=dtype)
        return StepResult(own, adv_nt, spans, own_credit, batch.metrics, batch.warnings, batch.credits)

    def credit(self, own: ReadBatch, *, learn: bool = True, number: int | None = None) -> BatchCredit:
        """Credit the rows of all processes, as `finish` does, without the share of each token; rows need no spans for that."""
        whole = own.everyone
        credits = self._credit(whole, learn=learn)
        values = metrics(credits, whole.reading, self.scheme, group_n=whole.batch.group_n)
        sentences, unscored = self._watch.of_reading(own.reading)
        if learn:
            sentences += self._watch.of_batch({**self._noted, **values}, step=number)
            self._noted.clear()
        sentences = sentences if number is None else [f"Step {number}: {sentence}" for sentence in sentences]
        if learn and not credits.has_signal:
            self.zero_batches += 1
            names, place = ", ".join(map(repr, self.scheme.names)), "" if number is None else f" at step {number}"
            cause = "the prompts are too easy or too hard, or a reward is constant"
            if self.zero_batches == 1:
                sentences.append(
                    f"Every advantage of the batch{place} is zero: under no objective ({names}) did a completion differ from what "
                    "it is compared with, so nothing is learned from it. If this lasts (see credit/no_signal), "
                    f"{'the warning before this one says why' if unscored else cause}."
                )
        return BatchCredit(credits, values, sentences)

    def _credit(self, whole: ReadBatch, *, learn: bool) -> Credit:
        """Credit the rows of all processes; an estimator remembers the batch only if it learns."""
        entry: Any = self.scheme.entry
        before = entry.estimator.state_dict() if entry.stateful and not learn else None
        credits = credit_batch(whole.reading, whole.batch, self.scheme)
        if before is not None:
            entry.estimator.load_state_dict(before)
        return credits

    def useful(self, own: ReadBatch) -> Bool[Tensor, " n"]:
        """Mark the rows whose group gets credit somewhere, before values and log-probabilities are known; remember nothing."""
        whole = (own if self.ranks is None else with_tokens(own, self.scheme, self.ranks)).everyone
        return in_useful_groups(self._credit(whole, learn=False), whole.batch.group_n)[own.here]

    def rollouts(
        self,
        result: StepResult,
        *,
        number: int,
        prompts: Sequence[Any],
        completions: Sequence[Any] = (),
        columns: Mapping[str, Sequence[Any]] | None = None,
        learn: bool = True,
    ) -> Rollouts:
        """Return the rows of this process as a table of rollouts: tokens, rewards, credit and advantages.

        Args:
            result: result of `finish`; its batch has token ids, its reading has text.
            number: number of the step.
            prompts, completions, columns: one entry per row.
            learn: as in `finish`.
        """
        batch, adv_nt = result.own.batch, result.advantages_nt
        # Padding on the right.
        fillers = {"ids_nt": 0.0, "mask_nt": 0.0, "value_nt": torch.nan, "logp_nt": torch.nan}
        if "logp_nt" not in self.scheme.needs:
            batch = replace(batch, logp_nt=None)
        tables = {name: (getattr(batch, name), fill) for name, fill in fillers.items() if getattr(batch, name) is not None}
        batch = replace(  # the trainer's table may be wider than the batch at `read`
            batch,
            columns={name: list(values) for name, values in (columns or {}).items()},
            **{name: wider(value_nt, adv_nt.shape[1], fill=fill) for name, (value_nt, fill) in tables.items()},
        )
        return Rollouts(
            mode="train" if learn else "eval",
            step=number,
            method=self.scheme.method,
            batch=batch,
            reading=result.own.reading,
            spans=result.spans,
            credit=result.credit,
            advantages_nt=adv_nt,
            prompts=list(prompts),
            completions=list(completions),
            value_names=self.scheme.value_names,
            more={name: value_n for mode in self.scheme.modes for name, value_n in mode.columns(result.own.batch).items()},
        )
