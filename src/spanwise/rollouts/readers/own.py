"""Read the rollout files that a training run or `spanwise credit` wrote, with the columns of `rollouts.schema`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from spanwise.credit import group_index
from spanwise.errors import DataError
from spanwise.rollouts import schema
from spanwise.rollouts.cells import read_steps
from spanwise.rollouts.files import concatenate_tables
from spanwise.rollouts.table import AsRecorded, Ragged, RolloutTable, TokenizedTexts, finite, load_tokenizer, tokenize
from spanwise.score import Reward
from spanwise.segment import Vocabulary
from spanwise.types import Status

AS_TEXT = "The file holds its tokens as text, without ids."


def read_own(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read spanwise's own parquet with the tokenizer of the run's model, or with the tokenizer that the file names.

    Credit is left where it is: it is what a method made of the rest. So are advantages, but for those of the only method, or of
    `recorded`: they are what the completions were trained with.
    """
    folder = next((place for place in (files[0].parent.parent, files[0].parent) if (place / "recipe.yaml").is_file()), None)
    arrow_schema = pq.read_schema(files[0])
    names, methods = arrow_schema.names, schema.methods_in(arrow_schema.names)
    source = schema.IDS if schema.IDS in names else schema.TOKENS
    if source == schema.TOKENS and tokenizer is not None:
        raise DataError(f"'{path}' holds its tokens as text, so there is nothing to read with --tokenizer; leave it out.")
    if source == schema.IDS and tokenizer is None:
        tokenizer = (folder and tokenizer_in(folder)) or schema.tokenizer_of(arrow_schema)
    per_token = schema.token_columns(names)
    trained_methods = [schema.RECORDED] if schema.RECORDED in methods else methods if len(methods) == 1 else []
    trained_columns = [name for method in trained_methods if (name := schema.column("advantages", method)) in names]
    unread = {
        schema.column("start", block) for block in schema.family_names(names, "end")
    }  # segmentation finds the spans again
    unread.update(name for method in methods for name in schema.method_columns(method, names) if name not in trained_columns)
    unread.update([] if tokenizer is None else [schema.TEXT])
    tables = [pq.read_table(file, columns=[name for name in names if name not in unread]) for file in files]
    for file, table in zip(files, tables, strict=True):
        schema.token_edges(table, [source, schema.TRAINABLE, *per_token, *trained_columns], f"'{file}'")
    table = concatenate_tables(path, tables)
    trainable = schema.flat_values(table[schema.TRAINABLE], np.bool_)
    edges = schema.offsets(table[source])
    if source == schema.TOKENS:  # each distinct token text gets an id
        token_texts = table[source].combine_chunks().flatten().dictionary_encode()
        vocabulary = Vocabulary(tuple(token_texts.dictionary.cast(pa.binary()).to_pylist()) or (b"",))
        ids = token_texts.indices.to_numpy(zero_copy_only=False).astype(np.int32)
        tokens = TokenizedTexts(Ragged(ids, edges), trainable, vocabulary, AS_TEXT)
    elif tokenizer is not None:
        vocabulary = load_tokenizer(tokenizer)[1]
        tokens = TokenizedTexts(Ragged(schema.flat_values(table[source], np.int32), edges), trainable, vocabulary, "")
        _check_spelling(files[0], vocabulary, tokenizer)
    else:
        per_token, trained_columns = [], []  # numbers per token do not fit other tokens
        if schema.TEXT not in names:
            raise DataError(f"'{path}' holds token ids and no text; give the folder of the tokenizer with --tokenizer.")
        note = "There is no tokenizer beside the file; credit is shown per word. Give its folder with --tokenizer."
        tokens = tokenize([[(text or "", True)] for text in table[schema.TEXT].to_pylist()])._replace(note=note)
    plain = [column_field.name for column_field in table.schema if not pa.types.is_list(column_field.type)]
    rollouts = _whole(path, table, schema.ROLLOUT)
    values = {name: schema.flat_values(table[name], np.float64) for name in trained_columns}
    recorded = [AsRecorded(f"the file's '{name}'", value, shares=True, by_token=True) for name, value in values.items()]
    return replace(
        RolloutTable.of(
            "spanwise",
            path,
            tokens,
            prompts=table[schema.PROMPT].to_pylist(),
            steps=read_steps(path, table[schema.STEP].to_pylist() if schema.STEP in plain else [None] * len(table)),
            keys=_whole(path, table, schema.GROUP),
            columns={name: table[name].to_pylist() for name in plain if schema.type_of(name) is None},
            rewards={},
        ),
        rewards=_rewards(path, table),
        tokenizer=None if tokenizer is None else Path(tokenizer),
        token_values={name: schema.flat_values(table[name], np.float32) for name in per_token},
        learned_n=None if source == schema.IDS and tokenizer is None else _learned(table, tokens),
        folder=folder,
        as_recorded=next(iter(recorded), None),
        rollout_n=None if rollouts is None else group_index(rollouts),
        score_n=schema.float_column(table, schema.SCORE) if schema.SCORE in plain else None,
    )


def tokenizer_in(run: Path) -> Path | None:
    """Return the folder with a run's tokenizer: `model` or, for a run of a script, `tokenizer`; None if neither has one."""
    return next((run / name for name in ("model", "tokenizer") if (run / name / "tokenizer.json").is_file()), None)


def _whole(path: Path, table: pa.Table, name: str) -> list[int] | None:
    """Return the column of group or rollout ids; refuse one with gaps."""
    if name not in table.column_names:
        return None
    if missing_count := table[name].null_count:
        problem = f"{missing_count} of {len(table)} completions of '{path}' have no '{name}'"
        raise DataError(f"{problem}; fill in every row, or remove the column.")
    return table[name].to_pylist()


def _rewards(path: Path, table: pa.Table) -> dict[str, Reward]:
    """Read the rewards with their statuses; a missing value without a status counts as unscored."""
    rewards = {}
    codes = {status.name.lower(): status for status in Status}
    for name in schema.family_names(table.column_names, "reward"):
        status = schema.column("status", name)
        statuses = table[status].to_pylist() if status in table.column_names else ["unscored"] * len(table)
        wrong_row = next((row for row, value in enumerate(statuses) if value not in codes), None)
        if wrong_row is not None:
            problem = f"Completion {wrong_row} of '{path}' has '{statuses[wrong_row]}' as '{status}'"
            raise DataError(f"{problem}, which is none of {', '.join(codes)}.")
        values = [finite(value) for value in table[schema.column("reward", name)].to_pylist()]
        rewards[name] = Reward.of(values, status=[Status.UNSCORED if value == "ok" else codes[value] for value in statuses])
    return rewards


def _learned(table: pa.Table, tokens: TokenizedTexts) -> torch.Tensor | None:
    """Return which completions were in the loss; one with tokens and no block was masked (`mask_truncated_completions`)."""
    ends = [table[schema.column("end", name)].to_numpy() for name in schema.family_names(table.column_names, "end")]
    if not ends:
        return None
    counts = np.concatenate(([0], np.cumsum(tokens.trainable)))[tokens.ids.offsets]
    return torch.from_numpy((np.max(ends, axis=0) > 0) | (np.diff(counts) == 0))


def _check_spelling(file: Path, vocabulary: Vocabulary, tokenizer: str | Path) -> None:
    """Refuse a tokenizer that decodes the first completions to another text than the file holds."""
    parquet_file = pq.ParquetFile(file)
    names = [schema.IDS, schema.TRAINABLE, schema.TEXT]
    if schema.TEXT not in parquet_file.schema_arrow.names:
        return
    rows = [row for batch in islice(parquet_file.iter_batches(batch_size=32, columns=names), 1) for row in batch.to_pylist()]
    errors = 0
    for row in rows:
        ids = np.array(row[schema.IDS], dtype=np.int64)[np.array(row[schema.TRAINABLE], dtype=np.bool_)]
        known_ids = ids[(ids >= 0) & (ids < len(vocabulary))]
        errors += len(known_ids) < len(ids) or vocabulary.join(known_ids)[0].decode(errors="replace") != row[schema.TEXT]
    if errors > len(rows) // 2:
        raise DataError(
            f"The tokenizer of '{tokenizer}' decodes {errors} of the first {len(rows)} completions of '{file}' to "
            f"another text than the file holds; give the tokenizer that they were sampled with."
        )
