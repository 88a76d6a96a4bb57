"""Read rollout files of every known format. `read_rollouts` recognises a format by the files' content."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq

from spanwise.errors import DataError
from spanwise.rollouts import schema
from spanwise.rollouts.cells import clean, is_chat_or_message
from spanwise.rollouts.files import SUFFIXES, check_names, holds_json, read_records, readable
from spanwise.rollouts.readers.evals import LM_EVAL_REQUIRED, is_inspect, read_inspect, read_lm_eval
from spanwise.rollouts.readers.own import read_own
from spanwise.rollouts.readers.plain import FORMATS, NAMES, read_plain
from spanwise.rollouts.readers.slime import read_slime
from spanwise.rollouts.readers.trainers import VERL_REQUIRED, read_verifiers, read_verl
from spanwise.rollouts.table import RolloutTable

_ERROR_OF_SUFFIX = {
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".tar"), "'{file}' is compressed; unpack it first."),
    **dict.fromkeys((".xls", ".xlsx", ".ods"), "'{file}' is a spreadsheet; save it as CSV in UTF-8."),
    **dict.fromkeys(
        (".pkl", ".pickle"), "'{file}' is a pickle, and reading it could run code; write its completions as JSON lines."
    ),
}
#: The patterns of rollout files in a folder. The first pattern that any file matches is used.
_PLACES = (
    "rollouts/*.parquet", "completions/*.parquet", "*.parquet", "traces.jsonl", "results.jsonl", "[0-9]*.jsonl", "*.csv", "*.tsv",
    "*.eval", "samples_*.jsonl", "rollout_data/[0-9]*.pt", "[0-9]*.pt",
)  # fmt: skip
#: The suffixes of files that may hold rollouts. JSON is left out, because it often holds settings.
_TABLES = (".parquet", ".jsonl", ".csv", ".tsv", ".eval", ".pt")
#: verl did not write a table that has one of these columns but lacks the column `gts`.
_NAMES_BESIDE_OUTPUT = {name for role in NAMES for name in NAMES[role]} - {*VERL_REQUIRED, "answer", "step"} | {"rewards"}
_LEGACY_VERIFIERS_FIELDS = {"example_id", "metrics", "error", "error_chain"}  # Fields of verifiers before 1.0.
#: A table with one of these columns was not written by verifiers < 1.0.
_NO_LEGACY_VERIFIERS_FIELDS = {*NAMES["group"], *NAMES["step"]} - _LEGACY_VERIFIERS_FIELDS


def read_rollouts(
    path: str | Path,
    *,
    tokenizer: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    parts: Sequence[str] = (),
) -> RolloutTable:
    r"""Read rollouts of spanwise, TRL, verl, verifiers or slime, logs of evaluations, or a table of your own.

    A table is CSV, TSV, a JSON array, JSON lines or parquet, with a completion in each row or a list of completions of one prompt,
    as texts or as chat messages. Of a conversation in `messages` the completion is what follows the last user message. Logs of
    evaluations are Inspect's (`.eval`, `.json`; its package reads them) and the `samples_*.jsonl` of lm-evaluation-harness.

    Args:
        path: a file, a folder of them, or the run folder they lie in.
        tokenizer: folder of the tokenizer that the completions were sampled with. Default: the one of the run's model, where
            the file lies in a run folder; else texts are cut into words that keep every byte.
        columns: role -> column of a table whose columns are called otherwise: `prompt`, `completion` or `completions` (a list in
            each cell), `answer`, `group`, `step`.
        parts: the columns of a table without completions that hold the parts of a completion, in order. The completion is then
            these texts, each between tags of its column's name; a part is left out where its cell is empty.

    Returns:
        N completions with their groups (rows of one prompt and step), tokens, recorded rewards and further columns.

    Raises:
        DataError: nothing there, a file that is damaged, empty or of a foreign schema, rows that do not fit together.
        RecipeError: a role in `columns` that there is not.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "mine.csv")
        >>> _ = file.write_text("question,output,gold,reward\n2+2=,4,4,1\n2+2=,5,4,0\n3+3=,6,6,\n")
        >>> table = read_rollouts(file, columns={"completion": "output", "answer": "gold"})
        >>> table.group_n.tolist(), table.rewards["reward"].value_n.tolist(), table.columns["answer"]
        ([0, 0, 1], [1.0, 0.0, nan], ['4', '4', '6'])
    """
    rollouts_path = Path(path)
    all_files = rollout_files(rollouts_path)
    for file in (rollouts_path, *all_files):
        if str(file) != clean(str(file)):  # a name that is not valid UTF-8 cannot be printed
            raise DataError(f"The name of '{clean(str(file))}' is not valid UTF-8; rename it.")
        if file.suffix.lower() in _ERROR_OF_SUFFIX and file.is_file():
            raise DataError(_ERROR_OF_SUFFIX[file.suffix.lower()].format(file=file))
    if rollouts_path.is_file() and rollouts_path.stat().st_size == 0:
        raise DataError(f"'{rollouts_path}' is empty.")
    plain_reader = partial(read_plain, columns=columns, parts=parts)
    readers = {reader for file in all_files if (reader := _choose_reader(file, columns, plain_reader)) is not None}
    if not readers:
        raise DataError(f"'{all_files[0]}' holds no completions.")
    if len(readers) > 1:
        raise DataError(f"The folder '{all_files[0].parent}' holds files of more than one format. Give one file.")
    reader = readers.pop()
    with readable(all_files[0] if len(all_files) == 1 else rollouts_path):
        rollout_table = reader(rollouts_path, all_files, tokenizer)
    if len(rollout_table) == 0:
        raise DataError(f"'{path}' holds no completions. {rollout_table.note}".strip())
    return replace(rollout_table, note=f"{rollout_table.note} {_unread_note(rollouts_path, all_files)}".strip())


def _unread_note(path: Path, files: Sequence[Path]) -> str:
    """Tell the user which rollout files in a folder are not read."""
    if files[0].parent != path:
        return ""
    other_paths = sorted({*path.iterdir()}.difference(files))
    unread_names = [file.name for file in other_paths if file.suffix.lower() in _TABLES and file.is_file()]
    remainder_text = f" and {len(unread_names) - 3} more" if len(unread_names) > 3 else ""
    return f"These files of the folder were not read: {', '.join(unread_names[:3])}{remainder_text}." if unread_names else ""


def rollout_files(path: Path) -> list[Path]:
    """Return the rollout files of a path in numeric order, 2.jsonl before 10.jsonl."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"There is no file or folder '{path}'.")
    for pattern in _PLACES:
        files = [file for file in path.glob(pattern) if file.is_file()]
        if files:
            return sorted(files, key=lambda file: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", file.name)])
    is_run_folder = (path / "recipe.yaml").is_file()
    hint = " The run has saved no rollouts yet. To save them, train with --set keep_rollouts=1." if is_run_folder else ""
    raise DataError(f"The folder '{path}' holds no rollouts (looked for {', '.join(_PLACES)}).{hint}")


def _choose_reader(
    file: Path, columns: Mapping[str, str] | None, plain_reader: Callable[..., RolloutTable]
) -> Callable[..., RolloutTable] | None:
    """Return the reader of a file's format, or `plain_reader` if the user names columns. Return None for JSON without records."""
    if file.suffix.lower() in SUFFIXES:
        return plain_reader
    format_reader = plain_reader
    format_name = ""
    with readable(file):
        if file.suffix == ".pt":
            format_reader, format_name = read_slime, "a dump of slime"
        elif is_inspect(file):
            format_reader, format_name = read_inspect, "a log of Inspect"
        elif holds_json(file):
            _, _, first_record = next(read_records([file]), (file, "", None))
            if first_record is None:
                return None
            field_names = {*first_record}
            if field_names & {"traces", "nodes"}:
                format_reader, format_name = read_verifiers, "verifiers' traces"
            elif field_names.issuperset(VERL_REQUIRED) and _is_verl(first_record):
                format_reader = read_verl
            elif field_names >= LM_EVAL_REQUIRED:
                format_reader, format_name = read_lm_eval, "samples of lm-evaluation-harness"
            elif {"prompt", "completion"} <= field_names and field_names & _LEGACY_VERIFIERS_FIELDS:
                format_reader = read_verifiers if field_names.isdisjoint(_NO_LEGACY_VERIFIERS_FIELDS) else plain_reader
        else:
            _check_parquet(file)
            arrow_schema = pq.read_schema(file)
            check_names(file, arrow_schema.names)
            field_names = {*arrow_schema.names}
            if {schema.PROMPT, schema.TRAINABLE} <= field_names and field_names & {schema.IDS, schema.TOKENS}:
                schema.check_version(file, arrow_schema)
                format_reader, format_name = read_own, "spanwise's own rollouts"
    if columns and format_name:
        raise DataError(f"'{file}' holds {format_name}, whose columns have fixed names; leave out --columns.")
    return plain_reader if columns else format_reader


def _is_verl(record: Mapping[str, object]) -> bool:
    """Return whether a record with `input` and `output` comes from verl."""
    holds_chats = any(is_chat_or_message(record[name]) for name in VERL_REQUIRED)
    return "gts" in record or not (holds_chats or _NAMES_BESIDE_OUTPUT & record.keys())


def _check_parquet(file: Path) -> None:
    """Refuse a file that is not parquet, and say what it is."""
    with file.open("rb") as stream:
        first_bytes = stream.read(200)
    if first_bytes.startswith(b"PAR1"):
        return
    # Bytes that are not text become surrogate characters, for which `isprintable` is False.
    first_lines = first_bytes.decode(errors="surrogateescape").splitlines()
    first_line = first_lines[0][:60] if first_lines else ""
    if first_bytes.startswith(b"PK"):
        raise DataError(
            f"'{file}' is a zip archive. If it is a log of Inspect, let its name end in '.eval'. Otherwise unpack it."
        )
    if not (first_line and first_line.isprintable()):
        raise DataError(f"'{file}' is neither parquet nor text. Known formats: {FORMATS}.")
    if "," in first_line or "\t" in first_line:
        raise DataError(f"'{file}' looks like CSV; let its name end in '.csv' or '.tsv'. It begins {first_line!r}.")
    raise DataError(f"'{file}' is text in no known format. Known formats: {FORMATS}. The file begins {first_line!r}.")
