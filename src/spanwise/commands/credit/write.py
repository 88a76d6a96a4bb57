"""Write the files of `credit`: `credit.parquet`, `summary.json` and a page made of them; print a short table."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spanwise.commands.credit.apply import CreditResult
from spanwise.commands.shared.fitted import plain_table, say
from spanwise.commands.shared.folder import EXPORT, MOST, write_page
from spanwise.errors import DataError, check_known, lacking, refuse
from spanwise.rollouts import rollout_table, schema, write_rollouts
from spanwise.rollouts.folder import RunFolder
from spanwise.rollouts.read import rollout_files
from spanwise.rollouts.rows import credited_units, summarise_credit
from spanwise.rollouts.schema import credit_columns, score_columns, span_columns
from spanwise.rollouts.table import fitting_runs
from spanwise.rollouts.traces import write_branches
from spanwise.score import judge_of
from spanwise.types import Status

#: Tokens per row group of the file; smaller row groups make a larger file.
AT_A_TIME = 1_000_000
_CAPTION = (
    "Exactly 0: share of the completions with the block. No signal: completions without credit on any token. "
    "Dead strata: comparisons in which no completion gets credit. "
    "Stop: credit on the last token of completions without any block that a reward pays."
)


def write_result(folder: Path, result: CreditResult, options: Mapping[str, Any], console: Console) -> None:
    """Write the completions with their credit, the figures and, if its packages are installed, the page; print notes and table."""
    table, figures = result.table, summary(result, options)
    tables = figures_tables(figures["methods"], result.title)
    pieces = None if table.has_ids else table.vocabulary.pieces
    write_rollouts(folder / EXPORT, credited_parts(result), pieces=pieces, tokenizer=table.tokenizer)
    RunFolder(folder).write_summary(figures)
    say(console, *tables, *result.notes, keep=2)
    written = [str(folder / EXPORT)]
    try:
        from spanwise.commands.credit.page import credit_page
    except ModuleNotFoundError as error:
        say(console, f"No report: {lacking('it', error)}")
    else:
        written.append(str(write_page(folder, credit_page(folder))))
    say(console, f"Written: {', '.join(written)}")


def check_writable(result: CreditResult, method: str, folder: Path) -> None:
    """Refuse to write the credit of a method that was not applied, or into files that no trainer reads back."""
    table, names = result.table, [arm.name for arm in result.applied]
    check_known("method of --write", method, names)
    refuse(
        {
            f"--write writes traces of verifiers and prime-rl again, and '{table.path}' is a file of {table.source}. Leave it "
            f"out; the advantage of every token stands in {folder / EXPORT} then.": table.source != "verifiers",
            f"--write needs the token ids of '{table.path}'; give the folder of the policy's tokenizer with --tokenizer.": (
                not table.has_ids
            ),
            f"--write would overwrite '{table.path}' itself; give another --output.": any(
                (folder / file.name).resolve() == file.resolve() for file in rollout_files(table.path)
            ),
        },
        DataError,
    )


def write_traces_again(result: CreditResult, method: str, folder: Path, console: Console) -> None:
    """Write the traces of a file or folder again, under the same names, with the advantages of a method at their tokens."""
    table, arm = result.table, next(arm for arm in result.applied if arm.name == method)
    rows = (
        row.tolist()
        for first, last in fitting_runs(table.tokens.lengths, AT_A_TIME)
        for row in np.split(arm.advantages(table, first, last), np.cumsum(table.tokens.lengths[first : last - 1]))
    )
    scheme = result.arms.schemes.get(method)
    shared = "" if scheme is None else f" (per: {scheme.per}, so that a loss adds up tokens)"
    for file in rollout_files(table.path):
        write_branches(folder / file.name, file, rows)
        say(console, f"Written with the advantages of {method}{shared}: {folder / file.name}")


def credited_parts(result: CreditResult) -> Iterator[pa.Table]:
    """Yield the completions of a file for the writer, as many at a time as the memory holds."""
    table, marked = result.table, result.marked
    per_token = {schema.IDS: table.tokens.values, schema.TRAINABLE: table.trainable}
    per_token |= table.token_values
    for first, last in fitting_runs(table.tokens.lengths, AT_A_TIME):
        rows, edges = slice(first, last), table.tokens.offsets[first : last + 1]
        learned_n1 = torch.ones(last - first, 1).bool() if table.learned_n is None else table.learned_n[rows, None]
        left_out_v = np.repeat(~learned_n1[:, 0].numpy(), np.diff(edges))
        trained = [np.where(left_out_v, np.float32(np.nan), arm.advantages(table, first, last)) for arm in result.applied]
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
            schema.BLOCK: None if marked.pieces is None else marked.blocks(first, last),
        }
        for arm, advantages in zip(result.applied, trained, strict=True):
            present_nk = arm.marked.length_nk[rows] > 0
            columns |= credit_columns(arm.name, arm.marked.names, present_nk, arm.credit.take(rows), advantages)
        yield rollout_table(columns, edges - edges[0])


def summary(result: CreditResult, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of every method as plain data, with everything that the page needs."""
    table, scores, arms = result.table, result.scores, result.arms
    statuses = {
        name: {status.name.lower(): n for status in Status if (n := int((scores.status_nm[:, m] == int(status)).sum()))}
        for m, name in enumerate(scores.names)
    }
    kinds = {name: scheme.entry.kind for name, scheme in arms.schemes.items()}
    methods = {
        arm.name: {
            "blocks": {
                name: summarise_credit(credit_n)
                for name, credit_n in credited_units(arm.by_block, kinds.get(arm.name, "")).items()
            },
            "no_signal_share": float(arm.silent_n.double().mean()),
            "stop_mean_abs": float(arm.credit.stop_n.abs().mean()),
            "dead_strata": arm.dead,
        }
        for arm in result.applied
    }
    outcomes = (judge_of(o) or next(iter(o.outcomes), None) for o in arms.objectives)
    written = {
        "source": str(table.path),
        "format": table.source,
        "note": result.note,
        "completions": len(table),
        "groups": int(result.group_n.unique().numel()),
        "steps": int(table.step_n.unique().numel()),
        "tokens": int(table.trainable.sum()),
        "statuses": statuses,
        **({} if result.score is None else {"score": result.score}),
        "methods": methods,
        "options": {name: value for name, value in options.items() if value and (name, value) != ("rows", MOST)},
        "paid": {name: scheme.plain() for name, scheme in arms.schemes.items()},
        "own": arms.own,
        "outcome": outcome_of([o.name for o in arms.objectives], outcomes),
    }
    return json.loads(json.dumps(written, default=str))


def figures_tables(methods: Mapping[str, Mapping[str, Any]], title: Text) -> list[Table]:
    """Build the short tables of the terminal, a row per method and block; methods of the same blocks share a table."""
    blocks_of = {name: tuple(figures["blocks"]) for name, figures in methods.items()}
    tables = [
        _figures_table({name: methods[name] for name in methods if blocks_of[name] == blocks})
        for blocks in dict.fromkeys(blocks_of.values())
    ]
    tables[0].title, tables[0].title_justify = title, "left"
    tables[-1].caption, tables[-1].caption_justify = _CAPTION, "left"
    return tables


def _figures_table(methods: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = []
    for method, figures in methods.items():
        blocks = [
            (name, _cell(block["mean_abs"], ".4f"), _cell(block["zero_share"], ".1%"))
            for name, block in figures["blocks"].items()
        ]
        dead_texts = [f"{name} {share:.0%}" for name, share in figures["dead_strata"].items()]
        no_signal = _cell(figures["no_signal_share"], ".1%")
        for position, (row, strata) in enumerate(zip_longest(blocks, dead_texts)):
            rows.append(["" if position else method, *(row or ("", "", "")), "" if position else no_signal, strata or ""])
    return plain_table(
        "method", "block", "mean |credit|", "exactly 0", "no signal", "dead strata", rows=rows, right=(2, 3, 4)
    )


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def outcome_of(names: Collection[str], given: Iterable[str | None]) -> str | None:
    """Return the objective that tells right from wrong: one that others are given or judged by, else `correct`, else None."""
    return next((name for name in given if name in names), "correct" if "correct" in names else None)
