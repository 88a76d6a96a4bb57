"""Read rollout files that a training run or `spanwise credit` wrote. `rollouts.schema` defines their columns."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from spanwise.errors import DataError
from spanwise.rollouts import schema
from spanwise.rollouts.cells import parse_literal, read_steps, refuse_words
from spanwise.rollouts.columns import Shared, read_row_batches
from spanwise.rollouts.files import ReadingProgress, concatenate_tables
from spanwise.rollouts.table import AsRecorded, Ragged, RolloutTable, TokenizedTexts, finite, load_tokenizer, tokenize
from spanwise.rollouts.token_rows import DiskArray
from spanwise.score import Reward
from spanwise.segment import Vocabulary
from spanwise.types import Status


def read_own(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read spanwise's own parquet files. The default tokenizer is the run's or the file's."""
    parent_folders = (files[0].parent.parent, files[0].parent)
    run_folder = next((folder for folder in parent_folders if (folder / "recipe.yaml").is_file()), None)
    arrow_schema = pq.read_schema(files[0])
    column_names = arrow_schema.names
    method_names = schema.methods_in(column_names)
    token_column = schema.IDS if schema.IDS in column_names else schema.TOKENS
    if token_column == schema.TOKENS and tokenizer is not None:
        raise DataError(f"'{path}' holds its tokens as text, so spanwise needs no tokenizer. Leave --tokenizer out.")
    if token_column == schema.IDS and tokenizer is None:
        run_tokenizer = None if run_folder is None else tokenizer_in(run_folder)
        tokenizer = run_tokenizer or schema.tokenizer_of(arrow_schema)
    number_columns = schema.token_columns(column_names)
    # Training used the advantages `recorded` or, if the file has none, the advantages of the file's only method.
    possible_methods = [schema.RECORDED] if schema.RECORDED in method_names else method_names
    advantage_columns = [schema.column("advantages", method) for method in possible_methods]
    recorded_names = [name for name in advantage_columns if name in column_names] if len(advantage_columns) == 1 else []
    # Credit, spans and text are computed again, so they are not read.
    unread_columns = {name for method in method_names for name in schema.method_columns(method, column_names)}
    unread_columns |= {schema.column("start", block) for block in schema.family_names(column_names, "end")}
    # The lists of tokens and the texts are read later, a few rows at a time.
    unread_columns |= {schema.TEXT, *(field.name for field in arrow_schema if pa.types.is_nested(field.type))}
    splits_words = token_column == schema.IDS and tokenizer is None
    if splits_words and schema.TEXT not in column_names:
        raise DataError(f"'{path}' holds token ids, but no text; give the folder of the tokenizer with --tokenizer.")
    if splits_words:  # drop numbers per token, because the text is split into words instead
        number_columns, recorded_names = [], []
    kept_columns = [name for name in column_names if name not in unread_columns]
    table = concatenate_tables(path, [pq.read_table(file, columns=kept_columns) for file in files])
    dtype_of_column = {token_column: np.int32, schema.TRAINABLE: np.bool_}
    dtype_of_column |= {**dict.fromkeys(number_columns, np.float32), **dict.fromkeys(recorded_names, np.float64)}
    file_tokens = _read_tokens(files, token_column, dtype_of_column, keep=not splits_words)
    is_trainable = file_tokens.columns[schema.TRAINABLE]
    if token_column == schema.TOKENS:  # `_read_tokens` gives an id to each distinct token text
        vocabulary = Vocabulary(tuple(file_tokens.id_of_piece) or (b"",))
        token_note = "The file holds its tokens as text, without ids."
        tokens = TokenizedTexts(file_tokens.ids, is_trainable, vocabulary, token_note)
    elif tokenizer is not None:
        vocabulary = load_tokenizer(tokenizer)[1]
        tokens = TokenizedTexts(file_tokens.ids, is_trainable, vocabulary, "")
        _check_spelling(files[0], vocabulary, tokenizer)
    else:
        token_note = (
            "There is no tokenizer beside the file; credit is shown per word. Give the tokenizer's folder with --tokenizer."
        )
        text_columns = (batch[schema.TEXT] for batch in _batches(files, [schema.TEXT]))
        completion_texts = (text or "" for column in text_columns for text in column.to_pylist())
        tokens = tokenize([(text, True)] for text in completion_texts)._replace(note=token_note)
    deduplicate = Shared()
    scalar_names = [field.name for field in table.schema if not pa.types.is_list(field.type)]
    dataset_columns = {name: table[name].to_pylist() for name in scalar_names if schema.type_of(name) is None}
    if schema.ANSWER in dataset_columns:
        dataset_columns[schema.ANSWER] = [*map(_parse_answer, dataset_columns[schema.ANSWER])]
    recorded_advantages = (
        AsRecorded(f"the file's '{name}'", file_tokens.columns[name], shares=True, by_token=True) for name in recorded_names
    )
    return replace(
        RolloutTable.of(
            "spanwise",
            path,
            tokens,
            prompts=[deduplicate(text) for chunk in table[schema.PROMPT].chunks for text in chunk.to_pylist()],
            steps=read_steps(path, table[schema.STEP].to_pylist() if schema.STEP in scalar_names else [None] * len(table)),
            keys=_read_groups(path, table),
            rollouts=_read_rollouts(table),
            columns=dataset_columns,
            rewards={},
        ),
        rewards=_read_rewards(path, table),
        tokenizer=None if tokenizer is None else Path(tokenizer),
        token_values={name: file_tokens.columns[name] for name in number_columns},
        learned_n=None if splits_words else _find_learned(table, tokens),
        folder=run_folder,
        as_recorded=next(recorded_advantages, None),
        after_values={key: schema.float_column(table, key) for key in scalar_names if key.partition("/")[0] == schema.AFTER},
        score_n=schema.float_column(table, schema.SCORE) if schema.SCORE in scalar_names else None,
    )


def _parse_answer(cell: Any) -> Any:
    """Parse the cell of a gold answer. The JSON of a list with one text becomes that list again, because rewards read its entry."""
    if not (isinstance(cell, str) and cell.startswith('["')):
        return cell
    answers = parse_literal(cell)
    return answers if len(answers) == 1 and json.dumps(answers) == cell else cell


class _Tokens(NamedTuple):
    """The tokens of rollout files, stored end to end."""

    ids: Ragged
    columns: dict[str, np.ndarray]
    id_of_piece: dict[bytes, int]  # maps token texts to ids, if the file has no ids


def _read_tokens(files: Sequence[Path], token_column: str, dtype_by_column: Mapping[str, Any], *, keep: bool) -> _Tokens:
    """Check the token columns of files, and collect them if `keep` is true."""
    flat_columns = {name: DiskArray(dtype) for name, dtype in dtype_by_column.items()}
    token_counts = array("q")
    id_of_piece: dict[bytes, int] = {}
    for table in _batches(files, [*dtype_by_column], check=True):
        token_counts.extend(np.diff(schema.offsets(table[token_column])).tolist())
        for name, flat_column in flat_columns.items() if keep else ():
            if name == schema.TOKENS:
                encoded_tokens = table[name].combine_chunks().flatten().dictionary_encode()
                token_pieces = encoded_tokens.dictionary.cast(pa.binary()).to_pylist()
                piece_ids = [id_of_piece.setdefault(piece, len(id_of_piece)) for piece in token_pieces]
                batch_values = np.array(piece_ids, np.int32)[encoded_tokens.indices.to_numpy(zero_copy_only=False)]
            else:
                batch_values = schema.flat_values(table[name], flat_column.dtype)
            flat_column.extend(batch_values)
    values_by_column = {name: flat_column.read() for name, flat_column in flat_columns.items()}
    token_offsets = np.concatenate(([0], np.cumsum(token_counts, dtype=np.int64)))
    return _Tokens(Ragged(values_by_column[token_column], token_offsets), values_by_column, id_of_piece)


def _batches(files: Sequence[Path], names: Sequence[str], *, check: bool = False) -> Iterator[pa.Table]:
    """Yield some columns of rollout files, a few hundred rows at a time. `check`: refuse a row of unequal lists."""
    progress = ReadingProgress(files)
    for file in files:
        for batch in read_row_batches(file, names, progress):
            batch_table = pa.Table.from_batches([batch])
            if check:
                try:
                    schema.token_edges(batch_table, names, f"'{file}'")
                except DataError:  # read the whole file, so that the error counts all its rows
                    schema.token_edges(pq.read_table(file, columns=names), names, f"'{file}'")
                    raise
            yield batch_table


def tokenizer_in(run: Path) -> Path | None:
    """Return the folder of a run's tokenizer, or None."""
    return next((run / name for name in ("model", "tokenizer") if (run / name / "tokenizer.json").is_file()), None)


def _read_groups(path: Path, table: pa.Table) -> list[int] | None:
    """Return the group ids of a file, if it has them. Refuse missing ids."""
    if schema.GROUP not in table.column_names:
        return None
    if empty_id_count := table[schema.GROUP].null_count:
        raise DataError(
            f"{empty_id_count} of {len(table)} completions of '{path}' have no '{schema.GROUP}'; fill in every row, or remove the "
            "column."
        )
    return table[schema.GROUP].to_pylist()


def _read_rollouts(table: pa.Table) -> list[int | str] | None:
    """Return the rollout ids of a file, if it has them. A row without one, as in a batch without turns, is a rollout."""
    if schema.ROLLOUT not in table.column_names:
        return None
    return [f"row {row}" if name is None else name for row, name in enumerate(table[schema.ROLLOUT].to_pylist())]


def _read_rewards(path: Path, table: pa.Table) -> dict[str, Reward]:
    """Read the rewards with their statuses. A missing value without a status counts as unscored."""
    rewards = {}
    status_of_word = {status.name.lower(): status for status in Status} | {"ok": Status.UNSCORED}
    for name in schema.family_names(table.column_names, "reward"):
        status_column = schema.column("status", name)
        has_statuses = status_column in table.column_names
        status_words = table[status_column].to_pylist() if has_statuses else ["unscored"] * len(table)
        for row_index, word in enumerate(status_words):
            if word not in status_of_word:
                status_problem = f"Completion {row_index} of '{path}' has '{word}' in column '{status_column}'"
                raise DataError(f"{status_problem}; a status is one of {', '.join(status_of_word)}.")
        reward_cells = table[schema.column("reward", name)].to_pylist()
        refuse_words(path, schema.column("reward", name), reward_cells)
        rewards[name] = Reward.of([*map(finite, reward_cells)], status=[status_of_word[word] for word in status_words])
    return rewards


def _find_learned(table: pa.Table, tokens: TokenizedTexts) -> torch.Tensor | None:
    """Mark the completions that were trained. Those that the loss left out have sampled tokens but no block."""
    block_names = schema.family_names(table.column_names, "end")
    block_ends = [table[schema.column("end", name)].to_numpy() for name in block_names]
    if not block_ends:
        return None
    sampled_flags = tokens.ids.with_values(tokens.trainable)
    has_sampled_token_n = np.fromiter((sampled_flags.slice(n, n + 1).any() for n in range(len(sampled_flags))), np.bool_)
    return torch.from_numpy((np.max(block_ends, axis=0) > 0) | ~has_sampled_token_n)


def _check_spelling(file: Path, vocabulary: Vocabulary, tokenizer: str | Path) -> None:
    """Refuse a tokenizer that decodes the file's token ids to other texts than the file holds."""
    parquet_file = pq.ParquetFile(file)
    checked_columns = [schema.IDS, schema.TRAINABLE, schema.TEXT]
    if schema.TEXT not in parquet_file.schema_arrow.names:
        return
    first_batch = next(parquet_file.iter_batches(batch_size=32, columns=checked_columns), None)
    first_rows = [] if first_batch is None else first_batch.to_pylist()
    misspelled_count = 0
    for row in first_rows:
        sampled_ids = np.array(row[schema.IDS], dtype=np.int64)[np.array(row[schema.TRAINABLE], dtype=np.bool_)]
        valid_ids = sampled_ids[(sampled_ids >= 0) & (sampled_ids < len(vocabulary))]
        decoded_text = vocabulary.join(valid_ids)[0].decode(errors="replace")
        misspelled_count += len(valid_ids) < len(sampled_ids) or decoded_text != row[schema.TEXT]
    if misspelled_count > len(first_rows) // 2:
        raise DataError(
            f"The tokenizer of '{tokenizer}' decodes {misspelled_count} of the first {len(first_rows)} completions of '{file}' "
            "to other texts than the file holds. Give the tokenizer of the model that sampled the completions."
        )
