"""`spanwise report FOLDER`: write `report.html` from the files of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from spanwise.commands.credit.credit import credit_rollouts
from spanwise.commands.credit.page import choose_rows, credit_page, credited_view, several, shown_credit
from spanwise.commands.credit.write import credited_parts, outcome_of
from spanwise.commands.shared.folder import EXPORT, FIDELITY, MOST, again_command, read_fields, write_page
from spanwise.commands.shared.samples import FILE, Samples, ended_runs, read_samples, unmeasured
from spanwise.errors import DataError, SpanwiseError
from spanwise.fidelity.page import fidelity_report
from spanwise.measure import Curve, compare_arms, mean_interval
from spanwise.modes import MODES
from spanwise.recipe import SCRIPT, load
from spanwise.report import TokenView, compare_report, train_report
from spanwise.rollouts import schema
from spanwise.rollouts.files import read_records
from spanwise.rollouts.folder import ONE_PROMPT, TRAINING
from spanwise.rollouts.readers.own import tokenizer_in
from spanwise.rollouts.rows import read_rows

#: Budgets of the voting curves; more points would cost time and show little.
BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16)


def report_folder(folder: str | Path) -> Path:
    """Write `report.html` into the folder of a training run, a comparison, a fidelity measurement or a credit export."""
    path = Path(folder)
    kinds: Mapping[str, Callable[[Path], str]] = {
        EXPORT: credit_page,
        FIDELITY: fidelity_page,
        "metrics.jsonl": train_page,
        "summary.json": compare_page,
    }
    for name, page in kinds.items():
        if (path / name).is_file() and (name != "metrics.jsonl" or (path / "recipe.yaml").is_file()):
            return write_page(path, page(path))
    raise DataError(
        f"'{folder}' holds none of {', '.join(kinds)}: it is no folder of spanwise train, compare, fidelity or credit."
    )


def train_page(folder: Path) -> str:
    """Build the report of a run folder."""
    samples = read_samples(folder) if (folder / FILE).is_file() else None
    recipe = read_fields(folder / "recipe.yaml")
    batches, one_prompt = (sorted((folder / kind).glob("step_*.parquet")) for kind in (TRAINING, ONE_PROMPT))
    view, credit = recorded_view(folder, recipe, batches[-1:])
    return train_report(
        recipe={name: value for name, value in recipe.items() if (name, value) != ("task", SCRIPT)},
        metrics=[line for _, _, line in read_records([folder / "metrics.jsonl"])],
        summary=read_fields(folder / "summary.json") if (folder / "summary.json").is_file() else {},
        samples=_columns(samples) if samples and samples.correct else None,
        intervals=samples.intervals() if samples else None,
        votes={block: _votes(samples, block) for block in samples.correct} if samples else None,
        credit=credit,
        view=view,
        one_prompt=recorded_view(folder, recipe, one_prompt)[0],
        unmeasured=_unmeasured(folder),
        command="" if recipe.get("task") == SCRIPT else again_command("train", folder / "recipe.yaml", folder=folder),
    )


def _unmeasured(folder: Path) -> dict[str, str]:
    """Return the figures that the evaluations of a run lack, as far as its recipe can still be read."""
    try:
        recipe = load(folder / "recipe.yaml")
        layout = recipe.own_layout
    except SpanwiseError:
        return {}
    if recipe.task == SCRIPT and not (folder / FILE).is_file():
        return dict.fromkeys(_HELD_OUT, "the training script has no held-out prompts")
    return unmeasured(layout, recipe.answer_tags, scored=recipe.is_scored)


#: The figures of held-out prompts.
_HELD_OUT = ("accuracy", "ece", "auroc", "brier", "refusal_rate", "malformed")


def compare_page(folder: Path) -> str:
    """Build the report of a comparison from its runs; a run without an evaluation file gives only its final figures."""
    summary = read_fields(folder / "summary.json")
    if not isinstance(summary.get("arms"), list) or not isinstance(summary.get("figures"), dict):
        raise DataError(f"'{folder / 'summary.json'}' is no summary of a comparison: it lists no arms and figures.")
    arms, seeds, options = summary["arms"], summary["seeds"], summary.get("options")
    ended, samples, figures = ended_runs({arm: {seed: folder / f"{arm}-{seed}" for seed in seeds} for arm in arms})
    known = {name for by_seed in figures.values() for values in by_seed.values() for name in values}
    if not known:
        raise DataError("No run of this comparison exists; run spanwise compare again.")
    named = [name for name in next(iter(summary["figures"].values()), {}) if name in known]
    return compare_report(
        title=f"Comparison of {len(arms)} arms",
        recipe=summary.get("recipe", {}),
        comparison=compare_arms(figures, figures=named, reference=summary.get("reference")),
        curves={arm: {seed: end["curve"] for seed, end in by_seed.items()} for arm, by_seed in ended.items()},
        samples={
            arm: pooled(judged) for arm, by_seed in samples.items() if (judged := [s for s in by_seed.values() if s.correct])
        },
        votes={
            arm: over_seeds({seed: _votes(run, run.first, resamples=1) for seed, run in by_seed.items()})
            for arm, by_seed in samples.items()
            if by_seed
        },
        command="" if options is None else again_command("compare", *options.pop("places"), folder=folder, options=options),
    )


def fidelity_page(folder: Path) -> str:
    """Build the report of `fidelity.json`."""
    saved = read_fields(folder / FIDELITY)
    try:
        fields = {name: value for name, value in saved.items() if name != "options"}
        command = again_command("fidelity", saved["source"], folder=folder, options=saved.get("options"))
        return fidelity_report(**fields, command=command)
    except (TypeError, KeyError) as error:
        raise DataError(f"'{folder / FIDELITY}' was not written by spanwise fidelity: {error}.") from error


def over_seeds(votes: Mapping[int, Mapping[str, Curve]]) -> dict[str, Curve]:
    """Average the voting curves over seeds, with Student's t intervals."""
    curves_by_way = {}
    for way, first in {way: curve for curves in votes.values() for way, curve in curves.items()}.items():
        # A seed without any confidence has no weighted vote.
        common = {s: found for s, curves in votes.items() if (found := curves.get(way)) and found.budgets == first.budgets}
        value_sb = torch.tensor([[i.value for i in curve.intervals] for curve in common.values()], dtype=torch.float64)
        curves_by_way[way] = Curve(first.budgets, value_sb, tuple(common), tuple(map(mean_interval, value_sb.T)))
    return curves_by_way


def _columns(samples: Samples) -> dict[str, Tensor]:
    columns = {"confidence": samples.confidence_n, "correct": samples.correct[samples.first], "prompt": samples.prompt_n}
    score_n = samples.score_n
    return columns if score_n is None else {**columns, "score": score_n.clamp(0.0, 1.0)}


def pooled(samples: Sequence[Samples]) -> dict[str, Tensor]:
    """Join the samples of all seeds; a prompt that two seeds answer is one prompt."""
    first_columns, *other_columns = map(_columns, samples)
    return {
        name: torch.cat([column, *(other[name] for other in other_columns)])
        for name, column in first_columns.items()
        if all(name in other for other in other_columns)
    }


def _votes(samples: Samples, block: str, *, resamples: int = 1000) -> dict[str, Curve]:
    most = samples.most_votes(block)
    budgets = sorted({n for n in (*BUDGETS, most) if 1 <= n <= most})
    return samples.votes(block, budgets=budgets, resamples=resamples) if len(budgets) > 1 else {}


def recorded_view(
    folder: Path, recipe: Mapping[str, Any], files: Sequence[Path]
) -> tuple[TokenView | None, dict[str, dict[str, Tensor]]]:
    """Return recorded completions of a run, with the credit of the run's method and of `grpo` (or `bae`)."""
    if not files:
        return None, {}
    table, paying = pa.concat_tables(map(read_rows, files), promote_options="default"), {}
    methods = schema.methods_in(table.column_names)
    entries = recipe.get("objectives") or ()
    judges = [(entry.get("options") or {}).get("of") for entry in entries]
    judges += [name for entry in entries for name in several(entry.get("given"))]
    if len(methods) == 1:
        place = files[0] if len(files) == 1 else files[0].parent
        table, paying = _beside(table, place, "bae" if methods[0] == "grpo" else "grpo")
    if methods:
        of_run = {"objectives": entries, **{name: recipe.get(name) for name in ("method", "options", *MODES)}}
        paying = {methods[0]: of_run, **paying}
    rows = choose_rows(schema.float_column(table, schema.STEP).long(), MOST)
    view = credited_view(
        table, table.take(rows), rows, paying=paying,
        outcome=outcome_of(schema.family_names(table.column_names, "reward"), judges),
        own=next(iter(methods), None), tokenizer=tokenizer_in(folder) or folder / "model",
    )  # fmt: skip
    return replace(view, by_step=len(files) > 1), shown_credit(table, paying)


def _beside(table: pa.Table, place: Path, method: str) -> tuple[pa.Table, dict[str, Any]]:
    """Add another method's credit to the rollouts, if they record enough for it."""
    try:
        result = credit_rollouts(place, methods=[method])
    except SpanwiseError:
        return table, {}
    if not result.table.has_ids:  # the tokens of the page are not those of the file
        return table, {}
    other_table = pa.concat_tables(credited_parts(result))
    for name in schema.method_columns(method, other_table.column_names):
        table = table.append_column(name, other_table[name])
    return table, {method: result.arms.schemes[method].plain()}
