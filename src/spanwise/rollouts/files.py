"""Read parquet, CSV, TSV and JSON files. Report unreadable files in one sentence."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from io import BufferedReader
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import csv as arrow_csv

from spanwise.errors import DataError, first_line
from spanwise.rollouts.cells import at_place, short_repr
from spanwise.rollouts.json_array import array_entries

Parsed = TypeVar("Parsed")
SUFFIXES = {".csv": ",", ".tsv": "\t"}  # The usual delimiter of each text format.
#: The usual and the largest number of bytes to read at once.
_BLOCK, _LARGEST_BLOCK = 2**20, 2**31 - 1
#: The function that shows progress. Its arguments are the work, the amount done and the total.
REPORT: ContextVar[Callable[[str, int, int], None]] = ContextVar("report", default=lambda work, done, total: None)


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Raise a DataError if the code in the `with` block cannot read its file."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if file.is_file() and file.stat().st_size == 0:
            raise DataError(f"'{file}' is empty.") from error
        if isinstance(error, OSError) and error.errno:
            raise DataError(f"'{file}' cannot be read: {os.strerror(error.errno)}.") from error
        raise DataError(f"'{file}' is not readable as parquet; it is damaged or cut off ({first_line(error)}).") from error


def check_names(file: Path, names: Sequence[str]) -> None:
    """Raise an error if a table has two columns of the same name."""
    repeated_name = next((name for name in names if names.count(name) > 1), None)
    if repeated_name is not None:
        raise DataError(f"'{file}' has several columns called '{repeated_name}'; give each column its own name.")


def concatenate_tables(path: Path, tables: Iterable[pa.Table]) -> pa.Table:
    """Concatenate the Arrow tables of several files. Raise an error if their columns do not fit together."""
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
        raise DataError(f"The files of '{path}' differ in their columns ({first_line(error)}). Give one file.") from None


class ReadingProgress:
    """Reports how many bytes of some files have been read, once per percent."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.total = sum(file.stat().st_size for file in files if file.is_file())
        self._done, self._percent, self._report = 0.0, 0, REPORT.get()

    def add(self, size: int | float) -> None:
        """Count `size` more bytes as read. The number may be an estimate."""
        self._done += size
        # Rounding may put the sum of fractions just below a whole percent.
        percent = int(100 * self._done / max(self.total, 1) + 1e-6)
        if percent > self._percent:
            self._percent = percent
            self._report("reading", min(round(self._done), self.total), self.total)


def delimited_names(file: Path) -> tuple[list[str], str]:
    """Return the column names of a CSV or TSV file, and its delimiter: that of the suffix, else `;`, else a tab."""
    with readable(file), file.open("rb") as stream:
        byte_lines = iter(partial(stream.readline, 2**20), b"")  # no CSV heading is longer than 1 MiB, so limit each line
        heading = next((line for line in byte_lines if line.strip()), b"")
    if not heading:
        raise DataError(f"'{file}' is empty.")
    if heading.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"'{file}' is UTF-16; save it as CSV in UTF-8.")
    heading_lines = heading.decode("utf-8-sig", "replace").splitlines()
    heading_line = next((line for line in heading_lines if line.strip()), "")
    if re.fullmatch(r"\s*[\[{]\s*([{\"].*)?", heading_line):
        raise DataError(f"'{file}' looks like JSON, not like CSV; let its name end in '.json' or '.jsonl'.")
    if {"\0", "\ufffd"} & {*heading_line}:
        raise DataError(f"'{file}' is not UTF-8 text; save it as CSV in UTF-8.")
    delimiters = (SUFFIXES.get(file.suffix.lower(), ","), ";", "\t")
    names_by_delimiter = {candidate: next(csv.reader([heading_line], delimiter=candidate)) for candidate in delimiters}
    delimiter = next((candidate for candidate in delimiters if len(names_by_delimiter[candidate]) > 1), delimiters[0])
    check_names(file, names_by_delimiter[delimiter])
    return names_by_delimiter[delimiter], delimiter


def read_delimited(file: Path) -> pa.Table:
    """Read the columns of a CSV or TSV file as texts. An empty cell without quotes becomes null."""
    schema = pa.schema(dict.fromkeys(delimited_names(file)[0], pa.large_string()))
    return pa.Table.from_batches(read_batches(file, None, ReadingProgress([file])), schema)


def read_batches(file: Path, columns: Sequence[str] | None, progress: ReadingProgress) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a CSV or TSV file as texts, in the file's order. Cells in quotes may hold line breaks."""
    column_names, delimiter = delimited_names(file)
    convert_options = arrow_csv.ConvertOptions(
        column_types=dict.fromkeys(column_names, pa.large_string()), include_columns=columns,
        strings_can_be_null=True, quoted_strings_can_be_null=False, null_values=[""],
    )  # fmt: skip
    parse_options = arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    block_size = _BLOCK
    row_count = 0
    while True:
        read_options = arrow_csv.ReadOptions(block_size=block_size, use_threads=False)
        skipped_row_count = row_count
        try:
            with arrow_csv.open_csv(file, read_options, parse_options, convert_options) as reader:
                for whole_batch in reader:
                    new_rows = whole_batch.slice(min(skipped_row_count, len(whole_batch)))
                    skipped_row_count -= len(whole_batch) - len(new_rows)
                    row_count += len(new_rows)
                    progress.add(block_size if len(new_rows) else 0)
                    yield new_rows
            return
        except (pa.ArrowException, UnicodeDecodeError) as error:
            format_fault = first_line(error).removeprefix("CSV parse error: ")[:200]
        # A row may be longer than the CSV reader's block of bytes, so read again with larger blocks.
        if "straddles two block boundaries" not in format_fault or block_size > file.stat().st_size:
            break
        block_size = min(8 * block_size, _LARGEST_BLOCK)
    if "utf8" in format_fault.lower() or "utf-8" in format_fault.lower():
        raise DataError(f"'{file}' cannot be read as CSV, because it is not UTF-8; save it in UTF-8.")
    advice = ""
    if count_match := re.search(r"Expected (\d+) columns, got (\d+)", format_fault):
        format_fault = f"{format_fault[0].lower()}{format_fault[1:]}"
        advice = " Put text that holds a comma or a line break in quotes."
        if int(count_match[2]) < int(count_match[1]):
            advice += " If the file was cut off, write it again."
    raise DataError(f"'{file}' cannot be read as CSV: {format_fault}.{advice}")


def parse_records(files: Sequence[Path], parse: Callable[[Mapping[str, Any]], Parsed]) -> Iterator[Parsed]:
    """Yield `parse(record)` for every record of the files. An error names the record's file and line."""
    for file, record_place, record in read_records(files):
        with at_place(f"{record_place} of '{file}'"):
            parsed_record = parse(record)
        yield parsed_record


def read_records(files: Sequence[Path]) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """Yield every JSON record with its file and place, such as "Line 3". Skip blank lines."""
    progress = ReadingProgress(files)
    for file in files:
        with readable(file), file.open("rb") as stream:
            is_json_array = _first_character(stream.peek(200)) == b"["
            for place, record in (_array_entries if is_json_array else _lines)(file, stream, progress):
                if not isinstance(record, dict):
                    noun = "entry of the array" if is_json_array else "line"
                    raise DataError(f"{place} of '{file}' holds {short_repr(record)}; each {noun} must be a JSON object.")
                yield file, place, record


def _lines(file: Path, stream: BufferedReader, progress: ReadingProgress) -> Iterator[tuple[str, Any]]:
    """Yield the place (such as "Line 3") and the JSON value of every line that is not blank."""
    for line_number, line in enumerate(stream, start=1):
        progress.add(len(line))
        if line.strip():
            yield f"Line {line_number}", _parse_json(file, f"Line {line_number}", line)


def _array_entries(file: Path, stream: BufferedReader, progress: ReadingProgress) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a JSON array with their places, such as "Entry 3"."""
    entry_iterator = array_entries(stream, progress.add)
    for entry_place in (f"Entry {entry_number}" for entry_number in count(1)):
        try:
            with at_place(f"{entry_place} of '{file}'"):
                array_entry = next(entry_iterator)
        except StopIteration:
            return
        except ValueError as error:  # a file that is not UTF-8 raises UnicodeDecodeError, a ValueError
            raise _not_json(file, entry_place, f"{error}") from None
        yield entry_place, array_entry


def holds_json(file: Path) -> bool:
    """Return whether a file is JSON, judged by its name or its first character."""
    with file.open("rb") as stream:
        return file.suffix.lower() in (".jsonl", ".json") or _first_character(stream.peek(200)) in (b"[", b"{")


def _first_character(start: bytes) -> bytes:
    """Return a text's first character that is neither white space nor a byte order mark."""
    return start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def _parse_json(file: Path, place: str, text: bytes) -> Any:
    """Parse the JSON text of a file or a line. An error names the place."""
    try:
        with at_place(f"{place} of '{file}'"):
            return json.loads(text)
    except ValueError as error:  # a file that is not UTF-8 raises UnicodeDecodeError, a ValueError
        error_text = str(error).removesuffix(".")
    if file.suffix.lower() == ".json" and place == "Line 1":
        raise DataError(
            f"'{file}' is neither one JSON array of objects nor one JSON object in each line ({error_text}). Write one "
            "array, in pandas with df.to_json(FILE, orient='records')."
        )
    raise _not_json(file, place, error_text)


def _not_json(file: Path, place: str, fault: str) -> DataError:
    """Return the error for a part of a file that is not JSON."""
    return DataError(f"{place} of '{file}' is not JSON ({fault}); was the file cut off while it was written?")
