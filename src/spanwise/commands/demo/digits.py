"""The method's point in one command: two arms from the same hard warm start, both with correctness + log score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from spanwise.commands.demo.demo import Demo, Trained
from spanwise.commands.shared.display import figure_table, text_plot

ARMS: dict[str, dict[str, Any]] = {
    "scalar": {"method": "rlcr_paper"},
    "blockwise": {"method": "bae_paper", "baseline": "outcome"},
}
COMMON = {"start": "hard", "calibration": "log_score", "steps": 80, "eval_every": 5, "keep_rollouts": 5}
_FIXED = frozenset({"method", "baseline", "seed", "output"})


def _result(trained: Sequence[Trained]) -> dict[str, Any]:
    """The figures of each seed and their means."""
    seeds: dict[str, dict[str, dict[str, Any]]] = {}
    for one in trained:
        seeds.setdefault(str(one.seed), {})[one.arm] = _figures(one.summary)
    recipe = trained[0].recipe.model_dump(mode="json")
    return {
        "arms": {arm: _mean([arms[arm] for arms in seeds.values()]) for arm in ARMS},
        "seeds": seeds,
        "recipe": {field: value for field, value in recipe.items() if field not in _FIXED},
    }


def _figures(summary: Mapping[str, Any]) -> dict[str, Any]:
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


def _show(console: Console, trained: Sequence[Trained], result: Mapping[str, Any]) -> None:
    for seed, arms in result["seeds"].items():
        columns = {arm: {k: v for k, v in figures.items() if k != "spanwise_share"} for arm, figures in arms.items()}
        console.print(figure_table(f"correctness + log score from the same hard warm start, seed {seed}", columns))
        for arm, figures in arms.items():
            console.print(f"{arm}: {verdict(figures)}", highlight=False)
    for one in trained:
        console.print(f"\n{one.title}, every {one.recipe.eval_every} steps", highlight=False)
        rates = {"refusals": "refusal_rate", "accuracy": "accuracy"}
        curves = {name: [point.get(rate) for point in one.summary["curve"]] for name, rate in rates.items()}
        console.print(text_plot(curves), highlight=False)


def _mean(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def mean(name: str) -> float | None:
        values = [row[name] for row in rows if row[name] is not None]
        return sum(values) / len(values) if values else None

    return {name: mean(name) for name in rows[0]}


DIGITS = Demo("demo", ARMS, COMMON, _FIXED, "-", _result, _show)
