"""`compare`: several arms, several seeds each, from one start; a table with intervals, and what it can and cannot say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console, RenderableType
from rich.table import Column
from rich.text import Text

from spanwise.commands.compare.side_by_side import side_by_side
from spanwise.commands.shared.fitted import plain_table, say
from spanwise.commands.shared.folder import check_no_run, without_nan
from spanwise.commands.shared.runs import ArmRun, planned
from spanwise.commands.shared.samples import ended_runs
from spanwise.disk import write_text
from spanwise.engines.checkpoints import newest_checkpoint
from spanwise.errors import DataError, RecipeError, unknown
from spanwise.explain import OF_SCORE
from spanwise.measure import ArmComparison, Interval, compare_arms
from spanwise.rollouts.folder import RunFolder, sole_writer

#: What the table shows, in the order of the paper's Table 1, with what a collapse would hide behind.
FIGURES = ("accuracy", "auroc", "ece", "brier", "coverage", "format_rate", "refusal_rate")
_PLACE = ("output", "seed")


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
    """Train every arm with every seed, as far as it is not there yet, and compare them."""
    console = console or Console()
    runs = planned(arms, seeds, choices or {}, output, shared=shared)
    if reference is not None and reference not in {run.arm for run in runs}:
        raise RecipeError(unknown("reference arm", reference, {run.arm for run in runs}))
    check_no_run(output)
    folder = Path(output)
    with sole_writer(output):
        waiting = [run for run in runs if not run.finished()]
        if waiting:
            try:
                _train_waiting(waiting, len(runs), processes, console)
            except (KeyboardInterrupt, SystemExit):
                say(console, "Stopped. The same command goes on with what is missing.")
                raise
        *_, figures = ended_runs({run.arm: {one.seed: one.folder for one in runs if one.arm == run.arm} for run in runs})
        comparison = compare_arms(figures, figures=_present(figures), reference=reference)
        asked = {
            "places": [] if shared is None else [str(shared)],
            "arms": list(arms),
            "seeds": list(seeds),
            "reference": reference,
        }
        _write(folder, runs, comparison, {**asked, "overrides": dict(choices or {})})
        say(console, *comparison_tables(comparison), comparison.summary())
        from spanwise.commands.report.report import report_folder  # a second of imports that only the end needs

        say(console, f"Report: {report_folder(folder)}")
    return comparison


def comparison_tables(comparison: ArmComparison) -> Iterator[RenderableType]:
    """The table of figures with what is wrong in it, then that of paired differences."""
    seeds = max(interval.count for interval in comparison.cells.values())
    title = Text(f"Mean over {seeds} seeds ± half of the {100 * comparison.level:g} % interval", style="italic")
    headings = (Column(name.replace("_", " "), no_wrap=True) for name in comparison.figures)
    rows = ([arm, *comparison.row(arm, seeds)] for arm in comparison.methods)
    yield plain_table("", *headings, rows=rows, title=title)
    yield from (Text(f"! {sentence}", style="bold red") for sentence in comparison.warnings())
    if not comparison.differences:
        return
    yield Text("\nPaired differences by seed (Holm by figure), and how many seeds would tell", style="italic")
    lines: list[list[str | Text]] = []
    for figure, differences in groupby(comparison.differences, key=lambda d: d.figure):
        lines.append([Text(figure.replace("_", " "), style="bold")])
        for d in differences:
            i = d.interval
            needed = "-" if d.seeds_needed is None or d.verdict == "clear" else str(d.seeds_needed)
            size = f"{i.value:+.3f} [{i.low:+.3f}, {i.high:+.3f}]" if i.low == i.low else f"{i.value:+.3f}"
            lines.append([f"  {d.a} - {d.b}", size, d.verdict, needed])
    columns = (Column(name, no_wrap=True) for name in ("difference", "verdict", "seeds"))
    yield plain_table(Column("", overflow="fold"), *columns, rows=lines)


def _present(found: Mapping[str, Mapping[int, Mapping[str, float | None]]]) -> list[str]:
    """The figures of the table that any run has."""
    values = [figures for seeds in found.values() for figures in seeds.values()]
    there = dict.fromkeys(name for figures in values for name, value in figures.items() if value is not None)
    unjudged = any((figures.get("verdict_rate") or 1.0) < 1 for figures in values)
    scored = (f"{OF_SCORE}{name}" for name in ("auroc", "ece", "brier", "coverage"))
    shown = [*FIGURES, *(["verdict_rate"] if unjudged else []), *scored]
    return [name for name in shown if name in there] + [n for n in there if "@" in n or n.endswith("_accuracy")]


def _train_waiting(waiting: Sequence[ArmRun], count: int, processes: int | None, console: Console) -> None:
    """Train what is missing of so many runs; a DataError that names the first that failed, once all have ended."""
    from spanwise.commands.shared.task import make_task  # seconds of imports that a comparison which goes on does not need

    make_task(waiting[0].recipe, console)  # makes the shared start once, before several processes would
    beside = processes or (2 if (os.cpu_count() or 1) >= 2 and not torch.cuda.is_available() else 1)
    say(console, f"{count - len(waiting)} of {count} runs are there; {beside} side by side.")
    started, failed, done = time.perf_counter(), {}, 0

    def ended(run: ArmRun, status: int) -> None:
        nonlocal done
        done += 1
        left = (time.perf_counter() - started) / done * (len(waiting) - done)
        if status == 0:
            final = json.loads((run.folder / "summary.json").read_text())["final"]
            shown = "  ".join(f"{name} {final[name]:.3f}" for name in FIGURES if final.get(name) is not None)
        else:
            failed[run.folder.name] = _why(run, status)
            shown = f"failed: {failed[run.folder.name]}"
        say(console, f"{done}/{len(waiting)}  {run.folder.name}  {shown}  left {left / 60:.0f} min")

    side_by_side(waiting, beside, start=lambda run: _start(run, console), ended=ended)
    if failed:
        name, why = next(iter(failed.items()))
        raise DataError(
            f"{len(failed)} of {len(waiting)} runs failed, the first was {name}: {why} "
            "The same command goes on with what is missing."
        )


def train_command(run: ArmRun, *, resume: bool) -> list[str]:
    """The command that trains one run."""
    how = ["--resume", "last"] if resume else ["--overwrite"]  # what is there was begun under this recipe: run.finished()
    return [sys.executable, "-m", "spanwise.cli", "train", str(run.file), *how]


def _start(run: ArmRun, console: Console) -> subprocess.Popen[bytes]:
    """Start the training of one run, from its newest intact checkpoint if it has one."""
    write_text(run.file, yaml.safe_dump(run.asked(), sort_keys=False))
    checkpoint, faults = newest_checkpoint(run.folder / "checkpoints")
    if faults:
        said = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
        goes_on = f"goes on from {checkpoint.name}" if checkpoint else "starts anew"
        say(console, f"{run.folder.name} {goes_on}; not readable are {said}.")
    environment = {"OMP_NUM_THREADS": str(run.recipe.threads), **os.environ, "COLUMNS": "120"}
    with _log(run).open("ab") as file:  # an earlier attempt, and another process that writes it, keep their lines
        return subprocess.Popen(
            train_command(run, resume=checkpoint is not None),
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip


def _log(run: ArmRun) -> Path:
    return run.folder.with_name(f"{run.folder.name}.log")


def _why(run: ArmRun, status: int) -> str:
    """Why a run failed: the signal that ended it, or its last line."""
    lines = _log(run).read_text(errors="replace").strip().splitlines()
    said = lines[-1] if lines else f"exit status {status}"
    if status < 0:
        said = f"it was ended by signal {-status} ({signal.strsignal(-status)})"
    return f"{said} (all of it: {_log(run)})"


def _write(output: Path, runs: Sequence[ArmRun], comparison: ArmComparison, options: Mapping[str, Any]) -> None:
    """Leave the comparison behind: numbers, Markdown."""
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
