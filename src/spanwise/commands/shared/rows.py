"""From the columns of a rollout file to what a page shows: credit by block, rewards, the rows of the token view."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from spanwise.commands.shared.segments import Segments
from spanwise.errors import AlignmentError, DataError, SpanwiseError
from spanwise.report import Part, TokenRow, with_stop
from spanwise.rollouts import schema
from spanwise.rollouts.parquet import flat, offsets
from spanwise.rollouts.recorded import numbers
from spanwise.rollouts.text import load_tokenizer
from spanwise.segment import Vocabulary
from spanwise.types import Fault

#: The texts of the tokens of one completion, from their ids.
Pieces = Callable[[Sequence[int]], list[str]]


def recorded_credit(table: pa.Table) -> dict[str, dict[str, Tensor]]:
    """Method -> block -> credit of each completion, as reports take it: NaN where it has no such block, and `stop`.

    >>> table = pa.table({"credit/bae/a": [0.5, None], "credit/bae/stop": [0.0, -1.0], "advantages/bae": [[0.5], [-1.0]]})
    >>> recorded_credit(table)["bae"]["stop"].tolist()
    [nan, -1.0]
    """
    found = {}
    for method in schema.methods(table.column_names):
        credit = {
            block: numbers(table, schema.credit(method, block)) for block in schema.credited(table.column_names, method)
        }
        stop_n = credit.pop(schema.STOP, None)
        found[method] = credit if stop_n is None else with_stop(credit, stop_n)
    return found


def recorded_rewards(table: pa.Table) -> dict[str, Tensor]:
    """Objective -> reward of each completion, NaN where there is none."""
    return {name: numbers(table, schema.reward(name)) for name in schema.objectives(table.column_names)}


def token_rows(
    table: pa.Table,
    pieces: Pieces | None,
    segments: Segments | None = None,
    own: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> list[TokenRow]:
    """The completions of a table as the token view takes them.

    Args:
        table: columns of `rollouts.schema`.
        pieces: ids of one completion -> text of each token, as `pieces_of` makes it; None shows the ids.
        segments: what opens one; they are found in every stream of values, where there are log-probabilities too.
        own: method -> `mixing.own_shares` of these completions, where scores of their own are mixed into the credit.

    Edge cases:
        What was not trained has advantage NaN, not 0. Objectives, blocks and methods are whatever columns there are. The ids of
        a completion are shown where one of them is not in the vocabulary.

    Raises:
        DataError: a column is missing.
        AlignmentError: advantages or trainable flags that do not fit the tokens.

    Example:
        >>> table = pa.table({
        ...     "prompt": ["1+1="], "completion_ids": [[0, 1]], "trainable": [[True, False]], "fault": [16],
        ...     "start/answer": [0], "end/answer": [1], "reward/correct": [1.0], "status/correct": ["ok"],
        ...     "advantages/bae": [[.5, 0.]],
        ... })
        >>> row = token_rows(table, None)[0]
        >>> row.tokens, row.advantages, row.spans, row.fault
        (['⟨0⟩', '⟨1⟩'], {'bae': [0.5, nan]}, {'answer': [(0, 1)]}, 'truncated')
    """
    names = table.column_names
    methods = schema.methods(names)
    source = schema.TOKENS if schema.TOKENS in names else schema.IDS
    needed = [schema.PROMPT, source, schema.TRAINABLE, *(schema.advantages(one) for one in methods or ["<method>"])]
    missing = [name for name in needed if name not in names]
    if missing:
        raise DataError(f"The rollouts have no column '{missing[0]}'; they have {', '.join(names) or 'none'}.")
    edges = offsets(table[source])
    trained = _aligned(table, schema.TRAINABLE, edges).astype(np.bool_)
    flat_of = {known: _aligned(table, name, edges) for known, name in schema.token_columns(names).items()}
    credited = {one: np.where(trained, _aligned(table, schema.advantages(one), edges), np.nan) for one in methods}
    block = _aligned(table, schema.BLOCK, edges) if schema.BLOCK in names else None
    texts = _texts(table[source], edges, pieces)
    plain = table.select([name for name in names if not pa.types.is_list(table.schema.field(name).type)]).to_pylist()
    scored, own = schema.SELF_REWARD in names, own or {}
    parts = {one: _parts(table[schema.parts(one)]) for one in methods if schema.parts(one) in names}
    made = []
    for n, (row, text, (first, last)) in enumerate(zip(plain, texts, pairwise(edges.tolist()), strict=True)):
        known = {name: values[first:last] for name, values in flat_of.items()}
        logp = known.pop("logp", None)
        values = {name.partition("/")[2]: value for name, value in known.items()}
        opens = {}
        if logp is not None and segments is not None:
            opens = {name: segments.opens(logp, ~np.isnan(value) & trained[first:last]) for name, value in values.items()}
        made.append(
            TokenRow(
                prompt=shown_prompt(row[schema.PROMPT]),
                tokens=text,
                advantages={method: advantages[first:last].tolist() for method, advantages in credited.items()},
                spans=_pieces(row, schema.blocks(names), None if block is None else block[first:last]),
                rewards={name: row[schema.reward(name)] for name in schema.objectives(names)},
                statuses={name: row[schema.status(name)] for name in schema.objectives(names)},
                fault=", ".join(fault.name.lower() for fault in Fault(row.get(schema.FAULT) or 0) if fault.name),
                values={name: value.tolist() for name, value in values.items()},
                probabilities=None if logp is None else np.exp(logp).tolist(),
                step=row.get(schema.STEP),
                stop={method: stop for method in methods if (stop := row.get(schema.credit(method, schema.STOP)))},
                opens=opens,
                credit={
                    one: {name: row[schema.credit(one, name)] for name in schema.credited(names, one) if name != schema.STOP}
                    for one in methods
                },
                score=math.nan if scored and row[schema.SELF_REWARD] is None else row.get(schema.SELF_REWARD),
                own={one: shares[n] for one, shares in own.items()},
                parts={one: listed[n] for one, listed in parts.items()},
                answer=None if row.get(schema.ANSWER) is None else str(row[schema.ANSWER]),
                stated={name: row.get(schema.stated(name)) for name in schema.objectives(names)},
                group=row.get(schema.GROUP),
            )
        )
    return made


def _parts(column: pa.ChunkedArray) -> list[list[Part]]:
    """What the credit of each completion is made of."""
    return [[Part(**entry) for entry in listed or ()] for listed in column.to_pylist()]


def _pieces(row: Mapping[str, Any], blocks: Sequence[str], block_t: np.ndarray | None) -> dict[str, list[tuple[int, int]]]:
    """Block -> its pieces: its span, or the runs of its tokens where the file says the block of each."""
    if block_t is None:
        return {name: [(row[schema.start(name)], row[schema.end(name)])] for name in blocks}
    edges = [0, *(np.flatnonzero(np.diff(block_t)) + 1).tolist(), len(block_t)]
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in blocks}
    for start, end in pairwise(edges):
        if start < end and 0 <= int(block_t[start]) < len(blocks):
            found[blocks[int(block_t[start])]].append((start, end))
    return found


def _aligned(table: pa.Table, name: str, edges: np.ndarray) -> np.ndarray:
    """A column of lists, end to end, that must have an entry for each token."""
    differ = np.flatnonzero(np.diff(edges) != (lengths := np.diff(offsets(table[name]))))
    if differ.size:
        row = int(differ[0])
        size = int(edges[row + 1] - edges[row])
        raise AlignmentError(f"Row {row + 1} of the rollouts has {size} tokens and {int(lengths[row])} in '{name}'.")
    return flat(table[name], np.float64)


def _texts(column: pa.ChunkedArray, edges: np.ndarray, pieces: Pieces | None) -> list[list[str]]:
    entries = column.combine_chunks().flatten()
    if not pa.types.is_integer(entries.type):
        coded = entries.dictionary_encode()
        words = [
            word if isinstance(word, str) else word.decode(errors="surrogateescape") for word in coded.dictionary.to_pylist()
        ]
        shown = [words[index] for index in coded.indices.to_pylist()]
        return [shown[first:last] for first, last in pairwise(edges.tolist())]
    ids = entries.to_pylist()
    return [_spelled(ids[first:last], pieces) for first, last in pairwise(edges.tolist())]


def _spelled(ids: list[int], pieces: Pieces | None) -> list[str]:
    if pieces is not None:
        try:
            return pieces(ids)
        except SpanwiseError:
            pass
    return [f"⟨{index}⟩" for index in ids]


def pieces_of(vocabulary: Vocabulary) -> Pieces:
    r"""The text of each token by itself, byte for byte.

    A byte that is no character by itself becomes a lone surrogate, so that the texts joined and encoded with
    errors="surrogateescape" are the bytes of the completion again.

    Raises:
        AlignmentError: (from the function returned) an id that is not in the vocabulary.

    Example:
        >>> pieces_of(Vocabulary((b"a", "é".encode()[:1], "é".encode()[1:])))([0, 1, 2])
        ['a', '\udcc3', '\udca9']
    """

    def pieces(ids: Sequence[int]) -> list[str]:
        vocabulary.join(np.array(ids, dtype=np.int64))  # names an id that is not there
        return [vocabulary.pieces[index].decode(errors="surrogateescape") for index in ids]

    return pieces


def read_pieces(tokenizer: Path | None) -> Pieces | None:
    """Token texts from the tokenizer of a folder; None if there is none or it cannot be read: the ids are shown then."""
    try:
        return None if tokenizer is None else pieces_of(load_tokenizer(tokenizer)[1])
    except SpanwiseError:
        return None


def shown_prompt(text: str) -> str:
    r"""The text of a prompt; a conversation, kept as JSON, is written role by role.

    >>> shown_prompt('[{"role": "user", "content": "1+1="}]')
    'user: 1+1='
    """
    try:
        messages = json.loads(text) if text.startswith("[{") else None
        return text if messages is None else "\n\n".join(f"{entry['role']}: {entry['content']}" for entry in messages)
    except (ValueError, KeyError, TypeError, RecursionError):
        return text
