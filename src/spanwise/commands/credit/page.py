"""Build the report of `spanwise credit`, and the view of credited tokens."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.commands.credit.apply import opening_tokens, rows_by_number
from spanwise.commands.shared.folder import EXPORT, MOST, again_command, read_fields
from spanwise.credit import METHODS
from spanwise.credit.methods._gae import SaeSegments
from spanwise.modes import Mode, scoring_mode
from spanwise.report import TokenView, credit_report
from spanwise.report.why import Rule
from spanwise.rollouts import schema
from spanwise.rollouts.rows import credited_units, read_credit, read_numbers, read_rows, read_vocabulary, token_rows
from spanwise.rollouts.schema import float_column


def credit_page(folder: Path) -> str:
    """Build the report for a folder that `spanwise credit` wrote. It shows token ids if the tokenizer no longer exists."""
    export_file = folder / EXPORT
    summary = read_fields(folder / "summary.json")
    table = read_numbers(export_file)
    command_options = summary.get("options") or {}
    rule_by_method = summary.get("paid") or {}
    group_n = float_column(table, schema.GROUP).long()
    row_indices = choose_rows(group_n, command_options.get("rows", MOST))
    shown_table = read_rows(export_file, row_indices)
    token_view, credit_by_method = credited_view(
        table, shown_table, row_indices, rules=rule_by_method, outcome=summary.get("outcome"), own=summary.get("own"),
        tokenizer=schema.tokenizer_of(shown_table.schema),
    )  # fmt: skip
    shown_rows_note = ""
    if len(row_indices) < len(table):
        shown_rows_note = (
            f" The page shows {len(row_indices)} of {len(table)} completions, drawn evenly over the file. The option --rows "
            "sets how many are shown."
        )
    verdict_name = (summary.get("score") or {}).get("verdict") or "correct"
    verdict_column = schema.column("reward", verdict_name)
    reward_names = schema.family_names(table.column_names, "reward")
    score_samples = None
    if {schema.SCORE, verdict_column} <= set(table.column_names):
        verdict_n = float_column(table, verdict_column)
        score_n = float_column(table, schema.SCORE).clamp(0.0, 1.0)
        judged_verdict_n = verdict_n.masked_fill((verdict_n != 0) & (verdict_n != 1), torch.nan)
        score_samples = {"score": score_n, "correct": judged_verdict_n, "prompt": group_n}
    return credit_report(
        source=summary["source"],
        note=f"{summary.get('note', '')}{shown_rows_note}".strip(),
        methods=list(credit_by_method),
        credit=credit_by_method,
        rewards={name: float_column(table, schema.column("reward", name)) for name in reward_names},
        statuses=summary["statuses"],
        dead={method: summary["methods"][method]["dead_strata"] for method in credit_by_method},
        view=token_view,
        samples=score_samples,
        command=again_command("credit", summary["source"], folder=folder, options=command_options),
    )


def choose_rows(group_n: Int[Tensor, " n"], count: int) -> list[int]:
    """Choose at most `count` completions, spread evenly over the file. Choose whole groups if each has at most `count`."""
    if len(group_n) <= count:
        return list(range(len(group_n)))
    rows_of_groups = sorted(rows_by_number(group_n), key=lambda rows: int(rows[0]))
    if max(map(len, rows_of_groups)) > count:
        return np.linspace(0, len(group_n) - 1, count).astype(int).tolist()
    chosen_groups: list[Tensor] = []
    for group_count in range(max(1, count * len(rows_of_groups) // len(group_n)), 0, -1):
        group_positions = np.linspace(0, len(rows_of_groups) - 1, group_count)
        chosen_groups = [rows_of_groups[int(position)] for position in group_positions]
        if sum(map(len, chosen_groups)) <= count:
            break
    return sorted(torch.cat(chosen_groups).tolist())[:count]


def groups_of_steps(table: pa.Table) -> Int[Tensor, " n"]:
    """Number the groups of a table of rollouts. Groups of different steps get different numbers."""
    id_names = [name for name in (schema.STEP, schema.GROUP) if name in table.column_names]
    ids_2n = torch.stack([float_column(table, name).nan_to_num().long() for name in id_names])
    return torch.unique(ids_2n, dim=1, return_inverse=True)[1]


def credited_view(
    table: pa.Table,
    shown_table: pa.Table,
    rows: Sequence[int],
    *,
    rules: Mapping[str, Mapping[str, Any]],
    outcome: str | None,
    own: str | None,
    tokenizer: Path | None,
) -> tuple[TokenView, dict[str, dict[str, Tensor]]]:
    """Return the page's token view of some completions, and each method's credit for all completions."""
    kind_by_method = {name: METHODS[rule["method"]].kind for name, rule in rules.items() if rule["method"] in METHODS}
    credit_by_method = {}
    for name, credit_columns in read_credit(table).items():
        credit_by_method[name] = credited_units(credit_columns, kind_by_method.get(name, ""))
    segments_of_methods = (SaeSegments.of(rule["method"], rule.get("options")) for rule in rules.values())
    sae_segments = next((segments for segments in segments_of_methods if segments is not None), None)
    segments_sentence = ""
    if sae_segments is not None:
        segment_verb = "opens" if sae_segments.boundary == "start" else "closes"
        segments_sentence = (
            "A tick marks the start of a segment. "
            f"A token with a probability below {sae_segments.threshold:g} {segment_verb} a segment."
        )
    mode_by_method = {name: scoring_mode(rule) for name, rule in rules.items()}
    score_shares_by_method = {name: score_shares(table, mode) for name, mode in mode_by_method.items() if mode is not None}
    find_segments = None if sae_segments is None else partial(opening_tokens, sae_segments)
    shown_shares = {name: [share_n[n] for n in rows] for name, share_n in score_shares_by_method.items()}
    token_view = TokenView(
        tuple(schema.methods_in(shown_table.column_names)),
        token_rows(shown_table, read_vocabulary(tokenizer), find_segments, shown_shares),
        outcome,
        segments_sentence,
        rules={name: rule_of(rule["method"], rule["objectives"], mode_by_method[name]) for name, rule in rules.items()},
        own=own,
        total=len(table),
    )
    return token_view, credit_by_method


def rule_of(method: str, objectives: Sequence[Mapping[str, Any]], mode: Mode | None = None) -> Rule:
    """Build the `Rule` by which a report explains a method's credit."""
    if method not in METHODS:
        return Rule()
    method_entry = METHODS[method]
    objective_by_name = {}
    for objective in objectives:
        baseline = objective.get("baseline") if method_entry.kind == "block" else None
        paid_blocks = as_names(objective.get("pays"))
        given_outcomes = as_names(objective.get("given"))
        objective_name = str(objective.get("name") or objective.get("reward"))
        objective_by_name[objective_name] = {**objective, "pays": paid_blocks, "baseline": baseline, "given": given_outcomes}
    return Rule(method_entry.kind, f"{method}: {method_entry.summary}", objective_by_name, (mode and mode.judge) or "")


def as_names(names: str | Sequence[Any] | None) -> list[str]:
    """Return a recipe field as a list of names. The field may hold a list, one name or nothing."""
    return [names] if isinstance(names, str) else [str(name) for name in names or ()]


def score_shares(table: pa.Table, mode: Mode) -> list[tuple[float, float]]:
    """Return the weight of each self-rewarding score in the credit, and its z-score within the group."""
    if not {schema.SCORE, schema.GROUP} <= set(table.column_names):
        return [(0.0, 0.0)] * len(table)
    step_n = float_column(table, schema.STEP).nan_to_num().long()
    score_share_n, score_in_group_n = mode.opinion(float_column(table, schema.SCORE), groups_of_steps(table), step_n)
    return list(zip(score_share_n.tolist(), score_in_group_n.where(score_share_n > 0, 0.0).tolist(), strict=True))
