"""From figures to the plain rows that charts and tables take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from spanwise.explain import OF_SCORE, SCORE_FIGURES
from spanwise.layout import any_index

_T = TypeVar("_T")
#: A row of a chart or a table.
Row = dict[str, Any]
#: seed -> points, each with its `step`.
Seeds = Mapping[int, Sequence[Mapping[str, Any]]]

#: Figures of an evaluation: how they are called, and which way is good.
FIGURES: Mapping[str, str] = {
    "accuracy": "accuracy",
    "refusal_rate": "refusal rate",
    "malformed": "malformed rate",
    "coverage": "states a confidence",
    "ece": "ECE",
    "brier": "Brier score",
    "auroc": "AUROC",
    "mean_confidence": "mean confidence",
    "sharpness": "sharpness (variance)",
}
#: Those that are shares of completions.
SHARES = ("accuracy", "refusal_rate", "malformed", "coverage")
#: Most points of a curve, and so rows of its table.
MOST = 100


def figures_of(points: Iterable[Mapping[str, Any]]) -> list[str]:
    """The figures that evaluations can have: the usual ones, `<block>_accuracy` of later attempts, those of a score.

    >>> [name for name in figures_of([{"step": 0, "second_accuracy": .5}]) if name not in FIGURES]
    ['second_accuracy']
    """
    there = dict.fromkeys(name for point in points for name in point)
    scored = (name for name in SCORE_FIGURES if name in there)
    return list(dict.fromkeys([*FIGURES, *(name for name in there if name.endswith("_accuracy")), *scored]))


def together(columns: Mapping[str, _T]) -> dict[str, list[_T]]:
    """Columns by name, those of repeated blocks (`items[0]`, `items[1]`, ...) together as `items[*]`."""
    parts: dict[str, list[_T]] = {}
    for name, column in columns.items():
        parts.setdefault(any_index(name), []).append(column)
    return parts


def grouped(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Columns by name, those of repeated blocks one after the other.

    >>> grouped({"a": torch.tensor([1.0]), "b[0]": torch.tensor([2.0]), "b[1]": torch.tensor([3.0])})
    {'a': tensor([1.]), 'b[*]': tensor([2., 3.])}
    """
    return {name: torch.cat(parts) for name, parts in together(columns).items()}


def figure_name(name: str) -> str:
    """How a figure is called.

    >>> figure_name("ece"), figure_name("second_accuracy"), figure_name("laser_ece"), figure_name("laser_coverage")
    ('ECE', 'second accuracy', 'ECE of its score', 'has a score')
    """
    if name in SCORE_FIGURES:
        return {"coverage": "has a score", "mean_confidence": "mean score"}.get(
            bare := name.removeprefix(OF_SCORE), f"{figure_name(bare)} of its score"
        )
    return FIGURES.get(name, name.replace("_", " "))


def is_share(name: str) -> bool:
    """Whether a figure is a share of completions."""
    return name.removeprefix(OF_SCORE) in SHARES or name.endswith("_accuracy")


def figure(point: Mapping[str, Any], name: str) -> float | None:
    """One figure of an evaluation; `malformed` is what `format_rate` leaves over. None where it does not exist.

    >>> figure({"format_rate": 0.75}, "malformed"), figure({}, "malformed"), figure({"ece": float("nan")}, "ece")
    (0.25, None, None)
    """
    if name == "malformed" and point.get("malformed") is None:
        value = point.get("format_rate")
        return None if value is None else 1.0 - value
    value = point.get(name)
    return None if value is None or value != value else float(value)


def seed_curves(seeds: Seeds, name: str, series: str) -> list[Row]:
    """Mean of a figure over seeds at each step, from the lowest to the highest seed."""
    values_at: dict[int, list[float]] = {}
    for points in seeds.values():
        for point in {point["step"]: point for point in points}.values():  # a later line for a step replaces an earlier one
            if (value := figure(point, name)) is not None:
                values_at.setdefault(point["step"], []).append(value)
    return [
        {"series": series, "x": step, "value": math.fsum(values) / len(values)}
        | ({"low": min(values), "high": max(values)} if len(values) > 1 else {})
        for step, values in sorted(values_at.items())
    ]


def batch_curve(points: Sequence[Mapping[str, Any]], name: str, series: str, *, most: int = MOST) -> list[Row]:
    """A figure of every training batch; more than `most` are averaged in equal stretches, at the last step of each."""
    size = max(1, math.ceil(len(points) / most))
    rows = []
    for first in range(0, len(points), size):
        stretch = points[first : first + size]
        values = [value for point in stretch if (value := figure(point, name)) is not None]
        if values:
            rows.append({"series": series, "x": stretch[-1]["step"], "value": math.fsum(values) / len(values)})
    return rows


def wide(rows: Iterable[Row], *, key: str, label: str | None = None) -> list[Row]:
    """A table with a row per `key`, ascending, and a column per series as it first appears, for the numbers under a chart.

    >>> wide([{"x": 1, "series": "a", "value": 2.0}, {"x": 1, "series": "b", "value": 3.0, "low": 1.0, "high": 4.0}], key="x")
    [{'x': 1, 'a': 2.0, 'b': '3.000 [1.000, 4.000]'}]
    """
    table: dict[Any, Row] = {}
    names: dict[str, None] = {}
    for row in rows:
        value = row["value"]
        if row.get("low") is not None and row["low"] == row["low"]:
            value = f"{value:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        table.setdefault(row[key], {})[row["series"]] = value
        names[row["series"]] = None
    return [{label or key: at, **{name: table[at].get(name) for name in names}} for at in sorted(table)]


def merged(rows: Iterable[Row], *, key: str) -> list[Row]:
    """Rows of the same `key` as one.

    >>> merged([{"n": 1, "a": 2}, {"n": 1, "b": 3}], key="n")
    [{'n': 1, 'a': 2, 'b': 3}]
    """
    table: dict[Any, Row] = {}
    for row in rows:
        table.setdefault(row[key], {}).update(row)
    return list(table.values())


def percent(share: float) -> str:
    """A share of 1 as a person reads it.

    >>> percent(0.8906), percent(0.00049), percent(0.0), percent(1.0)
    ('89.1 %', '0.05 %', '0 %', '100 %')
    """
    digits = 0 if share in (0, 1) else 1 if share >= 0.001 else 2
    return f"{100 * share:.{digits}f} %"
