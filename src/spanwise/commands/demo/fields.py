"""`demo fields`: a JSON object of eight small answers, paid with one number or field by field, from the same warm start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from spanwise.commands.demo.demo import Demo, Trained
from spanwise.commands.shared.display import figure_table, text_plot
from spanwise.commands.shared.fitted import say
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
#: Running means are over so many batches.
WINDOW = 5
GOAL = 0.8


def _result(trained: Sequence[Trained]) -> dict[str, Any]:
    """The curve of each run, and where it ends."""
    figures, curves = dict[str, dict[str, Any]](), dict[str, list[float]]()
    for one in trained:
        names = [f"rewards/equals.{name}/mean" for name in Fields(one.recipe.fields).knowable]
        curve = running_mean([sum(batch[name] for name in names) / len(names) for batch in one.summary["batches"]])
        ended = run_figures(curve, size=one.recipe.prompts * one.recipe.group_size)
        final = {"format rate": one.summary["final"]["format_rate"], "seconds": one.summary["seconds"]}
        figures[one.title], curves[one.title] = ended | final, curve
    return {"arms": figures, "curves": curves}


def _show(console: Console, trained: Sequence[Trained], result: Mapping[str, Any]) -> None:
    title = f"fields right in the batches, means of {WINDOW}: {trained[-1].recipe.fields} fields"
    say(console, figure_table(title, result["arms"]), text_plot(result["curves"]))


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


FIELDS = Demo("demo-fields", ARMS, COMMON, frozenset({"task", "method", "seed", "output"}), "-seed_", _result, _show)
