"""The page of a credit export, made of its files: `credit.parquet` and `summary.json`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.commands.credit.write import EXPORT
from spanwise.commands.shared.again import MOST, credit_command
from spanwise.commands.shared.files import read_json
from spanwise.commands.shared.view import credited_view
from spanwise.credit.methods._gae import SaeSegments
from spanwise.report import credit_report
from spanwise.rollouts import schema
from spanwise.rollouts.recorded import numbers, read_numbers, read_rows, recorded_credit, recorded_rewards


def credit_page(folder: Path) -> str:
    """The report of a credit export; tokens are ids where the tokenizer that its file names is not there any more."""
    file, summary = folder / EXPORT, read_json(folder / "summary.json")
    table, options = read_numbers(file), summary.get("options") or {}
    credit = recorded_credit(table)
    chosen = choose_rows(numbers(table, schema.GROUP).long(), options.get("rows", MOST))
    shown = read_rows(file, chosen)
    view = credited_view(
        table, shown, chosen, paying=summary.get("paid") or {},
        segments=SaeSegments(**summary["segments"]) if summary.get("segments") else None,
        outcome=summary.get("outcome"), own=summary.get("own"), tokenizer=schema.tokenizer_of(shown.schema),
    )  # fmt: skip
    return credit_report(
        source=summary["source"],
        note=rows_note(summary.get("note", ""), len(chosen), len(table)),
        methods=list(credit),
        credit=credit,
        rewards=recorded_rewards(table),
        statuses=summary["statuses"],
        dead={method: summary["methods"][method]["dead_strata"] for method in credit},
        view=view,
        samples=scored_samples(table, (summary.get("score") or {}).get("verdict", "correct")),
        command=credit_command(folder, summary["source"], options),
    )


def scored_samples(table: pa.Table, verdict: str) -> dict[str, Tensor]:
    """What a reliability diagram of the scores takes; nothing where there are none, or nothing says what is right."""
    if schema.SCORE not in table.column_names or schema.column("reward", verdict) not in table.column_names:
        return {}
    right_n = numbers(table, schema.column("reward", verdict))
    return {
        "score": numbers(table, schema.SCORE).clamp(0.0, 1.0),
        "correct": right_n.masked_fill((right_n != 0) & (right_n != 1), torch.nan),
        "prompt": numbers(table, schema.GROUP).long(),
    }


def choose_rows(group_n: Int[Tensor, " n"], count: int) -> list[int]:
    """At most `count` rows, evenly from the file, whole groups.

    >>> choose_rows(torch.tensor([0, 0, 1, 1, 2, 2]), 4)
    [0, 1, 4, 5]
    """
    if len(group_n) <= count:
        return list(range(len(group_n)))
    order = torch.argsort(group_n, stable=True)
    members = torch.split(order, torch.unique_consecutive(group_n[order], return_counts=True)[1].tolist())
    members = sorted(members, key=lambda rows: int(rows[0]))
    wanted = max(1, int(count * len(members) / len(group_n)))
    while wanted >= 1:
        chosen = [members[int(place)] for place in np.linspace(0, len(members) - 1, wanted)]
        if sum(map(len, chosen)) <= count or wanted == 1:
            return sorted(int(row) for rows in chosen for row in rows)[:count]
        wanted -= 1
    return []


def rows_note(note: str, chosen: int, total: int) -> str:
    """The note of an export with what its token view leaves out.

    >>> rows_note("Rewards: correct from the file.", 2, 4)
    'Rewards: correct from the file. 2 of 4 completions are shown, evenly from the file.'
    """
    left_out = f" {chosen} of {total} completions are shown, evenly from the file." if chosen < total else ""
    return f"{note}{left_out}".strip()
