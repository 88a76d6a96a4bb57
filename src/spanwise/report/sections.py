"""Build sections that several report pages share, and the rows for their charts and tables."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
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

Row = dict[str, Any]
#: Maps each seed to its run's evaluations. An evaluation is a dict of figures with its `step`.
Seeds = Mapping[int, Sequence[Mapping[str, Any]]]

SHARES = ("accuracy", "refusal_rate", "malformed", "coverage")
MOST = 100  # the largest number of points in a chart's curve, and of rows in the chart's table
_VOTING_OPTIONS: Mapping[str, Any] = {"x": "samples n", "label": "n", "height": 280}
VOTES_BY_SCORE = "No completion states a confidence, so votes are weighted by the model's ratings of its answers (LaSeR)."


def section(title: str, words: Mapping[str, Any] | None = None, **parts: Any) -> Section:
    """Build a section of a report page. Its text is in `static/words.yaml`; `words` fills in the placeholders."""
    section_entry = SECTIONS[title]
    return Section(title, section_entry["text"].format(**words or {}).strip(), asks=section_entry["asks"], **parts)


def calibration_section(samples: Mapping[str, Mapping[str, Tensor]], *, note: str = "") -> Section:
    """Build the section with a reliability diagram per arm (method). A single arm, named "", also gets histograms."""
    panels = []
    for (name, columns), kind in product(samples.items(), ("confidence", "score")):
        panels += _calibration_panels(name, kind, columns, note) if kind in columns else []
    has_scores = any("score" in columns for columns in samples.values())
    same_value_text = "the same confidence or the same score" if has_scores else "the same confidence"
    score_note = f" {NOTES['score']}" if has_scores else ""
    return section("Reliability", {"kinds": same_value_text, "score": score_note}, panels=panels)


def _calibration_panels(name: str, kind: str, columns: Mapping[str, Tensor], note: str) -> list[Panel]:
    """Build the reliability diagram of an arm (method). A single arm, named "", also gets histograms."""
    reliability_rows = reliability(columns[kind], columns["correct"], prompts=columns.get("prompt"))
    if not reliability_rows:
        return []
    judged_count = sum(row["count"] for row in reliability_rows)
    completion_count = len(columns["correct"])
    count_note = f"{judged_count:,} of {completion_count:,} completions have a {kind}, and are known to be right or wrong."
    diagram_title = name or f"Accuracy by {kind}"
    if name and kind == "score":
        diagram_title = f"{name}, by its score"
    bin_table: list[Row] = [
        {
            kind: "1" if row["low"] == row["high"] else f"{row['low']:.2g} to {row['high']:.2g}",
            "completions": row["count"], f"mean {kind}": row["confidence"], "accuracy": row["accuracy"],
            "95 %": f"{row['accuracy_low']:.3f} to {row['accuracy_high']:.3f}",
        }
        for row in reliability_rows
    ]  # fmt: skip
    diagram = Panel(diagram_title, reliability_diagram(reliability_rows, by=kind), bin_table, f"{count_note} {note}".strip())
    if name:
        return [diagram]
    names = ("right answers", "wrong answers")
    histogram_bins = confidence_rows(columns[kind], columns["correct"])
    chart = histograms(histogram_bins, names=names, x=f"{kind} (the last step: exactly 1)", zero=False, height=330)
    bin_rows = [{kind: row["low"], row["series"]: row["share"]} for row in histogram_bins if row["low"] <= 1]
    return [diagram, Panel(f"{kind.title()} of right and wrong answers", (chart,), merged(bin_rows, key=kind), legend=names)]


def curve_panel(
    title: str, rows: list[Row], names: Sequence[str], *, x: str = "step", label: str = "step", note: str = "",
    legend: Sequence[str] = (), **options: Any,
) -> list[Panel]:  # fmt: skip
    """Return a panel with curves over `x` and a table of their numbers. Without rows: no panel."""
    if not rows:
        return []
    return [Panel(title, (curves(rows, names=names, x=x, **options),), wide(rows, key="x", label=label), note, legend)]


def figure_panel(name: str, rows: list[Row], names: Sequence[str], **options: Any) -> list[Panel]:
    """Build a panel with the curves of one evaluation figure."""
    title = figure_name(name)
    axis_title = "share of completions" if is_share(name) else title
    return curve_panel(title[:1].upper() + title[1:], rows, names, y=axis_title, percent=is_share(name), **options)


def voting_section(
    votes: Mapping[str, Mapping[str, Curve]], samples: Mapping[str, Mapping[str, Tensor]], *, over: str = "prompts"
) -> Section:
    """Build the section with a panel of voting curves per arm (method). The intervals are over prompts or seeds."""
    arms_with_score = [arm for arm, columns in samples.items() if "score" in columns and columns["confidence"].isnan().all()]
    score_note = VOTES_BY_SCORE if arms_with_score else ""
    if any(arms_with_score):
        score_note = f"{', '.join(arms_with_score)}: {score_note[0].lower()}{score_note[1:]}"
    rows_of_arm = {arm: voting_rows(arm_curves, over=over) for arm, arm_curves in votes.items()}
    voting_rules = list(dict.fromkeys(row["series"] for rows in rows_of_arm.values() for row in rows))
    arm_panels: list[Panel] = []
    for arm, rows in rows_of_arm.items():
        panel_title = arm or "Accuracy by voting budget"
        arm_panels += curve_panel(panel_title, rows, voting_rules, y="accuracy", percent=True, **_VOTING_OPTIONS)
    return section("Voting", {"over": over, "note": score_note}, legend=voting_rules, panels=arm_panels)


def attempts_section(votes: Mapping[str, Mapping[str, Curve]]) -> Section:
    """Build the section on how much more accurate later attempts are than the first. Each chooses by majority vote."""
    first_block = next(iter(votes), "")
    curves_of_attempts = {name: curve_by_rule["majority"] for name, curve_by_rule in votes.items() if curve_by_rule}
    difference_curves = {
        f"{name} - {first_block}": curve_difference(curve, curves_of_attempts[first_block])
        for name, curve in curves_of_attempts.items()
        if name != first_block and curve.prompts == curves_of_attempts[first_block].prompts
    }
    difference_names = list(difference_curves)
    curve_options = {"y": "difference in accuracy", "y_zero": True, **_VOTING_OPTIONS}
    panels = curve_panel("Later attempt minus the first", voting_rows(difference_curves), difference_names, **curve_options)
    return section("Attempts", legend=difference_names, panels=panels)


def credit_section(methods: Sequence[str], credit: Mapping[str, Mapping[str, Tensor]], *, of: str) -> Section:
    """Build the section with histograms of each block's credit under several methods. `of` describes the completions."""
    credit = {method: grouped(columns) for method, columns in credit.items()}
    block_names = dict.fromkeys(block for method in methods for block in credit[method])
    panels = list[Panel]()
    for block in block_names:
        rows = histogram_rows({method: credit[method][block] for method in methods if block in credit[method]})
        # Each histogram's empty last bin is left out.
        bin_rows = [{"from": x["low"], "to": x["high"], x["series"]: x["share"]} for x in rows if x["low"] < x["high"]]
        if rows:
            panels.append(Panel(block, (histograms(rows, names=methods, height=220),), merged(bin_rows, key="from")))
    stop_note = f" {NOTES['stop']}" if STOP in block_names else ""
    return section("Credit by block", {"of": of, "stop": stop_note}, legend=methods, panels=panels)


def tokens_section(view: TokenView | None, *, title: str = "Tokens", note: str = "") -> Section:
    """Build the section that shows the tokens of completions with their credit. Without completions it is empty."""
    return section(title, {"note": note}, body=token_view(view) if view is not None and view.completions else None)


def confidence_rows(confidence_n: Float[Tensor, " n"], correct_n: Float[Tensor, " n"]) -> list[Row]:
    """Count right and wrong answers by the confidence that they state, in bins of 0.1."""
    # Rounding may put a confidence just below its bin (0.7 in float32), so add a small number.
    confidence_n = confidence_n.double() + 1e-7
    confidences = {"right answers": confidence_n[correct_n == 1], "wrong answers": confidence_n[correct_n == 0]}
    return _count_in_bins(confidences, [tenths / 10 for tenths in range(12)])  # the last bin, 1.0 to 1.1, is for the value 1


def _count_in_bins(values: Mapping[str, Tensor], edges: Sequence[float]) -> list[Row]:
    """Count each series' values in the bins between `edges`. Add an empty last bin, at which a chart's line ends."""
    rows: list[Row] = []
    for series, value_n in values.items():
        finite_value_n = value_n[value_n.isfinite()].double().cpu()
        bin_counts = np.histogram(finite_value_n, edges)[0].tolist()
        bins_with_counts = zip(edges, [*edges[1:], edges[-1]], [*bin_counts, 0], strict=True)
        for low, high, count in bins_with_counts if len(finite_value_n) else ():
            rows.append({"series": series, "low": low, "high": high, "share": count / len(finite_value_n), "count": count})
    return rows


def voting_rows(votes: Mapping[str, Curve], *, over: str = "prompts") -> list[Row]:
    """Return rows for a chart of accuracy by number of samples and way of voting, without pass@1, whose curve is flat."""
    return [
        {"series": WAYS.get(name, name), "x": budget, "value": ci.value, "low": ci.low, "high": ci.high, over: ci.count}
        for name, curve in votes.items()
        if name != "pass@1"
        for budget, ci in zip(curve.budgets, curve.intervals, strict=True)
        if ci.value == ci.value
    ]


def histogram_rows(values: Mapping[str, Float[Tensor, " n"]], *, bins: int = 41) -> list[Row]:
    """Count each series in bins, and return rows for a chart. All series share bins that are symmetric about 0."""
    abs_value_n = torch.cat([value_n[value_n.isfinite()].abs().double() for value_n in values.values()])
    largest_abs_value = float(abs_value_n.max()) if abs_value_n.any() else 1.0
    return _count_in_bins(values, np.linspace(-largest_abs_value, largest_abs_value, bins + 1).tolist())


def figures_of(points: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the evaluation figures to draw. Usual ones, then accuracies, then scores."""
    measured_names = dict.fromkeys(name for point in points for name in point)
    accuracy_names = [name for name in measured_names if name.endswith("_accuracy")]
    score_figure_names = [name for name in SCORE_FIGURES if name in measured_names]
    return list(dict.fromkeys([*FIGURES, *accuracy_names, *score_figure_names]))


def grouped(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate the columns of repeated blocks, such as `step[0]` and `step[1]`, under one name."""
    return {name: torch.cat(repeated_columns) for name, repeated_columns in together(columns).items()}


def figure_name(name: str) -> str:
    """Return the name of an evaluation figure in words."""
    if name in SCORE_FIGURES:
        bare_name = name.removeprefix(OF_SCORE)
        special_names = {"coverage": "has a score", "mean_confidence": "mean score"}
        return special_names.get(bare_name, f"{figure_name(bare_name)} of the score")
    return FIGURES.get(name, name.replace("_", " "))


def is_share(name: str) -> bool:
    """Return whether a figure is a share of completions, which a page shows as a percentage."""
    return name.removeprefix(OF_SCORE) in SHARES or name.endswith("_accuracy")


def figure(point: Mapping[str, Any], name: str) -> float | None:
    """Return a figure of an evaluation, or None if the evaluation lacks it."""
    if name == "malformed" and point.get("malformed") is None:
        format_rate = point.get("format_rate")
        return None if format_rate is None else 1.0 - format_rate
    figure_value = point.get(name)
    return None if figure_value is None or figure_value != figure_value else float(figure_value)


def seed_curves(seeds: Seeds, name: str, series: str) -> list[Row]:
    """Return at most `MOST` rows, one per evaluated step, with a figure's mean, lowest and highest value over seeds."""
    values_by_step: dict[int, list[float]] = {}
    for points in seeds.values():
        # If a step was evaluated twice, the later evaluation counts.
        for point in {point["step"]: point for point in points}.values():
            if (value := figure(point, name)) is not None:
                values_by_step.setdefault(point["step"], []).append(value)
    steps = sorted(values_by_step)
    # The first and the last step are always drawn.
    drawn_indices = sorted({index * (len(steps) - 1) // (MOST - 1) for index in range(MOST)}) if steps else []
    return [
        {"series": series, "x": step, "value": math.fsum(values) / len(values)}
        | ({"low": min(values), "high": max(values)} if len(values) > 1 else {})
        for step, values in ((steps[index], values_by_step[steps[index]]) for index in drawn_indices)
    ]


def batch_curve(points: Sequence[Mapping[str, Any]], name: str, series: str, *, most: int = MOST) -> list[Row]:
    """Return a chart's curve of a training metric with at most `most` points. Each is the mean of equally many batches."""
    chunk_size = max(1, math.ceil(len(points) / most))
    curve_rows = []
    for chunk_start in range(0, len(points), chunk_size):
        chunk_points = points[chunk_start : chunk_start + chunk_size]
        values = [value for point in chunk_points if (value := figure(point, name)) is not None]
        if values:
            curve_rows.append({"series": series, "x": chunk_points[-1]["step"], "value": math.fsum(values) / len(values)})
    return curve_rows


def wide(rows: Sequence[Row], *, key: str, label: str | None = None) -> list[Row]:
    """Turn the rows of a chart into a table with one row per `key` and one column per series."""
    row_by_key: dict[Any, Row] = {}
    for row in rows:
        cell_value = row["value"]
        if row.get("low") is not None and row["low"] == row["low"]:
            cell_value = f"{cell_value:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        row_by_key.setdefault(row[key], {})[row["series"]] = cell_value
    series = dict.fromkeys(row["series"] for row in rows)
    return [{label or key: place, **{name: row_by_key[place].get(name) for name in series}} for place in sorted(row_by_key)]


def merged(rows: Iterable[Row], *, key: str) -> list[Row]:
    """Merge all table rows with the same value under `key` into one row."""
    merged_rows: dict[Any, Row] = {}
    for row in rows:
        merged_rows.setdefault(row[key], {}).update(row)
    return list(merged_rows.values())


def percent(share: float) -> str:
    """Format a share as a percentage."""
    decimal_places = 0 if share in (0, 1) else 1 if share >= 0.001 else 2
    return f"{100 * share:.{decimal_places}f} %"
