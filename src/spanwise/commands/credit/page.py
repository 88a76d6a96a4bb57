"""Build the page of a credit export from its files, and the token view that pages of runs also show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.commands.credit.apply import steps
from spanwise.commands.shared.folder import EXPORT, MOST, again_command, read_fields
from spanwise.credit import METHODS
from spanwise.credit.methods._gae import SaeSegments
from spanwise.modes import Mode, scoring_mode
from spanwise.report import Rule, TokenView, credit_report
from spanwise.rollouts import schema
from spanwise.rollouts.rows import credited_units, read_credit, read_numbers, read_rows, read_vocabulary, token_rows
from spanwise.rollouts.schema import float_column


def credit_page(folder: Path) -> str:
    """Build the report of a credit export; tokens are ids if the tokenizer that the file names no longer exists."""
    file, summary = folder / EXPORT, read_fields(folder / "summary.json")
    table, options = read_numbers(file), summary.get("options") or {}
    paying = summary.get("paid") or {}
    credit = shown_credit(table, paying)
    group_n = float_column(table, schema.GROUP).long()
    chosen = choose_rows(group_n, options.get("rows", MOST))
    chosen_rows = read_rows(file, chosen)
    view = credited_view(
        table, chosen_rows, chosen, paying=paying, outcome=summary.get("outcome"), own=summary.get("own"),
        tokenizer=schema.tokenizer_of(chosen_rows.schema),
    )  # fmt: skip
    left_out = (
        "" if len(chosen) == len(table) else f" {len(chosen)} of {len(table)} completions are shown, evenly from the file."
    )
    verdict = schema.column("reward", (summary.get("score") or {}).get("verdict") or "correct")
    samples = None
    if {schema.SCORE, verdict} <= set(table.column_names):
        right_n, score_n = float_column(table, verdict), float_column(table, schema.SCORE).clamp(0.0, 1.0)
        judged_n = right_n.masked_fill((right_n != 0) & (right_n != 1), torch.nan)
        samples = {"score": score_n, "correct": judged_n, "prompt": group_n}
    return credit_report(
        source=summary["source"],
        note=f"{summary.get('note', '')}{left_out}".strip(),
        methods=list(credit),
        credit=credit,
        rewards={
            n: float_column(table, schema.column("reward", n)) for n in schema.family_names(table.column_names, "reward")
        },
        statuses=summary["statuses"],
        dead={method: summary["methods"][method]["dead_strata"] for method in credit},
        view=view,
        samples=samples,
        command=again_command("credit", summary["source"], folder=folder, options=options),
    )


def shown_credit(table: pa.Table, paying: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """Return the recorded credit by method, each with the blocks that it tells apart; `paying` as in `credited_view`."""
    kinds = {name: METHODS[rule["method"]].kind for name, rule in paying.items() if rule["method"] in METHODS}
    return {name: credited_units(columns, kinds.get(name, "")) for name, columns in read_credit(table).items()}


def choose_rows(group_n: Int[Tensor, " n"], count: int) -> list[int]:
    """Choose at most `count` rows, evenly from the file, in whole groups."""
    if len(group_n) <= count:
        return list(range(len(group_n)))
    members = sorted(steps(group_n), key=lambda rows: int(rows[0]))
    chosen: list[Tensor] = []
    for group_count in range(max(1, count * len(members) // len(group_n)), 0, -1):
        chosen = [members[int(position)] for position in np.linspace(0, len(members) - 1, group_count)]
        if sum(map(len, chosen)) <= count:
            break
    return sorted(torch.cat(chosen).tolist())[:count]


def credited_view(
    table: pa.Table,
    shown: pa.Table,
    rows: Sequence[int],
    *,
    paying: Mapping[str, Mapping[str, Any]],
    outcome: str | None,
    own: str | None,
    tokenizer: Path | None,
) -> TokenView:
    """Build the token view of `shown`, the `rows` of a table of whole groups; `paying`: method -> its rule (`Scheme.plain`)."""
    cuts = (SaeSegments.of(rule["method"], rule.get("options")) for rule in paying.values())
    segments = next((cut for cut in cuts if cut is not None), None)
    scoring = {name: scoring_mode(rule) for name, rule in paying.items()}
    shares = {name: own_shares(table, mode) for name, mode in scoring.items() if mode is not None}
    return TokenView(
        tuple(schema.methods_in(shown.column_names)),
        token_rows(
            shown,
            read_vocabulary(tokenizer),
            None if segments is None else partial(opening_tokens, segments),
            {name: [by_row[n] for n in rows] for name, by_row in shares.items()},
        ),
        outcome,
        "" if segments is None else segment_words(segments),
        rules={name: rule_of(rule["method"], rule["objectives"], scoring[name]) for name, rule in paying.items()},
        own=own,
        total=len(table),
    )


def segment_words(segments: SaeSegments) -> str:
    """Explain in a sentence which tokens are segment boundaries."""
    verb = "opens a segment" if segments.boundary == "start" else "has closed a segment"
    return f"A tick marks each place where a token with a probability below {segments.threshold:g} {verb}."


def opening_tokens(segments: SaeSegments, logp: np.ndarray, trained: np.ndarray) -> list[int]:
    """Return the tokens of a completion that open a segment, except the first trained one, which has none before it."""
    known_1t = torch.from_numpy(logp).float().nan_to_num(nan=0.0)[None]  # a token of unknown probability opens no segment
    return segments.opens(known_1t, torch.from_numpy(trained)[None])[0].nonzero().flatten()[1:].tolist()


def rule_of(method: str, objectives: Sequence[Mapping[str, Any]], mode: Mode | None = None) -> Rule:
    """Build the rule by which a page explains a method; objectives are written as `Scheme.plain` writes them."""
    if method == schema.RECORDED or method not in METHODS:
        return Rule()
    entry = METHODS[method]
    rules = {}
    for objective in objectives:
        baseline = objective.get("baseline") if entry.kind == "block" else None
        pays, given = several(objective.get("pays")), several(objective.get("given"))
        name = str(objective.get("name") or objective.get("reward"))
        rules[name] = {**objective, "pays": pays, "baseline": baseline, "given": given}
    return Rule(entry.kind, f"{method}: {entry.summary}", rules, (mode and mode.judge) or "")


def several(names: str | Sequence[Any] | None) -> list[str]:
    """Return the names in a field that holds a list or one name."""
    return [names] if isinstance(names, str) else [str(name) for name in names or ()]


def own_shares(table: pa.Table, mode: Mode) -> list[tuple[float, float]]:
    """Return (tau, z) of each completion: the share of the score in the credit, and the score compared within its group."""
    if not {schema.SCORE, schema.GROUP} <= set(table.column_names):
        return [(0.0, 0.0)] * len(table)  # without mixing, the score has no share
    has_steps = schema.STEP in table.column_names
    step_n = float_column(table, schema.STEP).nan_to_num().long() if has_steps else torch.zeros(len(table)).long()
    group_n = torch.unique(torch.stack([step_n, float_column(table, schema.GROUP).long()]), dim=1, return_inverse=True)[1]
    share_n, compared_n = mode.opinion(float_column(table, schema.SCORE), group_n, step_n)
    return list(zip(share_n.tolist(), compared_n.where(share_n > 0, 0.0).tolist(), strict=True))
