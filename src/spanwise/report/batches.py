"""What the training batches of a run say: what was paid for what, what improved, what was dropped, and what each mode declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from spanwise.explain import end_alarms
from spanwise.explain.alarms import values_of
from spanwise.metric import Metric, metrics_in
from spanwise.mode import Chart, Mode
from spanwise.modes import MODES
from spanwise.report.page import Headline, Panel, Section
from spanwise.report.rows import Row, batch_curve, percent
from spanwise.report.sections import curve_panel, section

Lines = Sequence[Mapping[str, Any]]

#: Section -> its charts; {} stands for an objective or a block, one curve for each.
_CHARTS: Mapping[str, Sequence[Chart]] = {
    "Dropped": (
        Chart("Absent rewards", {"credit/{}/reward_absent": "{}"}, "share of completions"),
        Chart("Malformed completions", {"malformed": "malformed"}, "share of completions"),
        Chart("Cut off at the longest length", {"completions/clipped_ratio": "cut off"}, "share of completions"),
    ),
    "Credit": (
        Chart("Size of the credit", {"credit/{}/mean_abs": "{}"}, "mean |credit|"),
        Chart("Credit of exactly 0", {"credit/{}/zero_frac": "{}"}, "share of completions"),
    ),
    "Dead strata": (
        Chart("Nobody to compare with", {"credit/{}/singletons": "{}"}, "share of completions"),
        Chart("Groups with one total reward", {"frac_reward_zero_std": "total reward"}, "share of groups"),
        Chart("Batches without any signal", {"credit/no_signal": "all objectives"}, "share of batches"),
    ),
    "Optimiser": (
        Chart("Entropy", {"entropy": "entropy"}, "nats per token"),
        Chart("Gradient norm", {"grad_norm": "gradient norm"}, "norm"),
        Chart("Completion length", {"completions/mean_length": "tokens"}, "tokens"),
        Chart("Learning rate", {"learning_rate": "learning rate"}, "per step"),
    ),
}


def batch_section(title: str, batches: Lines, names: Sequence[str] = ()) -> Section:
    """A section of `_CHARTS`; the objectives or blocks of these names come first among the colours."""
    panels: list[Panel] = []
    for chart in _CHARTS[title]:
        each = {key: names if "{}" in key else ("",) for key in chart.series}
        series = {key.format(name): label.format(name) for key, label in chart.series.items() for name in each[key]}
        zero = chart.y.startswith(("share", "mean |"))
        panels += _panel(chart, batches, series, names, y_zero=zero, percent=chart.y.startswith("share"))
    return section(title, legend=names, panels=panels)


def rewards_section(batches: Lines, recipe: Mapping[str, Any]) -> Section:
    """Each mean reward, and each objective with what it pays and its mean in the first and in the last tenth of the batches."""
    objectives, panels, rows = objectives_in(batches), list[Panel](), list[Row]()
    pays = {str(entry.get("name") or entry.get("reward")): entry.get("pays") for entry in recipe.get("objectives") or ()}
    tenth = max(1, len(batches) // 10)
    for name in objectives:
        series = {f"rewards/{name}/mean": name}
        panels += _panel(Chart(f"Reward: {name}", series, "mean reward"), batches, series, objectives)
        values = (values_of(part, f"rewards/{name}/mean") for part in (batches[:tenth], batches[-tenth:]))
        first, last = (sum(part) / len(part) if part else None for part in values)
        paid = ", ".join(map(str, pays.get(name) or ())) or "unknown"
        change = None if first is None or last is None else f"{last - first:+.3f}"
        rows.append({"objective": name, "pays": paid, "first batches": first, "last batches": last, "change": change})
    return section("Rewards", legend=objectives, panels=panels, table=rows if len(batches) > 1 else [])


def objectives_in(batches: Lines) -> list[str]:
    """The objectives that the batches have a mean reward of."""
    return [name for _, name, _ in metrics_in(batches, [Metric("rewards/<objective>/mean")])]


def blocks_in(batches: Lines) -> list[str]:
    """The blocks that the batches have a share of credit 0 of."""
    return [name for _, name, _ in metrics_in(batches, [Metric("credit/<block>/zero_frac")])]


def mode_sections(batches: Lines) -> list[Section]:
    """A section for each mode with a page (`spanwise.mode.Page`); without panels where the batches say nothing of it.

    Example:
        >>> (section,) = mode_sections([{"step": 1, "critic/explained_variance": -0.5, "critic/share": 0.25}])
        >>> section.warnings[0]
        'The critic knows nothing: its explained variance is -0.50 at the end (mean of the last batch).'
        >>> [panel.title for panel in section.panels]
        ['Explained variance']
    """
    sections = []
    for mode in MODES.values():
        if (page := mode.page) is None:
            continue
        panels, values = list[Panel](), _values(mode, batches)
        for chart in (chart for chart in page.charts if len(chart.series) == 1):
            series = {start + end: value or name for end, name in chart.series.items() for value, start in values.items()}
            panels += _panel(chart, batches, series, y_zero=True)
        for place, (value, start) in enumerate(values.items()):
            for chart in (chart for chart in page.charts if len(chart.series) > 1):
                title, note = f"{chart.title}: {value}" if value else chart.title, "" if place else chart.note
                series = {start + end: name for end, name in chart.series.items()}
                panels += _panel(replace(chart, title=title, note=note), batches, series, y_zero=True)
        share = values_of(batches, f"{mode.name}/share")
        cost = f" It took {percent(median(share))} of the time of the rest of a step (median)." if share else ""
        own = [sentence for key, sentence in end_alarms(batches).items() if key.startswith(f"{mode.name}/")]
        sections.append(Section(page.title, f"{page.text}{cost}", warnings=own, panels=panels, asks=page.asks))
    return sections


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


def _values(mode: type[Mode], batches: Lines) -> dict[str, str]:
    """Each value that the batches have the headline's metric of ("" is the only one) -> what its metrics start with."""
    end = mode.page.headline[0] if mode.page is not None else ""
    known = [Metric(f"{mode.name}/[value/]{end}")] if end else []
    return {value: key.removesuffix(end) for key, value, _ in metrics_in(batches, known)}


def _panel(chart: Chart, batches: Lines, series: Mapping[str, str], names: Sequence[str] = (), **drawn: Any) -> list[Panel]:
    """Curves of metrics by their names, `names` before them, else with a legend; nothing where no batch has one."""
    rows = [row for key, name in series.items() for row in batch_curve(batches, key, name)]
    cut = chart.floor is not None and any(row["value"] < chart.floor for row in rows)
    note = chart.note + (f" What is below {chart.floor:g} is drawn there." if cut else "")
    ordered = list(dict.fromkeys([*names, *series.values()]))
    legend = () if names or len(ordered) == 1 else ordered
    return curve_panel(chart.title, rows, ordered, y=chart.y, dots=(), floor=chart.floor, note=note, legend=legend, **drawn)
