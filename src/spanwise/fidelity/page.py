"""The report of baseline fidelity: every baseline against Monte Carlo, and where each drives a confidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from spanwise.fidelity.baselines import Fidelity
from spanwise.fidelity.tokens import TokenFidelity
from spanwise.report.charts import dodged, fixed_points, forest
from spanwise.report.page import Headline, Panel, Section, render
from spanwise.report.rows import Row, percent, wide

#: Rows of figures, as `fidelity.json` keeps them.
Rows = Sequence[Mapping[str, Any]]
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


def fidelity_rows(fidelity: Fidelity) -> list[Row]:
    """Every figure of every baseline and group size: `baseline`, `group_size`, `figure`, `value`, `low`, `high`."""
    rows = []
    for baseline, size, figure in product(fidelity.baselines, fidelity.group_sizes, (*PANELS, "ceiling")):
        low, high = fidelity.interval(baseline, size, figure)
        value = fidelity.value(baseline, size, figure)
        rows.append({"baseline": baseline, "group_size": size, "figure": figure, "value": value, "low": low, "high": high})
    return rows


def difference_rows(fidelity: Fidelity, one: str = "blended", other: str = "outcome") -> list[Row]:
    """One baseline minus another, paired over prompts: `a`, `b`, `group_size`, `figure`, `value`, `low`, `high`."""
    rows = []
    for figure, size in product(("correlation", "rmse_scaled", "gradient_noise"), fidelity.group_sizes):
        value, low, high = fidelity.difference(one, other, size, figure)
        rows.append({"a": one, "b": other, "group_size": size, "figure": figure, "value": value, "low": low, "high": high})
    return rows


def token_rows(fidelity: TokenFidelity) -> list[Row]:
    """Correlations with Monte Carlo over the decision tokens: `critic`, `estimator`, `value`, `low`, `high`."""
    rows = []
    for critic, name in product(fidelity.critics, fidelity.estimators):
        interval = fidelity.interval(critic, name, "correlation", kind="decision")
        rows.append(
            {"critic": critic, "estimator": name, "value": interval.value, "low": interval.low, "high": interval.high}
        )
    return rows


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
    """Write the report of `spanwise fidelity` as one HTML file.

    Args:
        source: the checkpoint.
        recipe: of the run.
        counts: `completions`, `prompts`, `rerolls`, `prefixes`, and `share`, the part of the completions that could be used.
        figures: as `fidelity_rows` gives them.
        differences: as `difference_rows` gives them.
        points: the q* test: `baseline`, `group_size`, `p`, `q`, and `error` (one standard error) where q is simulated.
        tokens: as `token_rows` gives them.
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


def fidelity_finding(figures: Rows, differences: Rows = (), tokens: Rows = ()) -> str:
    """Say which baseline is nearest to Monte Carlo at the smallest group size, and whether the next one is told from it."""
    correlations = [row for row in figures if row["figure"] == "correlation" and _measured(row)]
    if correlations:
        smallest = min(row["group_size"] for row in correlations)
        return _nearest([row for row in correlations if row["group_size"] == smallest], differences)
    best = max(filter(_measured, tokens), key=lambda row: row["value"], default=None)
    if best is None:
        return "Nothing was measured: no baseline has a correlation with Monte Carlo."
    return (
        f"At tokens {best['estimator']} with {best['critic']} is nearest to Monte Carlo: correlation {_with_bounds(best)}."
    )


def _nearest(rows: Rows, differences: Rows) -> str:
    best, *others = sorted(rows, key=lambda row: -row["value"])
    if best["low"] <= 0:
        return (
            f"At G = {best['group_size']} no baseline is told from noise: the best, {best['baseline']}, has "
            f"{_with_bounds(best)}."
        )
    head = f"At G = {best['group_size']} {best['baseline']} is nearest to Monte Carlo: correlation {_with_bounds(best)}"
    if not others:
        return f"{head}."
    second = others[0]
    paired = [
        row for row in differences
        if row["figure"] == "correlation" and row["group_size"] == best["group_size"]
        and {row["a"], row["b"]} == {best["baseline"], second["baseline"]}
    ]  # fmt: skip
    same = any(row["low"] <= 0 <= row["high"] for row in paired) if paired else second["high"] >= best["low"]
    tail = "; the two are not told apart" if same else ""
    return f"{head}; next is {second['baseline']} with {_with_bounds(second)}{tail}."


def _measured(row: Mapping[str, Any]) -> bool:
    return row["value"] is not None and row["value"] == row["value"]


def _with_bounds(row: Mapping[str, Any]) -> str:
    return f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"


def _warnings(figures: Rows, counts: Mapping[str, int | float], tokens: Rows) -> list[str]:
    """What the figures must not be read without."""
    sentences = []
    if not any(map(_measured, (*figures, *tokens))):
        sentences.append(
            "No figure was measured. Usually no completion has the last block that is rolled again, or all are malformed."
        )
    share = counts.get("share")
    if share is not None and share < 0.5:
        sentences.append(
            f"Only {percent(share)} of the completions could be used; the figures are of those alone. Usually the others are "
            "malformed or have no verdict."
        )
    return sentences


def _lead(counts: Mapping[str, int | float]) -> str:
    """What was sampled, as far as it is known."""

    def number(name: str) -> str:
        return f"{counts[name]:,}" if name in counts else "an unknown number of"

    first = f"{number('completions')} completions of {number('prompts')} prompts"
    if counts and "rerolls" not in counts:  # tokens alone
        return f"{first}."
    return f"{first}; {number('rerolls')} re-rolls of {number('prefixes')} distinct prefixes."


def _headlines(figures: Rows, counts: Mapping[str, int | float]) -> list[Headline]:
    """Correlation of each baseline at the smallest group size, and what could be used."""
    sizes = sorted({row["group_size"] for row in figures if isinstance(row["group_size"], int)})
    smallest = sizes[0] if sizes else None
    share = counts.get("share")
    if counts and share is None:
        return []
    nearest = [
        Headline(f"{row['baseline']}, G = {smallest}", row["value"], "correlation with Monte Carlo")
        for row in figures
        if row["figure"] == "correlation" and row["group_size"] == smallest and row["baseline"] != "none"
    ]
    return [*nearest, Headline("completions used", None if share is None else percent(share), "with re-rolls to compare")]


def _panel(figures: Rows, figure: str, names: Sequence[str]) -> Panel | None:
    ceiling = {row["group_size"]: row["value"] for row in figures if row["figure"] == "ceiling" and figure == "correlation"}
    rows: list[Row] = [
        {"series": row["baseline"], "x": row["group_size"], **_bounds(row),
         "reference": ceiling.get(row["group_size"])}
        for row in figures if row["figure"] == figure and _measured(row)
    ]  # fmt: skip
    if not rows:
        return None
    title, y = PANELS[figure]
    return Panel(title, (dodged(rows, names=names, y=y),), wide(rows, key="x", label="G"))


def _pairs(differences: Rows) -> list[Panel]:
    panels = []
    for figure in dict.fromkeys(str(row["figure"]) for row in differences):
        pairs = [row for row in differences if row["figure"] == figure]
        rows = [{"name": f"G = {row['group_size']}", "series": "", **_bounds(row)} for row in pairs]
        title = f"{PANELS[figure][0]}: {pairs[0]['a']} - {pairs[0]['b']}"
        table = [
            {"G": row["group_size"], "difference": row["value"], "from": row["low"], "to": row["high"]} for row in pairs
        ]
        panels.append(Panel(title, (forest(rows, names=("",), x=f"difference in {PANELS[figure][1]}"),), table))
    return panels


def _bounds(row: Mapping[str, Any]) -> Row:
    return {key: row[key] for key in ("value", "low", "high")}


def _point_panels(points: Rows, names: Sequence[str]) -> list[Panel]:
    panels = []
    for size in dict.fromkeys(row["group_size"] for row in points if row["group_size"] is not None):
        rows = [
            {"series": row["baseline"], "p": row["p"], "q": row["q"], "error": row.get("error")}
            for row in points
            if row["group_size"] in (size, None)  # None: the same for every group size
        ]
        table = [{"p": row["p"], "series": row["series"], "value": row["q"]} for row in rows]
        errors = [float(row["error"]) for row in rows if isinstance(row["error"], float)]
        note = f"Simulated points have a standard error of at most {max(errors):.4f}." if errors else ""
        panels.append(Panel(f"G = {size}", (fixed_points(rows, names=names),), wide(table, key="p"), note))
    return panels


def _token_section(tokens: Rows) -> Section:
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
