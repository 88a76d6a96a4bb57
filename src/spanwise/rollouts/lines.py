"""JSON lines, read with the number of the line that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from spanwise.errors import DataError
from spanwise.rollouts.fields import FieldError

Parsed = TypeVar("Parsed")


def parsed(files: Sequence[Path], parse: Callable[[Mapping[str, Any]], Parsed]) -> Iterator[Parsed]:
    """What `parse` makes of every record; the FieldErrors it raises get their file and line here.

    Raises:
        DataError: see `records`; a record that does not hold what its format says.
    """
    for file, number, record in records(files):
        try:
            yield parse(record)
        except FieldError as error:
            raise DataError(f"Line {number} of '{file}' {error}.") from None
        except RecursionError:
            raise _deep(file, number) from None


def records(files: Sequence[Path]) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    """Every record with its file and line number; blank lines are skipped.

    Raises:
        DataError: a file that cannot be read, a line that is not a JSON object.
    """
    for file in files:
        try:
            with file.open("rb") as stream:
                for number, line in enumerate(stream, start=1):
                    if line.strip():
                        yield file, number, _record(file, number, line)
        except OSError as error:
            raise DataError(f"'{file}' cannot be read: {error.strerror or error}.") from error


def _record(file: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:  # a UnicodeDecodeError is one, too
        reason = str(error).removesuffix(".")
        raise DataError(
            f"Line {number} of '{file}' is not JSON ({reason}); was the file cut off while it was written?"
        ) from None
    except RecursionError:
        raise _deep(file, number) from None
    if not isinstance(record, dict):
        raise DataError(f"Line {number} of '{file}' holds a {type(record).__name__}; each line must hold one JSON object.")
    return record


def _deep(file: Path, number: int) -> DataError:
    return DataError(f"Line {number} of '{file}' is nested too deeply to be read; leave out the field that is.")


def lacks(key: str, record: Mapping[str, Any]) -> FieldError:
    """The sentence for a record without something that its format has."""
    return FieldError(f"has no '{key}'; it has {', '.join(map(str, record)) or 'nothing'}")
