"""Read parquet, CSV, TSV and JSON files, and report an unreadable file in one sentence."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import csv as arrow_csv

from spanwise.errors import DataError
from spanwise.rollouts.cells import at_place, by_column

Parsed = TypeVar("Parsed")
#: The suffixes of text tables, each with its delimiter; a CSV file may use another delimiter.
SUFFIXES = {".csv": ",", ".tsv": "\t"}
#: The smallest and the largest size, in bytes, of the single block as which Arrow reads a text table.
_SMALLEST_BLOCK, _LARGEST_BLOCK = 2**20, 2**31 - 1
#: The function to which long work reports its name, the amount done and the total; commands set one that shows a progress bar.
REPORT: ContextVar[Callable[[str, int, int], None]] = ContextVar("report", default=lambda work, done, total: None)


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Turn errors of the operating system or of Arrow, in a `with` block that reads a file, into a DataError."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if file.is_file() and file.stat().st_size == 0:
            raise DataError(f"'{file}' is empty.") from error
        if isinstance(error, OSError) and error.errno:
            raise DataError(f"'{file}' cannot be read: {os.strerror(error.errno)}.") from error
        error_line = _first_line(error) or type(error).__name__
        raise DataError(f"'{file}' is not readable as parquet; it is damaged or cut off ({error_line}).") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")


def check_names(file: Path, names: Sequence[str]) -> None:
    """Raise an error if a table has two columns of the same name."""
    repeated_name = next((name for name in names if names.count(name) > 1), None)
    if repeated_name is not None:
        raise DataError(f"'{file}' has several columns called '{repeated_name}'; give each column its own name.")


def concatenate_tables(path: Path, tables: Iterable[pa.Table]) -> pa.Table:
    """Concatenate the Arrow tables of several files, or raise an error if their columns do not fit together."""
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
        raise DataError(f"The files of '{path}' do not fit together ({_first_line(error)}); give one of them.") from None


def read_delimited(file: Path) -> pa.Table:
    """Read the columns of a CSV or TSV file as texts, where an empty cell is null and two quotes are an empty text.

    Cells in quotes may hold line breaks. If the heading of a CSV file has no comma, `;` or a tab stands between cells.
    """
    with readable(file), file.open("rb") as stream:
        first_bytes, file_size = stream.read(_SMALLEST_BLOCK), file.stat().st_size
    if not first_bytes.strip():
        raise DataError(f"'{file}' is empty.")
    if first_bytes.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"'{file}' is UTF-16; save it as CSV in UTF-8.")
    heading_line = next(line for line in first_bytes.decode("utf-8-sig", "replace").splitlines() if line.strip())
    delimiters = (SUFFIXES.get(file.suffix.lower(), ","), ";", "\t")
    names_by_delimiter = {sign: next(csv.reader([heading_line], delimiter=sign)) for sign in delimiters}
    delimiter = next((sign for sign in delimiters if len(names_by_delimiter[sign]) > 1), delimiters[0])
    check_names(file, names_by_delimiter[delimiter])
    convert_options = arrow_csv.ConvertOptions(
        column_types=dict.fromkeys(names_by_delimiter[delimiter], pa.large_string()),
        strings_can_be_null=True, quoted_strings_can_be_null=False, null_values=[""],
    )  # fmt: skip
    # Arrow reads the file as one block, so that no row is split between two blocks.
    read_options = arrow_csv.ReadOptions(block_size=min(max(file_size + 1, _SMALLEST_BLOCK), _LARGEST_BLOCK))
    parse_options = arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    try:
        return arrow_csv.read_csv(file, read_options, parse_options, convert_options)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        format_fault = _first_line(error).removeprefix("CSV parse error: ").rstrip(".: ")[:200]
    if "utf8" in format_fault.lower() or "utf-8" in format_fault.lower():
        format_fault = "it is not UTF-8; save it in UTF-8"
    elif "Expected" in format_fault and "columns" in format_fault:
        format_fault = f"{format_fault[0].lower()}{format_fault[1:]}; text with a comma or a line break must stand in quotes"
    raise DataError(f"'{file}' cannot be read as CSV: {format_fault}.")


def parse_records(files: Sequence[Path], parse: Callable[[Mapping[str, Any]], Parsed]) -> Iterator[Parsed]:
    """Yield `parse(record)` for every record of the files; an error names the file and the line of the record."""
    for file, place, record in read_records(files):
        with at_place(f"{place} of '{file}'"):
            parsed_record = parse(record)
        yield parsed_record


def read_records(files: Sequence[Path]) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """Yield every JSON record with its file and its place there, "Line 3" or "Entry 3"; skip blank lines."""
    bytes_read, total_bytes, report_progress = 0, sum(file.stat().st_size for file in files if file.is_file()), REPORT.get()
    for file in files:
        with readable(file), file.open("rb") as stream:
            is_array = _first_character(stream.peek(200)) == b"["
            for number, entry in enumerate(_parse_json(file, "A list", stream.read()) if is_array else stream, start=1):
                bytes_read += 0 if is_array else len(entry)
                if number % 1000 == 0 and not is_array:
                    report_progress("reading", bytes_read, total_bytes)
                place = f"{'Entry' if is_array else 'Line'} {number}"
                if not is_array and not entry.strip():
                    continue
                record = entry if is_array else _parse_json(file, place, entry)
                if not isinstance(record, dict):
                    requirement = "entry of the array must be a" if is_array else "line must hold one"
                    raise DataError(f"{place} of '{file}' holds a {type(record).__name__}; each {requirement} JSON object.")
                yield file, place, record


@dataclass(frozen=True)
class RereadColumn:
    """A column that every iteration reads from its files again, because its texts may not fit into memory."""

    files: Sequence[Path]
    name: str
    size: int

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        return (record.get(self.name) for _, _, record in read_records(self.files))


def record_columns(files: Sequence[Path], long: Collection[str | None]) -> dict[str, list[Any] | RereadColumn]:
    """Turn the JSON records of files into columns that store equal texts once; `long` columns are read again at every use."""
    shared_texts: dict[str, str] = {}

    def intern(name: str, value: Any) -> Any:
        return None if name in long else shared_texts.setdefault(value, value) if isinstance(value, str) else value

    rows = [{name: intern(name, value) for name, value in record.items()} for _, _, record in read_records(files)]
    return {
        name: RereadColumn(files, name, len(rows)) if name in long else column for name, column in by_column(rows).items()
    }


def holds_json(file: Path) -> bool:
    """Return whether a file is JSON by its name or its first character."""
    with file.open("rb") as stream:
        return file.suffix.lower() in (".jsonl", ".json") or _first_character(stream.peek(200)) in (b"[", b"{")


def _first_character(start: bytes) -> bytes:
    """Return the first character of a text after a byte order mark and white space."""
    return start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def _parse_json(file: Path, place: str, text: bytes) -> Any:
    """Parse the JSON text of a file or a line; an error names the place."""
    try:
        with at_place(f"{place} of '{file}'"):
            return json.loads(text)
    except ValueError as error:  # UnicodeDecodeError is a ValueError
        error_text = str(error).removesuffix(".")
    if file.suffix.lower() == ".json" and place == "Line 1":
        raise DataError(
            f"'{file}' is neither one JSON array of objects nor one JSON object in each line ({error_text}). Write an array: from "
            "pandas, to_json(FILE, orient='records')."
        )
    raise DataError(f"{place} of '{file}' is not JSON ({error_text}); was the file cut off while it was written?")
