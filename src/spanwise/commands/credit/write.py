"""What `spanwise credit` leaves behind: `credit.parquet`, and what its page needs beside it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from spanwise.commands.credit.apply import CreditResult
from spanwise.commands.credit.arms import Arm
from spanwise.commands.credit.score import AT_A_TIME
from spanwise.credit.methods._gae import SaeSegments
from spanwise.rollouts import rollout_table, schema, write_rollouts
from spanwise.rollouts.write import credit_columns, score_columns, span_columns
from spanwise.score import judge_of

#: The file of an export.
EXPORT = "credit.parquet"


def write_credit(file: Path, result: CreditResult) -> None:
    """Write the completions of a file with what every method credits them with, in the columns of `rollouts.schema`."""
    table = result.table
    pieces = None if table.has_ids else table.vocabulary.pieces
    write_rollouts(file, credited_parts(result), pieces=pieces, tokenizer=table.tokenizer)


def credited_parts(result: CreditResult) -> Iterator[pa.Table]:
    """The completions of a file as the writer takes them, as many at a time as fit."""
    table, marked = result.table, result.marked
    per_token = {schema.IDS: table.tokens.values, schema.TRAINABLE: table.trainable}
    per_token |= {schema.BLOCK: marked.block} if marked.interleaved else {}
    per_token |= table.token_values
    for first, last in table.tokens.chunks(AT_A_TIME):
        rows, edges = slice(first, last), table.tokens.offsets[first : last + 1]
        learned_n1 = torch.ones(last - first, 1).bool() if table.learned_n is None else table.learned_n[rows, None]
        columns: dict[str, Any] = {
            schema.STEP: table.step_n[rows],
            schema.GROUP: result.group_n[rows],
            schema.ROLLOUT: None if table.rollout_n is None else table.rollout_n[rows],
            schema.PROMPT: table.prompts[rows],
            schema.ANSWER: table.columns[schema.ANSWER][rows] if schema.ANSWER in table.columns else None,
            schema.FAULT: marked.fault_n[rows],
            **span_columns(marked.names, marked.start_nk[rows] * learned_n1, marked.end_nk[rows] * learned_n1),
            schema.SCORE: None if table.score_n is None else table.score_n[rows],
            **score_columns(result.scores.take(rows)),
            **{name: values[edges[0] : edges[-1]] for name, values in per_token.items()},
        }
        left_out = np.repeat(~learned_n1[:, 0].numpy(), np.diff(edges))
        for one in result.applied:
            advantages = np.where(left_out, np.float32(np.nan), one.advantages(table, first, last))
            present_nk = one.marked.length_nk[rows] > 0
            columns |= credit_columns(one.name, one.marked.names, present_nk, one.credit.take(rows), advantages)
        yield rollout_table(columns, edges - edges[0])


def remembered(arms: Sequence[Arm], options: Mapping[str, Any]) -> dict[str, Any]:
    """What the page of an export needs beside its figures, for its `summary.json`."""
    given = (judge_of(o) or next(iter(o.outcomes), None) for arm in arms for o in arm.scheme.objectives)
    cut = (SaeSegments.of(arm.scheme.method, arm.scheme.options) for arm in arms)
    segments = next((found for found in cut if found is not None), None)
    return {
        "options": json.loads(json.dumps({name: value for name, value in options.items() if value}, default=str)),
        "paid": {arm.name: _paying(arm) for arm in arms},
        "own": next((arm.name for arm in arms if arm.own), None),
        "outcome": outcome_of([o.name for arm in arms for o in arm.scheme.objectives], given),
        **({"segments": asdict(segments)} if segments is not None else {}),
    }


def _paying(arm: Arm) -> dict[str, Any]:
    """What `rule_of` reads of an arm."""
    listed = [
        {
            "name": o.name, "pays": list(o.pays), "weight": o.weight, "scale": o.scale or "none", "if_missing": o.if_missing,
            "baseline": o.baseline, "given": list(o.outcomes),
        }
        for o in arm.scheme.objectives
    ]  # fmt: skip
    return {"method": arm.scheme.method, "objectives": listed, **{mode.name: mode.plain() for mode in arm.scheme.modes}}


def outcome_of(names: Collection[str], given: Iterable[str | None]) -> str | None:
    """The objective that says what is right: the one that others are given or judged by, else `correct`, else none.

    Example:
        >>> outcome_of(["format", "right", "brier"], [None, None, "right"]), outcome_of(["format"], [None])
        ('right', None)
    """
    return next((name for name in given if name in names), "correct" if "correct" in names else None)
