"""`Samples`: the answers and verdicts of an evaluation. Figures and votes are computed from them later."""

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
from spanwise.errors import DataError, first_line
from spanwise.explain.alarms import CALIBRATION, OF_REWARD, OF_SCORE, SCORE_FIGURES
from spanwise.layout import Layout, together
from spanwise.measure import Curve, Interval, figure_intervals, figures, mean_interval, voting
from spanwise.rollouts import schema

FILE = "evaluation.parquet"
_Figure = TypeVar("_Figure")
#: Maps the name of a compared recipe, and then a seed, to a result of the run, such as its samples.
ByArm = dict[str, dict[int, _Figure]]


@dataclass(frozen=True)
class Samples:
    """The completions of an evaluation, in columns."""

    prompt_n: Int[Tensor, " n"]  # The index of each completion's held-out prompt.
    answers: Mapping[str, list[str | None]]  # Answers by block; None if no answer could be read.
    correct: Mapping[str, Float[Tensor, " n"]]  # By block: 1 if the answer is right, 0 if wrong or missing, NaN if unknown.
    confidence_n: Float[Tensor, " n"]  # The confidence that each completion states, or NaN.
    well_formed_n: Bool[Tensor, " n"]
    refusal_n: Bool[Tensor, " n"] | None = None  # Whether the completion declines to answer.
    score_n: Float[Tensor, " n"] | None = None  # The self-rewarding score, not clipped; NaN if a completion has none.
    rewards: Mapping[str, Float[Tensor, " n"]] = field(default_factory=dict)  # Rewards by objective; NaN without a reward.

    @property
    def first(self) -> str:
        """The name of the first block that holds an answer; "" if there is none."""
        return next(iter(self.correct), "")

    @property
    def stated(self) -> bool:
        """Whether any completion states a confidence."""
        return not bool(self.confidence_n.isnan().all())

    def by_score(self) -> "Samples | None":
        """Return a copy with the self-rewarding scores as confidences, or None if there are no scores."""
        return None if self.score_n is None else replace(self, confidence_n=self.score_n.clamp(0.0, 1.0), score_n=None)

    def most_votes(self, block: str) -> int:
        """Return how many samples of a prompt can vote on a block's answer, at most 16."""
        if not len(self.prompt_n) or block not in self.correct or bool(self.correct[block].isnan().all()):
            return 0
        return min(int(torch.bincount(self.prompt_n).max()), 16)

    def figures(self) -> dict[str, float | None]:
        """Compute the evaluation's figures: accuracy, calibration, format, refusals, and mean rewards."""
        return self._apply_to_answers(figures) | {name: interval.value for name, interval in self.mean_rewards().items()}

    def intervals(self, *, resamples: int = 1000) -> dict[str, Interval | None]:
        """Compute the evaluation's figures with bootstrap intervals over prompts."""
        compute_intervals = partial(figure_intervals, prompts=self.prompt_n.tolist(), resamples=resamples)
        return {**self._apply_to_answers(compute_intervals), **self.mean_rewards()}

    def mean_rewards(self) -> dict[str, Interval]:
        """Compute each reward's mean with an interval over prompts. The elements of a JSON list share one mean."""
        interval_by_reward = {
            f"{OF_REWARD}{name}": mean_interval(torch.cat(columns).double(), self.prompt_n.repeat(len(columns)))
            for name, columns in together(self.rewards).items()
        }
        return {name: interval for name, interval in interval_by_reward.items() if interval.value == interval.value}

    def _apply_to_answers(self, compute: Callable[..., Mapping[str, _Figure]]) -> dict[str, _Figure]:
        """Compute all figures of the first answer, the accuracy of later answers, and the calibration of LaSeR's scores."""
        format_columns = {"well_formed_n": self.well_formed_n, "refusal_n": self.refusal_n}
        if not self.correct:
            unjudged_figures = compute(self.confidence_n, torch.full_like(self.confidence_n, torch.nan), **format_columns)
            return {name: unjudged_figures[name] for name in ("format_rate", *(["coverage"] if self.stated else []))}
        figures_by_block = {
            name: compute(self.confidence_n, correct_n, **format_columns) for name, correct_n in self.correct.items()
        }
        later_accuracies = {f"{name}_accuracy": figures_by_block[name]["accuracy"] for name in list(figures_by_block)[1:]}
        laser_figures = {}
        if (scored_samples := self.by_score()) is not None:
            score_figures = scored_samples._apply_to_answers(compute)
            laser_figures = {name: score_figures[name.removeprefix(OF_SCORE)] for name in SCORE_FIGURES}
        return {**figures_by_block[self.first], **later_accuracies, **laser_figures}

    def votes(
        self, block: str | None = None, *, budgets: Sequence[int] | None = None, resamples: int = 1000
    ) -> dict[str, Curve]:
        """Compute, for each number of samples, the accuracy of votes on one block's answers."""
        block_name = block or self.first
        scored_samples = self.by_score()
        if scored_samples is not None and not self.stated:  # without stated confidences, votes use LaSeR's scores instead
            return scored_samples.votes(block, budgets=budgets, resamples=resamples)
        prompt_indices = self.prompt_n.tolist()
        answers = self.answers[block_name]
        correct_n = self.correct[block_name]
        curves = voting(answers, self.confidence_n, correct_n, prompts=prompt_indices, budgets=budgets, resamples=resamples)
        if scored_samples is not None:
            laser_curves = scored_samples.votes(block, budgets=budgets, resamples=resamples)
            curves |= {f"{OF_SCORE}{name}": laser_curves[name] for name in ("weighted", "maxconf") if name in laser_curves}
        return curves

    def figures_and_votes(self) -> dict[str, float | None]:
        """Compute the figures and the accuracy of votes, such as `majority@16`."""
        vote_count = self.most_votes(self.first)
        vote_names = ("majority", "weighted", f"{OF_SCORE}weighted")
        # One bootstrap resample is enough, because only the accuracies are used, not their intervals.
        votes = self.votes(budgets=(vote_count,), resamples=1) if vote_count else {}
        return self.figures() | {f"{way}@{vote_count}": votes[way].intervals[0].value for way in vote_names if way in votes}

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
        sample_table = pa.table({
            name: pa.array(column.numpy(), from_pandas=True) if isinstance(column, Tensor) else column
            for name, column in columns.items()
            if column is not None
        })  # fmt: skip
        with whole_file(Path(folder) / FILE) as temporary_file:
            pq.write_table(sample_table, temporary_file)


def unmeasured(layout: Layout | None, tags: Mapping[str, str], *, scored: bool = False) -> dict[str, str]:
    """Return the figures that an evaluation cannot measure, each with the reason."""
    if layout is None or not any(layout.keys.values()):
        return {}
    parts_by_block = layout.keys
    part_names = list(dict.fromkeys(part for parts in parts_by_block.values() for part in parts))
    part_noun = "tag" if layout.segmenters == ("tags",) else "part"
    part_template = "<{}>" if part_noun == "tag" else "'{}'"
    last_block = list(parts_by_block)[-1]
    answer_tag, confidence_tag = tags["answer"], tags["confidence"]
    judged_figure_names = ("accuracy", "refusal_rate", "verdict_rate")
    score_figure_names = SCORE_FIGURES[1:] if scored else ()

    def only(parts: Sequence[str]) -> str:
        return f", only {', '.join(map(part_template.format, parts))}" if parts else ""

    # Without a part (such as a tag) for the answer or the confidence, no answer can be judged.
    if part_noun == "part" and {answer_tag, confidence_tag}.isdisjoint(part_names):
        no_part_reason = (
            f"no block has the part '{answer_tag}' or '{confidence_tag}'; if the answer is in another part, name that "
            "part in the objective 'correct'"
        )
        return dict.fromkeys((*judged_figure_names, "coverage", *CALIBRATION, *score_figure_names), no_part_reason)
    reason_by_figure: dict[str, str] = {}
    if confidence_tag not in parts_by_block[last_block]:
        confidence_part = part_template.format(confidence_tag) + only(parts_by_block[last_block])
        reason = f"the last block, {last_block}, has no {part_noun} {confidence_part}"
        if scored and answer_tag in part_names:
            reason = f"{reason}; the self-rewarding score is measured instead of a confidence"
        reason_by_figure = dict.fromkeys(("coverage", *CALIBRATION), reason)
    if answer_tag not in part_names:
        answer_part = part_template.format(answer_tag) + only(part_names)
        reason = f"no block has the {part_noun} {answer_part}; name the {part_noun} of the answer in the objective 'correct'"
        reason_by_figure |= dict.fromkeys((*judged_figure_names, *CALIBRATION, *score_figure_names), reason)
    return reason_by_figure


def read_samples(folder: str | Path) -> Samples:
    """Read `evaluation.parquet` of a run folder; raise a DataError if that fails."""
    file = Path(folder) / FILE
    try:
        table = pq.read_table(file)
        tensor_names = (name for name in table.column_names if not name.startswith("answer/"))
        columns = {name: torch.tensor(table[name].to_numpy()) for name in tensor_names}
        block_names = [name.removeprefix("correct/") for name in columns if name.startswith("correct/")]
        answers = {name: table[f"answer/{name}"].to_pylist() for name in block_names}
        correct_by_block = {name: columns[f"correct/{name}"].double() for name in block_names}
        confidence_n = columns.get("confidence", torch.full((len(table),), torch.nan)).double()
        rewards = {name.removeprefix(OF_REWARD): column for name, column in columns.items() if name.startswith(OF_REWARD)}
        refusal_n, score_n = columns.get("refusal"), columns.get(schema.SCORE)
        return Samples(
            columns["prompt"], answers, correct_by_block, confidence_n, columns["well_formed"], refusal_n, score_n, rewards
        )
    except FileNotFoundError:
        raise DataError(f"The evaluation '{file}' does not exist; write it with: spanwise eval {folder}") from None
    except (OSError, pa.ArrowInvalid, KeyError) as error:
        raise DataError(f"The file '{file}' cannot be read as an evaluation: {first_line(error)}.") from error


def ended_runs(
    places: Mapping[str, Mapping[int, Path]],
) -> tuple[ByArm[dict[str, Any]], ByArm[Samples], ByArm[dict[str, float | None]]]:
    """Read the summaries, samples and final figures of a comparison's finished runs."""
    summaries_by_arm: ByArm[dict[str, Any]] = {arm: {} for arm in places}
    samples_by_arm: ByArm[Samples] = {arm: {} for arm in places}
    figures_by_arm: ByArm[dict[str, float | None]] = {arm: {} for arm in places}
    for arm, seed, folder in ((arm, seed, folder) for arm, arm_runs in places.items() for seed, folder in arm_runs.items()):
        if (folder / "summary.json").is_file():
            summaries_by_arm[arm][seed] = read_fields(folder / "summary.json")
            figures_by_arm[arm][seed] = summaries_by_arm[arm][seed]["final"]
            if (folder / FILE).is_file():
                samples_by_arm[arm][seed] = read_samples(folder)
                figures_by_arm[arm][seed] = figures_by_arm[arm][seed] | samples_by_arm[arm][seed].figures_and_votes()
    _check_sizes({str(places[arm][seed]): run for arm, arm_runs in samples_by_arm.items() for seed, run in arm_runs.items()})
    return summaries_by_arm, samples_by_arm, figures_by_arm


def _check_sizes(samples: Mapping[str, Samples]) -> None:
    """Refuse to compare evaluations with different numbers of prompts or samples."""
    prompts_by_run = {run: run_samples.prompt_n for run, run_samples in samples.items()}
    sizes = {run: (len(prompt_n.unique()), len(prompt_n)) for run, prompt_n in prompts_by_run.items()}
    largest_run = max(sizes, key=lambda run: sizes[run][1], default="")
    for run in sizes:
        if sizes[run] != sizes[largest_run]:
            prompt_count, completion_count = sizes[largest_run]
            size, largest_size = (f"{p} prompts x {n / max(p, 1):g} samples" for p, n in (sizes[run], sizes[largest_run]))
            raise DataError(
                f"The evaluations of '{run}' ({size}) and '{largest_run}' ({largest_size}) differ in size. Evaluate "
                f"'{run}' again: spanwise eval {run} --prompts {prompt_count} --samples {completion_count // max(prompt_count, 1)}"
            )
