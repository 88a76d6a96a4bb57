"""Turn plain rows into Altair charts; the page adds the colours, light or dark, and the legend.

The docstring or signature of a chart names the keys of its rows; None and NaN are not drawn. `series` selects the colour, in the
order of `names`. As a thin mark is hard to hit, each chart has a layer of bands on top, one for each step, bin, group or row, which
is highlighted and names the value of every series there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import altair as alt

Row = Mapping[str, Any]
Rows = Sequence[Row]
Drawn = alt.Chart | alt.LayerChart
#: The page's colours that a chart takes; in "verdicts" the third colour and later ones are grey.
Palette = Literal["series", "verdicts"]

#: The text of a series without a value.
NOTHING = "none"
#: Room for the labels of a vertical axis, the same for charts that stand above each other.
_AXIS = 42


def curves(
    rows: Rows,
    *,
    names: Sequence[str],
    y: str,
    x: str = "step",
    y_zero: bool = False,
    percent: bool = False,
    dots: Sequence[str] | None = None,
    floor: float | None = None,
    height: int = 225,
) -> Drawn:
    """Draw lines of rows of `x`, `value`, `series`, with a band from `low` to `high`; values below `floor` are cut off."""

    def draw(part: Rows) -> alt.Chart:
        return _chart(part).encode(x=_x("x", x), color=_color(names))

    value, low = (_y(field, y, zero=y_zero, percent=percent) for field in ("value", "low"))
    if floor is not None and any(is_known(row["value"]) and row["value"] < floor for row in rows):
        value = value.scale(alt.Scale(zero=y_zero, domainMin=floor, clamp=True))
    layers = []
    if any(is_known(row.get("low")) for row in rows):
        layers.append(draw(rows).mark_area(opacity=0.13, line=False).encode(y=low, y2="high:Q"))
    dotted = [row for row in rows if dots is None or row["series"] in dots]
    for part, width in (([row for row in rows if row not in dotted], 1.2), (dotted, 2)):
        if part:
            opacity = 0.5 if width < 2 and dotted else 1
            layers.append(draw(part).mark_line(strokeWidth=width, opacity=opacity).encode(y=value))
    if dotted:
        layers.append(_points(draw(dotted), 36).encode(y=value, shape=_shape(names)))
    return _layered(height, *layers, nearest(rows, x=_x("left", x), title=x, percent=percent))


def reliability_diagram(rows: Rows, *, by: str = "confidence", height: int = 250) -> tuple[Drawn, Drawn]:
    """Draw accuracy against confidence, the diagonal, and below it how many answers each bin holds."""
    filled_bins = [row for row in rows if row["count"]]
    widest = max((row["high"] for row in rows if is_known(row["high"])), default=1.0)
    scale = alt.Scale(domain=[0, max(1.04, widest)], nice=False)
    fifths = alt.Axis(values=[0, 0.2, 0.4, 0.6, 0.8, 1], grid=False)
    unlabelled = alt.Axis(values=[0, 0.2, 0.4, 0.6, 0.8, 1], grid=False, title=None, labels=False, ticks=False)
    accuracy = {"title": "accuracy", "scale": _UNIT, "axis": alt.Axis(minExtent=_AXIS)}
    base, x = _chart(filled_bins), alt.X("confidence:Q", scale=scale, axis=unlabelled)
    whiskers = base.mark_rule(strokeWidth=2).encode(x=x, y=alt.Y("accuracy_low:Q", **accuracy), y2="accuracy_high:Q")
    points = _points(base, 70).encode(x=x, y=alt.Y("accuracy:Q", **accuracy))
    bins = _chart([{**row, "high": row["high"] if row["high"] > row["low"] else row["low"] + 0.035} for row in filled_bins])
    x_low = alt.X("low:Q", title=by, scale=scale, axis=fifths)
    count = alt.Y("count:Q", title="count", axis=alt.Axis(minExtent=_AXIS, tickCount=3, format="~s"))
    bars = bins.mark_bar(binSpacing=1).encode(x=x_low, x2="high:Q", y=count, y2=alt.datum(0))
    names = {"confidence": f"mean {by}", "accuracy": "accuracy", "accuracy_low": "95 % from", "accuracy_high": "95 % to"}
    tips = _tips(filled_bins, low="from", high="to", **names, count="completions")
    hover = lit(bins, x=alt.X("low:Q", scale=scale, axis=unlabelled), x2="high:Q", tooltip=tips)
    diagonal = _diagonal(scale, axis=unlabelled)
    return _layered(height, diagonal, whiskers, points, hover), _layered(
        115, bars, lit(bins, x=x_low, x2="high:Q", tooltip=tips)
    )


def dodged(rows: Rows, *, names: Sequence[str], y: str, x: str = "group size G", height: int = 250) -> Drawn:
    """Draw points with error bars side by side at each `x`."""
    position = alt.X("x:O", title=x, axis=alt.Axis(labelAngle=0, grid=False))
    offset = alt.XOffset("series:N", scale=alt.Scale(domain=list(names)))
    base = _chart(rows).encode(x=position, xOffset=offset, color=_color(names))
    layers = []
    references = {row["x"]: row["reference"] for row in rows if is_known(row.get("reference"))}
    if references:
        ticks = _chart([{"x": key, "value": value} for key, value in references.items()])
        ticks = ticks.mark_tick(style="reference", strokeDash=[1, 0], orient="horizontal", bandSize=60)
        layers.append(ticks.encode(x=position, y=_y("value", y)))
    if any(is_known(row.get("low")) for row in rows):
        layers.append(base.mark_rule(strokeWidth=2).encode(y=_y("low", y), y2="high:Q"))
    layers.append(_points(base, 50).encode(y=_y("value", y), shape=_shape(names)))
    exact_rows = [{"x": key, "series": "exact advantages", "value": value} for key, value in references.items()]
    return _layered(height, *layers, bands([*rows, *exact_rows], keys={"x": x}, x=position))


def fixed_points(rows: Rows, *, names: Sequence[str]) -> Drawn:
    """Draw the confidence that each baseline drives a policy to, against the true probability `x`."""
    chart = curves(rows, names=names, x="probability of being right, p", y="where its confidence ends, q*", height=270)
    chart.layer.insert(0, _diagonal(_UNIT))
    return chart


def histograms(rows: Rows, *, names: Sequence[str], x: str = "credit", zero: bool = True, height: int = 210) -> Drawn:
    """Draw the outlines of several histograms over the same bins, from rows of `low`, `high`, `share`, `series`."""
    x_low = alt.X("low:Q", title=x, scale=alt.Scale(nice=False), axis=alt.Axis(grid=False, tickCount=7))
    share = alt.Y("share:Q", title="share of completions", axis=alt.Axis(format="%", tickCount=4))
    base = _chart(rows).encode(x=x_low, color=_color(names))
    area = base.mark_area(interpolate="step-after", opacity=0.16, line=False).encode(y=share.stack(None))
    line = base.mark_line(interpolate="step-after", strokeWidth=2).encode(y=share)
    zero_line = [_chart([{"low": 0}]).mark_rule(style="reference").encode(x="low:Q")] if zero else []
    bins = [row for row in rows if row["low"] < row["high"]]
    hover = bands(bins, keys={"low": "from", "high": "to"}, value="share", percent=True, x=x_low, x2=alt.X2("high:Q"))
    return _layered(height, *zero_line, area, line, hover)


def forest(rows: Rows, *, names: Sequence[str], x: str, palette: Palette = "series") -> Drawn:
    """Draw values with their intervals, one line per `name`, and a dashed line at 0."""
    axis = alt.Axis(labelLimit=150, ticks=False, domain=False)
    lines = _chart(rows).encode(y=alt.Y("name:N", sort=_order(rows), title=None, axis=axis))
    base = lines.encode(color=_color(names, palette))
    whiskers = base.mark_rule(strokeWidth=2).encode(x=_x("low", x), x2="high:Q")
    points = _points(base, 60).encode(x=_x("value", x), shape=_shape(names))
    hover = lit(lines, tooltip=_tips(rows, name="", series="verdict" if palette == "verdicts" else "series", value=x))
    zero_line = _chart([{"value": 0.0}]).mark_rule(style="reference").encode(x="value:Q")
    return _layered(45 + 24 * max(2, len(_order(rows))), zero_line, whiskers, points, hover)


def bars(rows: Rows, *, names: Sequence[str], x: str, percent: bool = False, stacked: bool = True) -> Drawn:
    """Draw horizontal bars, one line per `name`."""
    order = _order(rows)
    axis = alt.Axis(format="%" if percent else "~s", tickCount=5, grid=True)
    scale = alt.Scale(domain=[0, 1]) if percent else alt.Undefined
    lines = _chart(rows).mark_bar(cornerRadius=2).encode(
        x=alt.X("value:Q", title=x, axis=axis, scale=scale, stack="zero" if stacked else None),
        y=alt.Y("name:N", sort=order, title=None, axis=alt.Axis(ticks=False, domain=False, labelLimit=140)),
        color=_color(names),
        tooltip=_tips(rows, name="", series="", value=x),
    )  # fmt: skip
    if not stacked:
        lines = lines.encode(yOffset=alt.YOffset("series:N", scale=alt.Scale(domain=list(names))))
    return _wide(lines, 45 + len(order) * (28 if stacked else 14 * len(names) + 10))


_UNIT = alt.Scale(domain=[0, 1])


def _chart(rows: Rows) -> alt.Chart:
    """Build a chart from rows, with null for NaN and infinity, which JSON lacks."""
    values = [
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
        for row in rows
    ]
    return alt.Chart(alt.InlineData(values=values))


def _order(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["name"] for row in rows))


def _points(chart: alt.Chart, size: int) -> alt.Chart:
    return chart.mark_point(filled=True, size=size, opacity=1)


def _diagonal(scale: alt.Scale, **axis: Any) -> alt.Chart:
    x, y = alt.X("a:Q", scale=scale, **axis), alt.Y("b:Q", scale=_UNIT)
    return _chart([{"a": 0, "b": 0}, {"a": 1, "b": 1}]).mark_line(style="reference").encode(x=x, y=y)


def _layered(height: int, *charts: alt.Chart) -> Drawn:
    return _wide(alt.LayerChart(layer=list(charts)), height)


def _wide(chart: Drawn, height: int) -> Drawn:
    """Set a chart to the full width and to a total height, so that charts side by side end on one line."""
    return chart.properties(width="container", height=height, autosize=alt.AutoSizeParams(type="fit", contains="padding"))


def _x(field: str, title: str) -> alt.X:
    return alt.X(f"{field}:Q", title=title, scale=alt.Scale(zero=False), axis=alt.Axis(grid=False, tickCount=5))


def _y(field: str, title: str, *, zero: bool = False, percent: bool = False) -> alt.Y:
    axis = alt.Axis(tickCount=5, minExtent=_AXIS, format=".3~p" if percent else alt.Undefined)
    return alt.Y(f"{field}:Q", title=title, scale=alt.Scale(zero=zero), axis=axis)


def _color(names: Sequence[str], palette: Palette = "series") -> alt.Color:
    colours = "category" if palette == "series" else "ordinal"  # names of colour lists in the page's configuration
    return alt.Color("series:N", scale=alt.Scale(domain=list(names), range=colours), legend=None)


def _shape(names: Sequence[str]) -> alt.Shape:
    return alt.Shape("series:N", scale=alt.Scale(domain=list(names)), legend=None)


def _tips(rows: Rows, **titles: str) -> list[alt.Tooltip]:
    """Build the tooltip of a row: words unchanged, numbers with four digits."""
    keys = {key for row in rows for key in row if row[key] != ""}
    all_titles = {"series": " ", **titles, "low": "from", "high": "to"}
    return [tip(key, title, number=key not in ("series", "name")) for key, title in all_titles.items() if key in keys]


def said(row: Row, *, value: str = "value", percent: bool = False) -> str:
    """Return a value as text, with its interval if it has one."""
    if not is_known(row.get(value)):
        return NOTHING
    bounds = [_number(row[side], percent) for side in ("low", "high") if is_known(row.get(side))]
    error = f" ± {_number(row['error'], percent)}" if is_known(row.get("error")) else ""
    return f"{_number(row[value], percent)}{error}" + (f" [{', '.join(bounds)}]" if len(bounds) == 2 else "")


def nearest(rows: Rows, *, x: alt.X, title: str, percent: bool = False) -> alt.Chart:
    """Add a band around each `x` that shows the values of all series in a tooltip."""
    places = sorted({row["x"] for row in rows})
    first, last = (places[0], places[-1]) if len(places) > 1 else (places[0] - 0.5, places[0] + 0.5)
    edges = [first, *((a + b) / 2 for a, b in pairwise(places)), last]
    sides = {place: {"left": left, "right": right} for place, (left, right) in zip(places, pairwise(edges), strict=True)}
    wide = [{**row, **sides[row["x"]]} for row in rows]
    return bands(wide, keys={"x": title, "left": None, "right": None}, percent=percent, x=x, x2=alt.X2("right:Q"))


def bands(
    rows: Rows, *, keys: Mapping[str, str | None], value: str = "value", percent: bool = False, **place: Any
) -> alt.Chart:
    """Add a band for each place along one axis with a tooltip of all series; `keys`: fields of a place -> heading or None."""
    # A series becomes a numbered field, as its name may hold characters that a field's name must not.
    names = list(dict.fromkeys(str(row["series"]) for row in rows))
    places: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        place_row = {key: row[key] for key in keys}
        texts = places.setdefault(tuple(place_row.values()), place_row | {f"s{n}": NOTHING for n in range(len(names))})
        texts[f"s{names.index(str(row['series']))}"] = said(row, value=value, percent=percent)
    titles = {key: title for key, title in keys.items() if title is not None}
    where = [tip(key, title, number=all(isinstance(row[key], int | float) for row in rows)) for key, title in titles.items()]
    tips = [tip(f"s{n}", name or value) for n, name in enumerate(names)]
    return lit(alt.Chart(alt.InlineData(values=list(places.values()))), **place, tooltip=[*where, *tips])


def lit(chart: alt.Chart, **encoded: Any) -> alt.Chart:
    """Build the layer that is highlighted under the pointer and shows the tooltip."""
    pointer = alt.selection_point(name="near", on="pointerover", clear="pointerout", empty=False)
    opacity: Any = alt.when(alt.param("near"), empty=False).then(alt.value(0.14)).otherwise(alt.value(0))
    area = chart.properties(name="hover").mark_rect(style="pointed")
    return area.encode(**encoded, opacity=opacity).add_params(pointer)


def tip(key: str, title: str, *, number: bool = False) -> alt.Tooltip:
    """Build one line of a tooltip: a word, or a number with four digits."""
    return alt.Tooltip(f"{key}:{'Q' if number else 'N'}", title=title or " ", format=".4~g" if number else alt.Undefined)


def is_known(value: Any) -> bool:
    """Return whether a value is a number that can be drawn."""
    return value is not None and math.isfinite(value)


def _number(value: float | int, percent: bool) -> str:
    return f"{100 * value:.3g} %" if percent else f"{value:.4g}"
