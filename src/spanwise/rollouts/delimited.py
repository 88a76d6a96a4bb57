"""Tables of text, CSV and TSV: every cell as it is written, and None where nothing is."""

from __future__ import annotations

import csv
from pathlib import Path

import pyarrow as pa
from pyarrow import csv as arrow_csv

from spanwise.errors import DataError

#: What is read as a table of text, with the sign between two cells; of CSV it may be another one (`_sign`).
SUFFIXES = {".csv": ",", ".tsv": "\t"}
_LARGEST = 2**31 - 1
_LEAST = 2**20


def read_delimited(file: Path) -> pa.Table:
    r"""The columns of a CSV or TSV file as texts.

    A cell with nothing in it is null; an empty text in quotes is an empty text. Cells may hold line breaks inside of quotes. Of a
    CSV file whose heading has no comma, `;` or a tab may stand between cells, as spreadsheets write them.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "a.csv")
        >>> _ = file.write_text('prompt,completion,acc\n2+2=,"4\n",\n2+2=,"",0\n')
        >>> read_delimited(file).to_pylist()
        [{'prompt': '2+2=', 'completion': '4\n', 'acc': None}, {'prompt': '2+2=', 'completion': '', 'acc': '0'}]
    """
    try:
        with file.open("rb") as stream:
            start = stream.read(_LEAST)
            size = file.stat().st_size
    except OSError as error:
        raise DataError(f"'{file}' cannot be read: {error.strerror or error}.") from error
    if not start.strip():
        raise DataError(f"'{file}' is empty.")
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"'{file}' is UTF-16; save it as CSV in UTF-8.")
    # One block, so that no row lies across two of them.
    how = arrow_csv.ReadOptions(block_size=min(max(size + 1, _LEAST), _LARGEST))
    parse = arrow_csv.ParseOptions(delimiter=_sign(file, start), newlines_in_values=True)
    try:
        names = arrow_csv.read_csv(pa.BufferReader(_heading(start)), arrow_csv.ReadOptions(), parse).column_names
        texts = arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.large_string()),
            strings_can_be_null=True, quoted_strings_can_be_null=False, null_values=[""],
        )  # fmt: skip
        return arrow_csv.read_csv(file, how, parse, texts)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"'{file}' cannot be read as CSV: {_why(error)}") from error


def _heading(start: bytes) -> bytes:
    """The first line that says anything."""
    return next(line for line in start.splitlines() if line.strip()) + b"\n"


def _sign(file: Path, start: bytes) -> str:
    """What stands between two cells."""
    usual = SUFFIXES.get(file.suffix.lower(), ",")
    line = _heading(start).decode("utf-8", "replace").removeprefix("\ufeff")
    for sign in (usual, ";", "\t"):
        if len(next(csv.reader([line], delimiter=sign))) > 1:
            return sign
    return usual


def _why(error: Exception) -> str:
    """What went wrong, and what to do about it."""
    said = (str(error).strip().splitlines() or [""])[0].removeprefix("CSV parse error: ").rstrip(".: ")
    if "utf8" in said.lower() or "utf-8" in said.lower():
        return "it is not UTF-8; save it in UTF-8."
    if "Expected" in said and "columns" in said:
        said = f"{said[0].lower()}{said[1:]}"
        return f"{said[:200]}; text with a comma or a line break must stand in quotes."
    return f"{said[:200]}."
