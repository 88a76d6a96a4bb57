"""`Step`: what every engine drives, in two calls; before them it fills in a batch, after them it places the advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.batch import Batch
from spanwise.credit import restrict
from spanwise.errors import AlignmentError
from spanwise.explain.remarks import Watch
from spanwise.pipeline import advantages, credit_batch, metrics, read
from spanwise.rollouts import Rollouts
from spanwise.scheme import Scheme
from spanwise.segment import Vocabulary
from spanwise.step.rows import TURNS, Ranks, ReadBatch, gathered, says_turns, turn_rows, wider, with_tokens
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
        row_s, credits = whole.batch.steps.trajectory_s, self.credits
        present_sk = whole.reading.present_nk.to(credits.block_nk.dtype)
        count_nk = present_sk.new_zeros((whole.completions, present_sk.shape[1])).index_add(0, row_s, present_sk)
        total_nk = torch.zeros_like(count_nk).index_add(0, row_s, credits.block_nk * present_sk)
        stop_n = credits.stop_n.new_zeros(whole.completions).index_add(0, row_s, credits.stop_n)
        mean = Credit(total_nk / count_nk.clamp(min=1), stop_n, credits.singleton_m, credits.absent_m)
        return mean, count_nk > 0


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
        told = batch.columns.get(TURNS)  # a method that runs over tokens takes a conversation as the one sequence that it is
        says = told is not None and self.scheme.entry.kind != "token" and all(map(says_turns, told))
        if "steps" in self.scheme.needs or says:
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
        entry: Any = self.scheme.entry
        before = entry.estimator.state_dict() if entry.stateful and not learn else None
        credits = credit_batch(whole.reading, whole.batch, self.scheme)
        if before is not None:
            entry.estimator.load_state_dict(before)
        mine, spans = credits.take(own.here), own.spans
        if mask_nt is not None:
            mask_su = mask_nt if own.turns is None else own.turns.take(mask_nt[:, : own.turns.width])
            if own.turns is not None and int(mask_su.sum()) != int(mask_nt.sum()):
                raise AlignmentError(
                    f"The trainer trains on {int(mask_nt.sum())} tokens, and {int(mask_su.sum())} of them belong to a turn; its "
                    "mask changed after the turns were found."
                )
            spans = restrict(spans, mask_su)
        adv_nt = advantages(mine, spans, self.scheme, dtype=dtype)
        known = metrics(credits, whole.reading, self.scheme, group_n=whole.batch.group_n)
        sentences, unscored = self._watch.of_reading(own.reading)
        if learn:
            sentences += self._watch.of_batch({**self._noted, **known}, step=number)
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
        return StepResult(own, adv_nt, spans, mine, known, sentences, credits)

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
        # What is behind their last token.
        known = {"ids_nt": 0.0, "mask_nt": 0.0, "value_nt": torch.nan, "logp_nt": torch.nan}
        if "logp_nt" not in self.scheme.needs:
            batch = replace(batch, logp_nt=None)
        there = {name: (getattr(batch, name), fill) for name, fill in known.items() if getattr(batch, name) is not None}
        batch = replace(  # a trainer may have widened what was read
            batch,
            columns={name: list(values) for name, values in (columns or {}).items()},
            **{name: wider(value_nt, adv_nt.shape[1], fill=fill) for name, (value_nt, fill) in there.items()},
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
