"""From a rollouts table to the rows of the token view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from spanwise.commands.credit.write import shown_prompt
from spanwise.errors import AlignmentError, DataError, SpanwiseError
from spanwise.report.tokens import TokenRow
from spanwise.segment import Vocabulary
from spanwise.types import Fault


def pieces_of(vocabulary: Vocabulary) -> Callable[[list[int]], list[str]]:
    r"""The text of each token by itself, byte for byte.

    A byte that is no character by itself becomes a lone surrogate, so that the texts joined and encoded with
    errors="surrogateescape" are the bytes of the completion again.

    Raises:
        AlignmentError: (from the function returned) an id that is not in the vocabulary.

    Example:
        >>> pieces_of(Vocabulary((b"a", "é".encode()[:1], "é".encode()[1:])))([0, 1, 2])
        ['a', '\udcc3', '\udca9']
    """

    def pieces(ids: list[int]) -> list[str]:
        text, ends = vocabulary.join(np.array(ids, dtype=np.int64))
        starts = [0, *ends.tolist()]
        return [text[a:b].decode(errors="surrogateescape") for a, b in pairwise(starts)]

    return pieces


def recorded_rows(
    table: pa.Table, *, pieces: Callable[[list[int]], list[str]] | None, method: str = "this run"
) -> list[TokenRow]:
    """Read the rows of spanwise's own rollouts (or credit) parquet for the token view.

    Args:
        table: with the columns of `rollout_table`; where a column `tokens` holds texts or bytes instead of ids, those are shown.
        pieces: token ids of one completion -> text of each, as `pieces_of` makes it; None shows the ids.
        method: name of the column `advantages`; columns `advantages/<method>` carry their own.

    Edge cases:
        What was not trainable has advantage NaN, not 0. Objectives and blocks are whatever columns there are. The ids of a
        completion are shown where one of them is not in the vocabulary.

    Raises:
        DataError: a column is missing.
        AlignmentError: advantages or trainable flags that do not fit the ids.

    Example:
        >>> table = pa.table({
        ...     "prompt": ["1+1="], "completion_ids": [[0, 1]], "trainable": [[True, False]], "fault": [16],
        ...     "start/answer": [0], "end/answer": [1], "reward/correct": [1.0], "status/correct": ["ok"], "advantages": [[.5, 0.]],
        ... })
        >>> row = recorded_rows(table, pieces=None)[0]
        >>> row.tokens, row.advantages, row.spans, row.fault
        (['⟨0⟩', '⟨1⟩'], {'this run': [0.5, nan]}, {'answer': (0, 1)}, 'truncated')
    """
    names = table.column_names
    methods = {"advantages": method} | {name: name.split("/", 1)[1] for name in names if name.startswith("advantages/")}
    methods = {column: shown for column, shown in methods.items() if column in names}
    missing = [name for name in ("prompt", "completion_ids") if name not in names] + ([] if methods else ["advantages"])
    if "tokens" in names and "completion_ids" in missing:
        missing.remove("completion_ids")
    if missing:
        raise DataError(f"The rollouts have no column '{missing[0]}'; they have {', '.join(names) or 'none'}.")
    rows = table.to_pylist()
    return [_row(row, number, methods, pieces) for number, row in enumerate(rows, start=1)]


def _row(
    row: dict[str, Any], number: int, methods: dict[str, str], pieces: Callable[[list[int]], list[str]] | None
) -> TokenRow:
    tokens = _texts(row, pieces)
    trainable = row.get("trainable") or [True] * len(tokens)
    for name, column in ({"trainable": trainable} | {name: row[name] for name in methods}).items():
        if len(column) != len(tokens):
            raise AlignmentError(f"Row {number} of the rollouts has {len(tokens)} tokens and {len(column)} in '{name}'.")

    def under(prefix: str) -> dict[str, Any]:
        return {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}

    ends = under("end/")
    return TokenRow(
        prompt=shown_prompt(row["prompt"]),
        tokens=tokens,
        advantages={shown: _trained(row[name], trainable) for name, shown in methods.items()},
        spans={name: (start, ends[name]) for name, start in under("start/").items() if name in ends},
        rewards=under("reward/"),
        statuses=under("status/"),
        fault=", ".join(fault.name.lower() for fault in Fault(row.get("fault") or 0) if fault.name),
        values=None if row.get("values") is None else np.array(row["values"], dtype=np.float32).tolist(),
        probabilities=None if row.get("logprobs") is None else np.exp(np.array(row["logprobs"], dtype=np.float32)).tolist(),
        step=row.get("step"),
        stop={
            shown: stop
            for name, shown in methods.items()
            if (stop := row.get(f"credit{name.removeprefix('advantages')}/stop"))
        },
    )


def _texts(row: dict[str, Any], pieces: Callable[[list[int]], list[str]] | None) -> list[str]:
    if "completion_ids" not in row:
        return [text if isinstance(text, str) else text.decode(errors="surrogateescape") for text in row["tokens"]]
    ids = row["completion_ids"]
    try:
        return [f"⟨{index}⟩" for index in ids] if pieces is None else pieces(ids)
    except SpanwiseError:
        return _texts(row, None)


def _trained(advantages: Sequence[float | None], trainable: Sequence[bool]) -> list[float]:
    return [float("nan") if a is None or not trained else float(a) for a, trained in zip(advantages, trainable, strict=True)]
