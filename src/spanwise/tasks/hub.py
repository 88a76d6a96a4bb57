"""The real path: a language model and a dataset of questions, by hub name or from local folders and files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from spanwise.errors import DataError, unknown
from spanwise.layout import Layout
from spanwise.tasks.task import Task

if TYPE_CHECKING:
    from datasets import Dataset
else:
    Dataset = Any  # the name must exist for runtime type checkers

PromptFormat = Literal["confidence", "two_attempts"]
PromptStyle = Literal["plain", "user", "system"]
#: Rows that are set aside for evaluation, or a fifth of them if that is less.
HELD_OUT = 512
_READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}

LAYOUTS: dict[PromptFormat, Layout] = {
    "confidence": Layout({"solution": ["reasoning", "answer"], "confidence": ["analysis", "confidence"]}),
    "two_attempts": Layout({"first": ["reasoning", "answer"], "second": ["reasoning", "answer"]}),
}

INSTRUCTIONS: dict[PromptFormat, str] = {
    "confidence": (
        "Solve the problem, then judge how likely your answer is to be right. Write exactly four parts, in this order, and "
        "nothing outside of them:\n"
        "<reasoning>your work, step by step</reasoning>\n"
        "<answer>the final answer only, as \\boxed{...}</answer>\n"
        "<analysis>a critical look at the work above: which steps could be wrong, and how sure each one is; do not solve the "
        "problem again</analysis>\n"
        "<confidence>one number from 0 to 1, the probability that the answer is right, such as 0.85</confidence>"
    ),
    "two_attempts": (
        "Solve the problem twice. Write exactly four parts, in this order, and nothing outside of them:\n"
        "<reasoning>your first attempt, step by step</reasoning>\n"
        "<answer>its final answer only, as \\boxed{...}</answer>\n"
        "<reasoning>look for mistakes in the first attempt and repair them, or find another way to the same answer</reasoning>\n"
        "<answer>the final answer you now stand by, as \\boxed{...}</answer>"
    ),
}


def load_task(
    model: str,
    dataset: str,
    *,
    prompt_format: PromptFormat = "confidence",
    split: str = "train",
    eval_split: str | None = None,
    question_column: str = "question",
    answer_column: str = "answer",
    limit: int | None = None,
    eval_limit: int = 512,
    max_completion_length: int = 4096,
) -> Task:
    """A model and a dataset of questions as a task; of the model only config and tokenizer are read here.

    Args:
        model: hub name or local folder.
        dataset: hub name (`name:config` where the dataset has several), local folder (also one of `save_to_disk`), or a local
            json, jsonl, parquet or csv file.
        prompt_format: which instruction goes before the question: "confidence" (reasoning, answer, analysis, confidence) or
            "two_attempts" (reasoning, answer, reasoning, answer).
        split: of the dataset, for training.
        eval_split: split for evaluation; None: 512 random rows of `split` are set aside, the same every time, at most a fifth.
        question_column, answer_column: columns with the question and the right answer.
        limit: use at most so many training questions, from the first.
        eval_limit: use at most so many evaluation questions; what is trained on does not hang on it.
        max_completion_length: tokens.

    Returns:
        A task with columns `prompt` and `answer`. Prompts are conversations if the tokenizer has a chat template (the
        instruction is the system message, or part of the user's where the template takes no system message), else plain text.

    Raises:
        DataError: the model or the dataset cannot be read, a column is missing or has an empty cell, there are too few rows.
    """
    if prompt_format not in LAYOUTS:
        raise DataError(unknown("prompt format", prompt_format, LAYOUTS))
    style = _prompt_style(model)
    rows = _check_columns(_read(dataset, split), dataset, question_column, answer_column)
    if eval_split is None:
        rows, held_out = _set_aside(rows, dataset, eval_limit)
    else:
        held_out = _check_columns(_read(dataset, eval_split), dataset, question_column, answer_column)
        held_out = held_out.select(range(min(eval_limit, len(held_out))))
    if limit is not None:
        rows = rows.select(range(min(limit, len(rows))))
    options = {"instruction": INSTRUCTIONS[prompt_format], "style": style, "names": (question_column, answer_column)}

    def prompts(part: Dataset) -> Dataset:
        written = part.map(_to_prompt, fn_kwargs=options, remove_columns=part.column_names)
        return written.select_columns(["prompt", "answer"])

    return Task(
        name=f"{Path(model).name} on {Path(dataset).name}, {prompt_format}",
        model=model,
        train=prompts(rows),
        evaluation=prompts(held_out),
        layout=LAYOUTS[prompt_format],
        max_completion_length=max_completion_length,
    )


def _prompt_style(model: str) -> PromptStyle:
    """Where the instruction can go: no chat template, one without a system message, or one with it."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        AutoConfig.from_pretrained(model)
        tokenizer = AutoTokenizer.from_pretrained(model)
    except Exception as error:  # transformers raises many kinds, and a damaged file adds its parser's
        if Path(model).is_dir():
            what = f"The model folder '{model}' needs a config and a tokenizer that can be read; it holds {_listing(Path(model))}"
        else:
            what = f"The model '{model}' is neither a local folder nor a hub model within reach"
        raise DataError(
            f"{what} ({_reason(error)}). Set --model to a folder written by save_pretrained or to a hub name."
        ) from error
    if not tokenizer.chat_template:
        return "plain"
    try:
        tokenizer.apply_chat_template(_message("system", "s") + _message("user", "u"), tokenize=False)
    except Exception:  # a template refuses a role with an exception of its own
        return "user"
    return "system"


def _read(dataset: str, split: str) -> Dataset:
    """One split of a dataset by hub name, folder or file."""
    from datasets import DatasetDict, load_dataset, load_from_disk

    place = Path(dataset)
    name, _, config = (dataset, "", "") if place.exists() else dataset.partition(":")
    reader = _READERS.get(place.suffix.lower())
    if (place.is_file() and not reader) or (reader and not place.is_file()):
        what = "is not a kind of file that can be read" if place.is_file() else "does not exist"
        raise DataError(
            f"The dataset file '{dataset}' {what}; set --dataset to a {', '.join(_READERS)} file, a folder or a hub name."
        )
    try:
        if reader:
            return load_dataset(reader, data_files={split: str(place)}, split=split)
        if (place / "dataset_info.json").is_file() or (place / "dataset_dict.json").is_file():
            saved = load_from_disk(dataset)
            return saved[split] if isinstance(saved, DatasetDict) else saved
        return load_dataset(name, config or None, split=split)
    except Exception as error:  # datasets, pyarrow and the hub client each raise their own kinds
        what = "file" if reader else "folder" if place.is_dir() else "name"
        raise DataError(
            f"Split '{split}' of the dataset {what} '{dataset}' cannot be read ({_reason(error)}). "
            f"Check --dataset (a file, a folder, or a hub name such as 'owner/name' or 'owner/name:config') and --set split=NAME."
        ) from error


def _check_columns(rows: Dataset, dataset: str, question: str, answer: str) -> Dataset:
    for name, option in ((question, "question_column"), (answer, "answer_column")):
        if name not in rows.column_names:
            raise DataError(
                f"The dataset '{dataset}' has no column '{name}'; its columns are {', '.join(rows.column_names)}. "
                f"Name the right one with --set {option}=NAME."
            )
        empty = next((row for row, value in enumerate(rows[name]) if value is None or not str(value).strip()), None)
        if empty is not None:
            raise DataError(
                f"Row {empty} of the dataset '{dataset}' has nothing in column '{name}'; fill it in or remove the row."
            )
    return rows


def _set_aside(rows: Dataset, dataset: str, eval_limit: int) -> tuple[Dataset, Dataset]:
    """Training rows in their order, and the first `eval_limit` of the rows set aside.

    Which rows are set aside hangs on the dataset alone: a run and a later evaluation may ask for different numbers of them.
    """
    size = min(HELD_OUT, max(1, len(rows) // 5))
    if len(rows) < 2 or eval_limit < 1:
        raise DataError(
            f"The dataset '{dataset}' has {len(rows)} rows and {eval_limit} evaluation rows were asked for; "
            f"at least one must be left on each side. Give a larger dataset or --set eval_prompts=1 or more."
        )
    chosen = np.random.default_rng(0).permutation(len(rows))[:size]
    left = np.setdiff1d(np.arange(len(rows)), chosen)
    return rows.select(left.tolist()), rows.select(sorted(chosen[:eval_limit].tolist()))


def _to_prompt(row: Mapping[str, Any], *, instruction: str, style: PromptStyle, names: tuple[str, str]) -> dict[str, Any]:
    question, answer = str(row[names[0]]).strip(), str(row[names[1]])
    prompt: Any = f"{instruction}\n\nProblem:\n{question}\n\n"
    if style == "user":
        prompt = _message("user", f"{instruction}\n\n{question}")
    elif style == "system":
        prompt = _message("system", instruction) + _message("user", question)
    return {"prompt": prompt, "answer": answer}


def _message(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause, which is the one that says what went wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = (str(error).strip().splitlines() or [""])[0].rstrip(" .:")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _listing(folder: Path) -> str:
    names = sorted(file.name for file in folder.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "no file"
