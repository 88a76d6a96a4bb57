"""The one writer of rollout files: completions with what is said of them, as tables, streamed by parts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from spanwise.batch import Batch
from spanwise.disk import whole_file
from spanwise.errors import AlignmentError
from spanwise.pipeline import Reading
from spanwise.rollouts import schema
from spanwise.rollouts.messages import clean
from spanwise.types import Credit, Scores, Spans, Status, Zero, whole_text


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
    about = schema.metadata(tokenizer)
    writer: pq.ParquetWriter | None = None
    with whole_file(file) as beside:
        try:
            for part in parts:
                table = (part if texts is None else _spelled(part, texts)).replace_schema_metadata(about)
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
    sides = (("start", start_nk), ("end", end_nk))
    return {schema.column(side, name): edge_nk[:, k] for k, name in enumerate(names) for side, edge_nk in sides}


def score_columns(scores: Scores) -> dict[str, Any]:
    """Rewards, why they are what they are, and what completions state; rewards by outcome are not written."""
    columns: dict[str, Any] = {}
    for m, objective in enumerate(scores.names):
        columns[schema.column("reward", objective)] = scores.reward_nm[:, m]
        status_n = scores.status_nm[:, m].tolist()
        columns[schema.column("status", objective)] = [Status(value).name.lower() for value in status_n]
        columns[schema.column("stated", objective)] = None if scores.stated_nm is None else scores.stated_nm[:, m]
    return columns


def credit_columns(
    method: str, names: Sequence[str], present_nk: Bool[Tensor, "n k"], credit: Credit, advantages: Shaped[Any, " v"]
) -> dict[str, Any]:
    """What one method credits completions with; NaN where a block is absent, and at tokens that were left out of the loss."""
    held_nk = credit.block_nk.masked_fill(~present_nk, torch.nan)
    return {
        **{schema.column("credit", method, name): held_nk[:, k] for k, name in enumerate(names)},
        schema.column("credit", method, schema.STOP): credit.stop_n,
        schema.column("parts", method): _part_lists(credit) if credit.names else None,
        schema.column("advantages", method): advantages,
    }


def _part_lists(credit: Credit) -> pa.Array:
    """A list per completion with a struct per objective, or one for the sum of all."""
    if credit.comparison is None or credit.adv_nm is None or credit.weight_m is None:
        raise AlignmentError("This credit has names and no comparison; take it from pipeline.credit_batch.")
    n, m = credit.adv_nm.shape
    known = {name.removesuffix("_nm"): table_nm.flatten().numpy() for name, table_nm in vars(credit.comparison).items()}
    reasons = np.array([reason.name.lower() if reason else "" for reason in Zero])
    known |= {
        "objective": list(credit.names) * n,
        "weight": np.tile(credit.weight_m.double().numpy(), n),
        "part": (credit.weight_m * credit.adv_nm).flatten().numpy(),
        "reason": reasons[known["reason"]],
    }
    columns = [pa.array(known[entry.name], entry.type, from_pandas=True) for entry in schema.PART]
    flat = pa.StructArray.from_arrays(columns, fields=list(schema.PART))
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


@dataclass(frozen=True)
class Rollouts:
    """The completions of the last generation batch of this process, with everything that was said of them.

    Attributes:
        mode: "train" or "eval".
        step: the optimiser step they were generated at.
        method: the name of what credited them.
        batch: the N completions as the trainer filled them in: groups, numbered over all processes, token ids, the mask of what the
            model sampled, the dataset's columns but the prompts, and what a critic, the policy or a mode said of them.
        reading: what each completion says, block by block, and its rewards and statuses.
        spans: where each block lies among the tokens that enter the loss.
        credit: credit per block of the N completions; its two counters cover all processes.
        advantages_nt: what every token is trained with, before the fold.
        prompts: N prompts, strings or message lists, as the dataset has them.
        completions: N completions as the trainer decoded them.
        value_names: of the values of the batch, if they are several (`Scheme.value_names`).
        more: what modes keep of each completion, by column (`Mode.columns`).
    """

    mode: str
    step: int
    method: str
    batch: Batch
    reading: Reading
    spans: Spans
    credit: Credit
    advantages_nt: Float[Tensor, "n t"]
    prompts: list[Any]
    completions: list[Any]
    value_names: tuple[str, ...] = ()
    more: Mapping[str, Tensor] = field(default_factory=dict)

    def recorded(self, *, step: int, rollout_n: Int[Tensor, " n"] | None = None) -> pa.Table:
        """What a rollout file keeps of them: no padding, of the dataset's columns only `answer`.

        Args:
            step: of training, which a batch may serve several optimiser steps of.
            rollout_n: the rollout of each completion, where some are parts of one that has one vote.

        Raises:
            AlignmentError: values that do not fit their names.
        """
        batch, spans, texts = self.batch, self.spans, self.reading.text or []
        assert batch.ids_nt is not None, "the batch of a trainer has token ids"
        assert batch.mask_nt is not None, "the batch of a trainer has a mask"
        mask_nt = batch.mask_nt.bool()
        filled_nt = mask_nt.flip(1).cumsum(1).flip(1) > 0  # up to the last sampled token
        learned_n1 = (spans.block_nt >= 0).any(dim=1, keepdim=True)
        present = [[text[name] is not None for name in spans.names] for text in texts]
        present_nk = torch.tensor(present, dtype=torch.bool).reshape(-1, len(spans.names))
        known = {name: known_nt.masked_fill(~mask_nt, torch.nan).float() for name, known_nt in self._known().items()}
        known |= {schema.BLOCK: spans.block_nt} if spans.interleaved else {}
        advantages_nt = self.advantages_nt.masked_fill(~learned_n1, torch.nan)
        columns = {
            schema.STEP: [step] * len(texts),
            schema.GROUP: batch.group_n,
            schema.ROLLOUT: rollout_n,
            schema.PROMPT: self.prompts,
            schema.ANSWER: batch.columns.get(schema.ANSWER),
            schema.TEXT: [whole_text(blocks) for blocks in texts],
            schema.FAULT: spans.fault_n,
            **span_columns(spans.names, spans.start_nk, spans.end_nk),
            schema.SCORE: batch.score_n,
            **self.more,
            **score_columns(self.reading.scores),
            schema.IDS: batch.ids_nt[filled_nt],
            schema.TRAINABLE: mask_nt[filled_nt],
            **{name: known_nt[filled_nt] for name, known_nt in known.items()},
            **credit_columns(self.method, spans.names, present_nk, self.credit, advantages_nt[filled_nt]),
        }
        return rollout_table(columns, np.cumsum([0, *filled_nt.sum(dim=1).tolist()]))

    def _known(self) -> dict[str, Float[Tensor, "n t"]]:
        """Values, by stream where there are several, and log-probabilities, as far as there are any."""
        value_nt, logp_nt = self.batch.value_nt, self.batch.logp_nt
        known = {} if logp_nt is None else {schema.LOGP: logp_nt.detach().cpu()}
        if value_nt is None:
            return known
        value_snt = (value_nt if value_nt.ndim == 3 else value_nt[:, :, None]).detach().cpu().unbind(dim=2)
        if len(value_snt) != max(1, len(self.value_names)):
            raise AlignmentError(
                f"The critic has {len(value_snt)} values for each token and they have {len(self.value_names)} names "
                f"({', '.join(self.value_names) or 'none'}); give one to each."
            )
        return dict(zip(schema.value_columns(self.value_names), value_snt, strict=True)) | known
