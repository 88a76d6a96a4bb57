"""Write `credit.parquet`, `summary.json` and `report.html`, and print a table of credit."""

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
from spanwise.commands.shared.folder import EXPORT, MOST, without_nan, write_page
from spanwise.errors import DataError, check_known, lacking, refuse
from spanwise.rollouts import rollout_table, schema, write_rollouts
from spanwise.rollouts.folder import RunFolder
from spanwise.rollouts.read import rollout_files
from spanwise.rollouts.readers.slime import write_samples
from spanwise.rollouts.rows import credited_units, summarise_credit
from spanwise.rollouts.schema import credit_columns, score_columns, span_columns
from spanwise.rollouts.table import fitting_runs
from spanwise.rollouts.traces import write_branches
from spanwise.score.outcomes import judge_of
from spanwise.types import Status

#: Tokens per row group of `credit.parquet`; smaller row groups make a larger file.
AT_A_TIME = 1_000_000
#: Maps file formats to functions that copy a file with advantages.
_WRITERS = {"verifiers": write_branches, "slime": write_samples}
_CAPTION = (
    "'Exactly 0' is the share of completions whose block gets no credit, among completions that have the block.\n"
    "'No signal' is the share of completions in which no token gets credit.\n"
    "'Dead strata' is the share of strata (sets of compared completions) in which no completion gets credit.\n"
    "'Stop' is the credit of the last token in completions without any rewarded block."
)


def write_result(folder: Path, result: CreditResult, options: Mapping[str, Any], console: Console) -> None:
    """Write `credit.parquet`, `summary.json` and, if possible, the report. Print a table and the notes."""
    file_table = result.table
    summary_fields = summary(result, options)
    token_pieces = None if file_table.has_ids else file_table.vocabulary.pieces
    write_rollouts(folder / EXPORT, credited_parts(result), pieces=token_pieces, tokenizer=file_table.tokenizer)
    RunFolder(folder).write_summary(summary_fields)
    say(console, *figures_tables(summary_fields["methods"], result.title), *result.notes, keep=2)
    written_files = [str(folder / EXPORT)]
    try:
        from spanwise.commands.credit.page import credit_page
    except ModuleNotFoundError as error:
        say(console, f"No report: {lacking('it', error)}")
    else:
        written_files.append(str(write_page(folder, credit_page(folder))))
    say(console, f"Written: {', '.join(written_files)}")


def check_writable(result: CreditResult, method: str, folder: Path) -> None:
    """Refuse the option `--write` if it cannot work with the files or the method."""
    table = result.table
    check_known("method of --write", method, [method_result.name for method_result in result.applied])
    method_credit = next(credit for credit in result.applied if credit.name == method)
    unknown_credit_count = int(method_credit.credit.block_nk.isnan().any(dim=1).sum())
    refuse(
        {
            f"--write only works for traces of verifiers and prime-rl and dumps of slime, but '{table.path}' is a file of "
            f"{table.source}. Leave --write out; the advantage of every token is in {folder / EXPORT}.": table.source
            not in _WRITERS,
            f"--write needs the token ids of every completion in '{table.path}', and the policy's tokenizer. Give the "
            "tokenizer's folder with --tokenizer.": not table.has_ids,
            f"In '{table.path}', the trainer recorded no advantage or reward for {unknown_credit_count} of {len(table)} "
            f"completions. So --write cannot write '{method}'. Give another method with --write.": unknown_credit_count > 0,
            f"--write would overwrite '{table.path}' itself; give another --output.": any(
                (folder / file.name).resolve() == file.resolve() for file in rollout_files(table.path)
            ),
        },
        DataError,
    )


def write_again(result: CreditResult, method: str, folder: Path, console: Console) -> None:
    """Write copies of the rollout files into a folder, with a method's advantage beside each token."""
    table = result.table
    method_credit = next(credit for credit in result.applied if credit.name == method)
    row_advantages = (
        adv_t.tolist()
        for start, end in fitting_runs(table.tokens.lengths, AT_A_TIME)
        for adv_t in np.split(method_credit.advantages(table, start, end), np.cumsum(table.tokens.lengths[start : end - 1]))
    )
    for file in rollout_files(table.path):
        _WRITERS[table.source](folder / file.name, file, row_advantages)
        say(console, f"Written with the advantages of {method}: {folder / file.name}")
    if (scheme := result.arms.schemes.get(method)) is not None:
        say(
            console,
            f"In these advantages, each credit is already divided among its tokens (option per: {scheme.per}). So train "
            "with a loss that sums over tokens. A mean over tokens would divide the credit again.",
        )


def credited_parts(result: CreditResult) -> Iterator[pa.Table]:
    """Yield the rows of `credit.parquet` as tables that are small enough for memory."""
    file_table, file_spans = result.table, result.file_spans
    token_columns = {schema.IDS: file_table.tokens.values, schema.TRAINABLE: file_table.trainable, **file_table.token_values}
    for start_row, end_row in fitting_runs(file_table.tokens.lengths, AT_A_TIME):
        rows = slice(start_row, end_row)
        token_offsets = file_table.tokens.offsets[start_row : end_row + 1]
        is_learned_n = torch.ones(end_row - start_row).bool() if file_table.learned_n is None else file_table.learned_n[rows]
        mask_n1 = is_learned_n[:, None]
        is_not_learned_v = np.repeat(~is_learned_n.numpy(), np.diff(token_offsets))
        file_columns: dict[str, Any] = {
            schema.STEP: file_table.step_n[rows],
            schema.GROUP: result.group_n[rows],
            schema.ROLLOUT: None if file_table.rollout_n is None else file_table.rollout_n[rows],
            schema.PROMPT: file_table.prompts[rows],
            schema.ANSWER: file_table.columns[schema.ANSWER][rows] if schema.ANSWER in file_table.columns else None,
            schema.FAULT: file_spans.fault_n[rows],
            **span_columns(file_spans.names, file_spans.start_nk[rows] * mask_n1, file_spans.end_nk[rows] * mask_n1),
            schema.SCORE: None if file_table.score_n is None else file_table.score_n[rows],
            **{name: value_n[rows] for name, value_n in file_table.after_values.items()},
            **score_columns(result.scores.take(rows)),
            **{name: values[token_offsets[0] : token_offsets[-1]] for name, values in token_columns.items()},
            schema.BLOCK: file_spans.block_v[token_offsets[0] : token_offsets[-1]] if file_spans.interleaved else None,
        }
        for arm in result.applied:
            learned_adv_v = np.where(is_not_learned_v, np.float32(np.nan), arm.advantages(file_table, start_row, end_row))
            present_nk = arm.file_spans.length_nk[rows] > 0
            file_columns |= credit_columns(arm.name, arm.file_spans.names, present_nk, arm.credit.take(rows), learned_adv_v)
        yield rollout_table(file_columns, token_offsets - token_offsets[0])


def summary(result: CreditResult, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `summary.json`."""
    file_table, scores, arms = result.table, result.scores, result.arms
    status_counts = {
        name: {status.name.lower(): n for status in Status if (n := int((scores.status_nm[:, m] == int(status)).sum()))}
        for m, name in enumerate(scores.names)
    }
    kind_by_method = {name: scheme.entry.kind for name, scheme in arms.schemes.items()}
    figures_by_method = {
        arm.name: {
            "blocks": {
                name: summarise_credit(credit_n)
                for name, credit_n in credited_units(arm.by_block, kind_by_method.get(arm.name, "")).items()
            },
            "no_signal_share": float(arm.silent_n.double().mean()),
            "stop_mean_abs": float(arm.credit.stop_n.abs().mean()),
            "dead_strata": arm.dead,
        }
        for arm in result.applied
    }
    outcome_names = (judge_of(objective) or next(iter(objective.outcomes), None) for objective in arms.objectives)
    summary_fields = {
        "source": str(file_table.path),
        "format": file_table.source,
        "note": result.note,
        "completions": len(file_table),
        "groups": len(result.group_n.unique()),
        "steps": len(file_table.step_n.unique()),
        "tokens": int(file_table.trainable.sum()),
        "statuses": status_counts,
        **({} if result.score is None else {"score": result.score}),
        "methods": figures_by_method,
        "options": {name: value for name, value in options.items() if value and (name, value) != ("rows", MOST)},
        "paid": {name: scheme.plain() for name, scheme in arms.schemes.items()},
        "own": arms.own,
        "outcome": outcome_of(scores.names, outcome_names),
    }
    return without_nan(summary_fields)


def figures_tables(methods: Mapping[str, Mapping[str, Any]], title: Text) -> list[Table]:
    """Build tables of credit figures to print, with a row per method and block. Methods with equal blocks share one."""
    blocks_by_method = {name: tuple(figures["blocks"]) for name, figures in methods.items()}
    method_tables = [
        _figures_table({name: methods[name] for name in methods if blocks_by_method[name] == blocks})
        for blocks in dict.fromkeys(blocks_by_method.values())
    ]
    method_tables[0].title, method_tables[0].title_justify = title, "left"
    method_tables[-1].caption, method_tables[-1].caption_justify = _CAPTION, "left"
    return method_tables


def _figures_table(methods: Mapping[str, Mapping[str, Any]]) -> Table:
    table_rows = []
    for method, method_figures in methods.items():
        block_cells = [
            (name, _cell(block["mean_abs"], ".4f"), _cell(block["zero_share"], ".1%"))
            for name, block in method_figures["blocks"].items()
        ]
        dead_strata_cells = [f"{name} {share:.0%}" for name, share in method_figures["dead_strata"].items()]
        for row_index, (block_cell_texts, dead_strata_cell) in enumerate(zip_longest(block_cells, dead_strata_cells)):
            method_cell = "" if row_index else method
            no_signal_cell = "" if row_index else _cell(method_figures["no_signal_share"], ".1%")
            table_rows.append([method_cell, *(block_cell_texts or ("", "", "")), no_signal_cell, dead_strata_cell or ""])
    return plain_table(
        "method", "block", "mean |credit|", "exactly 0", "no signal", "dead strata", rows=table_rows, right=(2, 3, 4)
    )


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def outcome_of(names: Collection[str], given_names: Iterable[str | None]) -> str | None:
    """Return the name of the reward that tells right from wrong."""
    return next((name for name in given_names if name in names), "correct" if "correct" in names else None)
