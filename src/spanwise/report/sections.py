"""Sections that more than one kind of report has: reliability, votes, attempts, credit by block, tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spanwise.explain.sections import SECTIONS
from spanwise.measure import Curve, curve_difference, reliability
from spanwise.report.charts import curves, histograms, reliability_diagram
from spanwise.report.page import Panel, Section
from spanwise.report.rows import Row, figure_name, grouped, is_share, merged, wide
from spanwise.report.tokens import TokenView, token_view
from spanwise.rollouts.schema import STOP

_BY_SAMPLES: Mapping[str, Any] = {"x": "samples n", "label": "n", "height": 280}
#: What a policy may say of its own answers: the column, what it is called, and what completions do with it.
_KINDS = (("confidence", "state a confidence"), ("score", "have a score"))
STOP_IS = (
    "Stop is not a block: it is what a completion's last token is credited with for leaving out every block that an objective "
    "pays; only completions that have such a credit are counted."
)
#: Said where votes are weighed by a self-rewarding score.
VOTES_BY_SCORE = "No confidence is stated: what weighs a vote is the score."
SCORE_IS = (
    "The score is what the model says of its own answer without words: how likely one reserved token (laser) is after its end, "
    "clipped to between 0 and 1; a completion that was cut off has none."
)


def section(title: str, words: Mapping[str, Any] | None = None, **parts: Any) -> Section:
    """A section of `explain.sections`, with `words` filled in."""
    asks, text = SECTIONS[title]
    return Section(title, text.format(**words or {}).strip(), asks=asks, **parts)


def calibration_section(samples: Mapping[str, Mapping[str, Tensor]], *, note: str = "") -> Section:
    """Reliability diagrams, one per arm; "" is the only one, and has the confidences of right and wrong answers beside it."""
    panels = []
    for name, columns in samples.items():
        for kind, have in _KINDS:
            if kind in columns:
                panels += _calibration(name, kind, have, columns, note)
    scored = any("score" in columns for columns in samples.values())
    kinds = "confidence or have the same score" if scored else "confidence"
    return section("Reliability", {"kinds": kinds, "score": f" {SCORE_IS}" if scored else ""}, panels=panels)


def _calibration(name: str, kind: str, have: str, columns: Mapping[str, Tensor], note: str) -> list[Panel]:
    """The diagram of one kind of confidence; of the only arm with its histograms."""
    rows = reliability(columns[kind], columns["correct"], prompts=columns.get("prompt"))
    if not rows:
        return []
    counted = f"{sum(row['count'] for row in rows):,} of {len(columns['correct']):,} completions {have} and could be judged."
    title = f"Accuracy by {kind}" if not name else f"{name}, by its score" if kind == "score" else name
    bins: list[Row] = [
        {
            kind: "1" if row["low"] == row["high"] else f"{row['low']:.2g} to {row['high']:.2g}",
            "completions": row["count"], f"mean {kind}": row["confidence"], "accuracy": row["accuracy"],
            "95 %": f"{row['accuracy_low']:.3f} to {row['accuracy_high']:.3f}",
        }
        for row in rows
    ]  # fmt: skip
    diagram = Panel(title, reliability_diagram(rows, by=kind), bins, f"{counted} {note}".strip())
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
    """Curves over `x` with the numbers under them; options as those of `charts.curves`. Nothing where there are no rows."""
    if not rows:
        return []
    chart = curves(rows, names=names, x=x, **options)
    return [Panel(title, (chart,), wide(rows, key="x", label=label), note, legend)]


def figure_panel(name: str, rows: list[Row], names: Sequence[str], **options: Any) -> list[Panel]:
    """Curves of one figure of evaluations."""
    title, share = figure_name(name), is_share(name)
    unit = "share of completions" if share else title
    return curve_panel(title[:1].upper() + title[1:], rows, names, y=unit, percent=share, **options)


def voting_section(
    votes: Mapping[str, Mapping[str, Curve]], samples: Mapping[str, Mapping[str, Tensor]], *, over: str = "prompts"
) -> Section:
    """Voting curves, one panel per arm ("" is the only one); `over` is what their intervals are over."""
    by_score = [name for name, one in samples.items() if "score" in one and bool(one["confidence"].isnan().all())]
    note = VOTES_BY_SCORE if by_score else ""
    if any(by_score):
        note = f"{', '.join(by_score)}: {note[0].lower()}{note[1:]}"
    rows = {name: voting_rows(curves_of, over=over) for name, curves_of in votes.items()}
    ways = list(dict.fromkeys(row["series"] for curve_rows in rows.values() for row in curve_rows))
    panels: list[Panel] = []
    for name, of_arm in rows.items():
        panels += curve_panel(name or "Accuracy by voting budget", of_arm, ways, y="accuracy", percent=True, **_BY_SAMPLES)
    return section("Voting", {"over": over, "note": note}, legend=ways, panels=panels)


def attempts_section(votes: Mapping[str, Mapping[str, Curve]]) -> Section:
    """What a later attempt is better by, if there is one: majority against majority, prompt by prompt."""
    first, *later = votes or ("",)
    differences = {
        f"{name} - {first}": curve_difference(votes[name]["majority"], votes[first]["majority"])
        for name in later
        if votes[name] and votes[name]["majority"].prompts == votes[first]["majority"].prompts
    }
    names, drawn = list(differences), {"y": "difference in accuracy", "y_zero": True, **_BY_SAMPLES}
    panels = curve_panel("Later attempt minus the first", voting_rows(differences), names, **drawn)
    return section("Attempts", legend=names, panels=panels)


def credit_section(methods: Sequence[str], credit: Mapping[str, Mapping[str, Tensor]], *, of: str) -> Section:
    """Histograms of the credit of each block under several methods; `of` says of which completions."""
    credit = {method: grouped(columns) for method, columns in credit.items()}
    blocks, panels = dict.fromkeys(block for method in methods for block in credit[method]), list[Panel]()
    for block in blocks:
        rows = histogram_rows({method: credit[method][block] for method in methods if block in credit[method]})
        bins = (row for row in rows if row["low"] < row["high"])
        table = merged(({"from": row["low"], "to": row["high"], row["series"]: row["share"]} for row in bins), key="from")
        panels += [Panel(block, (histograms(rows, names=methods, height=220),), table)] if rows else []
    words = {"of": of, "stop": f" {STOP_IS}" if STOP in blocks else ""}
    return section("Credit by block", words, legend=methods, panels=panels)


def tokens_section(view: TokenView | None, *, note: str = "") -> Section:
    """The token view, if there are completions to show; `note` says more about them."""
    body = token_view(view) if view is not None and view.completions else None
    return section("Tokens", {"note": note}, body=body)


def confidence_rows(confidence_n: Float[Tensor, " n"], correct_n: Float[Tensor, " n"]) -> list[Row]:
    """How often right and wrong answers have each confidence, in steps of 0.1."""
    # What rounding puts just below a border (.7 in float32) belongs above it.
    nudged_n, kinds = confidence_n.double() + 1e-7, {"right answers": 1.0, "wrong answers": 0.0}
    return _binned({series: nudged_n[correct_n == kind] for series, kind in kinds.items()}, [b / 10 for b in range(12)])


def _binned(values: Mapping[str, Tensor], edges: Sequence[float]) -> list[Row]:
    """The bins of each series that has a number, and an empty one behind the last."""
    rows: list[Row] = []
    for series, value_n in values.items():
        known = value_n[value_n.isfinite()].double().cpu()
        counts = [*np.histogram(known, edges)[0].tolist(), 0]
        for low, high, count in zip(edges, [*edges[1:], edges[-1]], counts, strict=True) if len(known) else ():
            rows.append({"series": series, "low": low, "high": high, "share": count / len(known), "count": count})
    return rows


def voting_rows(votes: Mapping[str, Curve], *, over: str = "prompts") -> list[Row]:
    """Accuracy by the number of samples, for each way of choosing; pass@1, flat by definition, is left out."""
    return [
        {"series": WAYS.get(name, name), "x": n, "value": i.value, "low": i.low, "high": i.high, over: i.count}
        for name, curve in votes.items()
        if name != "pass@1"
        for n, i in zip(curve.budgets, curve.intervals, strict=True)
        if i.value == i.value
    ]


WAYS = {
    "weighted": "confidence-weighted majority",
    "maxconf": "MaxConf",
    "laser_weighted": "majority weighted by its score",
    "laser_maxconf": "highest score",
}


def histogram_rows(values: Mapping[str, Float[Tensor, " n"]], *, bins: int = 41) -> list[Row]:
    """Histograms of several series over the same bins, symmetric about 0, with one bin around 0."""
    sizes_n = torch.cat([value_n[value_n.isfinite()].abs().double() for value_n in values.values()])
    widest = float(sizes_n.max()) if sizes_n.any() else 1.0
    return _binned(values, np.linspace(-widest, widest, bins + 1).tolist())
