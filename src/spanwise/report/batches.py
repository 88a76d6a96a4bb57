"""What the training batches of a run say: what was paid for what, what improved, what was dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanwise.report.charts import curves
from spanwise.report.page import Panel, Section
from spanwise.report.rows import Row, batch_curve, figure, wide

Lines = Sequence[Mapping[str, Any]]
HELD_OUT, BATCH = "held-out prompts", "training batches"


def figure_panel(
    title: str, rows: list[Row], names: Sequence[str], y: str = "", *, share: bool = False, zero: bool = False
) -> Panel:
    """Curves over steps; only evaluations get points, training batches are too many."""
    unit = y or ("share of completions" if share else title)
    chart = curves(rows, names=names, y=unit, dots=(HELD_OUT,), percent=share or unit.startswith("share"), y_zero=zero)
    return Panel(title[:1].upper() + title[1:], (chart,), wide(rows, key="x", label="step"))


def batch_sections(batches: Lines, recipe: Mapping[str, Any]) -> list[Section]:
    """Rewards, what was dropped, credit, and where no comparison was possible."""
    keys = list(dict.fromkeys(key for line in batches for key in line))
    objectives = [k.split("/")[1] for k in keys if k.startswith("rewards/") and k.endswith("/mean")]
    blocks = [k.split("/")[1] for k in keys if k.startswith("credit/") and k.endswith("/zero_frac")]
    rewards = _batch_panels(
        batches,
        objectives,
        *((f"Reward: {name}", "mean reward", {name: f"rewards/{name}/mean"}) for name in objectives),
    )
    dropped = _batch_panels(
        batches,
        objectives,
        ("Absent rewards", "share of completions", {name: f"credit/{name}/reward_absent" for name in objectives}),
    ) + _batch_panels(batches, (), *_DROPPED)
    credit = _batch_panels(
        batches,
        blocks,
        ("Size of the credit", "mean |credit|", {name: f"credit/{name}/mean_abs" for name in blocks}),
        ("Credit of exactly 0", "share of completions", {name: f"credit/{name}/zero_frac" for name in blocks}),
    )
    dead = _batch_panels(
        batches,
        objectives,
        ("Nobody to compare with", "share of completions", {name: f"credit/{name}/singletons" for name in objectives}),
        ("Groups with one total reward", "share of groups", {"total reward": "frac_reward_zero_std"}),
        ("Batches without any signal", "share of batches", {"all objectives": "credit/no_signal"}),
    )
    return [
        Section(
            "Rewards",
            "Means over the completions of a training batch that have the reward; the table compares the first tenth of the "
            "batches with the last.",
            objectives,
            panels=rewards,
            table=_improved(batches, objectives, recipe),
            asks="Which part of the answer improves?",
        ),
        Section(
            "Dropped",
            "Rewards that do not exist join no comparison, and they are not 0. Cut off: at the longest length.",
            objectives,
            panels=dropped,
            asks="What was dropped: failed, missing, cut off?",
        ),
        Section("Credit", "What the blocks of a training batch are paid.", blocks, panels=credit, asks="Why this number?"),
        Section(
            "Dead strata",
            "Where no comparison was possible: these completions taught nothing.",
            objectives,
            panels=dead,
            asks="Why is this advantage zero?",
        ),
    ]


def _improved(batches: Lines, objectives: Sequence[str], recipe: Mapping[str, Any]) -> list[Row]:
    """Each objective with what it pays, and its mean reward in the first and in the last tenth of the batches."""
    pays = {str(entry.get("name") or entry.get("reward")): entry.get("pays") for entry in recipe.get("objectives") or ()}
    tenth = max(1, len(batches) // 10)
    rows = []
    for name in objectives:
        first, last = (_mean(part, f"rewards/{name}/mean") for part in (batches[:tenth], batches[-tenth:]))
        paid = ", ".join(map(str, pays.get(name) or ())) or "unknown"
        change = None if first is None or last is None else f"{last - first:+.3f}"
        rows.append({"objective": name, "pays": paid, "first batches": first, "last batches": last, "change": change})
    return rows if len(batches) > 1 else []


def _mean(batches: Lines, key: str) -> float | None:
    values = [value for line in batches if (value := figure(line, key)) is not None]
    return sum(values) / len(values) if values else None


def optimiser_section(batches: Lines) -> Section:
    """Entropy, gradient norm, length and learning rate."""
    return Section("Optimiser", panels=_batch_panels(batches, (), *_OPTIMISER), asks="Did it collapse?")


def _batch_panels(batches: Lines, names: Sequence[str], *wanted: tuple[str, str, Mapping[str, str]]) -> list[Panel]:
    """Panels of (title, y, series -> key of the metrics), as far as there are values; `names` come first among the colours."""
    panels = []
    for title, y, series in wanted:
        rows = [row for name, key in series.items() for row in batch_curve(batches, key, name)]
        if rows:
            listed = list(dict.fromkeys([*names, *series]))
            panels.append(figure_panel(title, rows, listed, y, zero=y.startswith(("share", "mean |"))))
    return panels


_OPTIMISER = (
    ("Entropy", "nats per token", {"entropy": "entropy"}),
    ("Gradient norm", "norm", {"gradient norm": "grad_norm"}),
    ("Completion length", "tokens", {"tokens": "completions/mean_length"}),
    ("Learning rate", "per step", {"learning rate": "learning_rate"}),
)
_DROPPED = (
    ("Malformed completions", "share of completions", {"malformed": "malformed"}),
    ("Cut off at the longest length", "share of completions", {"cut off": "completions/clipped_ratio"}),
)
