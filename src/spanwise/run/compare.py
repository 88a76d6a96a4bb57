"""`compare`: several arms, several seeds each, from one start; a table with intervals, and what it can and cannot say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from spanwise.credit import METHODS, load_plugins
from spanwise.errors import DataError, RecipeError, unknown
from spanwise.measure import Comparison, Interval
from spanwise.measure import compare as compare_runs
from spanwise.recipe import Recipe, load
from spanwise.run.report_files import without_nan
from spanwise.run.samples import check_protocol, read_samples
from spanwise.score.objective import BASELINES

#: What the table shows, in the order of the paper's Table 1, with what a collapse would hide behind.
FIGURES = ("accuracy", "auroc", "ece", "brier", "coverage", "format_rate", "refusal_rate")
#: The largest budget of a vote.
MOST_VOTES = 16
COMMON = {"eval_every": 20, "eval_samples": 16, "keep_rollouts": 20, "report": False}
_PLACE = ("output", "seed")


@dataclass(frozen=True)
class Run:
    """One arm with one seed: what it trains and where."""

    arm: str
    seed: int
    recipe: Recipe

    @property
    def folder(self) -> Path:
        """Of the run."""
        return Path(self.recipe.output)

    @property
    def file(self) -> Path:
        """The recipe as it was asked for, beside the folder."""
        return self.folder.with_name(f"{self.folder.name}.yaml")

    def asked(self) -> dict[str, Any]:
        """What `file` holds."""
        return self.recipe.model_dump(mode="json")

    def finished(self) -> bool:
        """Whether the run was completed; a DataError if the folder holds another recipe."""
        if not self.file.is_file():
            return False
        found, asked = yaml.safe_load(self.file.read_text()) or {}, self.asked()
        other = [name for name in asked if name != "output" and found.get(name) != asked[name]]
        if other:
            was = ", ".join(f"{name} was {found.get(name)!r} and is {asked[name]!r} now" for name in other[:3])
            raise DataError(
                f"'{self.folder}' holds a run of another recipe ({was}). Give another --output, or delete '{self.folder}' "
                f"and '{self.file}'."
            )
        return (self.folder / "summary.json").is_file() and (self.folder / "evaluation.parquet").is_file()


def arm_fields(name: str) -> dict[str, Any]:
    """The recipe fields an arm stands for: a baseline (of `bae`), a method, or a recipe file.

    >>> arm_fields("blended"), arm_fields("rlcr")
    ({'method': 'bae', 'baseline': 'blended'}, {'method': 'rlcr'})
    """
    if name in BASELINES:
        return {"method": "bae", "baseline": name}
    load_plugins()
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
) -> list[Run]:
    """Every run of a comparison, seed by seed, so that an early look has whole pairs.

    What an arm says wins over the `shared` recipe file, and `choices` win over both.

    Raises:
        RecipeError: no arm or seed, an arm twice, one that cannot be planned, or choices that would make an arm another one.
    """
    names = [Path(arm).stem if arm.endswith((".yaml", ".yml")) else arm for arm in arms]
    for kind, listed in (("arm", names), ("seed", seeds)):
        if not listed or len(set(listed)) < len(listed):
            raise RecipeError(f"Give each {kind} once, and at least one; got {', '.join(map(str, listed)) or 'none'}.")
    fields = {name: arm_fields(arm) for name, arm in zip(names, arms, strict=True)}
    for name, own in fields.items():
        for field in ("method", "baseline"):
            if field in own and choices.get(field, own[field]) != own[field]:
                raise RecipeError(
                    f"Arm '{name}' has the {field} {own[field]}, and --set {field}={choices[field]} would make it another arm; "
                    f"leave that out, or give it as an arm."
                )
    written = set() if shared is None else load(shared).model_fields_set
    common = {field: value for field, value in COMMON.items() if field not in written}

    def recipe(name: str, seed: int) -> Recipe:
        place = str(Path(output) / f"{name}-{seed}")
        return load(shared, {**common, **fields[name], **choices, "seed": seed, "output": place})

    return [Run(name, seed, recipe(name, seed)) for seed in seeds for name in names]


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
) -> Comparison:
    """Train every arm with every seed, as far as it is not there yet, and compare them.

    Args:
        arms: baselines, methods or recipe files; each becomes a row.
        seeds: of prompts and sampling; arms with the same seed are paired.
        output: folder; a run folder `<arm>-<seed>` for each, the table in `summary.json` and `comparison.md`.
        shared: recipe file with what the arms share; an arm's own fields win over it.
        choices: recipe fields of all arms, which win over both.
        reference: compare the others with this arm only; default: all pairs.
        processes: trainings side by side; default 2 if there are two cores and no GPU, else 1.
        console: where progress is shown.

    Raises:
        SpanwiseError: an arm or field that does not exist, or an output that holds another comparison.
    """
    console = console or Console()
    runs = planned(arms, seeds, choices or {}, output, shared=shared)
    if reference is not None and reference not in {run.arm for run in runs}:
        raise RecipeError(unknown("reference arm", reference, [run.arm for run in runs]))
    Path(output).mkdir(parents=True, exist_ok=True)
    waiting = [run for run in runs if not run.finished()]
    if waiting:
        _warm_up(waiting[0].recipe, console)
        beside = processes or (2 if (os.cpu_count() or 1) >= 2 and not torch.cuda.is_available() else 1)
        console.print(f"{len(runs) - len(waiting)} of {len(runs)} runs are there; {beside} side by side.", highlight=False)
        failed = _train_all(waiting, beside, console)
        if failed:
            raise DataError(
                f"{len(failed)} of {len(waiting)} runs failed, the first was {failed[0][0].folder.name}: {failed[0][1]} "
                "The same command goes on with what is missing."
            )
    found = figures_by_arm(runs)
    comparison = compare_runs(found, figures=_present(found), reference=reference)
    _write(Path(output), runs, comparison, reference)
    for table in comparison_tables(comparison):
        console.print(table)
    console.print(comparison.summary(), highlight=False)
    from spanwise.run.report import report_folder  # a second of imports that only the end needs

    console.print(f"Report: {report_folder(output)}", highlight=False, soft_wrap=True)
    return comparison


def figures_by_arm(runs: Sequence[Run]) -> dict[str, dict[int, dict[str, float | None]]]:
    """Arm -> seed -> the final figures, with the accuracy of a vote over all samples of a prompt, at most 16.

    Raises:
        DataError: evaluations of different sizes, which `spanwise eval` on one of the runs makes.
    """
    samples = {str(run.folder): read_samples(run.folder) for run in runs}
    check_protocol(samples)
    found: dict[str, dict[int, dict[str, float | None]]] = {}
    for run in runs:
        one = samples[str(run.folder)]
        size = min(int(torch.bincount(one.prompt_n).max()), MOST_VOTES)
        votes = one.votes(budgets=(size,), resamples=1)  # seeds give the interval
        voted = {f"{name}@{size}": votes[name].intervals[0].value for name in ("majority", "weighted") if name in votes}
        found.setdefault(run.arm, {})[run.seed] = {**one.figures(), **voted}
    return found


def comparison_tables(comparison: Comparison) -> Iterator[Table]:
    """The table of figures, then that of paired differences."""
    seeds = max(cell.interval.count for cell in comparison.cells.values())
    title = f"Mean over {seeds} seeds ± half of the {100 * comparison.level:g} % interval"
    table = Table("", *(name.replace("_", " ") for name in comparison.figures), title=title, box=box.SIMPLE_HEAD)
    _, _, *rows = [line.strip("| ").split(" | ") for line in comparison.markdown().splitlines() if line.startswith("|")]
    for row in rows:
        table.add_row(*row)
    yield table
    title = "Paired differences by seed (Holm: over the pairs of a figure)"
    table = Table("figure", "arms", "difference", "95 %", "verdict", "seeds needed", title=title, box=box.SIMPLE_HEAD)
    for d in comparison.differences:
        i = d.interval
        needed = "-" if d.seeds_needed is None or d.verdict == "clear" else str(d.seeds_needed)
        size = (f"{i.value:+.3f}", f"{i.low:+.3f} to {i.high:+.3f}")
        table.add_row(d.figure.replace("_", " "), f"{d.a} - {d.b}", *size, d.verdict, needed)
    if comparison.differences:
        yield table


def _present(found: Mapping[str, Mapping[int, Mapping[str, float | None]]]) -> list[str]:
    """The figures of the table that any run has."""
    values = [figures for seeds in found.values() for figures in seeds.values()]
    there = dict.fromkeys(name for figures in values for name, value in figures.items() if value is not None)
    unjudged = any((figures.get("verdict_rate") or 1.0) < 1 for figures in values)
    shown = [*FIGURES, *(["verdict_rate"] if unjudged else [])]
    return [name for name in shown if name in there] + [n for n in there if "@" in n or n.endswith("_accuracy")]


def _warm_up(recipe: Recipe, console: Console) -> None:
    """Make the shared start once, before several processes would."""
    from spanwise.run.train import make_task

    make_task(recipe, console)


def _train_all(runs: Sequence[Run], processes: int, console: Console) -> list[tuple[Run, str]]:
    """Train each run in a process of its own; return those that failed, with the last thing they said."""
    started, failed = time.perf_counter(), []
    with ThreadPoolExecutor(max_workers=processes) as pool:
        waiting = {pool.submit(_train_one, run): run for run in runs}
        for done, future in enumerate(as_completed(waiting), start=1):
            run, said = waiting[future], future.result()
            left = (time.perf_counter() - started) / done * (len(runs) - done)
            if said is None:
                final = json.loads((run.folder / "summary.json").read_text())["final"]
                shown = "  ".join(f"{name} {final[name]:.3f}" for name in FIGURES if final.get(name) is not None)
            else:
                failed.append((run, said))
                shown = f"failed: {said}"
            console.print(
                f"{done}/{len(runs)}  {run.folder.name}  {shown}  left {left / 60:.0f} min", soft_wrap=True, highlight=False
            )
    return failed


def _train_one(run: Run) -> str | None:
    """Train one run; None, or why it failed."""
    run.file.write_text(yaml.safe_dump(run.asked(), sort_keys=False))
    command = [sys.executable, "-m", "spanwise.cli", "train", str(run.file)]
    if run.recipe.save_every and list(run.folder.glob("checkpoints/checkpoint-*")):
        command += ["--resume", "last"]
    environment = {"OMP_NUM_THREADS": str(run.recipe.threads), **os.environ, "COLUMNS": "120"}
    log = run.folder.with_name(f"{run.folder.name}.log")
    with log.open("w") as file:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False
        )
    if done.returncode == 0:
        return None
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else f'exit status {done.returncode}'} (all of it: {log})"


def _write(output: Path, runs: Sequence[Run], comparison: Comparison, reference: str | None) -> None:
    """Leave the comparison behind: numbers, Markdown."""
    fields = [run.asked() for run in runs]
    common = {k: v for k, v in fields[0].items() if k not in _PLACE and all(other[k] == v for other in fields)}
    cells: dict[str, dict[str, Any]] = {arm: {} for arm in comparison.methods}
    for (arm, figure), cell in comparison.cells.items():
        cells[arm][figure] = {**_interval(cell.interval), "sd": cell.sd, "seeds": cell.interval.count}
    differences = [{**asdict(d), "interval": _interval(d.interval)} for d in comparison.differences]
    summary = {
        "arms": list(comparison.methods), "seeds": sorted({run.seed for run in runs}), "reference": reference,
        "recipe": common, "figures": cells, "differences": differences,
    }  # fmt: skip
    (output / "summary.json").write_text(json.dumps(without_nan(summary), indent=2) + "\n")
    sentences = "\n".join(f"- {sentence}" for sentence in comparison.sentences())
    (output / "comparison.md").write_text(f"{comparison.markdown()}\n\n{comparison.summary()}\n\n{sentences}\n")


def _interval(interval: Interval) -> dict[str, float]:
    return {"mean": interval.value, "low": interval.low, "high": interval.high}
