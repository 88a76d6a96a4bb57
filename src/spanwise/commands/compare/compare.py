"""`spanwise compare`: train several methods or baselines with several seeds, and compare them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from math import isnan
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import yaml
from rich.console import Console, RenderableType
from rich.table import Column
from rich.text import Text

from spanwise.commands.shared.fitted import plain_table, say
from spanwise.commands.shared.folder import SECRETS, changed, check_no_run, read_fields, without_nan
from spanwise.commands.shared.samples import ended_runs
from spanwise.credit import METHODS
from spanwise.disk import write_text
from spanwise.engines.checkpoints import newest_checkpoint
from spanwise.errors import DataError, RecipeError, check_known, unknown
from spanwise.explain.alarms import OF_SCORE
from spanwise.measure import ArmComparison, Interval, compare_arms
from spanwise.objective import BASELINES
from spanwise.recipe import Recipe, answer_layout, load, read_file, resolved, scheme_of
from spanwise.rollouts.folder import RunFolder, hidden, is_filled, sole_writer
from spanwise.tasks import task_shape

#: The figures of the comparison table, as in Table 1 of the BAE paper.
FIGURES = ("accuracy", "auroc", "ece", "brier", "coverage", "format_rate", "refusal_rate")
#: The recipe fields that a comparison sets for every arm, unless the user sets them.
COMMON = {"eval_every": 20, "eval_samples": 16, "keep_rollouts": 20, "report": False}
#: Recipe fields that must be equal in all compared runs.
_SAME = (
    "task", "model", "dataset", "split", "question_column", "prompt_column", "instruction", "answer_column", "start", "start_seed",
    "start_steps", "temperature", "eval_prompts", "eval_samples",
)  # fmt: skip
#: The files that a run writes only at its end, so they show that the run is finished.
_ENDED = ("summary.json", "evaluation.parquet")
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class ArmRun:
    """One training run of a comparison: the name of its arm, its seed, and its recipe."""

    arm: str
    seed: int
    recipe: Recipe

    @property
    def folder(self) -> Path:
        """The folder that the training run writes."""
        return Path(self.recipe.output or "")

    @property
    def file(self) -> Path:
        """The YAML file with the run's recipe, beside the run's folder."""
        return self.folder.with_name(f"{self.folder.name}.yaml")

    def asked(self) -> dict[str, Any]:
        """Return the run's recipe as plain data. Preset values are not filled in."""
        return self.recipe.model_dump(mode="json")

    def finished(self) -> bool:
        """Return whether the training run has ended. Raise a DataError if its folder holds another recipe's run."""
        if not any(is_filled(self.folder / name) for name in ("metrics.jsonl", *_ENDED)):
            return False
        if not self.file.is_file():
            raise DataError(
                f"'{self.folder}' holds a run whose recipe, '{self.file}', is missing. Give another --output, or delete "
                f"'{self.folder}'."
            )
        task_layout, max_length = task_shape(self.recipe)
        resolved_recipe = resolved(self.recipe, scheme_of(self.recipe, answer_layout(self.recipe, task_layout), max_length))
        # Only `recipe.yaml` tells the run's `most`, because older versions wrote `most: 16` to `self.file` by default.
        changed_fields = changed(self.file, self.asked(), but=("output", "most"))
        changed_fields = changed_fields or changed(self.folder / "recipe.yaml", resolved_recipe, but=("output",))
        if changed_fields:
            raise DataError(
                f"'{self.folder}' holds a run of another recipe: {', '.join(changed_fields[:3])}. Give another --output, "
                f"or delete '{self.folder}' and '{self.file}'."
            )
        return all(is_filled(self.folder / name) for name in _ENDED)


def compare(
    *,
    arms: Sequence[str],
    seeds: Sequence[int],
    output: str,
    shared: str | Path | None = None,
    choices: Mapping[str, Any] | None = None,
    reference: str | None = None,
    processes: int | None = None,
    console: Console | None = None,
) -> ArmComparison:
    """Train each arm (method, baseline or recipe) with each seed, and compare the arms. Skip finished runs."""
    console = console or Console()
    runs = plan_runs(arms, seeds, choices or {}, output, shared=shared)
    if reference is not None:
        check_known("reference arm", reference, {run.arm for run in runs})
    check_no_run(output)
    with sole_writer(output):
        unfinished_runs = [run for run in runs if not run.finished()]
        if unfinished_runs:
            try:
                _train_waiting(unfinished_runs, len(runs), processes, console)
            except (KeyboardInterrupt, SystemExit):
                say(console, "Stopped. Run the same command again to train the missing runs.")
                raise
        folders_by_arm: dict[str, dict[int, Path]] = {}
        for run in runs:
            folders_by_arm.setdefault(run.arm, {})[run.seed] = run.folder
        *_, figures_by_arm = ended_runs(folders_by_arm)
        figure_names = _measured_figures(figures_by_arm)
        comparison = compare_arms(figures_by_arm, figures=figure_names, reference=reference)
        recipe_paths = [] if shared is None else [str(shared)]
        command_options = {"places": recipe_paths, "arms": list(arms), "seeds": list(seeds), "reference": reference}
        command_options["overrides"] = dict(choices or {})
        _write_comparison(Path(output), runs, comparison, command_options)
        say(console, *comparison_tables(comparison), comparison.summary())
        # Imported only here, because the report's packages take a second to load.
        from spanwise.commands.report.report import report_folder

        say(console, f"Report: {report_folder(output)}")
    return comparison


def comparison_tables(comparison: ArmComparison) -> Iterator[RenderableType]:
    """Yield the tables and warnings that show a comparison."""
    seed_count = max(interval.count for interval in comparison.cells.values())
    title = f"Each figure is the mean over {seed_count} seeds ± half the width of its {100 * comparison.level:g} % interval"
    figure_columns = (Column(name.replace("_", " "), no_wrap=True) for name in comparison.figures)
    figure_rows = ([arm, *comparison.row(arm, seed_count)] for arm in comparison.methods)
    yield plain_table("", *figure_columns, rows=figure_rows, title=Text(title, style="italic"))
    yield from (Text(f"! {sentence}", style="bold red") for sentence in comparison.warnings())
    if not comparison.differences:
        return
    yield Text(
        "\nEach difference is between runs of the same seed. The verdicts are corrected for the number of compared pairs "
        "(Holm's correction). The last column says how many seeds would show the difference clearly.",
        style="italic",
    )
    difference_rows: list[list[str | Text]] = []
    for figure, differences in groupby(comparison.differences, key=lambda d: d.figure):
        difference_rows.append([Text(figure.replace("_", " "), style="bold")])
        for row in differences:
            interval = row.interval
            seeds_needed_text = "-" if row.seeds_needed is None or row.verdict == "clear" else str(row.seeds_needed)
            bounds_text = "" if isnan(interval.low) else f" [{interval.low:+.3f}, {interval.high:+.3f}]"
            interval_text = f"{interval.value:+.3f}{bounds_text}"
            difference_rows.append([f"  {row.a} - {row.b}", interval_text, row.verdict, seeds_needed_text])
    difference_columns = (Column(name, no_wrap=True) for name in ("difference", "verdict", "seeds"))
    yield plain_table(Column("", overflow="fold"), *difference_columns, rows=difference_rows)


def _measured_figures(arms: Mapping[str, Mapping[int, Mapping[str, float | None]]]) -> list[str]:
    """Return the names of the figures (accuracy, ECE, ...) that any run has."""
    figures_of_runs = [figures for figures_by_seed in arms.values() for figures in figures_by_seed.values()]
    name_value_pairs = (pair for figures in figures_of_runs for pair in figures.items())
    figure_names = dict.fromkeys(name for name, value in name_value_pairs if value is not None)
    has_unjudged_runs = any(figures.get("verdict_rate", 1.0) not in (None, 1.0) for figures in figures_of_runs)
    score_figure_names = (f"{OF_SCORE}{name}" for name in ("auroc", "ece", "brier", "coverage"))
    usual_figure_names = [*FIGURES, *(["verdict_rate"] if has_unjudged_runs else []), *score_figure_names]
    other_figure_names = [name for name in figure_names if "@" in name or name.endswith("_accuracy")]
    return [*(name for name in usual_figure_names if name in figure_names), *other_figure_names]


def _train_waiting(unfinished_runs: Sequence[ArmRun], count: int, processes: int | None, console: Console) -> None:
    """Train the unfinished runs. Raise a DataError at the end if any of them failed."""
    # Imported only here, because transformers takes seconds to load.
    from spanwise.commands.shared.task import make_task

    # Make the start model once, before the training processes need it.
    make_task(unfinished_runs[0].recipe, console)
    can_train_two_at_once = (os.cpu_count() or 1) >= 2 and not torch.cuda.is_available()
    process_count = processes or (2 if can_train_two_at_once else 1)
    say(console, f"{count - len(unfinished_runs)} of {count} runs are finished. The others train {process_count} at a time.")
    start_run = partial(_start, console=console)
    start_time = time.perf_counter()
    reason_by_failed_run = {}
    # An error in this loop ends the running processes, too.
    for done_count, (run, exit_status) in enumerate(side_by_side(unfinished_runs, process_count, start=start_run), 1):
        seconds_left = (time.perf_counter() - start_time) / done_count * (len(unfinished_runs) - done_count)
        if exit_status == 0:
            figures = read_fields(run.folder / "summary.json")["final"]
            run_result_text = "  ".join(f"{name} {figures[name]:.3f}" for name in FIGURES if figures.get(name) is not None)
        else:
            reason_by_failed_run[run.folder.name] = _failure_reason(run, exit_status)
            run_result_text = f"failed: {reason_by_failed_run[run.folder.name]}"
        progress_text = f"{done_count}/{len(unfinished_runs)}"
        say(console, f"{progress_text}  {run.folder.name}  {run_result_text}  {seconds_left / 60:.0f} min left")
    if reason_by_failed_run:
        run_name, failure_reason = next(iter(reason_by_failed_run.items()))
        raise DataError(
            f"{len(reason_by_failed_run)} of {len(unfinished_runs)} runs failed. The first failed run is {run_name}: "
            f"{failure_reason}. Run the same command again to train the missing runs."
        )


def train_command(run: ArmRun, *, resume: bool) -> list[str]:
    """Return the command line that trains one run of a comparison."""
    # --overwrite is safe, because `run.finished()` refuses a folder that holds another recipe's run.
    start_options = ["--resume", "last"] if resume else ["--overwrite"]
    return [sys.executable, "-m", "spanwise.cli", "train", str(run.file), *start_options]


def _start(run: ArmRun, console: Console) -> subprocess.Popen[bytes]:
    """Start the process that trains one run. It resumes from the newest intact checkpoint, if any."""
    recipe_fields = run.asked()
    fields_without_secrets = hidden(recipe_fields)
    write_text(run.file, yaml.safe_dump(fields_without_secrets, sort_keys=False))
    secrets = {name: value for name, value in recipe_fields.items() if fields_without_secrets[name] != value}
    checkpoint, checkpoint_faults = newest_checkpoint(run.folder / "checkpoints")
    if checkpoint_faults:
        faults_text = "; ".join(f"{name}: {fault}" for name, fault in checkpoint_faults.items())
        start_text = f"continues from {checkpoint.name}" if checkpoint else "starts again from step 0"
        say(console, f"{run.folder.name}: these checkpoints cannot be read: {faults_text}. The run {start_text}.")
    thread_variables = {"OMP_NUM_THREADS": str(run.recipe.threads)}
    environment = {**thread_variables, **os.environ, "COLUMNS": "120", SECRETS: json.dumps(secrets)}
    with _log_file(run).open("ab") as log:  # append to the log, to keep the lines of earlier attempts
        return subprocess.Popen(
            train_command(run, resume=checkpoint is not None),
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip


def _log_file(run: ArmRun) -> Path:
    return run.folder.with_name(f"{run.folder.name}.log")


def _failure_reason(run: ArmRun, status: int) -> str:
    """Say why a run failed: the signal that ended its process, or the last line of its log."""
    log_lines = _log_file(run).read_text(errors="replace").strip().splitlines()
    failure_reason = log_lines[-1] if log_lines else f"exit status {status}"
    if status < 0:
        failure_reason = f"the run was ended by signal {-status} ({signal.strsignal(-status)})"
    return f"{failure_reason} (full log: {_log_file(run)})"


def _write_comparison(output: Path, runs: Sequence[ArmRun], comparison: ArmComparison, options: Mapping[str, Any]) -> None:
    """Write the figures of a comparison into `summary.json` and `comparison.md`."""
    recipes = [run.asked() for run in runs]
    common_field_names = [name for name in recipes[0] if all(recipe.get(name) == recipes[0][name] for recipe in recipes)]
    common_fields = {name: recipes[0][name] for name in common_field_names if name not in ("output", "seed")}
    figures_by_arm: dict[str, dict[str, Any]] = {arm: {} for arm in comparison.methods}
    for (arm, figure), interval in comparison.cells.items():
        figures_by_arm[arm][figure] = {**_interval(interval), "sd": interval.sd, "seeds": interval.count}
    summary_fields = {
        "arms": list(comparison.methods), "seeds": sorted({run.seed for run in runs}), "reference": options["reference"],
        "options": options, "recipe": common_fields, "figures": figures_by_arm,
        "differences": [{**vars(d), "interval": _interval(d.interval), "sd": d.interval.sd} for d in comparison.differences],
    }  # fmt: skip
    RunFolder(output).write_summary(without_nan(summary_fields))
    sentences_text = "\n".join(f"- {sentence}" for sentence in comparison.sentences())
    write_text(output / "comparison.md", f"{comparison.markdown()}\n\n{comparison.summary()}\n\n{sentences_text}\n")


def _interval(interval: Interval) -> dict[str, float]:
    return {"mean": interval.value, "low": interval.low, "high": interval.high}


def arm_fields(name: str) -> dict[str, Any]:
    """Return the recipe fields that a name stands for: a method, a baseline of the method `bae`, or a recipe file."""
    if name in BASELINES:
        return {"method": "bae", "baseline": name}
    METHODS.load_plugins()
    if name in METHODS:
        return {"method": name}
    if name.endswith((".yaml", ".yml")):
        return read_file(name)
    raise RecipeError(unknown("arm (a baseline, a method or a recipe file)", name, [*BASELINES, *METHODS]))


def plan_runs(
    arms: Sequence[str], seeds: Sequence[int], choices: Mapping[str, Any], output: str, *, shared: str | Path | None = None
) -> list[ArmRun]:
    """List the runs of a comparison seed by seed. After an early stop, the first seeds have all arms (methods)."""
    for field, option in (("seed", "seeds"), ("output", "output")):
        if field in choices:
            raise RecipeError(f"Every run of a comparison has its own {field}; give --{option} in place of --set {field}.")
    arm_names = [Path(arm).stem if arm.endswith((".yaml", ".yml")) else arm for arm in arms]
    for noun, entries in (("arm", arm_names), ("seed", seeds)):
        if not entries or len(set(entries)) < len(entries):
            raise RecipeError(f"Give at least one {noun}, and each only once; got {', '.join(map(str, entries)) or 'none'}.")
    fields_by_arm = {name: arm_fields(arm) for name, arm in zip(arm_names, arms, strict=True)}
    for name, arm_choices in fields_by_arm.items():
        for field in ("method", "baseline"):
            if field in arm_choices and choices.get(field, arm_choices[field]) != arm_choices[field]:
                raise RecipeError(
                    f"You compare '{name}' with the {field} {arm_choices[field]}, but --set {field}={choices[field]} would replace "
                    f"the {field}. Remove --set {field}. Or add {choices[field]} to the names that you compare."
                )
    # --set overrides the fields of an arm, and an arm overrides the recipe file.
    fields_in_file = set() if shared is None else load(shared).model_fields_set
    common_fields = {field: value for field, value in COMMON.items() if field not in fields_in_file}
    runs: list[ArmRun] = []
    for seed, name in product(seeds, arm_names):
        run_fields = {"seed": seed, "output": str(Path(output) / f"{name}-{seed}")}
        runs.append(ArmRun(name, seed, load(shared, {**common_fields, **fields_by_arm[name], **choices, **run_fields})))
    first_run = runs[0]
    for run in runs[: len(arm_names)]:
        for field in _SAME:
            first_value, other_value = getattr(first_run.recipe, field), getattr(run.recipe, field)
            if first_value != other_value:
                raise RecipeError(
                    f"Arm '{first_run.arm}' has the {field} {first_value}, but arm '{run.arm}' has {other_value}, so their "
                    f"figures cannot be compared. Use one {field} for all arms: --set {field}={first_value}."
                )
    return runs


def side_by_side(
    items: Iterable[_Item], processes: int, *, start: Callable[[_Item], subprocess.Popen[bytes]]
) -> Iterator[tuple[_Item, int]]:
    """Run one process per item, `processes` at a time. Yield items with exit status. Leaving the loop ends all."""
    waiting_items = list(items)[::-1]
    item_by_process = dict[subprocess.Popen[bytes], _Item]()
    with _sigterm_raises():
        try:
            while waiting_items or item_by_process:
                while waiting_items and len(item_by_process) < max(1, processes):
                    item = waiting_items.pop()
                    item_by_process[start(item)] = item
                for process in list(item_by_process):
                    if (exit_status := process.poll()) is not None:
                        yield item_by_process.pop(process), exit_status
                time.sleep(0.1)
        finally:
            _end_processes(item_by_process)


def _end_processes(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """Ask the processes to end, and kill them after ten seconds or at a second Ctrl-C."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + 10
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that clean-up code runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second SIGTERM must not interrupt the clean-up
        raise SystemExit(128 + number)

    old_signal_handler = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if old_signal_handler is None else old_signal_handler)
