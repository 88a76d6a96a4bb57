"""What a chart says of the place that is pointed at: every series there, not only the mark under the pointer.

A thin mark is hard to hit and a band of an interval has no single value. So each chart has one layer on top that covers all of it:
a line that snaps to the nearest `x`, or a band for each bin, group or row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

Row = Mapping[str, Any]
Rows = Sequence[Row]
#: What stands where a series has no value.
NOTHING = "none"


def said(row: Row, *, value: str = "value", percent: bool = False) -> str:
    """A value as text, with its interval where it has one.

    >>> said({"value": 0.25}), said({"value": 0.25, "low": 0.2, "high": 0.3}), said({"value": 0.25}, percent=True)
    ('0.25', '0.25 [0.2, 0.3]', '25 %')
    >>> said({"value": None})
    'none'
    """
    if not _known(row.get(value)):
        return NOTHING
    bounds = [_number(row[side], percent) for side in ("low", "high") if _known(row.get(side))]
    error = f" ± {_number(row['error'], percent)}" if _known(row.get("error")) else ""
    return f"{_number(row[value], percent)}{error}" + (f" [{', '.join(bounds)}]" if len(bounds) == 2 else "")


def crosshair(rows: Rows, *, x: alt.X, key: str, title: str, value: str = "value", percent: bool = False) -> alt.Chart:
    """A line at the `key` nearest to the pointer, which says what every series is there.

    Args:
        rows: `key`, `series` and `value`; `low` and `high` where there is an interval.
        x: the horizontal axis, as the other layers have it.
        key: its field.
        title: what it is called.
        value: the field of the vertical one.
        percent: values are shares of 1.

    Example:
        >>> rows = [{"x": 0, "series": "a", "value": 0.5}, {"x": 0, "series": "b", "value": None}]
        >>> chart = crosshair(rows, x=alt.X("x:Q"), key="x", title="step")
        >>> [tip["title"] for tip in chart.to_dict()["encoding"]["tooltip"]]
        ['step', 'a', 'b']
    """
    near = alt.selection_point(name="near", fields=[key], nearest=True, on="pointermove", clear="pointerout", empty=False)
    seen = alt.when(near).then(alt.value(0.8)).otherwise(alt.value(0))
    found, tips = _beside(rows, (key,), value, percent)
    rule = alt.Chart(found, name="hover").mark_rule(style="reference", strokeDash=[1, 0])
    return rule.encode(x=x, opacity=seen, tooltip=[alt.Tooltip(f"{key}:Q", title=title, format=".4~g"), *tips]).add_params(
        near
    )


def bands(rows: Rows, *, keys: Mapping[str, str], value: str = "value", percent: bool = False, **place: Any) -> alt.Chart:
    """A band for each place along one axis, as high or as wide as the chart, which says what every series is there.

    Args:
        rows: the fields of `keys`, `series` and `value`.
        keys: the fields that say where it is, and what they are called.
        value: the field of the other axis.
        percent: values are shares of 1.
        place: the encoding of the band: `x`, `x2` or `y`.
    """
    found, tips = _beside(rows, tuple(keys), value, percent)
    where = [
        alt.Tooltip(f"{key}:{'Q' if _numeric(rows, key) else 'N'}", title=title or " ",
                    format=".4~g" if _numeric(rows, key) else alt.Undefined)
        for key, title in keys.items()
    ]  # fmt: skip
    return alt.Chart(found, name="hover").mark_rect(opacity=0).encode(**place, tooltip=[*where, *tips])


def _beside(rows: Rows, keys: Sequence[str], value: str, percent: bool) -> tuple[alt.InlineData, list[alt.Tooltip]]:
    """A row per place with a column per series; columns are numbered, as a name may hold what a field's name must not."""
    names = list(dict.fromkeys(str(row["series"]) for row in rows))
    places: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        at = tuple(row[key] for key in keys)
        empty = dict(zip(keys, at, strict=True)) | {f"s{n}": NOTHING for n in range(len(names))}
        places.setdefault(at, empty)[f"s{names.index(str(row['series']))}"] = said(row, value=value, percent=percent)
    tips = [alt.Tooltip(f"s{n}:N", title=name or value) for n, name in enumerate(names)]
    return alt.InlineData(values=list(places.values())), tips


def _numeric(rows: Rows, key: str) -> bool:
    return all(isinstance(row[key], int | float) for row in rows)


def _number(value: float | int, percent: bool) -> str:
    return f"{100 * value:.3g} %" if percent else f"{value:.4g}"


def _known(value: Any) -> bool:
    return value is not None and math.isfinite(value)
