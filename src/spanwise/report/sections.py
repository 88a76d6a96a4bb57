"""Build the sections that several kinds of report share, and the rows for their charts and tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spanwise.explain.alarms import OF_SCORE, SCORE_FIGURES
from spanwise.layout import together
from spanwise.measure import Curve, curve_difference, reliability
from spanwise.report.charts import curves, histograms, reliability_diagram
from spanwise.report.page import Panel, Section
from spanwise.report.tokens import TokenView, token_view
from spanwise.report.words import FIGURES, NOTES, SECTIONS, WAYS
from spanwise.rollouts.schema import STOP

#: A row of a chart or a table.
Row = dict[str, Any]
#: Seed -> points, each with its `step`.
Seeds = Mapping[int, Sequence[Mapping[str, Any]]]

#: The figures that are shares of completions.
SHARES = ("accuracy", "refusal_rate", "malformed", "coverage")
#: The largest number of points of a curve, and so of rows of its table.
MOST = 100
_BY_SAMPLES: Mapping[str, Any] = {"x": "samples n", "label": "n", "height": 280}
#: The two confidences of a policy in its own answers: the column, its name, and the verb for completions that have it.
_KINDS = (("confidence", "state a confidence"), ("score", "have a score"))
#: The note on votes that are weighed by a self-rewarding score.
VOTES_BY_SCORE = "No confidence is stated, so votes are weighed by the score."


def section(title: str, words: Mapping[str, Any] | None = None, **parts: Any) -> Section:
    """Build a section from `static/words.yaml`, with `words` filled in."""
    entry = SECTIONS[title]
    return Section(title, entry["text"].format(**words or {}).strip(), asks=entry["asks"], **parts)


def calibration_section(samples: Mapping[str, Mapping[str, Tensor]], *, note: str = "") -> Section:
    """Build the reliability diagrams, one per arm; a single arm ("") also gets histograms of its confidences."""
    panels = []
    for name, columns in samples.items():
        for kind, phrase in _KINDS:
            if kind in columns:
                panels += _calibration(name, kind, phrase, columns, note)
    scored = any("score" in columns for columns in samples.values())
    phrases = "confidence or have the same score" if scored else "confidence"
    return section("Reliability", {"kinds": phrases, "score": f" {NOTES['score']}" if scored else ""}, panels=panels)


def _calibration(name: str, kind: str, have: str, columns: Mapping[str, Tensor], note: str) -> list[Panel]:
    """Build the reliability diagram of one kind of confidence, with histograms if there is only one arm."""
    rows = reliability(columns[kind], columns["correct"], prompts=columns.get("prompt"))
    if not rows:
        return []
    total = f"{sum(row['count'] for row in rows):,} of {len(columns['correct']):,} completions {have} and could be judged."
    title = f"Accuracy by {kind}" if not name else f"{name}, by its score" if kind == "score" else name
    bins: list[Row] = [
        {
            kind: "1" if row["low"] == row["high"] else f"{row['low']:.2g} to {row['high']:.2g}",
            "completions": row["count"], f"mean {kind}": row["confidence"], "accuracy": row["accuracy"],
            "95 %": f"{row['accuracy_low']:.3f} to {row['accuracy_high']:.3f}",
        }
        for row in rows
    ]  # fmt: skip
    diagram = Panel(title, reliability_diagram(rows, by=kind), bins, f"{total} {note}".strip())
    if name:
        return [diagram]
    names, rows = ("right answers", "wrong answers"), confidence_rows(columns[kind], columns["correct"])
    chart = histograms(rows, names=names, x=f"{kind} (the last step: exactly 1)", zero=False, height=330)
    table = [{kind: row["low"], row["series"]: row["share"]} for row in rows if row["low"] <= 1]
    return [diagram, Panel(f"{kind.title()} of right and wrong answers", (chart,), merged(table, key=kind), legend=names)]


def curve_panel(
    title: str, rows: list[Row], names: Sequence[str], *, x: str = "step", label: str = "step", note: str = "",
    legend: Sequence[str] = (), **options: Any,
) -> list[Panel]:  # fmt: skip
    """Build curves over `x` with a table of their numbers; nothing if there are no rows."""
    if not rows:
        return []
    chart = curves(rows, names=names, x=x, **options)
    return [Panel(title, (chart,), wide(rows, key="x", label=label), note, legend)]


def figure_panel(name: str, rows: list[Row], names: Sequence[str], **options: Any) -> list[Panel]:
    """Build the curves of one evaluation figure."""
    title, is_a_share = figure_name(name), is_share(name)
    unit = "share of completions" if is_a_share else title
    return curve_panel(title[:1].upper() + title[1:], rows, names, y=unit, percent=is_a_share, **options)


def voting_section(
    votes: Mapping[str, Mapping[str, Curve]], samples: Mapping[str, Mapping[str, Tensor]], *, over: str = "prompts"
) -> Section:
    """Build the voting curves, one panel per arm ("" if there is only one); `over` names the units of the intervals."""
    by_score = [name for name, one in samples.items() if "score" in one and bool(one["confidence"].isnan().all())]
    note = VOTES_BY_SCORE if by_score else ""
    if any(by_score):
        note = f"{', '.join(by_score)}: {note[0].lower()}{note[1:]}"
    rows = {name: voting_rows(curves_of, over=over) for name, curves_of in votes.items()}
    ways = list(dict.fromkeys(row["series"] for curve_rows in rows.values() for row in curve_rows))
    panels: list[Panel] = []
    for name, arm_rows in rows.items():
        panels += curve_panel(name or "Accuracy by voting budget", arm_rows, ways, y="accuracy", percent=True, **_BY_SAMPLES)
    return section("Voting", {"over": over, "note": note}, legend=ways, panels=panels)


def attempts_section(votes: Mapping[str, Mapping[str, Curve]]) -> Section:
    """Build the section on the gain of a later attempt: majority against majority, prompt by prompt."""
    first, *later = votes or ("",)
    differences = {
        f"{name} - {first}": curve_difference(votes[name]["majority"], votes[first]["majority"])
        for name in later
        if votes[name] and votes[name]["majority"].prompts == votes[first]["majority"].prompts
    }
    names, options = list(differences), {"y": "difference in accuracy", "y_zero": True, **_BY_SAMPLES}
    panels = curve_panel("Later attempt minus the first", voting_rows(differences), names, **options)
    return section("Attempts", legend=names, panels=panels)


def credit_section(methods: Sequence[str], credit: Mapping[str, Mapping[str, Tensor]], *, of: str) -> Section:
    """Build histograms of each block's credit under several methods; `of` names the completions."""
    credit = {method: grouped(columns) for method, columns in credit.items()}
    blocks, panels = dict.fromkeys(block for method in methods for block in credit[method]), list[Panel]()
    for block in blocks:
        rows = histogram_rows({method: credit[method][block] for method in methods if block in credit[method]})
        bins = (row for row in rows if row["low"] < row["high"])
        table = merged(({"from": row["low"], "to": row["high"], row["series"]: row["share"]} for row in bins), key="from")
        panels += [Panel(block, (histograms(rows, names=methods, height=220),), table)] if rows else []
    filled_in = {"of": of, "stop": f" {NOTES['stop']}" if STOP in blocks else ""}
    return section("Credit by block", filled_in, legend=methods, panels=panels)


def tokens_section(view: TokenView | None, *, title: str = "Tokens", note: str = "") -> Section:
    """Build the token view, if there are completions to show; `note` adds a sentence."""
    body = token_view(view) if view is not None and view.completions else None
    return section(title, {"note": note}, body=body)


def confidence_rows(confidence_n: Float[Tensor, " n"], correct_n: Float[Tensor, " n"]) -> list[Row]:
    """Count how often right and wrong answers state each confidence, in steps of 0.1."""
    # A number that rounding puts just below a border (.7 in float32) belongs above the border.
    nudged_n, kinds = confidence_n.double() + 1e-7, {"right answers": 1.0, "wrong answers": 0.0}
    return _binned({series: nudged_n[correct_n == kind] for series, kind in kinds.items()}, [b / 10 for b in range(12)])


def _binned(values: Mapping[str, Tensor], edges: Sequence[float]) -> list[Row]:
    """Return the bins of each series that has numbers, and one empty bin after the last."""
    rows: list[Row] = []
    for series, value_n in values.items():
        finite_n = value_n[value_n.isfinite()].double().cpu()
        counts = [*np.histogram(finite_n, edges)[0].tolist(), 0]
        for low, high, count in zip(edges, [*edges[1:], edges[-1]], counts, strict=True) if len(finite_n) else ():
            rows.append({"series": series, "low": low, "high": high, "share": count / len(finite_n), "count": count})
    return rows


def voting_rows(votes: Mapping[str, Curve], *, over: str = "prompts") -> list[Row]:
    """Return accuracy by number of samples for each way of voting, without pass@1, which is flat by definition."""
    return [
        {"series": WAYS.get(name, name), "x": n, "value": i.value, "low": i.low, "high": i.high, over: i.count}
        for name, curve in votes.items()
        if name != "pass@1"
        for n, i in zip(curve.budgets, curve.intervals, strict=True)
        if i.value == i.value
    ]


def histogram_rows(values: Mapping[str, Float[Tensor, " n"]], *, bins: int = 41) -> list[Row]:
    """Return histograms of several series over the same bins, symmetric about 0, with one bin around 0."""
    sizes_n = torch.cat([value_n[value_n.isfinite()].abs().double() for value_n in values.values()])
    widest = float(sizes_n.max()) if sizes_n.any() else 1.0
    return _binned(values, np.linspace(-widest, widest, bins + 1).tolist())


def figures_of(points: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the evaluation figures that exist: the usual ones, those of later attempts and of a score."""
    known = dict.fromkeys(name for point in points for name in point)
    scored = (name for name in SCORE_FIGURES if name in known)
    return list(dict.fromkeys([*FIGURES, *(name for name in known if name.endswith("_accuracy")), *scored]))


def grouped(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return columns by name, with the columns of repeated blocks next to each other."""
    return {name: torch.cat(parts) for name, parts in together(columns).items()}


def figure_name(name: str) -> str:
    """Return the name of a figure in words."""
    if name in SCORE_FIGURES:
        return {"coverage": "has a score", "mean_confidence": "mean score"}.get(
            bare := name.removeprefix(OF_SCORE), f"{figure_name(bare)} of its score"
        )
    return FIGURES.get(name, name.replace("_", " "))


def is_share(name: str) -> bool:
    """Return whether a figure is a share of completions."""
    return name.removeprefix(OF_SCORE) in SHARES or name.endswith("_accuracy")


def figure(point: Mapping[str, Any], name: str) -> float | None:
    """Return one evaluation figure, None if it does not exist; `malformed` is 1 minus `format_rate`."""
    if name == "malformed" and point.get("malformed") is None:
        value = point.get("format_rate")
        return None if value is None else 1.0 - value
    value = point.get(name)
    return None if value is None or value != value else float(value)


def seed_curves(seeds: Seeds, name: str, series: str) -> list[Row]:
    """Return the mean of a figure over seeds at each step, with the lowest and the highest seed."""
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
    """Return a figure of every training batch; more than `most` batches are averaged in equal stretches."""
    size = max(1, math.ceil(len(points) / most))
    rows = []
    for start in range(0, len(points), size):
        chunk = points[start : start + size]
        values = [value for point in chunk if (value := figure(point, name)) is not None]
        if values:
            rows.append({"series": series, "x": chunk[-1]["step"], "value": math.fsum(values) / len(values)})
    return rows


def wide(rows: Iterable[Row], *, key: str, label: str | None = None) -> list[Row]:
    """Turn rows into a table with one row per `key` and one column per series, for the numbers under a chart."""
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
    """Merge rows with the same `key` into one."""
    table: dict[Any, Row] = {}
    for row in rows:
        table.setdefault(row[key], {}).update(row)
    return list(table.values())


def percent(share: float) -> str:
    """Format a share as a percentage."""
    digits = 0 if share in (0, 1) else 1 if share >= 0.001 else 2
    return f"{100 * share:.{digits}f} %"
