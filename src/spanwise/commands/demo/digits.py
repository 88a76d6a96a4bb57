"""The method's point in one command: two arms from the same hard warm start, both with correctness + log score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from spanwise.commands.demo.demo import Demo, Trained
from spanwise.commands.shared.display import figure_table, text_plot
from spanwise.commands.shared.fitted import say

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
    return {
        "arms": {arm: _mean([arms[arm] for arms in seeds.values()]) for arm in ARMS},
        "seeds": seeds,
        "recipe": trained[0].recipe.model_dump(mode="json", exclude=set(_FIXED)),
    }


def _figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one run that the arms are compared by."""
    curve, final = summary["curve"], summary["final"]
    return {
        **{name: final[name] for name in ("accuracy", "refusal_rate")},
        "peak_refusal_rate": max(point["refusal_rate"] for point in curve),
        "mean_accuracy": sum(point["accuracy"] for point in curve) / len(curve),
        **{name: final[name] for name in ("ece", "brier", "auroc", "format_rate")},
        **{name: summary[name] for name in ("seconds", "spanwise_share")},
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
        title = f"correctness + log score from the same hard warm start, seed {seed}"
        verdicts = (f"{arm}: {verdict(figures)}" for arm, figures in arms.items())
        say(console, figure_table(title, arms, absent=["spanwise_share"]), *verdicts)
    for one in trained:
        rates = {"refusals": "refusal_rate", "accuracy": "accuracy"}
        curves = {name: [point.get(rate) for point in one.summary["curve"]] for name, rate in rates.items()}
        say(console, f"\n{one.title}, every {one.recipe.eval_every} steps", text_plot(curves))


def _mean(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def mean(name: str) -> float | None:
        values = [row[name] for row in rows if row[name] is not None]
        return sum(values) / len(values) if values else None

    return {name: mean(name) for name in rows[0]}


DIGITS = Demo("demo", ARMS, COMMON, _FIXED, "-", _result, _show)
