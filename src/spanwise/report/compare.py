"""Write the report of a comparison: figures of several arms (methods), and their differences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from spanwise.explain.alarms import CALIBRATION, CAUSES, SCORE_FIGURES, by_sentence
from spanwise.measure import ArmComparison, Curve, Difference
from spanwise.report import sections as parts
from spanwise.report.charts import forest
from spanwise.report.page import Headline, Panel, render

LOWER_BETTER = ("ece", "brier", "refusal_rate", "malformed", "laser_ece", "laser_brier")
HIGHER_BETTER = ("accuracy", "auroc", "coverage", "format_rate", "verdict_rate", "laser_auroc", "laser_coverage")
VERDICTS = ("clear", "borderline", "noise")


def compare_report(
    *,
    title: str,
    recipe: Mapping[str, Any],
    comparison: ArmComparison,
    curves: Mapping[str, parts.Seeds],
    samples: Mapping[str, Mapping[str, Tensor]] | None = None,
    votes: Mapping[str, Mapping[str, Curve]] | None = None,
    command: str = "",
) -> str:
    """Write the report that compares several arms (methods) over seeds as one HTML file.

    Args:
        title: of the page.
        recipe: the fields that all arms share.
        comparison: of the final figures.
        curves: arm -> seed -> evaluations, each with its `step`.
        samples: arm -> `confidence` and `correct` (and `prompt`, `score`) of the final evaluations, all seeds together.
        votes: arm -> voting curves, whose intervals are over seeds.
        command: how to run it again.

    Example:
        >>> from spanwise.measure import compare_arms
        >>> result = compare_arms({"bae": {0: {"ece": .1}, 1: {"ece": .2}}, "grpo": {0: {"ece": .1}}})
        >>> page = compare_report(title="Two arms", recipe={}, comparison=result, curves={})
        >>> "0.150 ± 0.635" in page, "0.100 (n=1)" in page
        (True, True)
    """
    arm_names = comparison.methods
    seeds = sorted({seed for arm_curves in curves.values() for seed in arm_curves})
    max_seed_count = max((interval.count for interval in comparison.cells.values()), default=0)
    clear_count_text = f"{sum(d.verdict == 'clear' for d in comparison.differences)} of {len(comparison.differences)}"
    seed_counts = {len(arm_curves) for arm_curves in curves.values()}
    seed_count_text = f"{min(seed_counts)} to {max_seed_count}" if len(seed_counts) > 1 else f"{max_seed_count}"
    evaluations_by_run = [evaluations for arm_curves in curves.values() for evaluations in arm_curves.values()]
    curve_panels: list[Panel] = []
    for name in parts.figures_of(chain.from_iterable(evaluations_by_run)):
        curve_rows = [row for arm in arm_names for row in parts.seed_curves(curves.get(arm, {}), name, arm)]
        curve_panels += parts.figure_panel(name, curve_rows, arm_names)
    page_sections = [
        parts.section(
            "Figures", {"level": 100 * comparison.level, "seeds": max_seed_count}, tables=[_arm_rows(comparison, max_seed_count)]
        ),
        parts.section(
            "Differences", {"summary": comparison.summary()}, legend=VERDICTS, palette="verdicts",
            points=comparison.sentences("clear"), panels=_difference_panels(comparison),
        ),
        parts.section(
            "Learning", {"seeds": "A line is the mean over seeds. Its band goes from the lowest to the highest seed. "},
            legend=arm_names, panels=curve_panels,
        ),
        parts.calibration_section(
            samples or {},
            note="The diagram shows the answers of all seeds. Its whiskers allow for answers to the same prompt being alike.",
        ),
        parts.voting_section(votes or {}, samples or {}, over="seeds"),
    ]  # fmt: skip
    return render(
        title=title,
        lead=f"{len(arm_names)} arms were trained from the same start, {seed_count_text} seeds each: {', '.join(arm_names)}."
        + (f" Seeds {', '.join(map(str, seeds))}." if seeds else ""),
        finding=compare_finding(comparison),
        command=command,
        warnings=_warnings(comparison),
        sections=page_sections,
        headlines=[
            Headline("arms", len(arm_names)),
            Headline("seeds per arm", seed_count_text),
            Headline("differences beyond the noise", clear_count_text, "after Holm's correction for the number of pairs"),
            *_best_arm_headlines(comparison),
        ],
        recipe=recipe,
    )


def _warnings(comparison: ArmComparison) -> list[str]:
    """Return the comparison's warnings with their usual causes. Methods without figures get one too."""
    alarm_sentences = [
        f"{sentence} {next((cause for problem, cause in CAUSES.items() if problem in sentence), '')}".strip()
        for sentence in comparison.warnings()
    ]
    return alarm_sentences + [
        f"{arm}: no run of this arm has measured a figure. Run spanwise compare again; finished runs are kept."
        for arm in comparison.methods
        if not any(comparison.cells[arm, figure].count for figure in comparison.figures)
    ]


def _best_arm_headlines(comparison: ArmComparison) -> list[Headline]:
    """Build headlines that name the best methods in accuracy and in ECE. No other clearly beats them."""
    headlines = []
    for figure in ("accuracy", "ece"):
        if figure not in comparison.figures:
            continue
        worse_arms = {_better_first(d)[1] for d in comparison.differences if d.figure == figure and d.verdict == "clear"}
        measured_arms = [arm for arm in comparison.methods if comparison.cells[arm, figure].count]
        best_arms = [arm for arm in measured_arms if arm not in worse_arms]
        warning = "; ".join(
            f"{arm}: {comparison.wrong[arm, figure]}" for arm in best_arms if (arm, figure) in comparison.wrong
        )
        count_text = f"{len(best_arms)} of {len(measured_arms)}"
        headlines.append(Headline(f"not beaten in {parts.figure_name(figure)}", count_text, ", ".join(best_arms), warning))
    return headlines


def _arm_rows(comparison: ArmComparison, most: int) -> list[parts.Row]:
    """Build a table row per arm (method) that sums up its figures over seeds. A figure that no seed has is None."""
    arm_rows: list[parts.Row] = []
    for arm in comparison.methods:
        figure_cells = [None if cell == "-" else cell.replace("!", "⚠") for cell in comparison.row(arm, most)]
        arm_rows.append({"arm": arm} | dict(zip(map(parts.figure_name, comparison.figures), figure_cells, strict=True)))
    return arm_rows


def _difference_panels(comparison: ArmComparison) -> list[Panel]:
    """Draw the differences between arms with their intervals, one panel for each figure."""
    difference_panels = []
    for figure in comparison.figures:
        chart_rows = []
        table_rows = []
        for d in (d for d in comparison.differences if d.figure == figure):
            pair_text = f"{d.a} - {d.b}"
            value, low, high = d.interval.value, d.interval.low, d.interval.high
            chart_rows.append({"name": pair_text, "series": d.verdict, "value": value, "low": low, "high": high})
            table_rows.append(
                {"pair": pair_text, "difference": value, "from": low, "to": high, "p (Holm)": d.p_adjusted, "verdict": d.verdict,
                 "seeds needed": "" if d.verdict == "clear" else d.seeds_needed or "unknown"}
            )  # fmt: skip
        if measured_rows := [row for row in chart_rows if math.isfinite(row["value"])]:
            chart = forest(measured_rows, names=(*VERDICTS, "same", "unknown"), x="difference", palette="verdicts")
            difference_panels.append(Panel(parts.figure_name(figure), (chart,), table_rows))
    return difference_panels


def compare_finding(comparison: ArmComparison) -> str:
    """Say which method is better, in which figure and by how much. Also name meaningless figures."""
    figure_names = [name for name in ("accuracy", "ece") if name in comparison.figures] or comparison.figures[:2]
    alarm_sentences = [
        f"Alarm for {' and '.join(dict.fromkeys(arm for arm, _ in arms_and_figures))}: {reason}."
        for reason, arms_and_figures in by_sentence(comparison.wrong).items()
    ]
    findings = [_figure_finding(comparison, name) for name in figure_names]
    return " ".join(filter(None, [*alarm_sentences, *findings])) or "Nothing was compared."


def _figure_finding(comparison: ArmComparison, name: str) -> str:
    """Say which runs clearly differ in one figure, such as the accuracy; if none do, describe the clearest difference."""
    differences = [d for d in comparison.differences if d.figure == name]
    meaningful_differences = [d for d in differences if not _is_meaningless(comparison, d)]
    figure_label = parts.figure_name(name)
    clear_differences = [d for d in meaningful_differences if d.verdict == "clear"]
    clear_differences.sort(key=lambda d: -abs(d.interval.value))
    sentences = [_state_better(d) for d in clear_differences[:2]]
    if len(clear_differences) > 2:
        sentences.append(f"{len(clear_differences) - 2} more differences in {figure_label} are beyond the noise.")
    if len(meaningful_differences) < len(differences):
        compared_arms = dict.fromkeys(arm for d in differences for arm in (d.a, d.b))
        untrusted_arms = [arm for arm in compared_arms if (arm, name) in comparison.wrong]
        sentences.append(f"The {figure_label} of {' and '.join(untrusted_arms)} means nothing (see the alarm).")
    if meaningful_differences and not clear_differences:
        example_diffs = [d for d in meaningful_differences if d.verdict == "borderline"][:2]
        if len(meaningful_differences) == 1 or {d.verdict for d in meaningful_differences} in ({"unknown"}, {"same"}):
            example_diffs = [max(meaningful_differences, key=lambda d: d.interval.count)]
        sentences += [d.sentence() for d in example_diffs] or [f"In {figure_label} all differences are inside the noise."]
    return " ".join(sentences)


def _is_meaningless(comparison: ArmComparison, d: Difference) -> bool:
    """Return whether a warning about one of two methods makes the difference between them meaningless."""
    arm_warnings = [comparison.wrong[arm, d.figure] for arm in (d.a, d.b) if (arm, d.figure) in comparison.wrong]
    is_calibration_figure = d.figure in (*CALIBRATION, *SCORE_FIGURES)
    return any(is_calibration_figure or warning.startswith("most answers could not") for warning in arm_warnings)


def _better_first(d: Difference) -> tuple[str, str]:
    """Return the names of two compared methods, the better one first. If none is better: the higher one."""
    return (d.a, d.b) if (d.interval.value > 0) != (d.figure in LOWER_BETTER) else (d.b, d.a)


def _state_better(d: Difference) -> str:
    """Say which method is clearly better in a figure, and by how much. It may be only higher."""
    is_accuracy_figure = d.figure.endswith("_accuracy") or "@" in d.figure
    has_better_direction = is_accuracy_figure or d.figure in (*LOWER_BETTER, *HIGHER_BETTER)
    winner, loser = _better_first(d)
    smaller_bound, larger_bound = sorted([abs(d.interval.low), abs(d.interval.high)])
    diff_text = f"{abs(d.interval.value):.3f} [{smaller_bound:.3f}, {larger_bound:.3f}]"
    adjective = "better" if has_better_direction else "higher"
    return f"{winner} is {adjective} than {loser} in {parts.figure_name(d.figure)} by {diff_text} over {d.interval.count} seeds."
