"""Plain rows in, Altair charts out. No colour is fixed here: the page gives them, light or dark, when it draws.

A chart takes a list of dictionaries and says in its docstring which keys they have; None and NaN are not drawn. `series` picks the
colour, in the order of `names`; the page shows the legend, since a legend inside a chart does not wrap on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import altair as alt

from spanwise.report.hover import bands, lit, nearest

Row = Mapping[str, Any]
Rows = Sequence[Row]
Drawn = alt.Chart | alt.LayerChart
#: Which of the page's colours a chart takes; in "verdicts" the third and later ones are grey.
Palette = Literal["series", "verdicts"]

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
    """Lines over `x` of rows with `x`, `value`, `series`, and a band where there are `low` and `high`; below `floor` it is cut."""
    base = _chart(rows).encode(x=_x("x", x), color=_color(names))
    scaled = _y("value", y, zero=y_zero, percent=percent)
    if floor is not None and any(_known(row["value"]) and row["value"] < floor for row in rows):
        scaled = scaled.scale(alt.Scale(zero=y_zero, domainMin=floor, clamp=True))
    layers = []
    if any(_known(row.get("low")) for row in rows):
        bounds = {"y": _y("low", y, zero=y_zero, percent=percent), "y2": alt.Y2("high:Q")}
        layers.append(base.mark_area(opacity=0.13, line=False).encode(**bounds))
    marked = [row for row in rows if dots is None or row["series"] in dots]
    for part, width in (([row for row in rows if row not in marked], 1.2), (marked, 2)):
        if part:
            line = base.mark_line(strokeWidth=width, opacity=0.5 if width < 2 and marked else 1)
            line.data = _data(part)
            layers.append(line.encode(y=scaled))
    if marked:
        points = base.mark_point(filled=True, size=36, opacity=1)
        points.data = _data(marked)
        layers.append(points.encode(y=scaled, shape=_shape(names)))
    return _wide(_layers(*layers, nearest(rows, x=_x("left", x), key="x", title=x, percent=percent)), height)


def reliability_diagram(rows: Rows, *, by: str = "confidence", height: int = 250) -> tuple[Drawn, Drawn]:
    """Accuracy against confidence, the diagonal, and below it how full each bin of a `spanwise.measure.Reliability` is."""
    full = [row for row in rows if row["count"]]
    widest = max((row["high"] for row in rows if _known(row["high"])), default=1.0)
    x_scale = alt.Scale(domain=[0, max(1.04, widest)], nice=False)
    axis = alt.Axis(values=[0, 0.2, 0.4, 0.6, 0.8, 1], grid=False, title=None, labels=False, ticks=False)
    x = alt.X("confidence:Q", scale=x_scale, axis=axis)
    y = alt.Y("accuracy:Q", title="accuracy", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(minExtent=_AXIS))
    named = {"confidence": f"mean {by}", "accuracy": "accuracy", "accuracy_low": "95 % from", "accuracy_high": "95 % to"}
    tips = _tips(full, low="from", high="to", **named, count="completions")
    base = _chart(full)
    diagonal = _chart([{"a": 0, "b": 0}, {"a": 1, "b": 1}]).mark_line(style="reference").encode(
        x=alt.X("a:Q", scale=x_scale, axis=axis), y=alt.Y("b:Q", scale=alt.Scale(domain=[0, 1]))
    )  # fmt: skip
    whiskers = base.mark_rule(strokeWidth=2).encode(
        x=x, y=alt.Y("accuracy_low:Q", title="accuracy", scale=alt.Scale(domain=[0, 1])), y2="accuracy_high:Q"
    )
    points = base.mark_point(filled=True, size=70, opacity=1).encode(x=x, y=y)
    drawn = [{**row, "high": row["high"] if row["high"] > row["low"] else row["low"] + 0.035} for row in full]
    at = alt.X("low:Q", title=by, scale=x_scale, axis=alt.Axis(values=[0, 0.2, 0.4, 0.6, 0.8, 1], grid=False))
    bars = _chart(drawn).mark_bar(binSpacing=1).encode(
        x=at,
        x2="high:Q",
        y=alt.Y("count:Q", title="count", axis=alt.Axis(minExtent=_AXIS, tickCount=3, format="~s")),
        y2=alt.datum(0),
    )  # fmt: skip
    above = lit(_chart(drawn), x=alt.X("low:Q", scale=x_scale, axis=axis), x2="high:Q", tooltip=tips)
    below = lit(_chart(drawn), x=at, x2="high:Q", tooltip=tips)
    return _wide(_layers(diagonal, whiskers, points, above), height), _wide(_layers(bars, below), 115)


def dodged(rows: Rows, *, names: Sequence[str], y: str, x: str = "group size G", height: int = 250) -> Drawn:
    """Points with error bars side by side at each `x`: `x`, `value`, `series`, maybe `low`, `high`, `reference`."""
    at = alt.X("x:O", title=x, axis=alt.Axis(labelAngle=0, grid=False))
    offset = alt.XOffset("series:N", scale=alt.Scale(domain=list(names)))
    base = _chart(rows).encode(x=at, color=_color(names))
    scaled = _y("value", y)
    layers = []
    references = {row["x"]: row["reference"] for row in rows if _known(row.get("reference"))}
    if references:
        ticks = _chart([{"x": key, "value": value} for key, value in references.items()])
        layers.append(
            ticks.mark_tick(style="reference", strokeDash=[1, 0], orient="horizontal", bandSize=60).encode(x=at, y=scaled)
        )
    if any(_known(row.get("low")) for row in rows):
        bounds = {"y": _y("low", y), "y2": alt.Y2("high:Q")}
        layers.append(base.mark_rule(strokeWidth=2).encode(xOffset=offset, **bounds))
    points = base.mark_point(filled=True, size=50, opacity=1)
    layers.append(points.encode(y=scaled, xOffset=offset, shape=_shape(names)))
    exact = [{"x": key, "series": "exact advantages", "value": value} for key, value in references.items()]
    return _wide(_layers(*layers, bands([*rows, *exact], keys={"x": x}, x=at)), height)


def fixed_points(rows: Rows, *, names: Sequence[str], height: int = 270) -> Drawn:
    """Where each baseline drives a confidence `q`, against the true probability `p`, maybe with a standard `error`."""
    unit = alt.Scale(domain=[0, 1])
    title = "probability of being right, p"
    base = _chart(rows).encode(
        x=alt.X("p:Q", title=title, scale=unit),
        y=alt.Y("q:Q", title="where its confidence ends, q*", scale=unit),
        color=_color(names),
    )
    diagonal = _chart([{"p": 0, "q": 0}, {"p": 1, "q": 1}]).mark_line(style="reference")
    line = base.mark_line(strokeWidth=2)
    points = base.mark_point(filled=True, size=36, opacity=1)
    hover = nearest(rows, x=alt.X("left:Q", title=title, scale=unit), key="p", title="p", value="q")
    return _wide(
        _layers(diagonal.encode(x=alt.X("p:Q", scale=unit), y=alt.Y("q:Q", scale=unit)), line,
                  points.encode(shape=_shape(names)), hover), height,
    )  # fmt: skip


def histograms(rows: Rows, *, names: Sequence[str], x: str = "credit", zero: bool = True, height: int = 210) -> Drawn:
    """Outlines of several histograms over the same bins: `low`, `high`, `share`, `series`."""
    at = alt.X("low:Q", title=x, scale=alt.Scale(nice=False), axis=alt.Axis(grid=False, tickCount=7))
    base = _chart(rows).encode(x=at, color=_color(names))
    share = alt.Y("share:Q", title="share of completions", axis=alt.Axis(format="%", tickCount=4))
    area = base.mark_area(interpolate="step-after", opacity=0.16, line=False).encode(y=share.stack(None))
    line = base.mark_line(interpolate="step-after", strokeWidth=2).encode(y=share)
    at_zero = [_chart([{"low": 0}]).mark_rule(style="reference").encode(x="low:Q")] if zero else []
    bins = [row for row in rows if row["low"] < row["high"]]
    hover = bands(bins, keys={"low": "from", "high": "to"}, value="share", percent=True, x=at, x2=alt.X2("high:Q"))
    return _wide(_layers(*at_zero, area, line, hover), height)


def forest(rows: Rows, *, names: Sequence[str], x: str, at: float | None = 0.0, palette: Palette = "series") -> Drawn:
    """Values with intervals, one line per `name`, of `name`, `value`, `low`, `high`, `series`; a dashed line `at` a value."""
    axis = alt.Axis(labelLimit=150, ticks=False, domain=False)
    lines = _chart(rows).encode(y=alt.Y("name:N", sort=_order(rows), title=None, axis=axis))
    base = lines.encode(color=_color(names, palette))
    whiskers = base.mark_rule(strokeWidth=2).encode(x=_x("low", x), x2="high:Q")
    points = base.mark_point(filled=True, size=60, opacity=1).encode(x=_x("value", x), shape=_shape(names))
    series = "verdict" if palette == "verdicts" else "series"
    hover = lit(lines, tooltip=_tips(rows, name="", series=series, value=x))
    line = [] if at is None else [_chart([{"value": at}]).mark_rule(style="reference").encode(x="value:Q")]
    return _wide(_layers(*line, whiskers, points, hover), 45 + 24 * max(2, len(_order(rows))))


def bars(rows: Rows, *, names: Sequence[str], x: str, percent: bool = False, stacked: bool = True) -> Drawn:
    """Horizontal bars, one line per `name`: `name`, `series`, `value`."""
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


def _chart(rows: Rows) -> alt.Chart:
    return alt.Chart(_data(rows))


def _data(rows: Rows) -> alt.InlineData:
    return alt.InlineData(values=[{key: _plain(value) for key, value in row.items()} for row in rows])


def _order(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["name"] for row in rows))


def _layers(*charts: alt.Chart) -> alt.LayerChart:
    return alt.LayerChart(layer=list(charts))


def _wide(chart: Drawn, height: int) -> Drawn:
    """At the width there is; the height is of the whole, so that charts side by side end on one line."""
    return chart.properties(width="container", height=height, autosize=alt.AutoSizeParams(type="fit", contains="padding"))


def _x(field: str, title: str) -> alt.X:
    return alt.X(f"{field}:Q", title=title, scale=alt.Scale(zero=False), axis=alt.Axis(grid=False, tickCount=5))


def _y(field: str, title: str, *, zero: bool = False, percent: bool = False) -> alt.Y:
    axis = alt.Axis(tickCount=5, minExtent=_AXIS, format=".3~p" if percent else alt.Undefined)
    return alt.Y(f"{field}:Q", title=title, scale=alt.Scale(zero=zero), axis=axis)


def _color(names: Sequence[str], palette: Palette = "series") -> alt.Color:
    colours = "category" if palette == "series" else "ordinal"  # names of lists in the page's configuration
    return alt.Color("series:N", scale=alt.Scale(domain=list(names), range=colours), legend=None)


def _shape(names: Sequence[str]) -> alt.Shape:
    return alt.Shape("series:N", scale=alt.Scale(domain=list(names)), legend=None)


def _tips(rows: Rows, **titles: str) -> list[alt.Tooltip]:
    keys = {key for row in rows for key in row if row[key] != ""}
    named = {"series": " ", **titles, "low": "from", "high": "to"}
    return [_tip(key, title or " ") for key, title in named.items() if key in keys]


def _tip(key: str, title: str) -> alt.Tooltip:
    return alt.Tooltip(f"{key}:N", title=title) if key in _WORDS else alt.Tooltip(f"{key}:Q", title=title, format=".4~g")


_WORDS = ("series", "name")


def _known(value: Any) -> bool:
    return value is not None and value == value


def _plain(value: Any) -> Any:
    """JSON knows neither NaN nor infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
