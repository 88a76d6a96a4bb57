"""`read_rollouts`: which format a rollout file has, found by what is in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq

from spanwise.errors import DataError
from spanwise.rollouts import schema
from spanwise.rollouts.lines import records
from spanwise.rollouts.messages import clean
from spanwise.rollouts.parquet import readable
from spanwise.rollouts.readers import own, trl, verl
from spanwise.rollouts.readers.verifiers import read_verifiers
from spanwise.rollouts.table import RolloutTable

Reader = Callable[[Path, Sequence[Path], "str | Path | None"], RolloutTable]

#: What can be read, in words for messages.
FORMATS = (
    "spanwise's rollouts (parquet with prompt, trainable, completion_ids or tokens), TRL's completions (parquet with prompt, "
    "completion), verl's rollout dump (jsonl with input, output) and verifiers' traces (jsonl with traces, or prompt and "
    "completion)"
)
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar")
_PLACES = (
    "rollouts/*.parquet", "completions/*.parquet", "*.parquet", "traces.jsonl", "results.jsonl", "[0-9]*.jsonl",
)  # fmt: skip


def read_rollouts(path: str | Path, *, tokenizer: str | Path | None = None) -> RolloutTable:
    """Read rollouts that spanwise, TRL, verl or verifiers has written.

    Args:
        path: a file, a folder of them, or the run folder they lie in.
        tokenizer: folder of the tokenizer that the completions were sampled with. Default: the one of the run's model, where
            the file lies in a run folder; else texts are cut into words that keep every byte.

    Returns:
        N completions with their groups (rows of one prompt and step), tokens, recorded rewards and further columns.

    Raises:
        DataError: nothing there, a file that is damaged, empty or of a foreign schema, rows that do not fit together.
    """
    place = Path(path)
    files = _files(place)
    _check_names(place, files)
    reader = _reader(files)
    with readable(files[0] if len(files) == 1 else place):
        table = reader(place, files, tokenizer)
    if len(table) == 0:
        raise DataError(f"'{path}' holds no completions. {table.note}".strip())
    return table


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise DataError(f"There is no file or folder '{place}'.")
    for pattern in _PLACES:
        found = sorted((file for file in place.glob(pattern) if file.is_file()), key=_natural)
        if found:
            return found
    kept = " The run has kept none so far; train with --set keep_rollouts=1." if (place / "recipe.yaml").is_file() else ""
    raise DataError(f"The folder '{place}' holds no rollouts (no {', '.join(_PLACES)}).{kept}")


def _check_names(place: Path, files: Sequence[Path]) -> None:
    for file in (place, *files):
        if str(file) != clean(str(file)):  # no message, table or page could name it
            raise DataError(f"The name of '{clean(str(file))}' is not valid UTF-8; rename it.")
        if file.suffix in _PACKED and file.is_file():
            raise DataError(f"'{file}' is compressed; unpack it first.")


def _natural(file: Path) -> list[int | str]:
    """Sort 2.jsonl before 10.jsonl."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", file.name)]


def _reader(files: Sequence[Path]) -> Reader:
    if files[0].suffix in (".jsonl", ".json") or _begins(files[0]).lstrip().startswith(b"{"):
        return _lines_reader(files)
    readers: list[Reader] = []
    for file in files:
        _check_parquet(file)
        with readable(file):
            found = pq.read_schema(file)
        names = found.names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise DataError(f"'{file}' has more than one column '{twice}'; each name may stand once.")
        if schema.is_own(names):
            schema.check(file, found)
            readers.append(own.read_own)
        elif set(trl.REQUIRED) <= set(names):
            readers.append(trl.read_trl)
        else:
            raise _foreign(file, names)
    if len(set(readers)) > 1:
        raise DataError(f"The folder '{files[0].parent}' holds files of more than one format; give one of its files.")
    return readers[0]


def _begins(file: Path) -> bytes:
    """The first bytes of a file."""
    with readable(file), file.open("rb") as stream:
        return stream.read(200)


def _check_parquet(file: Path) -> None:
    """Refuse what is text, such as CSV, as what it is, and not as damaged parquet.

    Raises:
        DataError: it does not begin as parquet does, and can be read as text.
    """
    start = _begins(file)
    try:
        line = start.decode().splitlines()[0][:60] if start and not start.startswith(b"PAR1") else ""
    except UnicodeDecodeError:
        return
    if line.isprintable() and line:
        kind = "CSV" if file.suffix in (".csv", ".tsv") or line.count(",") > 1 else "text"
        raise DataError(
            f"'{file}' is {kind}, which is no rollout format (it begins {line!r}). Known here: {FORMATS}. From Python, "
            f"pandas.read_csv(...).to_parquet(...) makes parquet of a table with the columns prompt and completion."
        )


def _lines_reader(files: Sequence[Path]) -> Reader:
    first = next(islice(records(files), 1), None)
    if first is None:
        raise DataError(f"'{files[0]}' holds no completions.")
    file, _, record = first
    if set(verl.REQUIRED) <= set(record):
        return verl.read_verl
    if "traces" in record or "nodes" in record or {"prompt", "completion"} <= set(record):
        return read_verifiers
    raise _foreign(file, list(record))


def _foreign(file: Path, names: Sequence[str]) -> DataError:
    shown = ", ".join(map(str, names[:12])) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    return DataError(f"'{file}' has the columns {shown or '(none)'}, which is no rollout format known here: {FORMATS}.")
