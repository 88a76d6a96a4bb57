"""The page of a credit export, made of its files: `credit.parquet` and `summary.json`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.commands.shared.folder import EXPORT, MOST, again_command, read_fields
from spanwise.commands.shared.view import credited_view
from spanwise.report import credit_report
from spanwise.rollouts import schema
from spanwise.rollouts.rows import read_numbers, read_rows, recorded_credit
from spanwise.rollouts.schema import numbers


def credit_page(folder: Path) -> str:
    """The report of a credit export; tokens are ids where the tokenizer that its file names is not there any more."""
    file, summary = folder / EXPORT, read_fields(folder / "summary.json")
    table, options = read_numbers(file), summary.get("options") or {}
    credit = recorded_credit(table)
    group_n = numbers(table, schema.GROUP).long()
    chosen = choose_rows(group_n, options.get("rows", MOST))
    shown = read_rows(file, chosen)
    view = credited_view(
        table, shown, chosen, paying=summary.get("paid") or {}, outcome=summary.get("outcome"), own=summary.get("own"),
        tokenizer=schema.tokenizer_of(shown.schema),
    )  # fmt: skip
    left_out = (
        "" if len(chosen) == len(table) else f" {len(chosen)} of {len(table)} completions are shown, evenly from the file."
    )
    verdict = schema.column("reward", (summary.get("score") or {}).get("verdict") or "correct")
    samples = None
    if {schema.SCORE, verdict} <= set(table.column_names):
        right_n, score_n = numbers(table, verdict), numbers(table, schema.SCORE).clamp(0.0, 1.0)
        judged_n = right_n.masked_fill((right_n != 0) & (right_n != 1), torch.nan)
        samples = {"score": score_n, "correct": judged_n, "prompt": group_n}
    return credit_report(
        source=summary["source"],
        note=f"{summary.get('note', '')}{left_out}".strip(),
        methods=list(credit),
        credit=credit,
        rewards={n: numbers(table, schema.column("reward", n)) for n in schema.behind(table.column_names, "reward")},
        statuses=summary["statuses"],
        dead={method: summary["methods"][method]["dead_strata"] for method in credit},
        view=view,
        samples=samples,
        command=again_command("credit", summary["source"], folder=folder, options=options),
    )


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
    chosen: list[Tensor] = []
    for wanted in range(max(1, count * len(members) // len(group_n)), 0, -1):
        chosen = [members[int(place)] for place in np.linspace(0, len(members) - 1, wanted)]
        if sum(map(len, chosen)) <= count:
            break
    return sorted(torch.cat(chosen).tolist())[:count]
