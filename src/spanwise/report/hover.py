"""What a chart says of the place that is pointed at: every series there, not only the mark under the pointer.

A thin mark is hard to hit and a band of an interval has no single value. So each chart has one layer on top that covers all of it:
a band for each step, bin, group or row, which is lit and says what is there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
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
    if not is_known(row.get(value)):
        return NOTHING
    bounds = [_number(row[side], percent) for side in ("low", "high") if is_known(row.get(side))]
    error = f" ± {_number(row['error'], percent)}" if is_known(row.get("error")) else ""
    return f"{_number(row[value], percent)}{error}" + (f" [{', '.join(bounds)}]" if len(bounds) == 2 else "")


def nearest(rows: Rows, *, x: alt.X, key: str, title: str, value: str = "value", percent: bool = False) -> alt.Chart:
    """A band around each `key`, half-way to its neighbours, which says what every series is there.

    Example:
        >>> rows = [{"x": x, "series": "a", "value": 0.5} for x in (0, 2)]
        >>> chart = nearest(rows, x=alt.X("left:Q"), key="x", title="step").to_dict()
        >>> [(row["left"], row["right"], row["s0"]) for row in next(iter(chart["datasets"].values()))]
        [(0, 1.0, '0.5'), (1.0, 2, '0.5')]
    """
    places = sorted({row[key] for row in rows})
    middles = [(a + b) / 2 for a, b in pairwise(places)]
    lefts = dict(zip(places, [*places[:1], *middles], strict=True))
    rights = dict(zip(places, [*middles, *places[-1:]], strict=True))
    if len(places) == 1:
        lefts, rights = {places[0]: places[0] - 0.5}, {places[0]: places[0] + 0.5}
    wide = [{**row, "left": lefts[row[key]], "right": rights[row[key]]} for row in rows]
    return bands(wide, keys={key: title}, value=value, percent=percent, also=("left", "right"), x=x, x2=alt.X2("right:Q"))


def bands(
    rows: Rows,
    *,
    keys: Mapping[str, str],
    value: str = "value",
    percent: bool = False,
    also: Sequence[str] = (),
    **place: Any,
) -> alt.Chart:
    """A band for each place along one axis, as high or as wide as the chart, which says what every series is there."""
    names = list(dict.fromkeys(str(row["series"]) for row in rows))  # numbered: a name may hold what a field's name must not
    places: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        at = {key: row[key] for key in (*keys, *also)}
        texts = places.setdefault(tuple(at.values()), at | {f"s{n}": NOTHING for n in range(len(names))})
        texts[f"s{names.index(str(row['series']))}"] = said(row, value=value, percent=percent)
    where = [tip(key, title, number=all(isinstance(row[key], int | float) for row in rows)) for key, title in keys.items()]
    tips = [tip(f"s{n}", name or value) for n, name in enumerate(names)]
    return lit(alt.Chart(alt.InlineData(values=list(places.values()))), **place, tooltip=[*where, *tips])


def lit(chart: alt.Chart, **encoded: Any) -> alt.Chart:
    """The layer of a chart that is lit where it is pointed at; its tooltip is among the encodings."""
    pointer = alt.selection_point(name="near", on="pointerover", clear="pointerout", empty=False)
    opacity: Any = alt.when(alt.param("near"), empty=False).then(alt.value(0.14)).otherwise(alt.value(0))
    drawn = chart.properties(name="hover").mark_rect(style="pointed")
    return drawn.encode(**encoded, opacity=opacity).add_params(pointer)


def tip(key: str, title: str, *, number: bool = False) -> alt.Tooltip:
    """A line of a tooltip: a word, or a number with four digits."""
    return alt.Tooltip(f"{key}:{'Q' if number else 'N'}", title=title or " ", format=".4~g" if number else alt.Undefined)


def is_known(value: Any) -> bool:
    """Whether a value is a number that can be drawn."""
    return value is not None and math.isfinite(value)


def _number(value: float | int, percent: bool) -> str:
    return f"{100 * value:.3g} %" if percent else f"{value:.4g}"
