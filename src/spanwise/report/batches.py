"""What the training batches of a run say: what was paid for what, what improved, what was dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanwise.explain.alarms import values_of
from spanwise.metric import Metric, metrics_in
from spanwise.report.page import Panel, Section
from spanwise.report.rows import Row, batch_curve
from spanwise.report.sections import curve_panel, section

Lines = Sequence[Mapping[str, Any]]
#: Title, unit, and the metric of each name of a legend, or what series are called -> their metrics.
_Wanted = tuple[str, str, str | Mapping[str, str]]

_DROPPED: Sequence[_Wanted] = (
    ("Absent rewards", "share of completions", "credit/{}/reward_absent"),
    ("Malformed completions", "share of completions", {"malformed": "malformed"}),
    ("Cut off at the longest length", "share of completions", {"cut off": "completions/clipped_ratio"}),
)
_CREDIT: Sequence[_Wanted] = (
    ("Size of the credit", "mean |credit|", "credit/{}/mean_abs"),
    ("Credit of exactly 0", "share of completions", "credit/{}/zero_frac"),
)
_DEAD: Sequence[_Wanted] = (
    ("Nobody to compare with", "share of completions", "credit/{}/singletons"),
    ("Groups with one total reward", "share of groups", {"total reward": "frac_reward_zero_std"}),
    ("Batches without any signal", "share of batches", {"all objectives": "credit/no_signal"}),
)
_OPTIMISER: Sequence[_Wanted] = (
    ("Entropy", "nats per token", {"entropy": "entropy"}),
    ("Gradient norm", "norm", {"gradient norm": "grad_norm"}),
    ("Completion length", "tokens", {"tokens": "completions/mean_length"}),
    ("Learning rate", "per step", {"learning rate": "learning_rate"}),
)


def batch_sections(batches: Lines, recipe: Mapping[str, Any]) -> list[Section]:
    """Rewards, what was dropped, credit, and where no comparison was possible."""
    objectives = objectives_in(batches)
    blocks = [name for _, name, _ in metrics_in(batches, [Metric("credit/<block>/zero_frac")])]
    rewards = [(f"Reward: {name}", "mean reward", {name: f"rewards/{name}/mean"}) for name in objectives]
    improved = _improved(batches, objectives, recipe)
    return [
        section("Rewards", legend=objectives, panels=_panels(batches, objectives, rewards), table=improved),
        section("Dropped", legend=objectives, panels=_panels(batches, objectives, _DROPPED)),
        section("Credit", legend=blocks, panels=_panels(batches, blocks, _CREDIT)),
        section("Dead strata", legend=objectives, panels=_panels(batches, objectives, _DEAD)),
    ]


def objectives_in(batches: Lines) -> list[str]:
    """The objectives that the batches have a mean reward of."""
    return [name for _, name, _ in metrics_in(batches, [Metric("rewards/<objective>/mean")])]


def optimiser_section(batches: Lines) -> Section:
    """Entropy, gradient norm, length and learning rate."""
    return section("Optimiser", panels=_panels(batches, (), _OPTIMISER))


def _improved(batches: Lines, objectives: Sequence[str], recipe: Mapping[str, Any]) -> list[Row]:
    """Each objective with what it pays, and its mean reward in the first and in the last tenth of the batches."""
    pays = {str(entry.get("name") or entry.get("reward")): entry.get("pays") for entry in recipe.get("objectives") or ()}
    tenth = max(1, len(batches) // 10)
    rows = []
    for name in objectives:
        values = (values_of(part, f"rewards/{name}/mean") for part in (batches[:tenth], batches[-tenth:]))
        first, last = (sum(part) / len(part) if part else None for part in values)
        paid = ", ".join(map(str, pays.get(name) or ())) or "unknown"
        change = None if first is None or last is None else f"{last - first:+.3f}"
        rows.append({"objective": name, "pays": paid, "first batches": first, "last batches": last, "change": change})
    return rows if len(batches) > 1 else []


def _panels(batches: Lines, legend: Sequence[str], wanted: Sequence[_Wanted]) -> list[Panel]:
    """A panel for each that has values; the names of the legend come first among the colours."""
    panels = []
    for title, y, metric in wanted:
        series = {name: metric.format(name) for name in legend} if isinstance(metric, str) else metric
        rows = [row for name, key in series.items() for row in batch_curve(batches, key, name)]
        drawn: dict[str, Any] = {
            "y": y,
            "percent": y.startswith("share"),
            "y_zero": y.startswith(("share", "mean |")),
            "dots": (),
        }
        panels += curve_panel(title, rows, list(dict.fromkeys([*legend, *series])), **drawn)
    return panels
