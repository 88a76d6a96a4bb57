"""`Step`: what every engine drives, in two calls; before them it fills in a batch, after them it places the advantages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from spanwise.batch import Batch
from spanwise.credit import restrict
from spanwise.explain.remarks import Watch
from spanwise.pipeline import advantages, credit_batch, metrics, read
from spanwise.rollouts import Rollouts
from spanwise.scheme import Scheme
from spanwise.segment import Vocabulary
from spanwise.step.rows import Ranks, ReadBatch, gathered, with_tokens
from spanwise.step.turns import has_turns, mean_credit, restrict_turns, turn_rows
from spanwise.types import Credit, Spans


@dataclass(frozen=True)
class StepResult:
    """What the rows of this process are trained with, and what is to be said of the batch.

    Attributes:
        own: what was read here; `own.put` takes numbers of rows to the completions.
        advantages_nt: of the tokens of the rows.
        spans: of the rows, without those of completions that the trainer left out.
        credit: of the rows; its counters cover all processes.
        metrics: of the rows of all processes.
        warnings: sentences that were not said before.
        credits: of the rows of all processes.
    """

    own: ReadBatch
    advantages_nt: Float[Tensor, "n t"]
    spans: Spans
    credit: Credit
    metrics: dict[str, float]
    warnings: list[str]
    credits: Credit

    def by_completion(self) -> tuple[Credit, Bool[Tensor, "n k"]]:
        """The credit of all completions, the mean over turns where rows are turns, and which blocks each has."""
        whole = self.own.everyone
        if whole.batch.steps is None:
            return self.credits, whole.reading.present_nk
        return mean_credit(self.credits, whole.reading, whole.batch.steps.trajectory_s, completions=whole.completions)


class Step:
    """One training step's worth of credit, the same for every engine: read, credit, advantages, metrics, warnings, rollouts.

    Args:
        scheme: the rule.
        vocabulary: the bytes of every token id; None: completions are read elsewhere.
        ranks: the processes of a training; None: there is one.

    Attributes:
        zero_batches: how many training batches had no credit other than 0.

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
        """What modes log of a batch after it was credited: looked through for alarms with the metrics of the next one."""
        self._noted.update(metrics)

    def read(self, batch: Batch) -> ReadBatch:
        """Read completions, turn by turn where the scheme or the rollouts ask for it.

        Args:
            batch: of this process; its groups are numbered over all processes.

        Raises:
            SpanwiseError: see `turn_rows` and `pipeline.read`.
        """
        assert self.vocabulary is not None, "who reads has a vocabulary"
        completions, turns = len(batch.group_n), None
        if has_turns(batch, self.scheme):
            batch, turns = turn_rows(batch, self.scheme)
        own = ReadBatch(batch, read(batch, self.scheme, self.vocabulary), completions, turns)
        return own if self.ranks is None else gathered(own, self.scheme, self.ranks)

    def finish(
        self,
        own: ReadBatch,
        *,
        mask_nt: Bool[Tensor, "n t"] | None = None,
        learn: bool = True,
        number: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> StepResult:
        """Credit what was read, once values, log-probabilities and the final mask are there.

        Args:
            own: what `read` gave, its batch with what the scheme needs of models.
            mask_nt: the trainer's final mask over the completions (`credit.restrict`); None: it trains on all that was read.
            learn: False: an evaluation, of which an estimator remembers nothing and no habit is made.
            number: of the step, for warnings.
            dtype: of the advantages.

        Raises:
            SpanwiseError: see `pipeline.credit_batch` and `pipeline.advantages`.
        """
        own = own if self.ranks is None else with_tokens(own, self.scheme, self.ranks)
        whole = own.everyone
        with nullcontext() if learn else _unmoved(self.scheme.entry):
            credits = credit_batch(whole.reading, whole.batch, self.scheme)
        mine, spans = credits.take(own.here), own.spans
        if mask_nt is not None:
            spans = restrict(spans, mask_nt) if own.turns is None else restrict_turns(spans, mask_nt, own.turns)
        adv_nt = advantages(mine, spans, self.scheme, dtype=dtype)
        known = metrics(credits, whole.reading, self.scheme, group_n=whole.batch.group_n)
        sentences = self._warnings(own, credits, known, learn=learn, number=number)
        return StepResult(own, adv_nt, spans, mine, known, sentences, credits)

    def _warnings(
        self, own: ReadBatch, credits: Credit, known: Mapping[str, float], *, learn: bool, number: int | None
    ) -> list[str]:
        sentences, unscored = self._watch.of_reading(own.reading)
        if learn:
            sentences += self._watch.of_batch({**self._noted, **known}, step=number)
            self._noted.clear()
        sentences = sentences if number is None else [f"Step {number}: {sentence}" for sentence in sentences]
        if not learn or credits.has_signal:
            return sentences
        self.zero_batches += 1
        return sentences if self.zero_batches > 1 else [*sentences, self._no_signal(number, explained=unscored)]

    def _no_signal(self, number: int | None, *, explained: bool) -> str:
        names, place = ", ".join(f"'{name}'" for name in self.scheme.names), "" if number is None else f" at step {number}"
        cause = "the prompts are too easy or too hard, or a reward is constant"
        return (
            f"Every advantage of the batch{place} is zero: under no objective ({names}) did a completion differ from what it is "
            f"compared with, so nothing is learned from it. If this lasts (see credit/no_signal), "
            f"{'the warning before this one says why' if explained else cause}."
        )

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
        """The rows of this process with everything that was said of them.

        Args:
            result: of `finish`; its batch has token ids, its reading text.
            number: of the step.
            prompts, completions, columns: of the rows.
            learn: as in `finish`.
        """
        batch, adv_nt = result.own.batch, result.advantages_nt
        assert batch.ids_nt is not None, "the batch of a trainer has token ids"
        assert batch.mask_nt is not None, "the batch of a trainer has a mask"
        spare = adv_nt.shape[1] - batch.ids_nt.shape[1]  # of a trainer that widened what was read
        logp_nt = batch.logp_nt if "logp_nt" in self.scheme.needs else None
        batch = replace(
            batch,
            ids_nt=pad(batch.ids_nt, (0, spare)),
            mask_nt=pad(batch.mask_nt, (0, spare)),
            columns={name: list(values) for name, values in (columns or {}).items()},
            value_nt=None if batch.value_nt is None else _wider(batch.value_nt, spare),
            logp_nt=None if logp_nt is None else _wider(logp_nt, spare),
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


def _wider(value_nt: Tensor, spare: int) -> Tensor:
    """With more tokens, of which nothing is known."""
    return pad(value_nt, (*(0, 0) * (value_nt.dim() - 2), 0, spare), value=torch.nan) if spare else value_nt


@contextmanager
def _unmoved(entry: Any) -> Iterator[None]:
    """What is only looked at teaches an estimator nothing."""
    state = entry.estimator.state_dict() if entry.stateful else None
    yield
    if state is not None:
        entry.estimator.load_state_dict(state)
