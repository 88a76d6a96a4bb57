"""Turn rows (dicts) of numbers into Altair charts. The report page adds colours and legends.

None and NaN are not drawn. The key `series` of a row selects the colour, in the order of `names`. As a thin mark is hard to hit,
each chart has a layer of bands on top; the band under the pointer is highlighted and names the value of every series there.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import altair as alt
from altair.utils.schemapi import debug_mode

Row = Mapping[str, Any]
Rows = Sequence[Row]
Drawn = alt.Chart | alt.LayerChart
#: The names of the page's two lists of colours.
Palette = Literal["series", "verdicts"]

NOTHING = "none"  # What a tooltip shows for a series without a value.
#: One width for all vertical axes with labels, so that charts above each other are aligned.
_AXIS_WIDTH = 42
#: Altair's check of every part of a chart takes five sixths of the time. Whole charts are checked by the tests.
_unchecked = debug_mode(False)


@_unchecked
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
    """Draw a curve with a band (`low` to `high`) for each series. Values below `floor` are cut off."""

    def draw(series_rows: Rows) -> alt.Chart:
        return _chart(series_rows).encode(x=_x("x", x), color=_color(names))

    value_axis, lower_bound_axis = (_y(field, y, zero=y_zero, percent=percent) for field in ("value", "low"))
    if floor is not None and any(is_known(row["value"]) and row["value"] < floor for row in rows):
        value_axis = value_axis.scale(alt.Scale(zero=y_zero, domainMin=floor, clamp=True))
    chart_layers = []
    if any(is_known(row.get("low")) for row in rows):
        chart_layers.append(draw(rows).mark_area(opacity=0.13, line=False).encode(y=lower_bound_axis, y2="high:Q"))
    dotted_rows = [row for row in rows if dots is None or row["series"] in dots]
    other_rows = [row for row in rows if dots is not None and row["series"] not in dots]
    for series_rows, width in ((other_rows, 1.2), (dotted_rows, 2)):
        if series_rows:
            line_opacity = 0.5 if width < 2 and dotted_rows else 1
            chart_layers.append(draw(series_rows).mark_line(strokeWidth=width, opacity=line_opacity).encode(y=value_axis))
    if dotted_rows:
        chart_layers.append(_points(draw(dotted_rows), 36).encode(y=value_axis, shape=_shape(names)))
    return _layered(height, *chart_layers, nearest(rows, x=_x("left", x), title=x, percent=percent))


@_unchecked
def reliability_diagram(rows: Rows, *, by: str = "confidence") -> tuple[Drawn, Drawn]:
    """Draw the rows of `measure.reliability` with the diagonal. A second chart shows the number of answers in each bin."""
    confidence_scale = alt.Scale(domain=[0, 1.04], nice=False)
    ticks = [0, 0.2, 0.4, 0.6, 0.8, 1]
    unlabelled_axis = alt.Axis(values=ticks, grid=False, title=None, labels=False, ticks=False)
    accuracy_options = {"title": "accuracy", "scale": _UNIT, "axis": alt.Axis(minExtent=_AXIS_WIDTH)}
    base_chart = _chart(rows)
    confidence_axis = alt.X("confidence:Q", scale=confidence_scale, axis=unlabelled_axis)
    lower_bound_axis = alt.Y("accuracy_low:Q", **accuracy_options)
    whisker_layer = base_chart.mark_rule(strokeWidth=2).encode(x=confidence_axis, y=lower_bound_axis, y2="accuracy_high:Q")
    point_layer = _points(base_chart, 70).encode(x=confidence_axis, y=alt.Y("accuracy:Q", **accuracy_options))
    # The bin of confidence 1 has no width, so draw it 0.035 wide.
    drawn_rows = [row if row["high"] > row["low"] else {**row, "high": row["low"] + 0.035} for row in rows]
    bin_chart = _chart(drawn_rows)
    bin_axis = alt.X("low:Q", title=by, scale=confidence_scale, axis=alt.Axis(values=ticks, grid=False))
    count_axis = alt.Y("count:Q", title="count", axis=alt.Axis(minExtent=_AXIS_WIDTH, tickCount=3, format="~s"))
    bar_layer = bin_chart.mark_bar(binSpacing=1).encode(x=bin_axis, x2="high:Q", y=count_axis, y2=alt.datum(0))
    titles = {"confidence": f"mean {by}", "accuracy": "accuracy", "accuracy_low": "95 % from", "accuracy_high": "95 % to"}
    tooltip = _tooltip(rows, low="from", high="to", **titles, count="completions")
    hover_axis = alt.X("low:Q", scale=confidence_scale, axis=unlabelled_axis)
    hover_layer = highlight(bin_chart, x=hover_axis, x2="high:Q", tooltip=tooltip)
    diagram_chart = _layered(250, _diagonal(confidence_scale, axis=unlabelled_axis), whisker_layer, point_layer, hover_layer)
    return diagram_chart, _layered(115, bar_layer, highlight(bin_chart, x=bin_axis, x2="high:Q", tooltip=tooltip))


@_unchecked
def dodged(rows: Rows, *, names: Sequence[str], y: str) -> Drawn:
    """Draw several series as points with error bars, side by side at each group size `x`."""
    x_axis = alt.X("x:O", title="group size G", axis=alt.Axis(labelAngle=0, grid=False))
    series_offset = alt.XOffset("series:N", scale=alt.Scale(domain=list(names)))
    base_chart = _chart(rows).encode(x=x_axis, xOffset=series_offset, color=_color(names))
    chart_layers = []
    reference_by_size = {row["x"]: row["reference"] for row in rows if is_known(row.get("reference"))}
    reference_rows = [{"x": size, "value": value} for size, value in reference_by_size.items()]
    if reference_rows:
        tick_layer = _chart(reference_rows).mark_tick(style="reference", strokeDash=[1, 0], orient="horizontal", bandSize=60)
        chart_layers.append(tick_layer.encode(x=x_axis, y=_y("value", y)))
    if any(is_known(row.get("low")) for row in rows):
        chart_layers.append(base_chart.mark_rule(strokeWidth=2).encode(y=_y("low", y), y2="high:Q"))
    chart_layers.append(_points(base_chart, 50).encode(y=_y("value", y), shape=_shape(names)))
    tooltip_rows = [*rows, *({**row, "series": "exact advantages"} for row in reference_rows)]
    return _layered(250, *chart_layers, bands(tooltip_rows, keys={"x": "group size G"}, x=x_axis))


@_unchecked
def fixed_points(rows: Rows, *, names: Sequence[str]) -> Drawn:
    """For each baseline, draw which confidence earns the most credit at each probability `x` of being right."""
    curve_chart = curves(rows, names=names, x="probability of being right, p", y="where its confidence ends, q*", height=270)
    curve_chart.layer.insert(0, _diagonal(_UNIT))
    return curve_chart


@_unchecked
def histograms(rows: Rows, *, names: Sequence[str], x: str = "credit", zero: bool = True, height: int = 210) -> Drawn:
    """Draw outlines of histograms over shared bins. Rows have `low`, `high`, `share` and `series`."""
    bin_axis = alt.X("low:Q", title=x, scale=alt.Scale(nice=False), axis=alt.Axis(grid=False, tickCount=7))
    share_axis = alt.Y("share:Q", title="share of completions", axis=alt.Axis(format="%", tickCount=4))
    base_chart = _chart(rows).encode(x=bin_axis, color=_color(names))
    area_layer = base_chart.mark_area(interpolate="step-after", opacity=0.16, line=False).encode(y=share_axis.stack(None))
    outline_layer = base_chart.mark_line(interpolate="step-after", strokeWidth=2).encode(y=share_axis)
    zero_lines = [_chart([{"low": 0}]).mark_rule(style="reference").encode(x="low:Q")] if zero else []
    bin_rows = [row for row in rows if row["low"] < row["high"]]
    tips = bands(bin_rows, keys={"low": "from", "high": "to"}, value="share", percent=True, x=bin_axis, x2=alt.X2("high:Q"))
    return _layered(height, *zero_lines, area_layer, outline_layer, tips)


@_unchecked
def forest(rows: Rows, *, names: Sequence[str], x: str, palette: Palette = "series") -> Drawn:
    """Draw a forest plot: a line for each value with its interval, and a dashed line at 0."""
    name_axis = alt.Axis(labelLimit=150, ticks=False, domain=False)
    row_chart = _chart(rows).encode(y=alt.Y("name:N", sort=_row_names(rows), title=None, axis=name_axis))
    coloured_chart = row_chart.encode(color=_color(names, palette))
    whisker_layer = coloured_chart.mark_rule(strokeWidth=2).encode(x=_x("low", x), x2="high:Q")
    point_layer = _points(coloured_chart, 60).encode(x=_x("value", x), shape=_shape(names))
    tooltip = _tooltip(rows, name="", series="verdict" if palette == "verdicts" else "series", value=x)
    hover_layer = highlight(row_chart, tooltip=tooltip)
    zero_line = _chart([{"value": 0.0}]).mark_rule(style="reference").encode(x="value:Q")
    return _layered(45 + 24 * max(2, len(_row_names(rows))), zero_line, whisker_layer, point_layer, hover_layer)


@_unchecked
def bars(rows: Rows, *, names: Sequence[str], x: str, percent: bool = False, stacked: bool = True) -> Drawn:
    """Draw a horizontal bar chart, where all bars of one `name` share a label. Rows have `name`, `series` and `value`."""
    row_names = _row_names(rows)
    value_axis = alt.Axis(format="%" if percent else "~s", tickCount=5, grid=True)
    value_scale = alt.Scale(domain=[0, 1]) if percent else alt.Undefined
    bar_chart = _chart(rows).mark_bar(cornerRadius=2).encode(
        x=alt.X("value:Q", title=x, axis=value_axis, scale=value_scale, stack="zero" if stacked else None),
        y=alt.Y("name:N", sort=row_names, title=None, axis=alt.Axis(ticks=False, domain=False, labelLimit=140)),
        color=_color(names),
        tooltip=_tooltip(rows, name="", series="", value=x),
    )  # fmt: skip
    if not stacked:
        bar_chart = bar_chart.encode(yOffset=alt.YOffset("series:N", scale=alt.Scale(domain=list(names))))
    return bar_chart.properties(**_wide(45 + len(row_names) * (28 if stacked else 14 * len(names) + 10)))


_UNIT = alt.Scale(domain=[0, 1])
_POINTER = alt.selection_point(name="near", on="pointerover", clear="pointerout", empty=False)
_HOVER_OPACITY = alt.OpacityValue(0, condition=[{"param": "near", "value": 0.14, "empty": False}])


def _chart(rows: Rows) -> alt.Chart:
    """Build an Altair chart from rows. NaN and infinity, which JSON lacks, become null."""
    json_rows = [
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
        for row in rows
    ]
    return alt.Chart(alt.InlineData(values=json_rows))


def _row_names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["name"] for row in rows))


def _points(chart: alt.Chart, size: int) -> alt.Chart:
    return chart.mark_point(filled=True, size=size, opacity=1)


def _diagonal(scale: alt.Scale, **axis: Any) -> alt.Chart:
    x_axis = alt.X("a:Q", scale=scale, **axis)
    y_axis = alt.Y("b:Q", scale=_UNIT)
    return _chart([{"a": 0, "b": 0}, {"a": 1, "b": 1}]).mark_line(style="reference").encode(x=x_axis, y=y_axis)


def _layered(height: int, *charts: alt.Chart) -> Drawn:
    return alt.LayerChart(layer=list(charts), **_wide(height))  # altair copies every layer if the size is set later


def _wide(height: int) -> dict[str, Any]:
    """Return a chart's size: its container's width and a fixed height, so that charts side by side are equally tall."""
    return {"width": "container", "height": height, "autosize": alt.AutoSizeParams(type="fit", contains="padding")}


def _x(field: str, title: str) -> alt.X:
    return alt.X(f"{field}:Q", title=title, scale=alt.Scale(zero=False), axis=alt.Axis(grid=False, tickCount=5))


def _y(field: str, title: str, *, zero: bool = False, percent: bool = False) -> alt.Y:
    value_axis = alt.Axis(tickCount=5, minExtent=_AXIS_WIDTH, format=".3~p" if percent else alt.Undefined)
    return alt.Y(f"{field}:Q", title=title, scale=alt.Scale(zero=zero), axis=value_axis)


def _color(names: Sequence[str], palette: Palette = "series") -> alt.Color:
    colour_list_name = "category" if palette == "series" else "ordinal"  # Vega's names for the colour lists
    return alt.Color("series:N", scale=alt.Scale(domain=list(names), range=colour_list_name), legend=None)


def _shape(names: Sequence[str]) -> alt.Shape:
    return alt.Shape("series:N", scale=alt.Scale(domain=list(names)), legend=None)


def _tooltip(rows: Rows, **titles: str) -> list[alt.Tooltip]:
    """Build a chart's tooltip from fields of its rows. Numbers have four digits."""
    filled_keys = {key for row in rows for key in row if row[key] != ""}
    all_titles = {"series": " ", **titles, "low": "from", "high": "to"}
    return [tip(key, title, number=key not in ("series", "name")) for key, title in all_titles.items() if key in filled_keys]


def value_text(row: Row, *, value: str = "value", percent: bool = False) -> str:
    """Format the value of a chart's row, with its interval or error if the row has one."""
    if not is_known(row.get(value)):
        return NOTHING
    bound_texts = [_format(row[bound_name], percent) for bound_name in ("low", "high") if is_known(row.get(bound_name))]
    margin_text = f" ± {_format(row['error'], percent)}" if is_known(row.get("error")) else ""
    return f"{_format(row[value], percent)}{margin_text}" + (f" [{', '.join(bound_texts)}]" if len(bound_texts) == 2 else "")


def nearest(rows: Rows, *, x: alt.X, title: str, percent: bool = False) -> alt.Chart:
    """Build an invisible band around each `x` of a chart. Its tooltip shows the values of all series there."""
    x_values = sorted({row["x"] for row in rows})
    edge_margin = 0 if len(x_values) > 1 else 0.5
    midpoints = [(left_x + right_x) / 2 for left_x, right_x in pairwise(x_values)]
    left_edges = dict(zip(x_values, [x_values[0] - edge_margin, *midpoints], strict=True))
    right_edges = dict(zip(x_values, [*midpoints, x_values[-1] + edge_margin], strict=True))
    rows_with_edges = [{**row, "left": left_edges[row["x"]], "right": right_edges[row["x"]]} for row in rows]
    return bands(rows_with_edges, keys={"x": title, "left": None, "right": None}, percent=percent, x=x, x2=alt.X2("right:Q"))


def bands(
    rows: Rows, *, keys: Mapping[str, str | None], value: str = "value", percent: bool = False, **place: Any
) -> alt.Chart:
    """Build invisible bands along an axis, with tooltips of all series. `keys` maps other tooltip fields to headings."""
    # Call the fields `s0`, `s1`, ..., because the names of series may contain forbidden characters.
    series_names = dict.fromkeys(str(row["series"]) for row in rows)
    field_of_series = {name: f"s{n}" for n, name in enumerate(series_names)}
    empty_fields = dict.fromkeys(field_of_series.values(), NOTHING)
    band_rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        band_position = {key: row[key] for key in keys}
        band_row = band_rows.setdefault(tuple(band_position.values()), band_position | empty_fields)
        band_row[field_of_series[str(row["series"])]] = value_text(row, value=value, percent=percent)
    position_tips = [
        tip(key, title, number=all(isinstance(row[key], int | float) for row in rows))
        for key, title in keys.items() if title is not None
    ]  # fmt: skip
    series_tips = [tip(field, name or value) for name, field in field_of_series.items()]
    band_chart = alt.Chart(alt.InlineData(values=list(band_rows.values())))
    return highlight(band_chart, **place, tooltip=[*position_tips, *series_tips])


def highlight(chart: alt.Chart, **encoded: Any) -> alt.Chart:
    """Turn a chart into areas that are invisible except under the pointer, where the area shows its tooltip."""
    hover_area = chart.properties(name="hover").mark_rect(style="pointed")
    return hover_area.encode(**encoded, opacity=_HOVER_OPACITY).add_params(_POINTER)


def tip(key: str, title: str, *, number: bool = False) -> alt.Tooltip:
    """Build one line of a tooltip: a word, or a number with four digits."""
    return alt.Tooltip(f"{key}:{'Q' if number else 'N'}", title=title or " ", format=".4~g" if number else alt.Undefined)


def is_known(value: Any) -> bool:
    """Return whether a chart can draw a value, that is, whether it is a finite number."""
    return value is not None and math.isfinite(value)


def _format(value: float | int, percent: bool) -> str:
    return f"{100 * value:.3g} %" if percent else f"{value:.4g}"
