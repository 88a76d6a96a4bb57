"""The rows of a dataset by name, folder or file: read, checked cell by cell, some set aside for evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spanwise.errors import DataError, RecipeError
from spanwise.rollouts.cells import chats, prompt_fault, typed
from spanwise.rollouts.files import SUFFIXES, read_delimited
from spanwise.tasks.problems import HELD_OUT

_READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_NO_ROWS = "The dataset '{}' is empty and cannot be read; add rows, or set --dataset to another one."


@dataclass(frozen=True)
class DatasetColumns:
    """Where a dataset has what."""

    prompt: str
    whole: bool  # the prompts are used as they are
    answer: str | None
    conversations: bool = False  # nobody has named the column: its conversations must not end with the answer itself


def read_rows(dataset: str, split: str, *, texts: Collection[str | None] = ()) -> Any:
    """One split of a dataset by hub name, folder or file."""
    from datasets import Dataset, DatasetDict, config, load_dataset, load_from_disk

    place = Path(dataset)
    suffix, kinds = place.suffix.lower(), (*_READERS, *SUFFIXES)
    if place.exists():
        config.HF_UPDATE_DOWNLOAD_COUNTS = False  # it counts readers of local files too, at a server of its own
    if place.is_file() != (suffix in kinds):
        gone = f"does not exist in '{Path.cwd()}' or beside the recipe"
        what = "is not a kind of file that can be read" if place.is_file() else gone
        raise DataError(
            f"The dataset file '{dataset}' {what}; set --dataset to a {', '.join(kinds)} file, a folder or a hub name."
        )
    if suffix in SUFFIXES:
        cells = read_delimited(place).to_pydict()
        return Dataset.from_dict({name: chats(cell if name in texts else typed(cell)) for name, cell in cells.items()})
    name, _, part = (dataset, "", "") if place.exists() else dataset.partition(":")
    reader = _READERS.get(suffix)
    try:
        if reader:
            return load_dataset(reader, data_files={split: str(place)}, split=split)
        if (place / "dataset_info.json").is_file() or (place / "dataset_dict.json").is_file():
            saved = load_from_disk(dataset)
            return saved[split] if isinstance(saved, DatasetDict) else saved
        return load_dataset(name, part or None, split=split)
    except Exception as error:  # datasets, pyarrow and the hub client each raise their own kinds
        if "StopIteration" in reason(error) or "corresponds to no data" in reason(error):
            raise DataError(_NO_ROWS.format(dataset)) from error
        what = "file" if reader else "folder" if place.is_dir() else "name"
        raise DataError(
            f"Split '{split}' of the dataset {what} '{dataset}' cannot be read ({reason(error)}). "
            f"Check --dataset (a file, a folder, or a hub name such as 'owner/name' or 'owner/name:config') and --set split=NAME."
        ) from error


def find_columns(
    names: Sequence[str], question: str, prompt: str | None, answer: str | None, instruction: str | None
) -> DatasetColumns:
    """Which columns hold what, as asked for; without a question column whole prompts in `prompt`, else in `messages`."""
    conversations = False
    if prompt is None and not instruction and question not in names:
        prompt = next((name for name in ("prompt", "messages") if name in names), None)
        conversations = prompt == "messages"
    if prompt is not None and instruction:
        raise RecipeError(
            f"Prompts of the column '{prompt}' are used as they are, so that the instruction would go nowhere. Leave it out, or "
            f"have it put before each of them with --set question_column={prompt} in place of prompt_column."
        )
    if prompt is None and instruction is None and "prompt" in names and question != "prompt":
        warnings.warn(
            f"The dataset has a column 'prompt' beside '{question}': what the model is shown is '{question}' with the usual "
            "instruction before it. Set prompt_column=prompt if your prompts are to be used as they are.",
            UserWarning,
            stacklevel=3,
        )
    return DatasetColumns(question if prompt is None else prompt, prompt is not None, answer, conversations)


def check_cells(rows: Any, dataset: str, columns: DatasetColumns, *, template: bool) -> None:
    """Refuse rows that are no questions or prompts, or that have no answer; say which row, and what to do."""
    if not len(rows):
        raise DataError(_NO_ROWS.format(dataset))
    for name, option in (
        (columns.prompt, "prompt_column" if columns.whole else "question_column"),
        (columns.answer, "answer_column"),
    ):
        if name is None:
            continue
        if name not in rows.column_names:
            other = {
                "question_column": ", or whole prompts, used as they are, with prompt_column=NAME",
                "answer_column": ", or say with answer_column=null that there are none",
            }
            raise DataError(
                f"The dataset '{dataset}' has no column '{name}'; its columns are {', '.join(rows.column_names)}. "
                f"Name the right one with --set {option}=NAME{other.get(option, '')}."
            )
        for row, cell in enumerate(rows[name]):
            empty = cell is None or not str(cell).strip()
            fault = "fill it in or remove the row." if empty else _fault(cell, option, columns, template=template)
            if fault:
                shown = "nothing" if empty else f"{cell!r:.80}"
                raise DataError(f"Row {row} of the dataset '{dataset}' has {shown} in column '{name}'; {fault}")


def _fault(cell: Any, option: str, columns: DatasetColumns, *, template: bool) -> str | None:
    """Why a cell is no question, no prompt or no answer."""
    if option == "prompt_column":
        fault = prompt_fault(cell, template=template)
        if not fault and columns.conversations and cell[-1]["role"] == "assistant":
            return "that ends with what the assistant says, and a prompt ends before it. Leave that message out."
        return fault
    if not isinstance(cell, (list, dict)):
        return None
    if option == "question_column":
        return "a question is a text. Name the column with prompt_column if it holds whole prompts, to be used as they are."
    return "an answer is one text or number. With answer_column=null the column is left to your own reward functions."


def set_aside(rows: Any, dataset: str, eval_limit: int) -> tuple[Any, Any]:
    """Training rows in their order, and the first `eval_limit` of the rows set aside."""
    size = min(HELD_OUT, max(1, len(rows) // 5))
    if len(rows) < 2 or eval_limit < 1:
        raise DataError(
            f"The dataset '{dataset}' has {len(rows)} rows and {eval_limit} evaluation rows were asked for; "
            f"at least one must be left on each side. Give a larger dataset or --set eval_prompts=1 or more."
        )
    chosen = np.random.default_rng(0).permutation(len(rows))[:size]
    left = np.setdiff1d(np.arange(len(rows)), chosen)
    return rows.select(left.tolist()), rows.select(sorted(chosen[:eval_limit].tolist()))


def reason(error: BaseException) -> str:
    """The first line of the innermost cause, which is the one that says what went wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = (str(error).strip().splitlines() or [""])[0].rstrip(" .:")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
