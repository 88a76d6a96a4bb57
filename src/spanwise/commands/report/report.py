"""`spanwise report FOLDER`: write `report.html` from the files in a folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from spanwise.commands.credit.credit import credit_rollouts
from spanwise.commands.credit.page import as_names, choose_rows, credit_page, credited_view, groups_of_steps
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

#: The numbers of samples at which a voting curve is computed.
BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16)


def report_folder(folder: str | Path) -> Path:
    """Write `report.html` into the folder of a run, comparison or other result."""
    run_folder = Path(folder)
    page_makers: Mapping[str, Callable[[Path], str]] = {
        EXPORT: credit_page,
        FIDELITY: fidelity_page,
        "metrics.jsonl": train_page,
        "summary.json": compare_page,
    }
    for name, make_page in page_makers.items():
        if (run_folder / name).is_file() and (name != "metrics.jsonl" or (run_folder / "recipe.yaml").is_file()):
            return write_page(run_folder, make_page(run_folder))
    raise DataError(
        f"'{folder}' has none of the files {', '.join(page_makers)}. Give a folder that spanwise train, "
        "compare, fidelity or credit wrote."
    )


def train_page(folder: Path) -> str:
    """Build the report of a training run from the files of its folder."""
    samples = read_samples(folder) if (folder / FILE).is_file() else None
    recipe_fields = read_fields(folder / "recipe.yaml")
    batch_files = sorted((folder / TRAINING).glob("step_*.parquet"))
    one_prompt_files = sorted((folder / ONE_PROMPT).glob("step_*.parquet"))
    token_view, credit_by_method = recorded_view(folder, recipe_fields, batch_files[-1:])
    return train_report(
        recipe={name: value for name, value in recipe_fields.items() if (name, value) != ("task", SCRIPT)},
        metrics=[record for _, _, record in read_records([folder / "metrics.jsonl"])],
        summary=read_fields(folder / "summary.json") if (folder / "summary.json").is_file() else {},
        samples=_columns(samples) if samples and samples.correct else None,
        intervals=samples.intervals() if samples else None,
        votes={block: _votes(samples, block) for block in samples.correct} if samples else None,
        credit=credit_by_method,
        view=token_view,
        one_prompt=recorded_view(folder, recipe_fields, one_prompt_files)[0],
        unmeasured=_unmeasured(folder),
        command="" if recipe_fields.get("task") == SCRIPT else again_command("train", folder / "recipe.yaml", folder=folder),
    )


def _unmeasured(folder: Path) -> dict[str, str]:
    """Return the figures that a run cannot measure, each with the reason."""
    try:
        recipe = load(folder / "recipe.yaml")
        layout = recipe.own_layout
    except SpanwiseError:
        return {}
    if recipe.task == SCRIPT and not (folder / FILE).is_file():
        figure_names = ("accuracy", "ece", "auroc", "brier", "refusal_rate", "malformed")
        return dict.fromkeys(figure_names, "a script trained this run and gave no held-out prompts")
    return unmeasured(layout, recipe.answer_tags, scored=recipe.is_scored)


def compare_page(folder: Path) -> str:
    """Build the report of a comparison from its runs. A run without evaluation samples gives only final figures."""
    summary_fields = read_fields(folder / "summary.json")
    if not isinstance(summary_fields.get("arms"), list) or not isinstance(summary_fields.get("figures"), dict):
        summary_problem = f"'{folder / 'summary.json'}' is no summary of a comparison: it lists no arms and figures"
        raise DataError(f"{summary_problem}. Give the output folder of spanwise compare.")
    arm_names = summary_fields["arms"]
    seeds = summary_fields["seeds"]
    options = summary_fields.get("options")
    folders_by_arm = {arm: {seed: folder / f"{arm}-{seed}" for seed in seeds} for arm in arm_names}
    summaries_by_arm, samples_by_arm, figures_by_arm = ended_runs(folders_by_arm)
    figures_of_runs = [figures for arm_runs in figures_by_arm.values() for figures in arm_runs.values()]
    measured_figure_names = {name for figures in figures_of_runs for name in figures}
    if not measured_figure_names:
        raise DataError("No run of this comparison exists; run spanwise compare again.")
    first_arm_figures = next(iter(summary_fields["figures"].values()), {})
    figure_names = [name for name in first_arm_figures if name in measured_figure_names]
    return compare_report(
        title=f"Comparison of {len(arm_names)} arms",
        recipe=summary_fields.get("recipe", {}),
        comparison=compare_arms(figures_by_arm, figures=figure_names, reference=summary_fields.get("reference")),
        curves={arm: {seed: run["curve"] for seed, run in arm_runs.items()} for arm, arm_runs in summaries_by_arm.items()},
        samples={
            arm: pooled(judged_samples)
            for arm, arm_runs in samples_by_arm.items()
            if (judged_samples := [run for run in arm_runs.values() if run.correct])
        },
        votes={
            arm: over_seeds({seed: _votes(run, run.first, resamples=1) for seed, run in arm_runs.items()})
            for arm, arm_runs in samples_by_arm.items()
            if arm_runs
        },
        command="" if options is None else again_command("compare", *options.pop("places"), folder=folder, options=options),
    )


def fidelity_page(folder: Path) -> str:
    """Build the report of `spanwise fidelity` from its file `fidelity.json`."""
    saved_fields = read_fields(folder / FIDELITY)
    try:
        report_fields = {name: value for name, value in saved_fields.items() if name != "options"}
        command = again_command("fidelity", saved_fields["source"], folder=folder, options=saved_fields.get("options"))
        return fidelity_report(**report_fields, command=command)
    except (TypeError, KeyError) as error:
        raise DataError(f"'{folder / FIDELITY}' was not written by spanwise fidelity: {error}.") from error


def over_seeds(votes: Mapping[int, Mapping[str, Curve]]) -> dict[str, Curve]:
    """Compute the mean curves of voting accuracy over the seeds of one training method."""
    mean_curves = {}
    for rule, budgets in {rule: curve.budgets for curves in votes.values() for rule, curve in curves.items()}.items():
        # Runs without stated confidences have no vote weighted by confidence.
        curve_by_seed = {seed: curves[rule] for seed, curves in votes.items() if rule in curves}
        comparable_curves = {seed: curve for seed, curve in curve_by_seed.items() if curve.budgets == budgets}
        accuracies_by_seed = [[interval.value for interval in curve.intervals] for curve in comparable_curves.values()]
        accuracy_sb = torch.tensor(accuracies_by_seed, dtype=torch.float64)
        mean_curves[rule] = Curve(budgets, accuracy_sb, tuple(comparable_curves), tuple(map(mean_interval, accuracy_sb.T)))
    return mean_curves


def _columns(samples: Samples) -> dict[str, Tensor]:
    columns = {"confidence": samples.confidence_n, "correct": samples.correct[samples.first], "prompt": samples.prompt_n}
    return columns if samples.score_n is None else {**columns, "score": samples.score_n.clamp(0.0, 1.0)}


def pooled(samples: Sequence[Samples]) -> dict[str, Tensor]:
    """Join the evaluation samples of all seeds of an arm (method). A prompt that two seeds answer counts once."""
    columns_of_seeds = [_columns(seed_samples) for seed_samples in samples]
    shared_names = (name for name in columns_of_seeds[0] if all(name in columns for columns in columns_of_seeds))
    return {name: torch.cat([columns[name] for columns in columns_of_seeds]) for name in shared_names}


def _votes(samples: Samples, block: str, *, resamples: int = 1000) -> dict[str, Curve]:
    max_vote_count = samples.most_votes(block)
    vote_counts = sorted({vote_count for vote_count in (*BUDGETS, max_vote_count) if 1 <= vote_count <= max_vote_count})
    return samples.votes(block, budgets=vote_counts, resamples=resamples) if len(vote_counts) > 1 else {}


def recorded_view(
    folder: Path, recipe: Mapping[str, Any], files: Sequence[Path]
) -> tuple[TokenView | None, dict[str, dict[str, Tensor]]]:
    """Return a run's tokens, with their credit by two methods."""
    if not files:
        return None, {}
    credit_table = pa.concat_tables(map(read_rows, files), promote_options="default")
    rule_by_method = {}
    methods = schema.methods_in(credit_table.column_names)
    objective_fields = recipe.get("objectives") or ()
    outcome_names = [(objective.get("options") or {}).get("of") for objective in objective_fields]
    outcome_names += [name for objective in objective_fields for name in as_names(objective.get("given"))]
    if len(methods) == 1:
        rollouts_path = files[0] if len(files) == 1 else files[0].parent
        other_method = "bae" if methods[0] == "grpo" else "grpo"
        credit_table, rule_by_method = _add_method(credit_table, rollouts_path, other_method)
    if methods:
        rule_fields = {name: recipe.get(name) for name in ("method", "options", *MODES)}
        rule_by_method = {methods[0]: {"objectives": objective_fields, **rule_fields}, **rule_by_method}
    row_indices = choose_rows(groups_of_steps(credit_table), MOST)
    token_view, credit_by_method = credited_view(
        credit_table, credit_table.take(row_indices), row_indices, rules=rule_by_method,
        outcome=outcome_of(schema.family_names(credit_table.column_names, "reward"), outcome_names),
        own=next(iter(methods), None), tokenizer=tokenizer_in(folder) or folder / "model",
    )  # fmt: skip
    return replace(token_view, by_step=len(files) > 1), credit_by_method


def _add_method(table: pa.Table, place: Path, method: str) -> tuple[pa.Table, dict[str, Any]]:
    """Add the credit of another method to a table of rollouts if possible."""
    try:
        credit_result = credit_rollouts(place, methods=[method])
    except SpanwiseError:
        return table, {}
    if not credit_result.table.has_ids:  # without token ids, the credit is per word instead of per token
        return table, {}
    other_credit_table = pa.concat_tables(credited_parts(credit_result))
    for name in schema.method_columns(method, other_credit_table.column_names):
        table = table.append_column(name, other_credit_table[name])
    return table, {method: credit_result.arms.schemes[method].plain()}
