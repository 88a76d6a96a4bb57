"""`compare`: train several arms with several seeds from one start, and say which differences are more than noise.

A run is one arm with one seed: what it trains, where, and whether that is done. Processes are trained side by side, and none of
them outlives the one that started them.
"""

from __future__ import annotations

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
from itertools import groupby
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
from spanwise.recipe import Recipe, load
from spanwise.rollouts.folder import RunFolder, hidden, is_filled, sole_writer

#: The figures of the table, in the order of the paper's Table 1; the last three show a collapse that the others hide.
FIGURES = ("accuracy", "auroc", "ece", "brier", "coverage", "format_rate", "refusal_rate")
_PLACE = ("output", "seed")
COMMON = {"eval_every": 20, "eval_samples": 16, "keep_rollouts": 20, "report": False}
#: The fields that decide the start and the evaluation of a run; arms that differ in these fields cannot be compared.
_SAME = (
    "task", "model", "dataset", "split", "question_column", "prompt_column", "instruction", "answer_column", "start", "start_seed",
    "start_steps", "temperature", "eval_prompts", "eval_samples",
)  # fmt: skip
#: The files that a run has only at its end.
_ENDED = ("summary.json", "evaluation.parquet")
#: The fields that a run's recipe.yaml takes from the preset where the user gave none (`recipe.resolved`).
_FILLED = ("layout", "prefilled", "segmenter", "objectives", "calibration", "baseline", "per", "options")
_LOOK_SECONDS = 0.1
_END_SECONDS = 10.0
_Item = TypeVar("_Item")


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
    """Train every arm with every seed, except finished runs, and compare them."""
    console = console or Console()
    runs = planned(arms, seeds, choices or {}, output, shared=shared)
    if reference is not None:
        check_known("reference arm", reference, {run.arm for run in runs})
    check_no_run(output)
    folder = Path(output)
    with sole_writer(output):
        waiting = [run for run in runs if not run.finished()]
        if waiting:
            try:
                _train_waiting(waiting, len(runs), processes, console)
            except (KeyboardInterrupt, SystemExit):
                say(console, "Stopped. Run the same command again to do the missing runs.")
                raise
        *_, figures = ended_runs({run.arm: {peer.seed: peer.folder for peer in runs if peer.arm == run.arm} for run in runs})
        comparison = compare_arms(figures, figures=_present(figures), reference=reference)
        options = {
            "places": [] if shared is None else [str(shared)],
            "arms": list(arms),
            "seeds": list(seeds),
            "reference": reference,
        }
        _write(folder, runs, comparison, {**options, "overrides": dict(choices or {})})
        say(console, *comparison_tables(comparison), comparison.summary())
        from spanwise.commands.report.report import report_folder  # importing takes a second, and only the end needs it

        say(console, f"Report: {report_folder(folder)}")
    return comparison


def comparison_tables(comparison: ArmComparison) -> Iterator[RenderableType]:
    """Build the table of figures with its warnings, then the table of paired differences."""
    seeds = max(interval.count for interval in comparison.cells.values())
    title = Text(f"Mean over {seeds} seeds ± half of the {100 * comparison.level:g} % interval", style="italic")
    headings = (Column(name.replace("_", " "), no_wrap=True) for name in comparison.figures)
    rows = ([arm, *comparison.row(arm, seeds)] for arm in comparison.methods)
    yield plain_table("", *headings, rows=rows, title=title)
    yield from (Text(f"! {sentence}", style="bold red") for sentence in comparison.warnings())
    if not comparison.differences:
        return
    yield Text("\nPaired differences by seed (Holm by figure), and how many seeds would make each clear", style="italic")
    lines: list[list[str | Text]] = []
    for figure, differences in groupby(comparison.differences, key=lambda d: d.figure):
        lines.append([Text(figure.replace("_", " "), style="bold")])
        for d in differences:
            i = d.interval
            more_seeds = "-" if d.seeds_needed is None or d.verdict == "clear" else str(d.seeds_needed)
            value = f"{i.value:+.3f} [{i.low:+.3f}, {i.high:+.3f}]" if i.low == i.low else f"{i.value:+.3f}"
            lines.append([f"  {d.a} - {d.b}", value, d.verdict, more_seeds])
    columns = (Column(name, no_wrap=True) for name in ("difference", "verdict", "seeds"))
    yield plain_table(Column("", overflow="fold"), *columns, rows=lines)


def _present(arms: Mapping[str, Mapping[int, Mapping[str, float | None]]]) -> list[str]:
    """Return the figures that at least one run has."""
    values = [figures for seeds in arms.values() for figures in seeds.values()]
    known = dict.fromkeys(name for figures in values for name, value in figures.items() if value is not None)
    has_unjudged = any((figures.get("verdict_rate") or 1.0) < 1 for figures in values)
    of_score = (f"{OF_SCORE}{name}" for name in ("auroc", "ece", "brier", "coverage"))
    figures_shown = [*FIGURES, *(["verdict_rate"] if has_unjudged else []), *of_score]
    return [name for name in figures_shown if name in known] + [n for n in known if "@" in n or n.endswith("_accuracy")]


def _train_waiting(waiting: Sequence[ArmRun], count: int, processes: int | None, console: Console) -> None:
    """Train the runs that are missing; after all have ended, raise a DataError that names the first failed run."""
    from spanwise.commands.shared.task import make_task  # importing takes seconds, and only missing runs need it

    make_task(waiting[0].recipe, console)  # make the shared start once, before several processes would
    at_once = processes or (2 if (os.cpu_count() or 1) >= 2 and not torch.cuda.is_available() else 1)
    say(console, f"{count - len(waiting)} of {count} runs are finished; {at_once} train at a time.")
    start_time, failures, done_count = time.perf_counter(), {}, 0

    def ended(run: ArmRun, status: int) -> None:
        nonlocal done_count
        done_count += 1
        seconds_left = (time.perf_counter() - start_time) / done_count * (len(waiting) - done_count)
        if status == 0:
            final = read_fields(run.folder / "summary.json")["final"]
            outcome = "  ".join(f"{name} {final[name]:.3f}" for name in FIGURES if final.get(name) is not None)
        else:
            failures[run.folder.name] = _why(run, status)
            outcome = f"failed: {failures[run.folder.name]}"
        say(console, f"{done_count}/{len(waiting)}  {run.folder.name}  {outcome}  left {seconds_left / 60:.0f} min")

    side_by_side(waiting, at_once, start=lambda run: _start(run, console), ended=ended)
    if failures:
        name, reason = next(iter(failures.items()))
        raise DataError(
            f"{len(failures)} of {len(waiting)} runs failed, the first was {name}: {reason} "
            "Run the same command again for the missing runs."
        )


def train_command(run: ArmRun, *, resume: bool) -> list[str]:
    """Return the command that trains one run."""
    # `run.finished()` has checked that the folder is of this recipe.
    mode = ["--resume", "last"] if resume else ["--overwrite"]
    return [sys.executable, "-m", "spanwise.cli", "train", str(run.file), *mode]


def _start(run: ArmRun, console: Console) -> subprocess.Popen[bytes]:
    """Start the training of one run, from its newest intact checkpoint if it has one."""
    fields = run.asked()
    write_text(run.file, yaml.safe_dump(hidden(fields), sort_keys=False))
    secrets = {name: value for name, value in fields.items() if hidden({name: value}) != {name: value}}
    checkpoint, faults = newest_checkpoint(run.folder / "checkpoints")
    if faults:
        damaged = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
        beginning = f"goes on from {checkpoint.name}" if checkpoint else "starts anew"
        say(console, f"{run.folder.name} {beginning}; these checkpoints are not readable: {damaged}.")
    environment = {"OMP_NUM_THREADS": str(run.recipe.threads), **os.environ, "COLUMNS": "120", SECRETS: json.dumps(secrets)}
    with _log(run).open("ab") as log:  # append, to keep the lines of earlier attempts
        return subprocess.Popen(
            train_command(run, resume=checkpoint is not None),
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip


def _log(run: ArmRun) -> Path:
    return run.folder.with_name(f"{run.folder.name}.log")


def _why(run: ArmRun, status: int) -> str:
    """Say why a run failed: the signal that ended it, or its last line."""
    lines = _log(run).read_text(errors="replace").strip().splitlines()
    reason = lines[-1] if lines else f"exit status {status}"
    if status < 0:
        reason = f"the run was ended by signal {-status} ({signal.strsignal(-status)})"
    return f"{reason} (full log: {_log(run)})"


def _write(output: Path, runs: Sequence[ArmRun], comparison: ArmComparison, options: Mapping[str, Any]) -> None:
    """Write the comparison as numbers and as Markdown."""
    fields = [run.asked() for run in runs]
    common = {k: v for k, v in fields[0].items() if k not in _PLACE and all(other[k] == v for other in fields)}
    cells: dict[str, dict[str, Any]] = {arm: {} for arm in comparison.methods}
    for (arm, figure), interval in comparison.cells.items():
        cells[arm][figure] = {**_interval(interval), "sd": interval.sd, "seeds": interval.count}
    summary = {
        "arms": list(comparison.methods), "seeds": sorted({run.seed for run in runs}), "reference": options["reference"],
        "options": options, "recipe": common, "figures": cells,
        "differences": [{**vars(d), "interval": _interval(d.interval), "sd": d.interval.sd} for d in comparison.differences],
    }  # fmt: skip
    RunFolder(output).write_summary(without_nan(summary))
    sentences = "\n".join(f"- {sentence}" for sentence in comparison.sentences())
    write_text(output / "comparison.md", f"{comparison.markdown()}\n\n{comparison.summary()}\n\n{sentences}\n")


def _interval(interval: Interval) -> dict[str, float]:
    return {"mean": interval.value, "low": interval.low, "high": interval.high}


@dataclass(frozen=True)
class ArmRun:
    """One arm with one seed: its recipe and its folder."""

    arm: str
    seed: int
    recipe: Recipe

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.recipe.output or "")

    @property
    def file(self) -> Path:
        """The file beside the folder that holds the recipe as the user gave it."""
        return self.folder.with_name(f"{self.folder.name}.yaml")

    def asked(self) -> dict[str, Any]:
        """Return the recipe as the user gave it, as plain data."""
        return self.recipe.model_dump(mode="json")

    def finished(self) -> bool:
        """Return whether the run ended under this recipe; raise a DataError if the folder holds another run."""
        if not any(is_filled(self.folder / name) for name in ("metrics.jsonl", *_ENDED)):
            return False
        if not self.file.is_file():
            raise DataError(
                f"'{self.folder}' holds a run, but '{self.file}', the recipe of that run, is missing: give another --output, or "
                f"delete '{self.folder}'."
            )
        fields, resolved_file = self.asked(), self.folder / "recipe.yaml"
        changes = changed(self.file, fields, but=("output",)) or changed(resolved_file, fields, but=("output", *_FILLED))
        if changes:
            raise DataError(
                f"'{self.folder}' holds a run of another recipe ({', '.join(changes[:3])}). Give another --output, or delete "
                f"'{self.folder}' and '{self.file}'."
            )
        return all(is_filled(self.folder / name) for name in _ENDED)


def arm_fields(name: str) -> dict[str, Any]:
    """Return the recipe fields of an arm: a baseline (of `bae`), a method, or a recipe file."""
    if name in BASELINES:
        return {"method": "bae", "baseline": name}
    METHODS.load_plugins()
    if name in METHODS:
        return {"method": name}
    if name.endswith((".yaml", ".yml")):
        return load(name).model_dump(exclude_unset=True, mode="json")
    raise RecipeError(unknown("arm (a baseline, a method or a recipe file)", name, [*BASELINES, *METHODS]))


def planned(
    arms: Sequence[str],
    seeds: Sequence[int],
    choices: Mapping[str, Any],
    output: str,
    *,
    shared: str | Path | None = None,
) -> list[ArmRun]:
    """List every run of a comparison, seed by seed, so that an unfinished comparison has whole pairs."""
    for field, option in (("seed", "seeds"), ("output", "output")):
        if field in choices:
            raise RecipeError(f"Every run of a comparison has its own {field}; give --{option} in place of --set {field}.")
    names = [Path(arm).stem if arm.endswith((".yaml", ".yml")) else arm for arm in arms]
    for kind, values in (("arm", names), ("seed", seeds)):
        if not values or len(set(values)) < len(values):
            raise RecipeError(f"Give each {kind} once, and at least one; got {', '.join(map(str, values)) or 'none'}.")
    fields = {name: arm_fields(arm) for name, arm in zip(names, arms, strict=True)}
    for name, arm_choices in fields.items():
        for field in ("method", "baseline"):
            if field in arm_choices and choices.get(field, arm_choices[field]) != arm_choices[field]:
                raise RecipeError(
                    f"Arm '{name}' has the {field} {arm_choices[field]}, but --set {field}={choices[field]} would override that. "
                    f"Drop the --set, or list it as an arm of its own."
                )
    # An arm's own fields win over the shared recipe file, and `choices` win over both.
    written_fields = set() if shared is None else load(shared).model_fields_set
    common = {field: value for field, value in COMMON.items() if field not in written_fields}

    def recipe(name: str, seed: int) -> Recipe:
        folder = str(Path(output) / f"{name}-{seed}")
        return load(shared, {**common, **fields[name], **choices, "seed": seed, "output": folder})

    runs = [ArmRun(name, seed, recipe(name, seed)) for seed in seeds for name in names]
    first = runs[0]
    for run in runs[: len(names)]:
        for field in _SAME:
            value, other_value = getattr(first.recipe, field), getattr(run.recipe, field)
            if value != other_value:
                raise RecipeError(
                    f"Arm '{first.arm}' has the {field} {value} but arm '{run.arm}' has {other_value}, so their figures cannot be "
                    f"compared. Use one {field} for all arms: --set {field}={value}."
                )
    return runs


def side_by_side(
    items: Iterable[_Item],
    processes: int,
    *,
    start: Callable[[_Item], subprocess.Popen[bytes]],
    ended: Callable[[_Item, int], None],
) -> None:
    """Run one process per item, a few at a time, and wait for all; Ctrl-C, SIGTERM or an error ends the running processes."""
    waiting, running = list(items)[::-1], dict[subprocess.Popen[bytes], _Item]()
    with _sigterm_raises():
        try:
            while waiting or running:
                while waiting and len(running) < max(1, processes):
                    item = waiting.pop()
                    running[start(item)] = item
                for process in list(running):
                    if (status := process.poll()) is not None:
                        ended(running.pop(process), status)
                time.sleep(_LOOK_SECONDS)
        finally:
            _end(running)


def _end(running: Collection[subprocess.Popen[bytes]]) -> None:
    """Ask the processes to end; kill them after some seconds, or at a second Ctrl-C."""
    for process in running:
        process.terminate()
    deadline = time.monotonic() + _END_SECONDS
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM end the block like an exception, so that the clean-up runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second SIGTERM must not interrupt the clean-up
        raise SystemExit(128 + number)

    old_handler = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if old_handler is None else old_handler)
