"""What `spanwise credit` leaves behind: `credit.parquet`, and what its page needs beside it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.commands.credit.apply import Applied
from spanwise.commands.credit.arms import Arm
from spanwise.commands.credit.score import AT_A_TIME, Marked
from spanwise.commands.shared.segments import Segments
from spanwise.rollouts import RolloutTable, rollout_table, schema, write_rollouts
from spanwise.rollouts.write import credit_columns, score_columns, span_columns
from spanwise.score import judge_of
from spanwise.types import Scores

#: The file of an export.
EXPORT = "credit.parquet"


def write_credit(
    file: Path, table: RolloutTable, applied: Sequence[Applied], scores: Scores, marked: Marked, group_n: Int[Tensor, " n"]
) -> None:
    """Write the completions of a table with what every method credits them with, in the columns of `rollouts.schema`.

    Args:
        file: written anew.
        table, applied, scores, marked, group_n: see `credited_parts`.

    Raises:
        DataError: the file cannot be written.
    """
    pieces = None if table.has_ids else table.vocabulary.pieces
    parts = credited_parts(table, applied, scores, marked, group_n)
    write_rollouts(file, parts, pieces=pieces, tokenizer=table.tokenizer)


def credited_parts(
    table: RolloutTable, applied: Sequence[Applied], scores: Scores, marked: Marked, group_n: Int[Tensor, " n"]
) -> Iterator[pa.Table]:
    """The completions of a table as the writer takes them, as many at a time as fit.

    Args:
        table: N completions.
        applied: the methods, in order.
        scores, marked: rewards, and the spans that are shown.
        group_n: the groups as they were compared.
    """
    for first, last in table.tokens.chunks(AT_A_TIME):
        rows = slice(first, last)
        tokens = table.tokens.rows(first, last)
        learned_n = torch.ones(last - first).bool() if table.learned_n is None else table.learned_n[rows]
        columns: dict[str, Any] = {
            schema.STEP: table.step_n[rows],
            schema.GROUP: group_n[rows],
            schema.ROLLOUT: None if table.rollout_n is None else table.rollout_n[rows],
            schema.PROMPT: table.prompts[rows],
            schema.ANSWER: None if (answers := table.columns.get(schema.ANSWER)) is None else answers[rows],
            schema.FAULT: marked.fault_n[rows],
            **span_columns(
                marked.names, marked.start_nk[rows] * learned_n[:, None], marked.end_nk[rows] * learned_n[:, None]
            ),
            schema.SELF_REWARD: None if table.self_reward_n is None else table.self_reward_n[rows],
            **score_columns(scores.take(rows)),
            schema.IDS: tokens.values,
            schema.TRAINABLE: table.tokens.with_values(table.trainable).slice(first, last),
            schema.BLOCK: table.tokens.with_values(marked.block).slice(first, last) if marked.interleaved else None,
            **{
                schema.token_column(name): table.tokens.with_values(values).slice(first, last)
                for name, values in table.token_values.items()
            },
        }
        for one in applied:
            advantages = one.advantages(table, first, last)
            if not bool(learned_n.all()):
                advantages = np.where(np.repeat(learned_n.numpy(), tokens.lengths), advantages, np.float32(np.nan))
            by_block = {name: credit_n[rows] for name, credit_n in one.by_block.items()}
            apart = None if one.parts is None else one.parts.take(rows)
            columns |= credit_columns(one.name, by_block, one.credit.stop_n[rows], advantages, apart)
        yield rollout_table(columns, tokens.offsets)


def remembered(arms: Sequence[Arm], options: Mapping[str, Any]) -> dict[str, Any]:
    """What the page of an export needs beside its figures, for its `summary.json`.

    Args:
        arms: the methods.
        options: of `credit_rollouts`, and `rows`.

    Returns:
        `options` as plain data; `paid`, the objectives of each arm; `own`, the arm that the recipe is; `outcome`, the objective
        that says what is right, if there is one; `segments`, where a method cuts completions into some.
    """
    given = (judge_of(o) or next(iter(o.outcomes), None) for arm in arms for o in arm.scheme.objectives)
    cut = (Segments.of(arm.scheme.method, arm.scheme.options) for arm in arms)
    segments = next((found for found in cut if found is not None), None)
    return {
        "options": json.loads(json.dumps({name: value for name, value in options.items() if value}, default=str)),
        "paid": {arm.name: _paying(arm) for arm in arms},
        "own": next((arm.name for arm in arms if arm.own), None),
        "outcome": outcome_of([o.name for arm in arms for o in arm.scheme.objectives], given),
        **({"segments": segments.plain} if segments is not None else {}),
    }


def _paying(arm: Arm) -> dict[str, Any]:
    """What `paid_of` reads of an arm."""
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

    Args:
        names: of all objectives.
        given: what each is given or judged by.

    Example:
        >>> outcome_of(["format", "right", "brier"], [None, None, "right"]), outcome_of(["format"], [None])
        ('right', None)
    """
    return next((name for name in given if name in names), "correct" if "correct" in names else None)
