"""The tables that `spanwise fidelity` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Column, Table

from spanwise.commands.shared.fitted import plain_table
from spanwise.fidelity import FIGURES, Fidelity, SaeSegments, TokenFidelity
from spanwise.fidelity.page import difference_rows
from spanwise.fidelity.tokens import TOKEN_KINDS
from spanwise.measure import Interval

#: The setting of SAE that is held against the best GAE; not chosen on the samples it is judged by.
SAE = "SAE start 0.5, 0"
GROUP_MEAN = "GRPO c - group mean"


def fidelity_tables(fidelity: Fidelity) -> Iterator[Table]:
    """A table per group size: rmse with its interval over prompts, by outcome and alone; then what does not depend on scale."""
    columns = ("", "RMSE", "95 %", "wrong", "right", "alone", "corr", "scaled", "noise")
    for size in fidelity.group_sizes:
        ceiling = fidelity.value(fidelity.baselines[0], size, "ceiling")
        rows = []
        for name in fidelity.baselines:
            bounds = "-".join(map(_decimals, fidelity.interval(name, size, "rmse")))
            first, *rest = (_decimals(fidelity.value(name, size, figure)) for figure in FIGURES if figure != "ceiling")
            rows.append([name, first, bounds, *rest])
        yield _table(
            f"G = {size}: advantages against Monte Carlo (the exact ones would correlate {ceiling:.3f})", columns, rows
        )


def difference_table(fidelity: Fidelity, one: str = "blended", other: str = "outcome") -> Table:
    """One baseline's figures minus another's, with paired intervals over prompts."""
    by_size: dict[int, list[str]] = {size: [] for size in fidelity.group_sizes}
    figures: dict[str, None] = {}
    for row in difference_rows(fidelity, one, other):
        figures[row["figure"].replace("_", " ")] = None
        by_size[row["group_size"]].append(f"{row['value']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]")
    rows = ([str(size), *cells] for size, cells in by_size.items())
    return _table(f"{one} minus {other}, paired over prompts", ("G", *figures), rows)


def fixed_point_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """The q* table of `fixed_point_rows`: what each baseline drives a confidence to."""
    rows = {("none, batch, group", "any"): {row["p"]: row["p"] for row in points}}
    for name in dict.fromkeys(row["baseline"] for row in points if row["baseline"] not in ("none", "batch", "group")):
        for row in (row for row in points if row["baseline"] == name):
            rows.setdefault((name, str(row["group_size"])), {})[row["p"]] = row["q"]
    p_b = list(rows["none, batch, group", "any"])
    cells = ([*names, *(_decimals(q_p[p]) for p in p_b)] for names, q_p in rows.items())
    table = _table("q*: the confidence a policy is driven to, by p", ("", "G", *(f"{p:g}" for p in p_b)), cells)
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
    own = [fidelity.critic_interval(critic, "rmse", kind=kind) for critic in fidelity.critics]
    rows = {"RMSE of the values": own} | {
        name: [fidelity.interval(critic, name, "correlation", kind=kind) for critic in fidelity.critics]
        for name in fidelity.estimators
    }
    cells = ([name, *(_decimals(interval.value) for interval in intervals)] for name, intervals in rows.items())
    title = f"{kind} tokens: correlation (of the exact advantage: {_decimals(ceiling.value)})"
    table = _table(title, ("", *fidelity.critics), cells)
    table.rows[0].end_section = True
    return table


def _leads(fidelity: TokenFidelity, kind: str, other: str) -> Table:
    """How far one SAE, and the best SAE, are ahead in correlation of the best of others, or of one other; paired over prompts."""
    single = other in fidelity.estimators
    title = f"{kind} tokens: lead over {'' if single else 'the best '}{other} in correlation (95 % over prompts)"
    rows = []
    for critic in fidelity.critics:
        best, best_sae = (_short(fidelity.best(critic, name, kind=kind), name) for name in (other, "SAE"))
        one_lead, best_lead = (_signed(fidelity.lead(critic, name, other, kind=kind)) for name in (SAE, "SAE"))
        rows.append([critic, *([] if single else [best]), one_lead, best_sae, best_lead])
    columns = ("critic", *([] if single else [f"best {other}"]), _short(SAE, "SAE"), "best SAE", "its lead")
    return _table(title, columns, rows)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table without borders; every column but the first is of numbers."""
    headings = [columns[0], *(Column(name, justify="right", no_wrap=True) for name in columns[1:])]
    return plain_table(*headings, rows=rows, title=title, padding=(0, 1, 0, 0))


def _decimals(number: float) -> str:
    return "-" if number != number else f"{number:.3f}"


def _short(name: str, family: str) -> str:
    """An estimator's name without its family and the zeros before its points."""
    return name.removeprefix(f"{family} ").replace("0.", ".")


def _signed(interval: Interval) -> str:
    """A difference with its interval, as in `+.046 (+.032,+.059)`."""
    value, low, high = (f"{number:+.3f}".replace("0.", ".") for number in (interval.value, interval.low, interval.high))
    return f"{value} ({low},{high})"
