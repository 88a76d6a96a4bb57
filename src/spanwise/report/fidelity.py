"""The report of baseline fidelity: every baseline against Monte Carlo, and where each drives a confidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanwise.measure import Fidelity
from spanwise.report.charts import dodged, fixed_points, forest
from spanwise.report.findings import fidelity_finding
from spanwise.report.page import Headline, Panel, Section, Table, render
from spanwise.report.rows import Row, percent, wide

#: Figure -> title of its panel and of its axis.
PANELS: Mapping[str, tuple[str, str]] = {
    "rmse": ("Distance from Monte Carlo", "RMSE"),
    "rmse_wrong": ("… when the answer is wrong", "RMSE"),
    "rmse_right": ("… when the answer is right", "RMSE"),
    "rmse_alone": ("… alone with its outcome in the group", "RMSE"),
    "correlation": ("Correlation with Monte Carlo", "correlation"),
    "rmse_scaled": ("Distance at the best scale", "RMSE after scaling"),
    "gradient_noise": ("Noise added to the gradient", "relative to the exact gradient"),
}


def fidelity_rows(found: Fidelity) -> list[Row]:
    """Every figure of every baseline and group size: `baseline`, `group_size`, `figure`, `value`, `low`, `high`.

    Example:
        >>> import torch
        >>> from spanwise.measure import FIGURES
        >>> nothing_bgf = torch.zeros(1, 1, len(FIGURES), dtype=torch.float64)
        >>> row = fidelity_rows(Fidelity(("group",), (4,), nothing_bgf, nothing_bgf[None], share=1.0))[0]
        >>> row["baseline"], row["group_size"], row["value"]
        ('group', 4, 0.0)
    """
    rows = []
    for baseline in found.baselines:
        for size in found.group_sizes:
            for figure in (*PANELS, "ceiling"):
                low, high = found.interval(baseline, size, figure)
                value = found.value(baseline, size, figure)
                rows.append(
                    {"baseline": baseline, "group_size": size, "figure": figure, "value": value, "low": low, "high": high}
                )
    return rows


def difference_rows(found: Fidelity, one: str = "blended", other: str = "outcome") -> list[Row]:
    """One baseline minus another, paired over prompts: `a`, `b`, `group_size`, `figure`, `value`, `low`, `high`.

    Example:
        >>> import torch
        >>> from spanwise.measure import FIGURES
        >>> value_bgf = torch.zeros(2, 1, len(FIGURES), dtype=torch.float64)
        >>> value_bgf[0, 0, FIGURES.index("correlation")] = 0.25
        >>> row = difference_rows(Fidelity(("blended", "outcome"), (4,), value_bgf, value_bgf[None], share=1.0))[0]
        >>> row["figure"], row["value"]
        ('correlation', 0.25)
    """
    rows = []
    for figure in ("correlation", "rmse_scaled", "gradient_noise"):
        for size in found.group_sizes:
            value, low, high = found.difference(one, other, size, figure)
            rows.append(
                {"a": one, "b": other, "group_size": size, "figure": figure, "value": value, "low": low, "high": high}
            )
    return rows


def fidelity_report(
    *,
    source: str,
    recipe: Mapping[str, Any],
    counts: Mapping[str, int | float],
    figures: Table,
    differences: Table = (),
    points: Table = (),
    tokens: Table = (),
    command: str = "",
) -> str:
    """Write the report of `spanwise fidelity` as one HTML file.

    Args:
        source: the checkpoint.
        recipe: of the run.
        counts: `completions`, `prompts`, `rerolls`, `prefixes`, and `share`, the part of the completions that could be used.
        figures: as `fidelity_rows` gives them.
        differences: as `difference_rows` gives them.
        points: the q* test: `baseline`, `group_size`, `p`, `q`, and `error` (one standard error) where q is simulated.
        tokens: token fidelity: `critic`, `estimator`, `value`, `low`, `high`, the correlation with Monte Carlo token advantages.
        command: how to measure it again.

    Example:
        >>> row = {"baseline": "group", "group_size": 4, "figure": "rmse", "value": 0.25, "low": 0.2, "high": 0.3}
        >>> page = fidelity_report(source="runs/a", recipe={}, counts={"completions": 64, "prompts": 8}, figures=[row])
        >>> "0.250 [0.200, 0.300]" in page
        True
    """
    names = list(dict.fromkeys(str(row["baseline"]) for row in (*figures, *points)))
    sections = [
        Section(
            "Fidelity",
            "Advantages of each baseline against Monte Carlo advantages from re-rolled last blocks; whiskers are 95 % intervals "
            "over prompts. RMSE alone rewards a baseline for including the sample itself; read it with the figures that do not "
            "depend on scale. The grey tick is what the exact advantages would reach.",
            legend=names,
            panels=[panel for figure in PANELS if (panel := _panel(figures, figure, names))],
            asks="Which baseline is nearest to the truth?",
        ),
        Section(
            "Paired differences",
            "On the same prompts; an interval that excludes 0 is beyond the noise.",
            panels=_pairs(differences),
            asks="Is it noise?",
        ),
        Section(
            "The q* test",
            "The confidence a policy ends at if only this baseline moves it. On the dashed line it says how probable it is to be "
            "right.",
            legend=names,
            panels=_point_panels(points, names),
            asks="Is the confidence honest?",
        ),
        _token_section(tokens),
    ]
    return render(
        title=f"Fidelity of the baselines on {source}",
        lead=_lead(counts),
        finding=fidelity_finding(figures, differences, tokens),
        warnings=_warnings(figures, counts, tokens),
        command=command,
        headlines=_headlines(figures, counts),
        sections=sections,
        recipe=recipe,
    )


def _warnings(figures: Table, counts: Mapping[str, int | float], tokens: Table) -> list[str]:
    """What the figures must not be read without."""
    said = []
    if not any(row["value"] is not None and row["value"] == row["value"] for row in (*figures, *tokens)):
        said.append(
            "No figure was measured. Usually no completion has the last block that is rolled again, or all are malformed."
        )
    share = counts.get("share")
    if share is not None and share < 0.5:
        said.append(
            f"Only {percent(share)} of the completions could be used; the figures are of those alone. Usually the others are "
            "malformed or have no verdict."
        )
    return said


def _lead(counts: Mapping[str, int | float]) -> str:
    """What was sampled, as far as it is known."""

    def number(name: str) -> str:
        return f"{counts[name]:,}" if name in counts else "an unknown number of"

    first = f"{number('completions')} completions of {number('prompts')} prompts"
    if counts and "rerolls" not in counts:  # tokens alone
        return f"{first}."
    return f"{first}; {number('rerolls')} re-rolls of {number('prefixes')} distinct prefixes."


def _headlines(figures: Table, counts: Mapping[str, int | float]) -> list[Headline]:
    """Correlation of each baseline at the smallest group size, and what could be used."""
    sizes = sorted({row["group_size"] for row in figures if isinstance(row["group_size"], int)})
    smallest = sizes[0] if sizes else None
    made = []
    for row in figures:
        if row["figure"] == "correlation" and row["group_size"] == smallest and row["baseline"] != "none":
            made.append(Headline(f"{row['baseline']}, G = {smallest}", row["value"], "correlation with Monte Carlo"))
    share = counts.get("share")
    return (
        []
        if counts and share is None
        else [
            *made,
            Headline("completions used", None if share is None else percent(share), "with re-rolls to compare"),
        ]
    )


def _panel(figures: Table, figure: str, names: Sequence[str]) -> Panel | None:
    ceiling = {row["group_size"]: row["value"] for row in figures if row["figure"] == "ceiling" and figure == "correlation"}
    rows: list[Row] = [
        {"series": row["baseline"], "x": row["group_size"], **_bounds(row),
         "reference": ceiling.get(row["group_size"])}
        for row in figures if row["figure"] == figure and row["value"] is not None and row["value"] == row["value"]
    ]  # fmt: skip
    if not rows:
        return None
    title, y = PANELS[figure]
    return Panel(title, (dodged(rows, names=names, y=y),), wide(rows, key="x", label="G"))


def _pairs(differences: Table) -> list[Panel]:
    panels = []
    for figure in dict.fromkeys(str(row["figure"]) for row in differences):
        found = [row for row in differences if row["figure"] == figure]
        rows = [{"name": f"G = {row['group_size']}", "series": "", **_bounds(row)} for row in found]
        title = f"{PANELS[figure][0]}: {found[0]['a']} - {found[0]['b']}"
        table = [
            {"G": row["group_size"], "difference": row["value"], "from": row["low"], "to": row["high"]} for row in found
        ]
        panels.append(Panel(title, (forest(rows, names=("",), x=f"difference in {PANELS[figure][1]}"),), table))
    return panels


def _bounds(row: Mapping[str, Any]) -> Row:
    return {key: row[key] for key in ("value", "low", "high")}


def _point_panels(points: Table, names: Sequence[str]) -> list[Panel]:
    panels = []
    for size in dict.fromkeys(row["group_size"] for row in points if row["group_size"] is not None):
        found = [row for row in points if row["group_size"] in (size, None)]  # None: the same for every group size
        rows = [{"series": row["baseline"], "p": row["p"], "q": row["q"], "error": row.get("error")} for row in found]
        table = [{"p": row["p"], "series": row["series"], "value": row["q"]} for row in rows]
        errors = [float(row["error"]) for row in rows if isinstance(row["error"], float)]
        note = f"Simulated points have a standard error of at most {max(errors):.4f}." if errors else ""
        panels.append(Panel(f"G = {size}", (fixed_points(rows, names=names),), wide(table, key="p"), note))
    return panels


def _token_section(tokens: Table) -> Section:
    panels = []
    for critic in dict.fromkeys(str(row["critic"]) for row in tokens):
        rows = [
            {"name": row["estimator"], "series": "", **_bounds(row)}
            for row in tokens if str(row["critic"]) == critic
        ]  # fmt: skip
        table = [
            {"estimator": row["name"], "correlation": row["value"], "from": row["low"], "to": row["high"]} for row in rows
        ]
        panels.append(Panel(critic, (forest(rows, names=("",), x="correlation with Monte Carlo"),), table))
    text = "GAE, SAE and a group mean at the tokens where the policy really chose (p < .97), for several frozen critics."
    return Section("Token advantages", text, panels=panels, asks="Which estimator is right at the tokens?")
