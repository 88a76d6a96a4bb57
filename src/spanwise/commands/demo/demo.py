"""`demo`: the method's point in one command. Two arms from the same hard warm start, both with correctness + log score."""

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
from spanwise.recipe import Recipe, load
from spanwise.rollouts.folder import check_free, sole_writer, write_summary

ARMS: dict[str, dict[str, Any]] = {
    "scalar": {"method": "rlcr_paper"},
    "blockwise": {"method": "bae_paper", "baseline": "outcome"},
}
_OWN = {"method", "baseline", "seed", "output"}
COMMON = {"start": "hard", "calibration": "log_score", "steps": 80, "eval_every": 5, "keep_rollouts": 5}


def demo(
    *,
    seeds: Sequence[int],
    output: str | None = None,
    choices: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train both arms for every seed and write `summary.json`.

    Args:
        seeds: one seed fills `arms` with its figures, several with their means, and `seeds` with each.
        output: folder; one run folder per arm (and seed, if there are several) inside. Default: a new one, `runs/demo-<n>`.
        choices: recipe fields that both arms change.
        overwrite: replace the runs that the output holds.
        console: where progress is shown.

    Raises:
        SpanwiseError: a seed twice, a field that is what the arms differ in, a folder that holds other runs, and what `train` says.
    """
    console = console or Console()
    started = time.perf_counter()
    if len(set(seeds)) < len(seeds):
        raise RecipeError(f"Give each seed once; got {', '.join(map(str, seeds))}.")
    for field in (choices or {}).keys() & _OWN:
        raise RecipeError(
            f"The demo sets the {field} of its arms itself, so --set {field} would change nothing; leave it out."
        )
    common = {**COMMON, **(choices or {})}
    folder = new_folder("demo") if output is None else Path(output)
    places = {(seed, arm): folder / (arm if len(seeds) == 1 else f"{arm}-{seed}") for seed in seeds for arm in ARMS}
    for place in places.values():
        check_free(place, overwrite=overwrite)
    by_seed: dict[int, dict[str, dict[str, Any]]] = {}
    curves: dict[str, dict[str, list[Any]]] = {}
    with sole_writer(folder):
        for seed in seeds:
            by_seed[seed] = {}
            for arm, own in ARMS.items():
                recipe = load(None, {**common, **own, "seed": seed, "output": str(places[seed, arm])})
                title = arm if len(seeds) == 1 else f"{arm}, seed {seed}"
                summary = train(recipe, console=console, title=title, overwrite=overwrite)
                by_seed[seed][arm] = arm_figures(summary)
                curves[title] = {name: [p.get(name) for p in summary["curve"]] for name in ("refusal_rate", "accuracy")}
        arms = {arm: _mean([by_seed[seed][arm] for seed in seeds]) for arm in ARMS}
        result = {
            "arms": arms,
            "seeds": {str(seed): figures for seed, figures in by_seed.items()},
            "recipe": _shared(load(None, common)),
            "seconds": time.perf_counter() - started,
        }
        write_summary(folder, result)
    _show(console, by_seed, curves, int(common["eval_every"]))
    console.print(f"{result['seconds']:.0f} s in all. Everything is in {folder}: summary.json, and a folder for each run.")
    return result


def arm_figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one run that the arms are compared by."""
    refusals = [point["refusal_rate"] for point in summary["curve"]]
    accuracies = [point["accuracy"] for point in summary["curve"]]
    final = summary["final"]
    return {
        **{name: final[name] for name in ("accuracy", "refusal_rate")},
        "peak_refusal_rate": max(refusals),
        "mean_accuracy": sum(accuracies) / len(accuracies),
        **{name: final[name] for name in ("ece", "brier", "auroc", "format_rate")},
        "seconds": summary["seconds"],
        "spanwise_share": summary["spanwise_share"],
    }


def verdict(figures: Mapping[str, Any]) -> str:
    """Say in words what the refusals of an arm did.

    >>> verdict({"peak_refusal_rate": .98, "refusal_rate": .95})
    'collapsed into refusing and stayed there'
    """
    if figures["peak_refusal_rate"] < 0.5:
        return "kept answering"
    if figures["refusal_rate"] > 0.5:
        return "collapsed into refusing and stayed there"
    return "collapsed into refusing and came back"


def _show(
    console: Console, by_seed: Mapping[int, Mapping[str, Mapping[str, Any]]], curves: Mapping[str, Any], every: int
) -> None:
    for seed, arms in by_seed.items():
        shown = {arm: {k: v for k, v in figures.items() if k != "spanwise_share"} for arm, figures in arms.items()}
        console.print(figure_table(f"correctness + log score from the same hard warm start, seed {seed}", shown))
        for arm, figures in arms.items():
            console.print(f"{arm}: {verdict(figures)}", highlight=False)
    for title, series in curves.items():
        console.print(f"\n{title}, every {every} steps", highlight=False)
        console.print(text_plot({"refusals": series["refusal_rate"], "accuracy": series["accuracy"]}), highlight=False)


def _mean(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def mean(name: str) -> float | None:
        values = [row[name] for row in rows if row[name] is not None]
        return sum(values) / len(values) if values else None

    return {name: mean(name) for name in rows[0]}


def _shared(recipe: Recipe) -> dict[str, Any]:
    return {key: value for key, value in recipe.model_dump(mode="json").items() if key not in _OWN}
