"""`spanwise report FOLDER`: write `report.html` from what a run left behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from spanwise.commands.credit.credit import credit_rollouts
from spanwise.commands.credit.page import credit_page
from spanwise.commands.credit.write import EXPORT, credited_parts, outcome_of, remembered
from spanwise.commands.shared.again import MOST, compare_command, fidelity_command, train_command
from spanwise.commands.shared.files import FIDELITY, read_json, read_lines, read_yaml
from spanwise.commands.shared.folder import write_page
from spanwise.commands.shared.samples import FILE, Samples, check_protocol, read_samples, unmeasured
from spanwise.commands.shared.segments import Segments
from spanwise.commands.shared.view import credited_view, several
from spanwise.errors import DataError, SpanwiseError
from spanwise.fidelity.page import fidelity_report
from spanwise.measure import ArmComparison, Curve, compare_arms, mean_interval
from spanwise.recipe import SCRIPT, answer_tags, is_scored, load, own_layout
from spanwise.report import TokenView, compare_report, train_report
from spanwise.rollouts import schema
from spanwise.rollouts.readers.own import tokenizer_in
from spanwise.rollouts.recorded import read_rows, recorded_credit

#: Budgets of the voting curves; those between cost more than they show.
BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16)


def report_folder(folder: str | Path) -> Path:
    """Write `report.html` into the folder of a training run, a comparison, a fidelity measurement or a credit export."""
    place = Path(folder)
    kinds: Mapping[str, Callable[[Path], str]] = {
        EXPORT: credit_page,
        FIDELITY: fidelity_page,
        "metrics.jsonl": train_page,
        "summary.json": compare_page,
    }
    for name, page in kinds.items():
        if (place / name).is_file() and (name != "metrics.jsonl" or (place / "recipe.yaml").is_file()):
            html = page(place)
            break
    else:
        raise DataError(
            f"'{folder}' holds none of {', '.join(kinds)}: it is no folder of spanwise train, compare, fidelity or credit."
        )
    return write_page(place, html)


def train_page(folder: Path) -> str:
    """The report of a run folder."""
    samples = read_samples(folder) if (folder / FILE).is_file() else None
    recipe = read_yaml(folder / "recipe.yaml")
    view, credit = last_rollouts(folder, recipe)
    return train_report(
        recipe={name: value for name, value in recipe.items() if (name, value) != ("task", SCRIPT)},
        metrics=read_lines(folder / "metrics.jsonl"),
        summary=read_json(folder / "summary.json") if (folder / "summary.json").is_file() else {},
        samples=None if samples is None else _columns(samples),
        votes=None if samples is None else {block: _votes(samples, block) for block in samples.correct},
        credit=credit,
        view=view,
        unmeasured=_unmeasured(folder),
        command="" if recipe.get("task") == SCRIPT else train_command(folder),
    )


def _unmeasured(folder: Path) -> dict[str, str]:
    """The figures that a run cannot have, as far as its recipe can be read today."""
    try:
        recipe = load(folder / "recipe.yaml")
        layout = own_layout(recipe)
    except SpanwiseError:
        return {}
    if recipe.task == SCRIPT and not (folder / FILE).is_file():
        return dict.fromkeys(_HELD_OUT, "the training script asks no held-out prompts")
    return unmeasured({} if layout is None else layout.keys, answer_tags(recipe), scored=is_scored(recipe))


#: The figures of held-out prompts.
_HELD_OUT = ("accuracy", "ece", "auroc", "brier", "refusal_rate", "malformed")


def compare_page(folder: Path) -> str:
    """The report of a comparison, worked out anew from its runs; a run without an evaluation file gives its final figures only."""
    summary = read_json(folder / "summary.json")
    if not isinstance(summary.get("arms"), list) or not isinstance(summary.get("figures"), dict):
        raise DataError(f"'{folder / 'summary.json'}' is not of a comparison: it lists no arms and figures.")
    arms, seeds, reference = summary["arms"], summary["seeds"], summary.get("reference")
    places = {arm: {seed: folder / f"{arm}-{seed}" for seed in seeds} for arm in arms}
    ended = {
        arm: {seed: read_json(file) for seed, place in found.items() if (file := place / "summary.json").is_file()}
        for arm, found in places.items()
    }
    samples = {
        arm: {seed: read_samples(places[arm][seed]) for seed in found if (places[arm][seed] / FILE).is_file()}
        for arm, found in ended.items()
    }
    check_protocol({str(places[arm][seed]): one for arm, found in samples.items() for seed, one in found.items()})
    votes = {
        arm: {seed: _votes(one, one.first, resamples=1) for seed, one in found.items()} for arm, found in samples.items()
    }
    figures = {
        arm: {
            seed: {
                **end["final"],
                **(samples[arm][seed].figures() if seed in samples[arm] else {}),
                **_voted(votes[arm].get(seed)),
            }
            for seed, end in found.items()
        }
        for arm, found in ended.items()
    }
    return compare_report(
        title=f"Comparison of {len(arms)} arms",
        recipe=summary.get("recipe", {}),
        comparison=_compared(figures, list(next(iter(summary["figures"].values()), {})), reference),
        curves={arm: {seed: end["curve"] for seed, end in found.items()} for arm, found in ended.items()},
        samples={arm: pooled(list(found.values())) for arm, found in samples.items() if found},
        votes={arm: over_seeds(found) for arm, found in votes.items() if found},
        command=compare_command(folder, summary),
    )


def fidelity_page(folder: Path) -> str:
    """The report of `fidelity.json`."""
    found = read_json(folder / FIDELITY)
    try:
        shown = {name: value for name, value in found.items() if name != "options"}
        return fidelity_report(**shown, command=fidelity_command(folder, found))
    except (TypeError, KeyError) as error:
        raise DataError(f"'{folder / FIDELITY}' is not what spanwise fidelity writes: {error}.") from error


def over_seeds(votes: Mapping[int, Mapping[str, Curve]]) -> dict[str, Curve]:
    """One curve per way of choosing: the mean over seeds of each seed's accuracy, with Student's t interval."""
    made = {}
    for way, first in {way: curve for curves in votes.values() for way, curve in curves.items()}.items():
        # A seed without any confidence has no weighted vote.
        there = {s: found for s, curves in votes.items() if (found := curves.get(way)) and found.budgets == first.budgets}
        value_sb = torch.tensor([[i.value for i in curve.intervals] for curve in there.values()], dtype=torch.float64)
        made[way] = Curve(first.budgets, value_sb, tuple(there), tuple(map(mean_interval, value_sb.T)))
    return made


def _voted(votes: Mapping[str, Curve] | None) -> dict[str, float]:
    """The last point of each voting curve, as `majority@16`."""
    return {f"{way}@{curve.budgets[-1]}": curve.intervals[-1].value for way, curve in (votes or {}).items()}


def _compared(
    figures: Mapping[str, Mapping[int, Mapping[str, float | None]]], names: Sequence[str], reference: str | None
) -> ArmComparison:
    there = {name for by_seed in figures.values() for values in by_seed.values() for name in values}
    if not there:
        raise DataError("None of the runs of this comparison is there; run spanwise compare again.")
    return compare_arms(figures, figures=[name for name in names if name in there], reference=reference)


def _columns(samples: Samples) -> dict[str, Tensor]:
    columns = {
        "confidence": samples.confidence_n, "correct": samples.correct[samples.first], "prompt": samples.prompt_n,
        "well_formed": samples.well_formed_n,
    }  # fmt: skip
    if samples.refusal_n is not None:
        columns["refusal"] = samples.refusal_n
    scored = samples.by_self_reward()
    return columns if scored is None else {**columns, "score": scored.confidence_n}


def pooled(samples: Sequence[Samples]) -> dict[str, Tensor]:
    """All seeds together; every seed answers the same held-out prompts, so a prompt under two seeds is one prompt."""
    wide = [_columns(found) for found in samples]
    names = [name for name in ("confidence", "correct", "prompt", "score") if all(name in columns for columns in wide)]
    return {name: torch.cat([columns[name] for columns in wide]) for name in names}


def _votes(samples: Samples, block: str, *, resamples: int = 1000) -> dict[str, Curve]:
    size = samples.most_votes(block)
    budgets = sorted({n for n in (*BUDGETS, size) if 1 <= n <= size})
    if len(budgets) < 2:
        return {}
    return samples.votes(block, budgets=budgets, resamples=resamples)


def last_rollouts(folder: Path, recipe: Mapping[str, Any]) -> tuple[TokenView | None, dict[str, dict[str, Tensor]]]:
    """The newest batch of completions that the run kept, as it was credited and as `grpo`, or beside it `bae`, would have."""
    files = sorted((folder / "rollouts").glob("step_*.parquet"))
    if not files:
        return None, {}
    table, paying = read_rows(files[-1]), {}
    methods = schema.methods_in(table.column_names)
    asked = recipe.get("objectives") or ()
    given = [(entry.get("options") or {}).get("of") for entry in asked]
    given += [name for entry in asked for name in several(entry.get("given"))]
    outcome = outcome_of(schema.objectives(table.column_names), given)
    if len(methods) == 1:
        table, paying = _beside(table, files[-1], "bae" if methods[0] == "grpo" else "grpo")
    credit = recorded_credit(table)
    if methods:
        of_run = {"method": str(recipe.get("method")), "objectives": asked, "laser": recipe.get("laser")}
        paying = {methods[0]: of_run, **paying}
    shown = table.slice(0, MOST)
    view = credited_view(
        table, shown, range(len(shown)), methods=tuple(credit), paying=paying,
        segments=Segments.of(recipe.get("method"), recipe.get("options")),
        outcome=outcome, own=next(iter(methods), None), tokenizer=tokenizer_in(folder) or folder / "model",
    )  # fmt: skip
    return view, credit


def _beside(table: pa.Table, file: Path, method: str) -> tuple[pa.Table, dict[str, Any]]:
    """Rollouts with what another method would have credited them with and what pays there, if they tell enough for that."""
    try:
        found = credit_rollouts(file, methods=[method])
    except SpanwiseError:
        return table, {}
    if not found.table.has_ids:  # its tokens are not those of the file
        return table, {}
    other = pa.concat_tables(credited_parts(found))
    for name in schema.made_by(method, other.column_names):
        table = table.append_column(name, other[name])
    return table, remembered(found.arms, {})["paid"]
