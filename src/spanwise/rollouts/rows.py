"""Read spanwise's rollout files for display."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Float
from torch import Tensor

from spanwise.errors import SpanwiseError
from spanwise.rollouts import schema
from spanwise.rollouts.cells import message_text, parse_prompt
from spanwise.rollouts.files import readable
from spanwise.rollouts.schema import CreditPart
from spanwise.rollouts.table import load_tokenizer
from spanwise.segment import Vocabulary
from spanwise.types import Fault

#: The name for the credit of a whole completion.
COMPLETION = "completion"


def read_numbers(file: Path) -> pa.Table:
    """Read the columns of a rollout file with one number per completion."""
    with readable(file):
        parquet_file = _open_parquet(file)
        arrow_schema = parquet_file.schema_arrow
        number_columns = [x.name for x in arrow_schema if pa.types.is_integer(x.type) or pa.types.is_floating(x.type)]
        return parquet_file.read(columns=number_columns)


def read_rows(file: Path, rows: Sequence[int] | None = None) -> pa.Table:
    """Read all columns of a rollout file. `rows` are ascending row numbers; None: all."""
    with readable(file):
        parquet_file = _open_parquet(file)
        if rows is None:
            return parquet_file.read()
        row_numbers = np.asarray(rows, dtype=np.int64)
        group_end = 0
        tables = [parquet_file.schema_arrow.empty_table()]
        for row_group_index in range(parquet_file.num_row_groups):
            group_start = group_end
            group_end += parquet_file.metadata.row_group(row_group_index).num_rows
            is_in_group = (row_numbers >= group_start) & (row_numbers < group_end)
            group_rows = row_numbers[is_in_group] - group_start
            tables += [parquet_file.read_row_group(row_group_index).take(pa.array(group_rows))] if len(group_rows) else []
        return pa.concat_tables(tables)


def _open_parquet(file: Path) -> pq.ParquetFile:
    parquet_file = pq.ParquetFile(file)
    schema.check_version(file, parquet_file.schema_arrow)
    return parquet_file


def read_credit(table: pa.Table) -> dict[str, dict[str, Tensor]]:
    """Return the credit of every completion by method and block. Absent blocks get NaN."""
    credit_of_method = {}
    for method in schema.methods_in(table.column_names):
        block_names = schema.family_names(table.column_names, "credit", method)
        block_credits = {block: schema.float_column(table, schema.column("credit", method, block)) for block in block_names}
        stop_credit_n = block_credits.pop(schema.STOP, torch.zeros(0))
        credit_of_method[method] = block_credits | stop_credit(stop_credit_n)
    return credit_of_method


def credited_units(by_block: Mapping[str, Float[Tensor, " n"]], kind: str) -> dict[str, Float[Tensor, " n"]]:
    """Return the credit of each block. If all are equal and `kind` is "completion", return one for `completion`."""
    credit_of_block = {name: credit_n for name, credit_n in by_block.items() if name != schema.STOP}
    if kind != "completion" or not credit_of_block:
        return dict(by_block)
    credit_nk = torch.stack(list(credit_of_block.values()), dim=1)
    mean_n = credit_nk.nanmean(dim=1)
    if not torch.where(credit_nk.isnan(), mean_n[:, None], credit_nk).isclose(mean_n[:, None], equal_nan=True).all():
        return dict(by_block)
    return {COMPLETION: mean_n, **{name: by_block[name] for name in by_block.keys() - credit_of_block.keys()}}


def stop_credit(stop_n: Float[Tensor, " n"]) -> dict[str, Float[Tensor, " n"]]:
    """Return the column `stop`: the credit for leaving out every rewarded block. Return {} if it is all 0."""
    return {schema.STOP: stop_n.masked_fill(stop_n == 0, torch.nan)} if bool((stop_n != 0).any()) else {}


def summarise_credit(credit_n: Float[Tensor, " n"]) -> dict[str, Any]:
    """Summarise the credit of a block: count, mean size, share of zeros and range."""
    known_credit_n = credit_n[~credit_n.isnan()].double()
    if not len(known_credit_n):
        return {"completions": 0, "mean_abs": None, "zero_share": None, "lowest": None, "highest": None}
    min_credit, max_credit = map(float, known_credit_n.aminmax())
    return {
        "completions": len(known_credit_n), "mean_abs": float(known_credit_n.abs().mean()),
        "zero_share": float((known_credit_n == 0).double().mean()), "lowest": min_credit, "highest": max_credit,
    }  # fmt: skip


@dataclass(frozen=True)
class TokenRow:
    """One completion as plain Python data, to show it token by token.

    Attributes:
        prompt: its text.
        tokens: (T,) texts. A byte that is no whole character by itself is a lone surrogate U+DC80 to U+DCFF, as
            `bytes.decode(errors="surrogateescape")` writes it; the view shows it as ‹C3›.
        advantages: method -> (T,) what each token is credited with; NaN where the token is not trained.
        spans: block -> its pieces, half-open intervals of tokens; empty where the block is absent.
        rewards: objective -> reward; None where there is none.
        statuses: objective -> why the reward has its value or has none, `Status` in lower case.
        fault: what is wrong with the tags, in words; "" is well-formed.
        values: stream -> (T,) what a critic expected before each token, NaN where there is none; "" is the only stream.
        probabilities: (T,) of each token under the policy that sampled it.
        step: of training.
        stop: method -> the part of its last trained token's credit that is for leaving out every paid block, if there is any.
        opens: stream -> the tokens that open a segment in it, ascending.
        credit: method -> block -> what the block is credited with; None where it is absent.
        score: the self-rewarding score, NaN where it did not end; None: nobody has read one.
        own: method -> the share of the score in the credit of blocks where it is mixed in, and the score as its group compares it.
        parts: method -> what its credit is made of, objective by objective; empty where nobody says it.
        answer: the gold answer; None: there is none.
        stated: objective -> the number that the completion states and the reward read (a confidence).
        group: completions of one step with one number are compared; None: not known.
        notes: objective -> why a judge gave the reward, or why a check failed; None where nothing is said.

    Example:
        >>> row = TokenRow("1+1=", ["2"], {"grpo": [0.5]}, {"answer": [(0, 1)]}, {"correct": 1.0}, {"correct": "ok"}, "")
        >>> row.advantages["grpo"]
        [0.5]
    """

    prompt: str
    tokens: Sequence[str]
    advantages: Mapping[str, Sequence[float]]
    spans: Mapping[str, Sequence[tuple[int, int]]]
    rewards: Mapping[str, float | None]
    statuses: Mapping[str, str]
    fault: str
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    probabilities: Sequence[float] | None = None
    step: int | None = None
    stop: Mapping[str, float] = field(default_factory=dict)
    opens: Mapping[str, Sequence[int]] = field(default_factory=dict)
    credit: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    score: float | None = None
    own: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    parts: Mapping[str, Sequence[CreditPart]] = field(default_factory=dict)
    answer: str | None = None
    stated: Mapping[str, float | None] = field(default_factory=dict)
    group: int | None = None
    notes: Mapping[str, str | None] = field(default_factory=dict)


def token_rows(
    table: pa.Table,
    vocabulary: Vocabulary | None,
    opens: Callable[[np.ndarray, np.ndarray], list[int]] | None = None,
    own: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> list[TokenRow]:
    """Turn a table's completions into rows for the token view. Tokens that the vocabulary lacks are shown by their ids.

    `opens` finds the tokens that open a segment, from log-probabilities and flags of trained tokens; `own` is `TokenRow.own`.
    """
    column_names = table.column_names
    schema.column_of(table, schema.PROMPT)
    token_column = schema.TOKENS if schema.TOKENS in column_names else schema.IDS
    methods = schema.methods_in(column_names)
    number_columns = schema.token_columns(column_names)
    # If the table has no method, `token_edges` raises an error that the column `advantages/<method>` is missing.
    advantage_columns = {method: schema.column("advantages", method) for method in methods or ["<method>"]}
    block_columns = [schema.BLOCK] if schema.BLOCK in column_names else []
    token_columns = [schema.TRAINABLE, *number_columns, *advantage_columns.values(), *block_columns]
    edges = schema.token_edges(table, [token_column, *token_columns], "the rollouts")
    flat_values = {name: schema.flat_values(table[name], np.float64) for name in token_columns}
    text_rows = _texts(table[token_column], edges, vocabulary)
    plain_columns = [column.name for column in table.schema if not pa.types.is_list(column.type)]
    plain_rows = table.select(plain_columns).to_pylist()
    block_names = schema.family_names(column_names, "end")
    objective_names = schema.family_names(column_names, "reward")
    block_names_by_method = {method: schema.family_names(column_names, "credit", method) for method in methods}
    parts_columns = {method: schema.column("parts", method) for method in methods}
    parts_of_method = {method: table[name].to_pylist() for method, name in parts_columns.items() if name in column_names}
    critic_columns = {name.partition("/")[2]: name for name in number_columns if name != schema.LOGP}
    view_rows = []
    for n, (row, token_texts, (start, end)) in enumerate(zip(plain_rows, text_rows, pairwise(edges.tolist()), strict=True)):
        row_columns = {name: values[start:end] for name, values in flat_values.items()}
        is_trained_t = row_columns[schema.TRAINABLE].astype(np.bool_)
        logp_t = row_columns.get(schema.LOGP)
        critic_values = {value_name: row_columns[column] for value_name, column in critic_columns.items()}
        find_starts = None if logp_t is None or opens is None else partial(opens, logp_t)
        view_rows.append(
            TokenRow(
                prompt=display_prompt(row[schema.PROMPT]),
                tokens=token_texts,
                advantages={
                    method: np.where(is_trained_t, row_columns[name], np.nan).tolist()
                    for method, name in advantage_columns.items()
                },
                spans=_pieces(row, block_names, row_columns.get(schema.BLOCK)),
                rewards={name: row[schema.column("reward", name)] for name in objective_names},
                statuses={name: row[schema.column("status", name)] for name in objective_names},
                fault=", ".join(fault.name.lower() for fault in Fault(row.get(schema.FAULT) or 0) if fault.name),
                values={name: value_t.tolist() for name, value_t in critic_values.items()},
                probabilities=None if logp_t is None else np.exp(logp_t).tolist(),
                step=row.get(schema.STEP),
                stop={method: stop for method in methods if (stop := row.get(schema.column("credit", method, schema.STOP)))},
                opens={name: find_starts(~np.isnan(v) & is_trained_t) for name, v in critic_values.items() if find_starts},
                credit={
                    key: {block: row[schema.column("credit", key, block)] for block in blocks if block != schema.STOP}
                    for key, blocks in block_names_by_method.items()
                },
                score=math.nan if row.get(schema.SCORE, 0.0) is None else row.get(schema.SCORE),
                own={method: shares[n] for method, shares in (own or {}).items()},
                parts={method: [CreditPart(**part) for part in parts[n] or ()] for method, parts in parts_of_method.items()},
                answer=None if row.get(schema.ANSWER) is None else str(row[schema.ANSWER]),
                stated={name: row.get(schema.column("stated", name)) for name in objective_names},
                group=row.get(schema.GROUP),
                notes={name: note for name in objective_names if (note := row.get(schema.column("note", name)))},
            )
        )
    return view_rows


def _pieces(row: Mapping[str, Any], blocks: Sequence[str], block_t: np.ndarray | None) -> dict[str, list[tuple[int, int]]]:
    """Map each block to its intervals of tokens."""
    if block_t is None:
        return {name: [(row[schema.column("start", name)], row[schema.column("end", name)])] for name in blocks}
    change_positions = np.flatnonzero(np.diff(block_t)) + 1
    intervals_by_block: dict[str, list[tuple[int, int]]] = {name: [] for name in blocks}
    for piece_start, piece_end in pairwise([0, *change_positions.tolist(), len(block_t)]):
        if piece_start < piece_end and 0 <= int(block_t[piece_start]) < len(blocks):
            intervals_by_block[blocks[int(block_t[piece_start])]].append((piece_start, piece_end))
    return intervals_by_block


def _texts(column: pa.ChunkedArray, edges: np.ndarray, vocabulary: Vocabulary | None) -> list[list[str]]:
    """Return the texts of each completion's tokens. If the vocabulary lacks one of them, return their ids."""
    encoded_tokens = column.combine_chunks().flatten().dictionary_encode()
    distinct_tokens = encoded_tokens.dictionary.to_pylist()
    token_indices = encoded_tokens.indices.to_pylist()
    vocabulary_pieces = () if vocabulary is None else vocabulary.pieces
    distinct_texts: list[str | None] = []
    for token in distinct_tokens:
        if isinstance(token, int):
            token = vocabulary_pieces[token] if 0 <= token < len(vocabulary_pieces) else None
        distinct_texts.append(token_text(token) if isinstance(token, bytes) else token)
    text_lists = []
    for indices in (token_indices[start:end] for start, end in pairwise(edges.tolist())):
        token_texts = [distinct_texts[index] for index in indices]
        text_lists.append([f"⟨{distinct_tokens[index]}⟩" for index in indices] if None in token_texts else token_texts)
    return text_lists


def token_text(piece: bytes) -> str:
    """Decode the bytes of a token. Each byte of an incomplete character becomes a lone surrogate."""
    return piece.decode(errors="surrogateescape")


def read_vocabulary(tokenizer: Path | None) -> Vocabulary | None:
    """Read the vocabulary of a folder's tokenizer. None if there is no readable one."""
    try:
        return None if tokenizer is None else load_tokenizer(tokenizer)[1]
    except SpanwiseError:
        return None


def display_prompt(text: str) -> str:
    """Return a prompt as text for display. A chat becomes one line per message."""
    prompt = parse_prompt(text)
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message_text(message)}" for message in prompt)
