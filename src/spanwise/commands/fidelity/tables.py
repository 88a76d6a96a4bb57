"""The tables that `spanwise fidelity` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from spanwise.fidelity import FIGURES, Fidelity, SaeSegments, TokenFidelity
from spanwise.fidelity.page import difference_rows
from spanwise.fidelity.tokens import TOKEN_KINDS
from spanwise.measure import Interval

#: The setting of SAE that is held against the best GAE; not chosen on the samples it is judged by.
SAE = "SAE start 0.5, 0"
GROUP_MEAN = "GRPO c - group mean"


def fidelity_tables(fidelity: Fidelity) -> list[Table]:
    """A table per group size: rmse with its interval over prompts, by outcome and alone; then what does not depend on scale."""
    tables = []
    for size in fidelity.group_sizes:
        ceiling = fidelity.value(fidelity.baselines[0], size, "ceiling")
        title = f"G = {size}: advantages against Monte Carlo (the exact ones would correlate {ceiling:.3f})"
        table = _plain(title, "", "RMSE", "95 %", "wrong", "right", "alone", "corr", "scaled", "noise")
        for name in fidelity.baselines:
            low, high = fidelity.interval(name, size, "rmse")
            first, *rest = (_decimals(fidelity.value(name, size, figure)) for figure in FIGURES if figure != "ceiling")
            table.add_row(name, first, f"{_decimals(low)}-{_decimals(high)}", *rest)
        tables.append(table)
    return tables


def difference_table(fidelity: Fidelity, one: str = "blended", other: str = "outcome") -> Table:
    """One baseline's figures minus another's, with paired intervals over prompts."""
    rows = difference_rows(fidelity, one, other)
    figures = dict.fromkeys(row["figure"].replace("_", " ") for row in rows)
    table = _plain(f"{one} minus {other}, paired over prompts", "G", *figures)
    for size in fidelity.group_sizes:
        here = [row for row in rows if row["group_size"] == size]
        table.add_row(str(size), *(f"{row['value']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]" for row in here))
    return table


def fixed_point_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """The q* table of `fixed_point_rows`: what each baseline drives a confidence to."""
    p_b = list(dict.fromkeys(row["p"] for row in points))
    table = _plain("q*: the confidence a policy is driven to, by p", "", "G", *(f"{p:g}" for p in p_b))
    table.add_row("none, batch, group", "any", *map(_decimals, p_b))
    for name in dict.fromkeys(row["baseline"] for row in points):
        for size in dict.fromkeys(row["group_size"] for row in points):
            q_b = [row["q"] for row in points if (row["baseline"], row["group_size"]) == (name, size)]
            if name not in ("none", "batch", "group"):
                table.add_row(name, str(size), *map(_decimals, q_b))
    worst = max(row["error"] or 0.0 for row in points)
    table.caption = f"outcome: exact; blended: simulated, standard error at most {worst:.4f}"
    return table


def token_tables(fidelity: TokenFidelity) -> Iterator[Table]:
    """Correlations of all tokens and of decisions, then the leads over GAE and over GRPO."""
    yield from (_correlations(fidelity, kind) for kind in TOKEN_KINDS)
    yield from (_leads(fidelity, kind, other) for kind in TOKEN_KINDS for other in ("GAE", GROUP_MEAN))


def reference_words(segments: SaeSegments | None) -> str:
    """A sentence on what the advantages are held against."""
    if segments is None:
        return "The reference is the change of the Monte Carlo value over each token."
    return (
        f"The reference is the change over each segment ({segments.boundary}, p < {segments.threshold:g}), broadcast to its "
        "tokens; it favours the SAE of these segments."
    )


def _correlations(fidelity: TokenFidelity, kind: str) -> Table:
    """A row per estimator and a column per critic; first the error of the critic's own values."""
    ceiling = fidelity.interval(fidelity.critics[0], fidelity.estimators[0], "ceiling", kind=kind)
    title = f"{kind} tokens: correlation (of the exact advantage: {_decimals(ceiling.value)})"
    table = _plain(title, "", *fidelity.critics)
    own = (fidelity.critic_interval(critic, "rmse", kind=kind).value for critic in fidelity.critics)
    table.add_row("RMSE of the values", *map(_decimals, own), end_section=True)
    for name in fidelity.estimators:
        values = (fidelity.interval(critic, name, "correlation", kind=kind).value for critic in fidelity.critics)
        table.add_row(name, *map(_decimals, values))
    return table


def _leads(fidelity: TokenFidelity, kind: str, other: str) -> Table:
    """How far one SAE, and the best SAE, are ahead in correlation of the best of others, or of one other; paired over prompts."""
    single = other in fidelity.estimators
    title = f"{kind} tokens: lead over {'' if single else 'the best '}{other} in correlation (95 % over prompts)"
    table = _plain(title, "critic", *([] if single else [f"best {other}"]), _short(SAE, "SAE"), "best SAE", "its lead")
    for critic in fidelity.critics:
        best = [] if single else [_short(fidelity.best(critic, other, kind=kind), other)]
        one_lead, best_lead = (_signed(fidelity.lead(critic, name, other, kind=kind)) for name in (SAE, "SAE"))
        table.add_row(critic, *best, one_lead, _short(fidelity.best(critic, "SAE", kind=kind), "SAE"), best_lead)
    return table


def _plain(title: str, first: str, *columns: str) -> Table:
    """An empty table without borders; every column but the first is of numbers."""
    table = Table(first, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _decimals(number: float) -> str:
    return "-" if number != number else f"{number:.3f}"


def _short(name: str, family: str) -> str:
    """An estimator's name without its family and the zeros before its points."""
    return name.removeprefix(f"{family} ").replace("0.", ".")


def _signed(interval: Interval) -> str:
    """A difference with its interval, as in `+.046 (+.032,+.059)`."""
    value, low, high = (f"{number:+.3f}".replace("0.", ".") for number in (interval.value, interval.low, interval.high))
    return f"{value} ({low},{high})"
