"""`Samples`: the answers of one evaluation, from which figures, intervals and votes can be computed later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.commands.shared.folder import read_fields
from spanwise.disk import whole_file
from spanwise.errors import DataError
from spanwise.explain.alarms import CALIBRATION, OF_REWARD, OF_SCORE, SCORE_FIGURES
from spanwise.layout import Layout, together
from spanwise.measure import Curve, Interval, figure_intervals, figures, mean_interval, voting
from spanwise.rollouts import schema

FILE = "evaluation.parquet"
#: The largest budget of a vote.
MOST_VOTES = 16
_Figure = TypeVar("_Figure")
#: Arm -> seed -> the figures, samples or summary of that run.
ByArm = dict[str, dict[int, _Figure]]


@dataclass(frozen=True)
class Samples:
    """One entry per completion of an evaluation."""

    prompt_n: Int[Tensor, " n"]  # index of the held-out prompt
    answers: Mapping[str, list[str | None]]  # answers by block; None if no answer could be read
    correct: Mapping[str, Float[Tensor, " n"]]  # verdicts by block: 1 right, 0 wrong or missing, NaN without a verdict
    confidence_n: Float[Tensor, " n"]  # the stated confidence, or NaN
    well_formed_n: Bool[Tensor, " n"]
    refusal_n: Bool[Tensor, " n"] | None = None  # the completion declined to answer; None where the task knows no refusals
    score_n: Float[Tensor, " n"] | None = None  # the score of a mode, not clipped; NaN where a completion has none
    rewards: Mapping[str, Float[Tensor, " n"]] = field(default_factory=dict)  # by objective; NaN if it does not apply

    @property
    def first(self) -> str:
        """The first block that holds an answer; "" if there is none."""
        return next(iter(self.correct), "")

    @property
    def stated(self) -> bool:
        """Whether any completion states a confidence."""
        return not bool(self.confidence_n.isnan().all())

    def by_score(self) -> Samples | None:
        """Return the samples with the score, clipped to [0, 1], as their confidence; None if there is no score."""
        if self.score_n is None:
            return None
        return replace(self, confidence_n=self.score_n.clamp(0.0, 1.0), score_n=None)

    def most_votes(self, block: str) -> int:
        """Return how many samples a vote over a block's answers can have, at most 16; 0 if none was judged."""
        if not len(self.prompt_n) or block not in self.correct or bool(self.correct[block].isnan().all()):
            return 0
        return min(int(torch.bincount(self.prompt_n).max()), MOST_VOTES)

    def figures(self) -> dict[str, float | None]:
        """Compute accuracy (also `<block>_accuracy`), calibration, format, refusals, `laser_<figure>` and `reward/<objective>`."""
        return self._each(figures) | {name: interval.value for name, interval in self.mean_rewards().items()}

    def intervals(self, *, resamples: int = 1000, seed: int = 0) -> dict[str, Interval | None]:
        """Compute the figures with bootstrap intervals by prompt (`measure.figure_intervals`)."""
        prompts = self.prompt_n.tolist()
        each = self._each(partial(figure_intervals, prompts=prompts, resamples=resamples, seed=seed))
        return {**each, **self.mean_rewards()}

    def mean_rewards(self) -> dict[str, Interval]:
        """Compute the mean of each reward with its interval by prompt; elements of a list count as `reward/<name>.items[*]`."""
        intervals = {
            f"{OF_REWARD}{name}": mean_interval(torch.cat(parts).double(), self.prompt_n.repeat(len(parts)))
            for name, parts in together(self.rewards).items()
        }
        return {name: interval for name, interval in intervals.items() if interval.value == interval.value}

    def _each(self, work: Callable[..., Mapping[str, _Figure]]) -> dict[str, _Figure]:
        """Compute all figures of the first answer, the accuracy of later answers, and the figures of the score."""
        marks = {"well_formed_n": self.well_formed_n, "refusal_n": self.refusal_n}
        if not self.correct:
            values = work(self.confidence_n, torch.full_like(self.confidence_n, torch.nan), **marks)
            return {name: values[name] for name in ("format_rate", *(["coverage"] if self.stated else []))}
        by_block = {name: work(self.confidence_n, correct_n, **marks) for name, correct_n in self.correct.items()}
        later_figures = {f"{name}_accuracy": values["accuracy"] for name, values in by_block.items() if name != self.first}
        scored_samples = self.by_score()
        score_figures = {} if scored_samples is None else scored_samples._each(work)
        by_score = {name: score_figures[name.removeprefix(OF_SCORE)] for name in SCORE_FIGURES if score_figures}
        return {**by_block[self.first], **later_figures, **by_score}

    def votes(
        self, block: str | None = None, *, budgets: Sequence[int] | None = None, resamples: int = 1000
    ) -> dict[str, Curve]:
        """Compute accuracy against the number of samples (`measure.voting`) for the answers of one block, by default the first."""
        name, scored_samples = block or self.first, self.by_score()
        if scored_samples is not None and not self.stated:  # the score is the only confidence
            return scored_samples.votes(block, budgets=budgets, resamples=resamples)
        prompts = self.prompt_n.tolist()
        curves = voting(
            self.answers[name], self.confidence_n, self.correct[name], prompts=prompts, budgets=budgets, resamples=resamples
        )
        if scored_samples is not None:
            score_curves = scored_samples.votes(block, budgets=budgets, resamples=resamples)
            curves |= {f"{OF_SCORE}{way}": score_curves[way] for way in ("weighted", "maxconf") if way in score_curves}
        return curves

    def figures_and_votes(self) -> dict[str, float | None]:
        """Compute the figures, and the accuracy of a vote over up to 16 samples of a prompt, as `majority@16`."""
        size = self.most_votes(self.first)
        votes = self.votes(budgets=(size,), resamples=1) if size else {}  # seeds give the interval
        ways = ("majority", "weighted", f"{OF_SCORE}weighted")
        return {**self.figures(), **{f"{way}@{size}": votes[way].intervals[0].value for way in ways if way in votes}}

    def write(self, folder: str | Path) -> None:
        """Write `evaluation.parquet` into a folder: a row per completion, null for missing values."""
        columns: dict[str, Any] = {"prompt": self.prompt_n}
        for name, correct_n in self.correct.items():
            columns |= {f"answer/{name}": pa.array(self.answers[name], pa.string()), f"correct/{name}": correct_n.double()}
        if self.correct or self.stated:
            columns["confidence"] = self.confidence_n.double()
        columns |= {"well_formed": self.well_formed_n, "refusal": self.refusal_n}
        columns |= {f"{OF_REWARD}{name}": reward_n.double() for name, reward_n in self.rewards.items()}
        columns[schema.SCORE] = None if self.score_n is None else self.score_n.double()
        table = pa.table({
            name: pa.array(column.numpy(), from_pandas=True) if isinstance(column, Tensor) else column
            for name, column in columns.items()
            if column is not None
        })  # fmt: skip
        with whole_file(Path(folder) / FILE) as unfinished:
            pq.write_table(table, unfinished)


def unmeasured(layout: Layout | None, tags: Mapping[str, str], *, scored: bool = False) -> dict[str, str]:
    """Return the figures that an evaluation cannot have, each with the reason."""
    keys_of = {} if layout is None else layout.keys
    all_parts = list(dict.fromkeys(part for parts in keys_of.values() for part in parts))
    if layout is None or not all_parts:
        return {}
    noun, template = ("tag", "<{}>") if layout.segmenters == ("tags",) else ("part", "'{}'")
    last, (answer, confidence) = list(keys_of)[-1], (tags["answer"], tags["confidence"])
    judged, of_score = ("accuracy", "refusal_rate", "verdict_rate"), SCORE_FIGURES[1:] if scored else ()

    def only(parts: Sequence[str]) -> str:
        return f", only {', '.join(map(template.format, parts))}" if parts else ""

    if noun == "part" and not {answer, confidence} & set(all_parts):  # another kind of task, whose parts need no list
        reason = f"no block has the part '{answer}' or '{confidence}'"
        reason += "; if another part is the answer, name it in the objective correct"
        return dict.fromkeys((*judged, "coverage", *CALIBRATION, *of_score), reason)
    reasons: dict[str, str] = {}
    if confidence not in keys_of[last]:
        reason = f"the last block, {last}, has no {noun} {template.format(confidence)}{only(keys_of[last])}"
        reason += "; the figures of the score are measured" if scored and answer in all_parts else ""
        reasons = dict.fromkeys(("coverage", *CALIBRATION), reason)
    if answer not in all_parts:
        reason = f"no block has the {noun} {template.format(answer)}{only(all_parts)}"
        reason += "; name the answer's own in the objective correct"
        reasons |= dict.fromkeys((*judged, *CALIBRATION, *of_score), reason)
    return reasons


def read_samples(folder: str | Path) -> Samples:
    """Read `evaluation.parquet` of a run folder; raise a DataError if that fails."""
    file = Path(folder) / FILE
    try:
        table = pq.read_table(file)
        number_columns = {entry.name: table[entry.name] for entry in table.schema if not entry.name.startswith("answer/")}
        columns = {name: torch.tensor(column.to_numpy()) for name, column in number_columns.items()}
        blocks = [name.removeprefix("correct/") for name in columns if name.startswith("correct/")]
        return Samples(
            columns["prompt"],
            {name: table[f"answer/{name}"].to_pylist() for name in blocks},
            {name: columns[f"correct/{name}"].double() for name in blocks},
            columns.get("confidence", torch.full((len(table),), torch.nan)).double(),
            columns["well_formed"],
            columns.get("refusal"),
            columns.get(schema.SCORE),
            {name.removeprefix(OF_REWARD): column for name, column in columns.items() if name.startswith(OF_REWARD)},
        )
    except FileNotFoundError:
        raise DataError(f"The evaluation '{file}' does not exist; write it with: spanwise eval {folder}") from None
    except (OSError, pa.ArrowInvalid, KeyError) as error:
        raise DataError(f"The file '{file}' cannot be read as an evaluation: {str(error).splitlines()[0]}") from error


def ended_runs(
    places: Mapping[str, Mapping[int, Path]],
) -> tuple[ByArm[dict[str, Any]], ByArm[Samples], ByArm[dict[str, float | None]]]:
    """Collect summaries, samples and final figures (with a vote's accuracy) of the runs that have ended, by arm and seed."""
    ended, samples, figures = ({arm: {} for arm in places} for _ in range(3))
    files = [(arm, seed, place, place / "summary.json") for arm, seeds in places.items() for seed, place in seeds.items()]
    for arm, seed, place, file in files:
        if file.is_file():
            ended[arm][seed] = read_fields(file)
            figures[arm][seed] = ended[arm][seed]["final"]
            if (place / FILE).is_file():
                samples[arm][seed] = read_samples(place)
                figures[arm][seed] = figures[arm][seed] | samples[arm][seed].figures_and_votes()
    _check_protocol({str(places[arm][seed]): run for arm, seeds in samples.items() for seed, run in seeds.items()})
    return ended, samples, figures


def _check_protocol(samples: Mapping[str, Samples]) -> None:
    """Refuse to compare evaluations of different sizes."""
    sizes = {run: (len(run_samples.prompt_n.unique()), len(run_samples.prompt_n)) for run, run_samples in samples.items()}
    most = max(sizes, key=lambda run: sizes[run][1], default="")
    for run, size in sizes.items():
        if size != sizes[most]:
            shapes = [f"{prompts} prompts x {count / max(prompts, 1):g} samples" for prompts, count in (size, sizes[most])]
            prompts, count = sizes[most]
            raise DataError(
                f"The evaluation of '{run}' has {shapes[0]} and that of '{most}' has {shapes[1]}, so their figures cannot be "
                f"compared. Write it again: spanwise eval {run} --prompts {prompts} --samples {count // max(prompts, 1)}"
            )
