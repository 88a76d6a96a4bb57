"""The one writer of rollout files: completions with what is said of them, as tables, streamed by parts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from spanwise.disk import whole_file
from spanwise.errors import AlignmentError
from spanwise.rollouts import schema
from spanwise.rollouts.messages import clean
from spanwise.types import Credit, Scores, Status, Zero


def write_rollouts(
    file: Path, parts: Iterable[pa.Table], *, pieces: Sequence[bytes] | None = None, tokenizer: Path | None = None
) -> None:
    """Write a rollout file, part by part; nobody ever sees half of it.

    Args:
        file: its folder is made if it does not exist.
        parts: completions, in order, as `rollout_table` makes them; all with the same columns.
        pieces: the bytes of every id, where the ids are no tokenizer's own; they are written instead of ids.
        tokenizer: the folder that the ids are of, where a reader could not know it.

    Raises:
        DataError: the file cannot be written.

    Example:
        Two answers to one prompt, and what GRPO without a scale credits them with; then they are read again.

        >>> import tempfile
        >>> from spanwise.rollouts import read_rollouts
        >>> part = rollout_table({
        ...     "prompt": ["2 + 2?"] * 2, "completion_ids": [0, 1], "trainable": [True, True], "advantages/grpo": [0.5, -0.5],
        ...     "reward/correct": [1.0, 0.0], "status/correct": ["ok", "ok"],
        ... }, [0, 1, 2])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_rollouts(Path(folder) / "step_1.parquet", [part], pieces=[b"4", b"5"])
        ...     table = read_rollouts(Path(folder) / "step_1.parquet")
        >>> table.prompts[0], table.rewards["correct"].value_n.tolist()
        ('2 + 2?', [1.0, 0.0])
    """
    texts = None if pieces is None else _piece_texts(pieces)
    writer: pq.ParquetWriter | None = None
    with whole_file(file) as beside:
        try:
            for part in parts:
                table = (part if texts is None else _spelled(part, texts)).replace_schema_metadata(
                    schema.metadata(tokenizer)
                )
                # Nobody looks for a completion by the bounds of a column; working them out takes a tenth of the time.
                writer = writer or pq.ParquetWriter(beside, table.schema, compression="zstd", write_statistics=False)
                writer.write_table(table)
        finally:
            if writer is not None:
                _close(writer)


def _close(writer: pq.ParquetWriter) -> None:
    """Close a writer, once: on a full disk that fails, and would again when the writer goes."""
    try:
        writer.close()
    finally:
        writer.is_open = False


def rollout_table(columns: Mapping[str, Any], offsets: Int[np.ndarray, " o"] | Sequence[int]) -> pa.Table:
    """Completions as a table in the columns of `rollouts.schema`, each of the type that it has there.

    Args:
        columns: name -> a value for each completion, or one for each token, end to end, if the column holds lists of them; NaN
            becomes null, and a prompt or an answer that is no text JSON. A column that is None is left out.
        offsets: where the tokens of each completion start, and where those of the last one end.

    Raises:
        AlignmentError: a column of tokens that does not have one entry for each of them.

    Example:
        One completion of two tokens, the second from a tool.

        >>> rollout_table({"prompt": ["2 + 2?"], "completion_ids": [5, 9], "trainable": [True, False]}, [0, 2]).to_pylist()
        [{'prompt': '2 + 2?', 'completion_ids': [5, 9], 'trainable': [True, False]}]
    """
    edges = pa.array(offsets, pa.int32())
    return pa.table({name: _column(name, values, edges) for name, values in columns.items() if values is not None})


def _column(name: str, values: Any, edges: pa.Array) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    if name in (schema.PROMPT, schema.ANSWER):
        return pa.array([_text(value) for value in values], pa.string())
    kind = schema.type_of(name)
    values = values.numpy() if isinstance(values, Tensor) else values
    if kind is None or not pa.types.is_list(kind):
        return pa.array(values, kind, from_pandas=True)  # NaN becomes null
    if len(values) != edges[-1].as_py():
        raise AlignmentError(f"There are {edges[-1]} tokens and {len(values)} entries of '{name}'; give one for each.")
    return pa.ListArray.from_arrays(edges, pa.array(values, kind.value_type, from_pandas=True))


def _text(value: Any) -> str | None:
    """A prompt or an answer as a file can hold it."""
    return None if value is None else clean(value if isinstance(value, str) else json.dumps(value, default=str))


def span_columns(
    names: Sequence[str], start_nk: Int[Tensor, "n k"], end_nk: Int[Tensor, "n k"]
) -> dict[str, Int[Tensor, " n"]]:
    """Where the blocks lie; nowhere, if a block is absent or the completion was left out of the loss."""
    edges = {name: (start_nk[:, k], end_nk[:, k]) for k, name in enumerate(names)}
    return {
        key: edge_n
        for name, (start_n, end_n) in edges.items()
        for key, edge_n in ((schema.start(name), start_n), (schema.end(name), end_n))
    }


def score_columns(scores: Scores) -> dict[str, Any]:
    """Rewards, why they are what they are, and what completions state; rewards by outcome are not written."""
    columns: dict[str, Any] = {}
    for m, objective in enumerate(scores.names):
        columns[schema.reward(objective)] = scores.reward_nm[:, m]
        columns[schema.status(objective)] = [Status(value).name.lower() for value in scores.status_nm[:, m].tolist()]
        columns[schema.stated(objective)] = None if scores.stated_nm is None else scores.stated_nm[:, m]
    return columns


def credit_columns(
    method: str,
    by_block: Mapping[str, Float[Tensor, " n"]],
    credit: Credit,
    advantages: Shaped[Any, " v"],
) -> dict[str, Any]:
    """What one method credits completions with; NaN where a block is absent, and at tokens that were left out of the loss."""
    return {
        **{schema.credit_column(method, block): credit_n for block, credit_n in by_block.items()},
        schema.credit_column(method, schema.STOP): credit.stop_n,
        schema.parts(method): _part_lists(credit) if credit.names else None,
        schema.advantages(method): advantages,
    }


def _part_lists(credit: Credit) -> pa.Array:
    """A list per completion with a struct per objective, or one for the sum of all."""
    comparison, adv_nm, weight_m = credit.comparison, credit.adv_nm, credit.weight_m
    if comparison is None or adv_nm is None or weight_m is None:
        raise AlignmentError("This credit has names and no comparison; take it from pipeline.credit_batch.")
    n, m = adv_nm.shape
    reasons = pa.array([reason.name.lower() if reason else "" for reason in Zero], pa.string())
    columns = {
        "objective": pa.array(list(credit.names) * n, pa.string()),
        "weight": pa.array(np.tile(weight_m.double().numpy(), n)),
        "reason": reasons.take(pa.array(comparison.reason_nm.flatten().numpy())),
        **{
            name: pa.array(table_nm.long().flatten().numpy())
            for name, table_nm in (
                ("stratum", comparison.stratum_nm), ("members", comparison.members_nm), ("averaged", comparison.averaged_nm),
            )
        },
        **{
            name: pa.array(table_nm.double().flatten().numpy(), from_pandas=True)
            for name, table_nm in (
                ("worth", comparison.worth_nm), ("baseline", comparison.baseline_nm), ("divisor", comparison.divisor_nm),
                ("part", weight_m * adv_nm),
            )
        },
    }  # fmt: skip
    flat = pa.StructArray.from_arrays([columns[field.name] for field in schema.PART], fields=list(schema.PART))
    return pa.ListArray.from_arrays(pa.array(np.arange(n + 1, dtype=np.int32) * m), flat)


def _piece_texts(pieces: Sequence[bytes]) -> pa.Array:
    """What each id says as text; as bytes where a tokenizer cuts characters."""
    try:
        return pa.array([piece.decode() for piece in pieces], pa.string())
    except UnicodeDecodeError:
        return pa.array(pieces, pa.binary())


def _spelled(part: pa.Table, pieces: pa.Array) -> pa.Table:
    """The piece of each id instead of it; nothing for what is none, as may stand at a masked token."""
    lists = part[schema.IDS].combine_chunks()
    ids = lists.values.to_numpy()
    known = np.where((ids >= 0) & (ids < len(pieces)), ids, len(pieces))
    texts = pa.concat_arrays([pieces, pa.array([""], pieces.type)]).take(pa.array(known))
    column = pa.ListArray.from_arrays(lists.offsets, texts)
    return part.set_column(part.schema.get_field_index(schema.IDS), schema.TOKENS, column)
