"""spanwise's own rollouts: `rollouts/step_<step>.parquet`, with the ids that were sampled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from spanwise.errors import DataError
from spanwise.rollouts.parquet import joined, steps_of
from spanwise.rollouts.table import Cut, Ragged, RolloutTable, finite
from spanwise.rollouts.text import cut_text, load_tokenizer
from spanwise.score import Reward
from spanwise.segment import Vocabulary
from spanwise.types import Status

REQUIRED = ("prompt", "completion_ids", "trainable")
_PER_TOKEN = {"value": ("values", "value"), "logp": ("logprobs", "log_probs", "logps")}
_OWN = ("credit/", "start/", "reward/", "status/", "advantages")


def read_own(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read spanwise's own parquet; the tokenizer is the one of the run's model, if it lies there.

    Raises:
        DataError: lists of one completion that differ in length, or a tokenizer that spells another text.
    """
    folder = run_folder(files[0])
    names = pq.read_schema(files[0]).names
    per_token = {key: next((n for n in known if n in names), None) for key, known in _PER_TOKEN.items()}
    if tokenizer is None and folder is not None and (folder / "model" / "tokenizer.json").is_file():
        tokenizer = folder / "model"
    held = [n for n in per_token.values() if n]
    wanted = [n for n in names if not n.startswith(_OWN) and n not in ("text", *held)]
    wanted += [n for n in names if n.startswith(("reward/", "status/")) or (n == "text" and tokenizer is None)]
    tables = [pq.read_table(file, columns=[*wanted, *held]) for file in files]
    for file, table in zip(files, tables, strict=True):
        _check(file, table, ["trainable", *held])
    table = joined(path, tables, promote="default")
    ids = _ragged(table["completion_ids"], np.int32)
    trainable = _flat(table["trainable"], np.bool_)
    values = {key: _flat(table[name], np.float32) for key, name in per_token.items() if name}
    has_ids = tokenizer is not None
    if tokenizer is not None:
        cut = Cut(ids, trainable, load_tokenizer(tokenizer)[1], "")
        _check_spelling(files[0], cut.vocabulary, tokenizer)
    elif "text" in table.column_names:
        note = "There is no tokenizer beside the file; credit is shown per word. Give its folder with --tokenizer."
        cut = cut_text([[(text or "", True)] for text in table["text"].to_pylist()])._replace(note=note)
    else:
        raise DataError(f"'{path}' holds token ids and no text; give the folder of the tokenizer with --tokenizer.")
    skipped = ("step", "prompt", "completion_ids", "trainable", "text", *held)
    return RolloutTable.of(
        "spanwise",
        path,
        cut,
        prompts=table["prompt"].to_pylist(),
        steps=steps_of(path, table),
        rewards=_rewards(path, table),
        has_ids=has_ids,
        columns={
            name: table[name].to_pylist()
            for name in table.column_names
            if name not in skipped and "/" not in name and not pa.types.is_list(table[name].type)
        },
        token_values=values if has_ids else {},
        learned_n=_learned(table, ids, trainable) if has_ids else None,
        folder=folder,
    )


def run_folder(file: Path) -> Path | None:
    """The run folder that a rollout file lies in, known by its `recipe.yaml`."""
    found = [place for place in (file.parent.parent, file.parent) if (place / "recipe.yaml").is_file()]
    return found[0] if found else None


def _check(file: Path, table: pa.Table, names: Sequence[str]) -> None:
    lengths = _lengths(file, table, "completion_ids")
    for name in names:
        other = _lengths(file, table, name)
        wrong = np.flatnonzero(lengths != other)
        if wrong.size:
            row = int(wrong[0])
            raise DataError(
                f"Completion {row} of '{file}' has {int(lengths[row])} tokens and {int(other[row])} values of '{name}'; "
                f"there must be one for each token. Was the file changed after it was written?"
            )


def _lengths(file: Path, table: pa.Table, name: str) -> np.ndarray:
    if name not in table.column_names:
        raise DataError(f"'{file}' has no column '{name}', unlike the files beside it; give one of them.")
    column = table[name]
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise DataError(f"The column '{name}' of '{file}' must hold a list per completion, not {column.type}.")
    if column.null_count:
        raise DataError(f"{column.null_count} of {len(column)} completions of '{file}' have no '{name}'.")
    flat = column.combine_chunks()
    return flat.value_lengths().to_numpy(zero_copy_only=False)


def _ragged(column: pa.ChunkedArray, dtype: Any) -> Ragged:
    lengths = column.combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
    return Ragged(_flat(column, dtype), np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))


def _flat(column: pa.ChunkedArray, dtype: Any) -> np.ndarray:
    flat = column.combine_chunks().flatten()
    if flat.null_count:
        flat = flat.cast(pa.float64())  # a gap among values is NaN; ids and flags have none
    return flat.to_numpy(zero_copy_only=False).astype(dtype)


def _rewards(path: Path, table: pa.Table) -> dict[str, Reward]:
    """The rewards with the statuses they were written with; a gap without a reason was never scored."""
    rewards = {}
    known = {status.name.lower(): status for status in Status}
    for column in table.column_names:
        if column.startswith("reward/"):
            name = column.removeprefix("reward/")
            status = f"status/{name}"
            given = table[status].to_pylist() if status in table.column_names else ["error"] * len(table)
            for row, value in enumerate(given):
                if value not in known:
                    raise DataError(
                        f"Completion {row} of '{path}' has '{value}' as '{status}', which is none of {', '.join(known)}."
                    )
            reasons = [Status.ERROR if value == "ok" else known[value] for value in given]
            rewards[name] = Reward.of([finite(value) for value in table[column].to_pylist()], status=reasons)
    return rewards


def _learned(table: pa.Table, ids: Ragged, trainable: np.ndarray) -> torch.Tensor | None:
    """A completion that has tokens and no block was left out of the loss (`mask_truncated_completions`)."""
    ends = [name for name in table.column_names if name.startswith("end/")]
    if not ends:
        return None
    inside = np.max([table[name].to_numpy() for name in ends], axis=0) > 0
    counts = np.concatenate(([0], np.cumsum(trainable)))[ids.offsets]
    return torch.from_numpy(inside | (np.diff(counts) == 0))


def _check_spelling(file: Path, vocabulary: Vocabulary, tokenizer: str | Path) -> None:
    """The first completions as the tokenizer spells them, against the text beside them."""
    if "text" not in pq.read_schema(file).names:
        return
    batch = next(pq.ParquetFile(file).iter_batches(batch_size=32, columns=["completion_ids", "trainable", "text"]), None)
    rows = [] if batch is None else batch.to_pylist()
    wrong = 0
    for row in rows:
        ids = np.array([i for i, keep in zip(row["completion_ids"], row["trainable"], strict=True) if keep], dtype=np.int64)
        known = ids[(ids >= 0) & (ids < len(vocabulary))]
        wrong += len(known) < len(ids) or vocabulary.join(known)[0].decode(errors="replace") != row["text"]
    if wrong > len(rows) // 2:
        raise DataError(
            f"The tokenizer of '{tokenizer}' spells {wrong} of the first {len(rows)} completions of '{file}' otherwise than "
            f"the file does; give the tokenizer that they were sampled with."
        )
