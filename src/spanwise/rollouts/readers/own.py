"""Read the rollout files that a training run or `spanwise credit` wrote, whose columns `rollouts.schema` defines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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


def read_own(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read spanwise's own parquet with the tokenizer of the run's model, or with the tokenizer that the file names."""
    run_folder = next((path for path in (files[0].parent.parent, files[0].parent) if (path / "recipe.yaml").is_file()), None)
    arrow_schema = pq.read_schema(files[0])
    names, methods = arrow_schema.names, schema.methods_in(arrow_schema.names)
    token_source = schema.IDS if schema.IDS in names else schema.TOKENS
    if token_source == schema.TOKENS and tokenizer is not None:
        raise DataError(f"'{path}' holds its tokens as text, so --tokenizer has nothing to read; leave --tokenizer out.")
    if token_source == schema.IDS and tokenizer is None:
        tokenizer = (run_folder and tokenizer_in(run_folder)) or schema.tokenizer_of(arrow_schema)
    stream_columns = schema.token_columns(names)
    # The advantages that training used are those called `recorded`, or those of the only method in the file.
    trained_methods = [schema.RECORDED] if schema.RECORDED in methods else methods if len(methods) == 1 else []
    trained_columns = [name for method in trained_methods if (name := schema.column("advantages", method)) in names]
    # Columns of credit, spans and text are not read: they are computed again from the tokens and rewards.
    unread_columns = {name for method in methods for name in schema.method_columns(method, names)} - {*trained_columns}
    unread_columns |= {schema.column("start", block) for block in schema.family_names(names, "end")}
    unread_columns |= set() if tokenizer is None else {schema.TEXT}
    tables = [pq.read_table(file, columns=[name for name in names if name not in unread_columns]) for file in files]
    for file, table in zip(files, tables, strict=True):
        schema.token_edges(table, [token_source, schema.TRAINABLE, *stream_columns, *trained_columns], f"'{file}'")
    table = concatenate_tables(path, tables)
    trainable = schema.flat_values(table[schema.TRAINABLE], np.bool_)
    edges = schema.offsets(table[token_source])
    if token_source == schema.TOKENS:  # each distinct token text gets an id
        token_texts = table[token_source].combine_chunks().flatten().dictionary_encode()
        vocabulary = Vocabulary(tuple(token_texts.dictionary.cast(pa.binary()).to_pylist()) or (b"",))
        text_ids = token_texts.indices.to_numpy(zero_copy_only=False).astype(np.int32)
        token_note = "The file holds its tokens as text, without ids."
        tokens = TokenizedTexts(Ragged(text_ids, edges), trainable, vocabulary, token_note)
    elif tokenizer is not None:
        vocabulary = load_tokenizer(tokenizer)[1]
        tokens = TokenizedTexts(Ragged(schema.flat_values(table[token_source], np.int32), edges), trainable, vocabulary, "")
        _check_spelling(files[0], vocabulary, tokenizer)
    else:
        stream_columns, trained_columns = [], []  # the text is split into words, which numbers per token do not fit
        if schema.TEXT not in names:
            raise DataError(f"'{path}' holds token ids, but no text; give the folder of the tokenizer with --tokenizer.")
        token_note = (
            "There is no tokenizer beside the file; credit is shown per word. Give the tokenizer's folder with --tokenizer."
        )
        tokens = tokenize([[(text or "", True)] for text in table[schema.TEXT].to_pylist()])._replace(note=token_note)
    single_names = [field.name for field in table.schema if not pa.types.is_list(field.type)]
    rollout_ids = _read_ids(path, table, schema.ROLLOUT)
    trained_values = {name: schema.flat_values(table[name], np.float64) for name in trained_columns}
    training_records = [
        AsRecorded(f"the file's '{name}'", value, shares=True, by_token=True) for name, value in trained_values.items()
    ]
    return replace(
        RolloutTable.of(
            "spanwise",
            path,
            tokens,
            prompts=table[schema.PROMPT].to_pylist(),
            steps=read_steps(path, table[schema.STEP].to_pylist() if schema.STEP in single_names else [None] * len(table)),
            keys=_read_ids(path, table, schema.GROUP),
            columns={name: table[name].to_pylist() for name in single_names if schema.type_of(name) is None},
            rewards={},
        ),
        rewards=_read_rewards(path, table),
        tokenizer=None if tokenizer is None else Path(tokenizer),
        token_values={name: schema.flat_values(table[name], np.float32) for name in stream_columns},
        learned_n=None if token_source == schema.IDS and tokenizer is None else _find_learned(table, tokens),
        folder=run_folder,
        as_recorded=next(iter(training_records), None),
        rollout_n=None if rollout_ids is None else group_index(rollout_ids),
        score_n=schema.float_column(table, schema.SCORE) if schema.SCORE in single_names else None,
    )


def tokenizer_in(run: Path) -> Path | None:
    """Return the folder with a run's tokenizer: `model`, or `tokenizer` if a user's script trained; None without either."""
    return next((run / name for name in ("model", "tokenizer") if (run / name / "tokenizer.json").is_file()), None)


def _read_ids(path: Path, table: pa.Table, name: str) -> list[int] | None:
    """Return a rollout file's column of group or rollout ids, None if it has none; refuse a column in which ids are missing."""
    if name not in table.column_names:
        return None
    if missing_count := table[name].null_count:
        problem = f"{missing_count} of {len(table)} completions of '{path}' have no '{name}'"
        raise DataError(f"{problem}; fill in every row, or remove the column.")
    return table[name].to_pylist()


def _read_rewards(path: Path, table: pa.Table) -> dict[str, Reward]:
    """Read the rewards with their statuses; a missing value without a status counts as unscored."""
    rewards = {}
    status_of_word = {status.name.lower(): status for status in Status} | {"ok": Status.UNSCORED}
    for name in schema.family_names(table.column_names, "reward"):
        status_column = schema.column("status", name)
        status_words = table[status_column].to_pylist() if status_column in table.column_names else ["unscored"] * len(table)
        row_index = next((row_index for row_index, word in enumerate(status_words) if word not in status_of_word), None)
        if row_index is not None:
            problem = f"Completion {row_index} of '{path}' has '{status_words[row_index]}' as '{status_column}'"
            raise DataError(f"{problem}; a status is one of {', '.join(status_of_word)}.")
        reward_values = [finite(value) for value in table[schema.column("reward", name)].to_pylist()]
        rewards[name] = Reward.of(reward_values, status=[status_of_word[word] for word in status_words])
    return rewards


def _find_learned(table: pa.Table, tokens: TokenizedTexts) -> torch.Tensor | None:
    """Return which completions were in the loss: a completion that has sampled tokens but no block was left out."""
    block_ends = [table[schema.column("end", name)].to_numpy() for name in schema.family_names(table.column_names, "end")]
    if not block_ends:
        return None
    sampled_count_before = np.concatenate(([0], np.cumsum(tokens.trainable)))[tokens.ids.offsets]
    return torch.from_numpy((np.max(block_ends, axis=0) > 0) | (np.diff(sampled_count_before) == 0))


def _check_spelling(file: Path, vocabulary: Vocabulary, tokenizer: str | Path) -> None:
    """Refuse a tokenizer that decodes most of the first completions to other texts than the file holds."""
    parquet_file = pq.ParquetFile(file)
    checked_columns = [schema.IDS, schema.TRAINABLE, schema.TEXT]
    if schema.TEXT not in parquet_file.schema_arrow.names:
        return
    first_batch = next(parquet_file.iter_batches(batch_size=32, columns=checked_columns), None)
    rows, errors = [] if first_batch is None else first_batch.to_pylist(), 0
    for row in rows:
        own_ids = np.array(row[schema.IDS], dtype=np.int64)[np.array(row[schema.TRAINABLE], dtype=np.bool_)]
        known_ids = own_ids[(own_ids >= 0) & (own_ids < len(vocabulary))]
        errors += len(known_ids) < len(own_ids) or vocabulary.join(known_ids)[0].decode(errors="replace") != row[schema.TEXT]
    if errors > len(rows) // 2:
        raise DataError(
            f"The tokenizer of '{tokenizer}' decodes {errors} of the first {len(rows)} completions of '{file}' to other texts "
            "than the file holds; give the tokenizer that they were sampled with."
        )
