"""How close token advantages come to Monte Carlo ones while a run trains: at its checkpoints, with the run's own critic.

    python benchmarks/token_fidelity.py runs/critic/digits/gae-.95-0 runs/critic/digits/sae-start-.2-0 [--steps 0,20,40]
    python benchmarks/token_fidelity.py runs/critic/digits_long/sae-start-.2-0 --prompts 24 --samples 2 --rerolls 16

Step 0 is the run that fitted the critic before, where the recipe names one (critic: {model: .../critic}). Every estimator gets the
same critic, whatever the run itself trained with. The ceiling is what the exact advantage would correlate: the re-rolls are noisy.
The best SAE and GAE are chosen anew in every bootstrap draw. Intervals are 95 %, over prompts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spanwise.commands.fidelity.fidelity import GROUP_MEAN, reference_words, rolled_tokens
from spanwise.commands.shared.progress import quiet
from spanwise.commands.shared.task import run_or_model
from spanwise.fidelity import SaeSegments, TokenFidelity, token_fidelity
from spanwise.fidelity.tokens import VALUES
from spanwise.measure import Interval

#: The SAE of the paper's threshold, and the families that leads are taken over.
SAE = "SAE start 0.2, 0.95"
LEADS = ((SAE, "GAE"), ("SAE", "GAE"), (SAE, GROUP_MEAN), ("SAE", GROUP_MEAN))
REFERENCES: Mapping[str, SaeSegments | None] = {"token": None, "segment": SaeSegments()}


def places(run: Path) -> Iterator[tuple[int, Path]]:
    """Step and folder of everything that a run left to look at, its start first."""
    _, recipe = run_or_model(run, None, {}) if (run / "model").is_dir() else (run, None)
    critic = recipe and getattr(recipe.modes.get("critic"), "model", None)
    if critic and (Path(critic).parent / "model").is_dir():
        yield 0, Path(critic).parent
    steps = {int(place.name.split("-")[1]): place for place in run.glob("checkpoints/checkpoint-*")}
    if recipe is not None:
        steps.setdefault(recipe.steps, run)
    yield from sorted(steps.items())


def rows(found: TokenFidelity, about: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every figure that the tables show."""

    def row(kind: str, name: str, interval: Interval) -> dict[str, Any]:
        return {**about, "kind": kind, "name": name, "value": interval.value, "low": interval.low, "high": interval.high}

    for kind in ("all", "decision"):
        counted = {**about, "kind": kind, "name": "tokens", "value": found.count(kind)}
        yield counted
        yield row(kind, "value RMSE", found.interval("own", VALUES, "rmse", kind=kind))
        yield row(kind, "ceiling", found.interval("own", found.estimators[0], "ceiling", kind=kind))
        for name in found.estimators:
            yield row(kind, name, found.interval("own", name, "correlation", kind=kind))
        for one, other in LEADS:
            first, second = (name if name in found.estimators else f"best {name}" for name in (one, other))
            yield row(kind, f"{first} minus {second}", found.lead("own", one, other, kind=kind))


def table(found: list[dict[str, Any]]) -> str:
    """Markdown, a column per step."""
    steps = sorted({row["step"] for row in found})
    lines = [" | ".join(["| ", *(f"step {step}" for step in steps)]) + " |", "|---" * (len(steps) + 1) + "|"]
    for name in dict.fromkeys(row["name"] for row in found):
        cells = {row["step"]: row for row in found if row["name"] == name}
        entries = [cell(cells[step]) if step in cells else "" for step in steps]
        lines.append(f"| {name} | {' | '.join(entries)} |")
    return "\n".join(lines)


def cell(row: Mapping[str, Any]) -> str:
    """A figure and its interval."""
    if row["name"] == "tokens":
        return str(row["value"])
    sign = "+" if "minus" in row["name"] else ""
    value, low, high = (format(row[key], f"{sign}.3f").replace("0.", ".") for key in ("value", "low", "high"))
    return f"{value} ({low}, {high})"


def measure(run: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rows of one run."""
    steps = None if options.steps is None else {int(step) for step in options.steps.split(",")}
    sizes = {name: getattr(options, name) for name in ("prompts", "samples", "rerolls", "most", "seed")}
    for step, place in places(run):
        if steps is not None and step not in steps:
            continue
        started = time.perf_counter(), time.process_time()
        folder, recipe = run_or_model(place, None, {})
        trajectories, critics = rolled_tokens(folder, recipe, critics=["own"], **sizes)
        for name, segments in REFERENCES.items():
            fidelity = token_fidelity(trajectories, critics, segments=segments, seed=options.seed)
            yield from rows(fidelity, {"run": run.name, "step": step, "reference": name})
        seconds = time.perf_counter() - started[0], time.process_time() - started[1]
        print(f"{run.name}, step {step} ({place}): {seconds[0]:.0f} s, {seconds[1]:.0f} of them on the CPU", flush=True)


def main() -> None:
    """Measure, write the rows, print the tables."""
    parser = argparse.ArgumentParser(description="Token advantages against Monte Carlo ones at the checkpoints of runs.")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders with a critic, and checkpoints (save_every)")
    parser.add_argument("--steps", help="some of the steps, separated by commas; default: all that are there")
    for name, default in (("prompts", 48), ("samples", 4), ("rerolls", 32), ("most", 16), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path, default=Path("runs/token_fidelity.jsonl"), help="a row per figure")
    options = parser.parse_args()
    quiet()
    records = [row for run in options.runs for row in measure(run, options)]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("".join(json.dumps(row) + "\n" for row in records), encoding="utf-8")
    for run in options.runs:
        for name, segments in REFERENCES.items():
            for kind in ("all", "decision"):
                these = [row for row in records if (row["run"], row["reference"], row["kind"]) == (run.name, name, kind)]
                print(f"\n{run.name}, {kind} tokens. {reference_words(segments)}\n\n{table(these)}")


if __name__ == "__main__":
    main()
