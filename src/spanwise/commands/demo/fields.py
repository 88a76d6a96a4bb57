"""`demo fields`: a JSON object of eight small answers, paid with one number or field by field, from the same warm start."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from spanwise.commands.shared.display import figure_table, text_plot
from spanwise.commands.shared.folder import new_folder
from spanwise.commands.train.train import train
from spanwise.errors import RecipeError
from spanwise.recipe import load
from spanwise.rollouts.folder import check_free, sole_writer, write_summary
from spanwise.tasks import Fields

#: Each arm with the learning rate that was best for it, see docs/evidence.md.
ARMS: dict[str, dict[str, Any]] = {
    "one number": {"method": "grpo", "learning_rate": 1e-3},
    "by field": {"method": "bae", "learning_rate": 2e-3},
}
COMMON: dict[str, Any] = {
    "task": "fields",
    "steps": 60,
    "prompts": 8,
    "group_size": 8,
    "warmup_steps": 0,
    "entropy": 0.0,
    "entropy_target": None,
    "eval_every": 0,
    "eval_prompts": 64,
    "eval_samples": 1,
    "keep_rollouts": 20,
}
_OWN = {"task", "method", "seed", "output"}
#: Running means are over so many batches.
WINDOW = 5
GOAL = 0.8


def demo_fields(
    *,
    seeds: Sequence[int],
    output: str | None = None,
    choices: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train both arms for every seed; write `summary.json`.

    Args:
        seeds, output, choices, overwrite, console: see `demo`.

    Raises:
        SpanwiseError: a seed twice, a field that is what the arms differ in, and what `train` says.
    """
    console = console or Console()
    started = time.perf_counter()
    if len(set(seeds)) < len(seeds):
        raise RecipeError(f"Give each seed once; got {', '.join(map(str, seeds))}.")
    for field in (choices or {}).keys() & _OWN:
        raise RecipeError(
            f"The demo sets the {field} of its arms itself, so --set {field} would change nothing; leave it out."
        )
    folder = new_folder("demo-fields") if output is None else Path(output)
    runs = {
        f"{arm}, seed {seed}" if len(seeds) > 1 else arm: {**COMMON, **own, **(choices or {}), "seed": seed}
        for seed in seeds
        for arm, own in ARMS.items()
    }
    places = {title: folder / title.replace(", ", "-").replace(" ", "_") for title in runs}
    for place in places.values():
        check_free(place, overwrite=overwrite)
    figures, curves = dict[str, dict[str, Any]](), dict[str, list[float]]()
    count = 0
    with sole_writer(folder):
        for title, fields in runs.items():
            recipe = load(None, {**fields, "output": str(places[title])})
            summary = train(recipe, console=console, title=title, overwrite=overwrite)
            count, knowable = recipe.fields, Fields("independent", recipe.fields).knowable
            batches = [[batch[f"rewards/equals.{name}/mean"] for name in knowable] for batch in summary["batches"]]
            curves[title] = running_mean([sum(row) / len(row) for row in batches])
            figures[title] = run_figures(curves[title], size=recipe.prompts * recipe.group_size)
            figures[title] |= {"format rate": summary["final"]["format_rate"], "seconds": summary["seconds"]}
        result = {"arms": figures, "curves": curves, "seconds": time.perf_counter() - started}
        write_summary(folder, result)
    console.print(figure_table(f"fields right in the batches, means of {WINDOW}: {count} fields", figures))
    console.print(text_plot(curves), highlight=False)
    console.print(f"{result['seconds']:.0f} s in all. Everything is in {folder}: summary.json, and a folder for each run.")
    return result


def running_mean(values: Sequence[float]) -> list[float]:
    """Means of the last `WINDOW` values, of fewer at the start.

    >>> running_mean([0.0, 1.0, 0.5])
    [0.0, 0.5, 0.5]
    """
    parts = [values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


def run_figures(curve: Sequence[float], *, size: int) -> dict[str, Any]:
    """Where a curve over batches of `size` completions ends, and what it took to reach the goal (None: it never did).

    >>> run_figures([0.2, 0.7, 0.85, 0.8], size=64)
    {'right at the end': 0.8, 'completions to 80 %': 192}
    """
    there = next((batch + 1 for batch, value in enumerate(curve) if value >= GOAL), None)
    return {
        "right at the end": curve[-1],
        f"completions to {GOAL:.0%}".replace("%", " %"): None if there is None else there * size,
    }
