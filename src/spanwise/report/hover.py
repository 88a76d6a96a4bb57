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
    if not _known(row.get(value)):
        return NOTHING
    bounds = [_number(row[side], percent) for side in ("low", "high") if _known(row.get(side))]
    error = f" ± {_number(row['error'], percent)}" if _known(row.get("error")) else ""
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
    found, tips = _beside(rows, (*keys, *also), value, percent)
    where = [
        alt.Tooltip(f"{key}:{'Q' if _numeric(rows, key) else 'N'}", title=title or " ",
                    format=".4~g" if _numeric(rows, key) else alt.Undefined)
        for key, title in keys.items()
    ]  # fmt: skip
    band = alt.Chart(found, name="hover").mark_rect(style="pointed")
    return band.encode(**place, opacity=_lit(), tooltip=[*where, *tips]).add_params(_pointer())


def lit(chart: alt.Chart, **place: Any) -> alt.Chart:
    """The same of a chart whose rows are said as they are: its tooltip is among the encodings."""
    return chart.properties(name="hover").mark_rect(style="pointed").encode(**place, opacity=_lit()).add_params(_pointer())


def _pointer() -> alt.Parameter:
    return alt.selection_point(name="near", on="pointerover", clear="pointerout", empty=False)


def _lit() -> Any:
    return alt.when(alt.param("near"), empty=False).then(alt.value(0.14)).otherwise(alt.value(0))


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
