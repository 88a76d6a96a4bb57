"""What the training batches say of a critic: how much of what was earned it knew, and where it was wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from spanwise.explain.alarms import critic_alarms, critic_streams
from spanwise.report.charts import curves
from spanwise.report.page import Headline, Panel, Section
from spanwise.report.rows import Row, batch_curve, figure, percent, wide

Lines = Sequence[Mapping[str, Any]]
#: Metric -> series, and the sentence under them.
_PARTS = {"error_mean": "of a completion's mean", "error_within": "within a completion"}
_LEVELS = {"value_mean": "expected", "target_mean": "earned"}
_EXPLAINED_NOTE = (
    "1 - variance of (earned - expected) / variance of earned, over the tokens of a batch: 1 knows all, 0 says the same "
    "everywhere, below 0 is worse than that."
)
_PARTS_NOTE = (
    "Together they are the error of a token: how far a completion's mean value is off, and how far the course of its values is. "
    "Where all reward comes at the end, what was earned has no course: a flat critic then has no error within, which is no merit."
)
#: A critic that starts from nothing may begin at -1,000.
_FLOOR = -1.0
_LEVELS_NOTE = "Means over the tokens of a batch: where they part, the critic lags behind the policy."


def critic_section(batches: Lines) -> Section:
    """Explained variance, the two parts of the error, and what is expected against what is earned; empty without a critic.

    Args:
        batches: the lines of `metrics.jsonl` of training batches.

    Example:
        >>> section = critic_section([{"step": 1, "critic/explained_variance": -0.5, "critic/share": 0.25}])
        >>> section.warnings[0]
        'The critic knows nothing: its explained variance is -0.50 at the end (mean of the last batch).'
        >>> [panel.title for panel in section.panels]
        ['Explained variance']
    """
    streams = critic_streams(batches)
    explained = [
        row for name, key in streams.items() for row in batch_curve(batches, f"{key}/explained_variance", _named(name))
    ]
    below = f" What is below {_FLOOR:g} is drawn there." if any(row["value"] < _FLOOR for row in explained) else ""
    panels = _panel(
        "Explained variance",
        explained,
        list(map(_named, streams)),
        "share of the variance",
        f"{_EXPLAINED_NOTE}{below}",
        floor=_FLOOR,
    )
    for place, (name, key) in enumerate(streams.items()):
        behind, notes = f": {name}" if name else "", ("", "") if place else (_PARTS_NOTE, _LEVELS_NOTE)
        error, level = _rows(batches, key, _PARTS), _rows(batches, key, _LEVELS)
        panels += _panel(f"Error of the critic{behind}", error, list(_PARTS.values()), "squared error", notes[0])
        panels += _panel(f"Expected and earned{behind}", level, list(_LEVELS.values()), "mean", notes[1])
    return Section(
        "Critic",
        _text(batches),
        warnings=list(critic_alarms(batches).values()),
        panels=panels,
        asks="Does the critic know anything?",
    )


def critic_headlines(batches: Lines) -> list[Headline]:
    """The explained variance of the last batch that has one, of each value."""
    made, wrong = [], critic_alarms(batches)
    for name, key in critic_streams(batches).items():
        found = [value for line in batches if (value := figure(line, f"{key}/explained_variance")) is not None]
        label = "explained variance" + (f": {name}" if name else "")
        note = f"{found[0]:.2f} in the first batch" if len(found) > 1 else ""
        said = ("the critic knows nothing" if found else "no batch tells") if name in wrong else ""
        made.append(Headline(label, f"{found[-1]:.2f}" if found else None, note, said))
    return made


def _named(stream: str) -> str:
    return stream or "critic"


def _rows(batches: Lines, key: str, names: Mapping[str, str]) -> list[Row]:
    return [row for part, series in names.items() for row in batch_curve(batches, f"{key}/{part}", series)]


def _panel(
    title: str, rows: list[Row], names: Sequence[str], y: str, note: str, *, floor: float | None = None
) -> list[Panel]:
    if not rows:
        return []
    chart = curves(rows, names=names, y=y, dots=(), y_zero=True, floor=floor)
    return [Panel(title, (chart,), wide(rows, key="x", label="step"), note, names if len(names) > 1 else ())]


def _text(batches: Lines) -> str:
    """What the critic is for, and what it costs."""
    share = [value for line in batches if (value := figure(line, "critic/share")) is not None]
    cost = f" It took {percent(median(share))} of the time of the rest of a step (median)." if share else ""
    return (
        "GAE and SAE credit a token with what the critic expects after it minus what it expected before: they are worth what its "
        f"values are.{cost}"
    )
