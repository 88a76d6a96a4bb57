"""Build the report page of the command `spanwise fidelity`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, product
from operator import itemgetter
from typing import Any

from spanwise.fidelity.baselines import Fidelity, Rerolls
from spanwise.fidelity.tokens import TokenFidelity
from spanwise.report.charts import Rows, dodged, fixed_points, forest, is_known
from spanwise.report.page import Headline, Panel, render
from spanwise.report.sections import Row, percent, section, wide

#: Maps a figure to the title of its panel and the title of its axis.
PANELS: Mapping[str, tuple[str, str]] = {
    "rmse": ("Distance from Monte Carlo", "RMSE"),
    "rmse_wrong": ("Distance when the answer is wrong", "RMSE"),
    "rmse_right": ("Distance when the answer is right", "RMSE"),
    "rmse_alone": ("Distance when no other completion of the group has the same outcome", "RMSE"),
    "correlation": ("Correlation with Monte Carlo", "correlation"),
    "rmse_scaled": ("Distance at the best scale", "RMSE after scaling"),
    "gradient_noise": ("Noise added to the gradient", "relative to the exact gradient"),
}


def written_baselines(fidelity: Fidelity, rolled: Rerolls) -> dict[str, Any]:
    """Return what `fidelity.json` stores: counts of completions, figures of baselines, and differences between baselines."""
    completion_counts = {
        "completions": rolled.prefix_xs.numel(), "prompts": len(rolled.prefix_xs), "rerolls": rolled.again_dm.numel(),
        "prefixes": len(rolled.again_dm), "share": fidelity.share,
    }  # fmt: skip
    figure_rows = [
        {"baseline": name, "group_size": size, "figure": figure, **_numbers(*fidelity.interval(name, size, figure))}
        for name, size, figure in product(fidelity.baselines, fidelity.group_sizes, (*PANELS, "ceiling"))
    ]
    return {"counts": completion_counts, "figures": figure_rows, "differences": difference_rows(fidelity)}


def difference_rows(fidelity: Fidelity) -> list[Row]:
    """Return the figures of the baseline `blended` minus those of `outcome`."""
    return [
        {"a": "blended", "b": "outcome", "group_size": size, "figure": figure_name}
        | _numbers(*fidelity.interval("blended", size, figure_name, minus="outcome"))
        for figure_name, size in product(("correlation", "rmse_scaled", "gradient_noise"), fidelity.group_sizes)
    ]


def token_rows(fidelity: TokenFidelity) -> list[Row]:
    """Return the correlation of each token estimator with Monte Carlo."""
    return [
        {"critic": critic, "estimator": name}
        | _numbers(**vars(fidelity.interval(critic, name, "correlation", kind="decision")))
        for critic, name in product(fidelity.critics, fidelity.estimators)
    ]


def _numbers(value: float, low: float, high: float, **_: Any) -> Row:
    """Return a figure's value and the bounds of its interval as fields of a row."""
    return {"value": value, "low": low, "high": high}


def fidelity_report(
    *,
    source: str,
    recipe: Mapping[str, Any],
    counts: Mapping[str, int | float],
    figures: Rows,
    differences: Rows = (),
    points: Rows = (),
    tokens: Rows = (),
    command: str = "",
) -> str:
    """Build the HTML report of `spanwise fidelity`. This module's functions make its rows."""
    baseline_names = list(dict.fromkeys(str(row["baseline"]) for row in (*figures, *points)))
    completions_text = f"{counts['completions']:,} completions of {counts['prompts']:,} prompts"
    headlines, warnings = [], []
    if "rerolls" in counts:
        completions_text += f"; {counts['rerolls']:,} re-rolls of {counts['prefixes']:,} distinct prefixes"
    if not any(is_known(row["value"]) for row in (*figures, *tokens)):
        warnings.append("Nothing was measured. All completions are probably malformed, or lack the measured block.")
    if "share" in counts:  # baselines were measured, not only tokens
        smallest_group_size = min((row["group_size"] for row in figures), default=None)
        used_share = percent(counts["share"])
        headlines = [
            Headline(f"{row['baseline']}, G = {smallest_group_size}", row["value"], "correlation with Monte Carlo")
            for row in figures
            if (row["figure"], row["group_size"]) == ("correlation", smallest_group_size) and row["baseline"] != "none"
        ]
        headlines.append(Headline("completions used", used_share, "with re-rolls to compare"))
        if counts["share"] < 0.5:
            warnings.append(
                f"Only {used_share} of the completions could be used, and only these count in the figures. Usually the others are "
                "malformed or have no verdict."
            )
    figure_panels = [panel for figure_name in PANELS if (panel := _figure_panel(figures, figure_name, baseline_names))]
    difference_panels = [_difference_panel(figure, rows) for figure, rows in _group_rows(differences, "figure")]
    token_panels = [
        _forest(critic, rows, {"estimator": "estimator", "correlation": "value"}, x="correlation with Monte Carlo")
        for critic, rows in _group_rows(tokens, "critic")
    ]
    page_sections = [
        section("Fidelity", legend=baseline_names, panels=figure_panels),
        section("Paired differences", panels=difference_panels),
        section("The q* test", legend=baseline_names, panels=_point_panels(points, baseline_names)),
        section("Token advantages", panels=token_panels),
    ]
    return render(
        title=f"Fidelity of the baselines on {source}", lead=f"{completions_text}.", warnings=warnings, command=command,
        finding=fidelity_finding(figures, differences, tokens), headlines=headlines, sections=page_sections, recipe=recipe,
    )  # fmt: skip


def fidelity_finding(figures: Rows, differences: Rows = (), tokens: Rows = ()) -> str:
    """Say which baseline's advantages correlate best with Monte Carlo advantages, in groups of the smallest size."""
    correlation_rows = [row for row in figures if row["figure"] == "correlation" and is_known(row["value"])]
    if not correlation_rows:
        top_row = max((row for row in tokens if is_known(row["value"])), key=lambda row: row["value"], default=None)
        if top_row is None:
            return "Nothing was measured: no correlation with the Monte Carlo advantage could be computed."
        estimator_and_critic = f"{top_row['estimator']} with the critic {top_row['critic']}"
        return (
            f"The token advantages of {estimator_and_critic} correlate best with the Monte Carlo advantages: "
            f"{_with_bounds(top_row)}."
        )
    size = min(row["group_size"] for row in correlation_rows)
    rows_of_size = [row for row in correlation_rows if row["group_size"] == size]
    top_row, *other_rows = sorted(rows_of_size, key=lambda row: -row["value"])
    if top_row["low"] <= 0:
        return (
            f"In groups of {size}, no baseline clearly correlates with the Monte Carlo advantages. The highest correlation is that "
            f"of {top_row['baseline']}: {_with_bounds(top_row)}."
        )
    best_sentence = f"In groups of {size}, {top_row['baseline']} correlates best with Monte Carlo: {_with_bounds(top_row)}"
    if not other_rows:
        return f"{best_sentence}."
    next_row = other_rows[0]
    baseline_pair = {top_row["baseline"], next_row["baseline"]}
    pair_rows = [row for row in differences if row["group_size"] == size and {row["a"], row["b"]} == baseline_pair]
    intervals = [(row["low"], row["high"]) for row in pair_rows if row["figure"] == "correlation"]
    is_within_noise = any(low <= 0 <= high for low, high in intervals) if intervals else next_row["high"] >= top_row["low"]
    difference_text = f"The difference between {top_row['baseline']} and {next_row['baseline']}"
    noise_sentence = f" {difference_text} is within the noise." if is_within_noise else ""
    return f"{best_sentence}; next is {next_row['baseline']} with {_with_bounds(next_row)}.{noise_sentence}"


def _with_bounds(row: Mapping[str, Any]) -> str:
    return f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"


def _figure_panel(figures: Rows, figure: str, names: Sequence[str]) -> Panel | None:
    """Build the panel with a figure of all baselines by group size."""
    ceiling_rows = [row for row in figures if figure == "correlation" and row["figure"] == "ceiling"]
    ceilings = {row["group_size"]: row["value"] for row in ceiling_rows}
    chart_rows: list[Row] = [
        {"series": row["baseline"], "x": row["group_size"], **_numbers(**row), "reference": ceilings.get(row["group_size"])}
        for row in figures
        if row["figure"] == figure and is_known(row["value"])
    ]
    if not chart_rows:
        return None
    title, axis_title = PANELS[figure]
    return Panel(title, (dodged(chart_rows, names=names, y=axis_title),), wide(chart_rows, key="x", label="G"))


def _group_rows(rows: Rows, key: str) -> Iterator[tuple[Any, Rows]]:
    """Group neighbouring rows with the same entry in a column. Yield each entry with its rows."""
    return ((shared_entry, list(group)) for shared_entry, group in groupby(rows, key=itemgetter(key)))


def _difference_panel(figure: str, rows: Rows) -> Panel:
    title, axis_title = PANELS[figure]
    title = f"{title}: {rows[0]['a']} - {rows[0]['b']}"
    return _forest(title, rows, {"G": "group_size", "difference": "value"}, x=f"difference in {axis_title}", prefix="G = ")


def _forest(title: str, rows: Rows, columns: Mapping[str, str], *, x: str, prefix: str = "") -> Panel:
    """Build a panel with a table and a forest plot of the same rows."""
    name_column = next(iter(columns.values()))
    chart_rows: list[Row] = [{"name": f"{prefix}{row[name_column]}", "series": "", **_numbers(**row)} for row in rows]
    field_of_label = {**columns, "from": "low", "to": "high"}
    table_rows = [{label: row[field] for label, field in field_of_label.items()} for row in rows]
    return Panel(title, (forest(chart_rows, names=("",), x=x),), table_rows)


def _point_panels(points: Rows, names: Sequence[str]) -> list[Panel]:
    point_panels = []
    for size, rows in _group_rows(points, "group_size"):
        dot_rows = [{"series": row["baseline"], "x": row["p"], "value": row["q"], "error": row.get("error")} for row in rows]
        table_rows = wide(dot_rows, key="x", label="p")
        known_errors = [float(row["error"]) for row in dot_rows if isinstance(row["error"], float)]
        error_note = f"A simulated confidence has a standard error of up to {max(known_errors):.4f}." if known_errors else ""
        point_panels.append(Panel(f"G = {size}", (fixed_points(dot_rows, names=names),), table_rows, error_note))
    return point_panels
