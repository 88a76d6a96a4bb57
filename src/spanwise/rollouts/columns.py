"""Read table columns in pieces. Short cells go into lists; long texts are read from the file at every use."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spanwise.rollouts import cells
from spanwise.rollouts.files import ReadingProgress, concatenate_tables, delimited_names, read_batches, read_records

_ROWS_AT_ONCE = 256
#: A function that reads the named columns (None: all) in chunks. It yields each chunk's row count and columns.
Pieces = Callable[[Collection[str] | None], Iterator[tuple[int, Mapping[str, Sequence[Any]]]]]


@dataclass(frozen=True)
class RereadColumn:
    """A column that is read from its files again at every iteration, to save memory."""

    read: Callable[[], Iterator[Any]]
    size: int

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        return self.read()


class Shared:
    """Replaces equal texts, and equal chats, by one object to save memory."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._chats: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        """Return an equal text or chat from an earlier call, or `value` itself if there is none."""
        if isinstance(value, str):
            return self._texts.setdefault(value, value)
        if cells.is_chat(value):
            stored_chat = self._chats.setdefault(hash(json.dumps(value, default=str)), value)
            return stored_chat if stored_chat == value else value
        return value


class ColumnBuilder:
    """Collects rows as columns, with None where a row lacks a field. Equal texts are stored once."""

    def __init__(self) -> None:
        self.columns: dict[Any, list[Any]] = {}
        self._size, self._shared = 0, Shared()

    def __len__(self) -> int:
        return self._size

    def append(self, row: Mapping[Any, Any]) -> None:
        """Add a row."""
        self.extend(1, {name: (value,) for name, value in row.items()})

    def update(self, place: int, row: Mapping[Any, Any]) -> None:
        """Set some fields of a row that was added before."""
        for name, value in row.items():
            self._column(name)[place] = value

    def extend(self, size: int, piece: Mapping[Any, Sequence[Any]]) -> None:
        """Add several rows, given as columns."""
        for name, values in piece.items():
            self._column(name).extend(map(self._shared, values))
        self._size += size
        for column in self.columns.values():
            if len(column) < self._size:
                column.extend([None] * (self._size - len(column)))

    def _column(self, name: Any) -> list[Any]:
        """Return a field's column, and fill a new column with None for all earlier rows."""
        if name not in self.columns:
            self.columns[name] = [None] * self._size
        return self.columns[name]


def read_columns(pieces: Pieces, long: Collection[str | None]) -> dict[str, list[Any] | RereadColumn]:
    """Read the columns of a table into lists. Columns in `long` are read from their files at every use."""
    column_builder = ColumnBuilder()
    on_disk_names: dict[str, None] = {}
    for row_count, piece in pieces(None):
        on_disk_names |= dict.fromkeys(name for name in piece if name in long)
        column_builder.extend(row_count, {name: () if name in long else values for name, values in piece.items()})

    def cells_of(name: str) -> Iterator[Any]:
        return (cell for row_count, piece in pieces([name]) for cell in piece.get(name, [None] * row_count))

    return {
        name: RereadColumn(partial(cells_of, name), len(column_builder)) if name in on_disk_names else column
        for name, column in column_builder.columns.items()
    }


def json_pieces(files: Sequence[Path], names: Collection[str] | None) -> Iterator[tuple[int, Mapping[str, Sequence[Any]]]]:
    """Yield the records of JSON files one at a time: a row count of 1, and the record's columns."""
    for _, _, record in read_records(files):
        yield 1, {name: (value,) for name, value in record.items() if names is None or name in names}


def delimited_pieces(
    files: Sequence[Path], names: Collection[str] | None
) -> Iterator[tuple[int, Mapping[str, Sequence[Any]]]]:
    """Yield the columns of CSV or TSV files, some rows at a time."""
    progress = ReadingProgress(files)
    for file in files:
        column_names = [name for name in delimited_names(file)[0] if names is None or name in names]
        for batch in read_batches(file, column_names or None, progress):
            yield len(batch), {name: batch[name].to_pylist() for name in column_names}


def read_row_batches(file: Path, names: Sequence[str], progress: ReadingProgress) -> Iterator[pa.RecordBatch]:
    """Yield some columns of a parquet file, a few hundred rows at a time."""
    # By default Arrow reads whole column chunks and keeps them until the last row.
    parquet_file = pq.ParquetFile(file, buffer_size=2**20, pre_buffer=False)
    bytes_per_row = file.stat().st_size / max(parquet_file.metadata.num_rows, 1)
    for row_batch in parquet_file.iter_batches(_ROWS_AT_ONCE, columns=names):
        progress.add(len(row_batch) * bytes_per_row)
        yield row_batch


def parquet_pieces(
    path: Path, files: Sequence[Path], names: Collection[str] | None
) -> Iterator[tuple[int, Mapping[str, Sequence[Any]]]]:
    """Yield the columns of parquet files, some rows at a time. A column has one type that fits all files."""
    progress = ReadingProgress(files)
    empty_tables = [pq.read_schema(file).empty_table() for file in files]
    joined_schema = concatenate_tables(path, empty_tables).schema
    for file, empty_table in zip(files, empty_tables, strict=True):
        column_names = [name for name in empty_table.column_names if names is None or name in names]
        for batch in read_row_batches(file, column_names, progress):
            batch_columns = {}
            for name in column_names:
                column = batch[name]
                joined_type = joined_schema.field(name).type
                batch_columns[name] = (column if column.type == joined_type else column.cast(joined_type)).to_pylist()
            yield len(batch), batch_columns
