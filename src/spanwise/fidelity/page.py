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
    keys = product(fidelity.baselines, fidelity.group_sizes, (*PANELS, "ceiling"))
    return [
        {"baseline": baseline, "group_size": size, "figure": figure}
        | _row(fidelity.value(baseline, size, figure), *fidelity.interval(baseline, size, figure))
        for baseline, size, figure in keys
    ]


def difference_rows(fidelity: Fidelity, one: str = "blended", other: str = "outcome") -> list[Row]:
    """One baseline minus another, paired over prompts: `a`, `b`, `group_size`, `figure`, `value`, `low`, `high`."""
    keys = product(("correlation", "rmse_scaled", "gradient_noise"), fidelity.group_sizes)
    return [
        {"a": one, "b": other, "group_size": size, "figure": figure} | _row(*fidelity.difference(one, other, size, figure))
        for figure, size in keys
    ]


def token_rows(fidelity: TokenFidelity) -> list[Row]:
    """Correlations with Monte Carlo over the decision tokens: `critic`, `estimator`, `value`, `low`, `high`."""
    rows = []
    for critic, name in product(fidelity.critics, fidelity.estimators):
        interval = fidelity.interval(critic, name, "correlation", kind="decision")
        rows.append({"critic": critic, "estimator": name} | _row(interval.value, interval.low, interval.high))
    return rows


def _row(value: float, low: float, high: float) -> Row:
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
            panels=[_difference_panel(figure, rows) for figure, rows in _grouped(differences, "figure").items()],
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
        Section(
            "Token advantages",
            "GAE, SAE and a group mean at the tokens where the policy really chose (p < .97), for several frozen critics.",
            panels=[_token_panel(critic, rows) for critic, rows in _grouped(tokens, "critic").items()],
            asks="Which estimator is right at the tokens?",
        ),
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
    """What was sampled."""
    first = f"{counts['completions']:,} completions of {counts['prompts']:,} prompts"
    if "rerolls" not in counts:  # tokens alone
        return f"{first}."
    return f"{first}; {counts['rerolls']:,} re-rolls of {counts['prefixes']:,} distinct prefixes."


def _headlines(figures: Rows, counts: Mapping[str, int | float]) -> list[Headline]:
    """Correlation of each baseline at the smallest group size, and what could be used; nothing for tokens alone."""
    if "share" not in counts:
        return []
    smallest = min((row["group_size"] for row in figures), default=None)
    nearest = [
        Headline(f"{row['baseline']}, G = {smallest}", row["value"], "correlation with Monte Carlo")
        for row in figures
        if (row["figure"], row["group_size"]) == ("correlation", smallest) and row["baseline"] != "none"
    ]
    return [*nearest, Headline("completions used", percent(counts["share"]), "with re-rolls to compare")]


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


def _grouped(rows: Rows, key: str) -> dict[str, list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(str(row[key]), []).append(row)
    return groups


def _difference_panel(figure: str, rows: Rows) -> Panel:
    title, axis = PANELS[figure]
    names, columns = [f"G = {row['group_size']}" for row in rows], {"G": "group_size", "difference": "value"}
    return _forest(f"{title}: {rows[0]['a']} - {rows[0]['b']}", rows, names, columns, x=f"difference in {axis}")


def _token_panel(critic: str, rows: Rows) -> Panel:
    names, columns = [row["estimator"] for row in rows], {"estimator": "estimator", "correlation": "value"}
    return _forest(critic, rows, names, columns, x="correlation with Monte Carlo")


def _forest(title: str, rows: Rows, names: Sequence[str], columns: Mapping[str, str], *, x: str) -> Panel:
    drawn: list[Row] = [{"name": name, "series": "", **_bounds(row)} for name, row in zip(names, rows, strict=True)]
    table = [{label: row[key] for label, key in {**columns, "from": "low", "to": "high"}.items()} for row in rows]
    return Panel(title, (forest(drawn, names=("",), x=x),), table)


def _bounds(row: Mapping[str, Any]) -> Row:
    return _row(row["value"], row["low"], row["high"])


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
