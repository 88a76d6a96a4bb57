"""JSON lines and JSON arrays, read with the number of the line or the entry that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from spanwise.errors import DataError
from spanwise.rollouts.fields import FieldError

Parsed = TypeVar("Parsed")


def parsed(files: Sequence[Path], parse: Callable[[Mapping[str, Any]], Parsed]) -> Iterator[Parsed]:
    """What `parse` makes of every record; the FieldErrors it raises get their file and line here."""
    for file, place, record in records(files):
        try:
            yield parse(record)
        except FieldError as error:
            raise DataError(f"{place} of '{file}' {error}.") from None
        except RecursionError:
            raise _deep(file, place) from None


def records(files: Sequence[Path]) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """Every record with its file and its place there, "Line 3" or "Entry 3"; blank lines are skipped."""
    for file in files:
        try:
            with file.open("rb") as stream:
                if begins_array(stream.peek(200)):
                    yield from _entries(file, stream.read())
                    continue
                for number, line in enumerate(stream, start=1):
                    if line.strip():
                        yield file, f"Line {number}", _record(file, f"Line {number}", line)
        except OSError as error:
            raise DataError(f"'{file}' cannot be read: {error.strerror or error}.") from error


def begins_array(start: bytes) -> bool:
    r"""Whether a file that begins so is one JSON array, and not a record in each line.

    >>> begins_array(b"  [\n {"), begins_array(b'{"a": [')
    (True, False)
    """
    return start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _entries(file: Path, text: bytes) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise DataError(f"'{file}' is not JSON ({_reason(error)}); was the file cut off while it was written?") from None
    except RecursionError:
        raise _deep(file, "A list") from None
    for number, entry in enumerate(found, start=1):
        if not isinstance(entry, dict):
            kind = type(entry).__name__
            raise DataError(f"Entry {number} of '{file}' holds a {kind}; each entry of the array must be a JSON object.")
        yield file, f"Entry {number}", entry


def _reason(error: ValueError) -> str:
    return str(error).removesuffix(".")


def _record(file: Path, place: str, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:  # a UnicodeDecodeError is one, too
        if file.suffix.lower() == ".json" and place == "Line 1":
            raise DataError(
                f"'{file}' is neither one JSON array of objects nor one JSON object in each line ({_reason(error)}). Write "
                "an array: from pandas, to_json(FILE, orient='records')."
            ) from None
        raise DataError(
            f"{place} of '{file}' is not JSON ({_reason(error)}); was the file cut off while it was written?"
        ) from None
    except RecursionError:
        raise _deep(file, place) from None
    if not isinstance(record, dict):
        raise DataError(f"{place} of '{file}' holds a {type(record).__name__}; each line must hold one JSON object.")
    return record


def _deep(file: Path, place: str) -> DataError:
    return DataError(f"{place} of '{file}' is nested too deeply to be read; leave out the field that is.")


def lacks(key: str, record: Mapping[str, Any]) -> FieldError:
    """The sentence for a record without something that its format has."""
    return FieldError(f"has no '{key}'; it has {', '.join(map(str, record)) or 'nothing'}")
