"""What the page of a run shows of the features beside the methods, as each declares it (`spanwise.mode.Page`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from spanwise.explain import end_alarms
from spanwise.explain.alarms import values_of
from spanwise.metric import Metric, metrics_in
from spanwise.mode import Chart, Mode
from spanwise.modes import MODES
from spanwise.report.page import Headline, Panel, Section
from spanwise.report.rows import batch_curve, percent
from spanwise.report.sections import curve_panel

Lines = Sequence[Mapping[str, Any]]


def mode_sections(batches: Lines) -> list[Section]:
    """A section for each mode with a page; without panels where the training batches say nothing of it.

    Example:
        >>> (section,) = mode_sections([{"step": 1, "critic/explained_variance": -0.5, "critic/share": 0.25}])
        >>> section.warnings[0]
        'The critic knows nothing: its explained variance is -0.50 at the end (mean of the last batch).'
        >>> [panel.title for panel in section.panels]
        ['Explained variance']
    """
    return [_section(mode, batches) for mode in MODES.values() if mode.page is not None]


def mode_headlines(batches: Lines) -> list[Headline]:
    """The metric that a mode puts at the top, of the last batch that has it, for each of its values."""
    headlines, wrong = [], end_alarms(batches)
    for mode in MODES.values():
        for value, start in _values(mode, batches).items():
            assert mode.page is not None, "it has values for its page"
            end, label, alarm = mode.page.headline
            numbers = values_of(batches, start + end)
            note = f"{numbers[0]:.2f} in the first batch" if len(numbers) > 1 else ""
            said = ("no batch tells" if not numbers else alarm) if start + end in wrong else ""
            last = f"{numbers[-1]:.2f}" if numbers else None
            headlines.append(Headline(label + (f": {value}" if value else ""), last, note, said))
    return headlines


def _section(mode: type[Mode], batches: Lines) -> Section:
    page, values = mode.page, _values(mode, batches)
    assert page is not None, "a mode with a page"
    panels: list[Panel] = []
    for chart in (chart for chart in page.charts if len(chart.series) == 1):
        panels += _panel(chart, batches, {f"{start}{end}": value or name for end, name in chart.series.items()
                                          for value, start in values.items()}, chart.note)  # fmt: skip
    for place, (value, start) in enumerate(values.items()):
        for chart in (chart for chart in page.charts if len(chart.series) > 1):
            series = {start + end: name for end, name in chart.series.items()}
            panels += _panel(chart, batches, series, "" if place else chart.note, behind=f": {value}" if value else "")
    share = values_of(batches, f"{mode.name}/share")
    cost = f" It took {percent(median(share))} of the time of the rest of a step (median)." if share else ""
    own = [sentence for key, sentence in end_alarms(batches).items() if key.startswith(f"{mode.name}/")]
    return Section(page.title, f"{page.text}{cost}", warnings=own, panels=panels, asks=page.asks)


def _values(mode: type[Mode], batches: Lines) -> dict[str, str]:
    """Each value that the batches have the headline's metric of ("" is the only one) -> what its metrics start with."""
    end = mode.page.headline[0] if mode.page is not None else ""
    known = [Metric(f"{mode.name}/[value/]{end}")] if end else []
    return {value: key.removesuffix(end) for key, value, _ in metrics_in(batches, known)}


def _panel(chart: Chart, batches: Lines, series: Mapping[str, str], note: str, *, behind: str = "") -> list[Panel]:
    """Curves of metrics by their names; nothing where no batch has one."""
    rows = [row for key, name in series.items() for row in batch_curve(batches, key, name)]
    if chart.floor is not None and any(row["value"] < chart.floor for row in rows):
        note = f"{note} What is below {chart.floor:g} is drawn there."
    names = list(series.values())
    drawn: dict[str, Any] = {"y": chart.y, "dots": (), "y_zero": True, "floor": chart.floor}
    legend = names if len(names) > 1 else ()
    return curve_panel(f"{chart.title}{behind}", rows, names, note=note, legend=legend, **drawn)
