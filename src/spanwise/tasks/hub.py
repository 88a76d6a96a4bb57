"""Tasks made from a model and a dataset of questions, each by hub name or from local files."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from spanwise.errors import DataError, RecipeError, first_line, unknown
from spanwise.layout import Layout
from spanwise.rollouts.cells import is_empty, parse_chats, parse_numbers, prompt_fault
from spanwise.rollouts.files import SUFFIXES, read_delimited
from spanwise.segment import SEGMENTERS
from spanwise.tasks.digits import HELD_OUT
from spanwise.tasks.embedded import Task

PromptFormat = Literal["confidence", "two_attempts"]
#: The place of an instruction: plain text (no chat template), user message or system message.
PromptStyle = Literal["plain", "user", "system"]
_FEW_PROMPTS = 10  # The fewest different prompts for a split by prompt. With fewer, evaluation may repeat training prompts.
_SEARCHED_PROMPTS = 64  # The number of prompts that are searched for the layout's tags.
_TRL_COLUMNS = ("completion", "completions", "completion_ids", "prompts", "image", "images", "environment")
_READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_NO_ROWS = "The dataset '{}' is empty and cannot be read; add rows, or set --dataset to another one."

LAYOUTS: Mapping[str, Layout] = {
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
    layout: Layout | None = None,
    instruction: str | None = None,
    split: str = "train",
    eval_split: str | None = None,
    question_column: str = "question",
    prompt_column: str | None = None,
    answer_column: str | None = "answer",
    limit: int | None = None,
    eval_limit: int = 512,
    max_completion_length: int = 4096,
) -> Task:
    """Build a task from a model and a dataset. Only the model's config and tokenizer are read here.

    Args:
        model: hub name or local folder.
        dataset: hub name (`name:config` where the dataset has several), local folder (also one of `save_to_disk`), or a local
            json (an array, or lines), jsonl, parquet, csv or tsv file.
        prompt_format: the instruction and layout to start from: "confidence" (reasoning, answer, analysis, confidence) or
            "two_attempts" (reasoning, answer, reasoning, answer).
        layout: the blocks of a completion; None: those of the prompt format.
        instruction: what goes before each question; None: that of the prompt format. With an empty one the question stands alone,
            and no prompt needs to hold what the layout looks for.
        split, question_column, answer_column: as the fields of a recipe. `a.b` is field b of column a, which holds objects.
        eval_split: split for evaluation; None: 512 random prompts of `split` are set aside, the same every time, at most a fifth.
            Of fewer than ten different prompts, rows are set aside, with a warning.
        prompt_column: column with whole prompts, texts or conversations, which are used as they are; None: `prompt`, else
            `messages`, where the dataset has no question column and no instruction is given.
        limit: use at most so many training questions, from the first.
        eval_limit: use at most so many evaluation questions; what is trained on does not hang on it.
        max_completion_length: tokens.

    Returns:
        A task with the columns `prompt`, `answer` (a text) and the dataset's own, for reward functions. Prompts are conversations
        if the tokenizer has a chat template (the instruction is the system message, or part of the user's where the template
        takes no system message), else plain text.

    Raises:
        DataError: the model or the dataset cannot be read, a column is missing or has a cell that does not fit, there are too
            few rows, there is no such prompt format.
        RecipeError: an instruction for prompts that are used as they are; the prompt format's own instruction for a layout with
            tags or keys that it does not ask for.
    """
    if prompt_format not in LAYOUTS:
        raise DataError(unknown("prompt format", prompt_format, LAYOUTS))
    tokenizer, prompt_style = _load_tokenizer(model)
    text_columns = (question_column, prompt_column, "prompt", answer_column)
    dataset_rows = _add_dotted_columns(read_rows(dataset, split, texts=text_columns), text_columns)
    columns = find_columns(dataset_rows.column_names, question_column, prompt_column, answer_column, instruction)
    check_cells(dataset_rows, dataset, columns, template=prompt_style != "plain")
    if eval_split is None:
        dataset_rows, held_out_rows = set_aside(dataset_rows, dataset, columns.prompt, eval_limit)
    else:
        if eval_split == split:
            raise DataError(
                f"split and eval_split are both '{split}', so evaluations would use training data. Name another "
                "split, or leave eval_split out."
            )
        held_out_rows = _add_dotted_columns(read_rows(dataset, eval_split, texts=text_columns), text_columns)
        check_cells(held_out_rows, dataset, columns, template=prompt_style != "plain")
        held_out_rows = held_out_rows.select(range(min(eval_limit, len(held_out_rows))))
    if limit is not None:
        dataset_rows = dataset_rows.select(range(min(limit, len(dataset_rows))))
    instruction_text = INSTRUCTIONS[prompt_format] if instruction is None else instruction
    train_rows = _add_prompts(dataset_rows, columns, instruction_text, prompt_style)
    eval_rows = _add_prompts(held_out_rows, columns, instruction_text, prompt_style)
    layout = layout or LAYOUTS[prompt_format]
    rendered_prompts = [render(prompt, tokenizer) for prompt in train_rows["prompt"][:_SEARCHED_PROMPTS]]
    _check_asked(layout, rendered_prompts, instruction=instruction, whole=columns.whole, usual=prompt_format)
    format_note = f", {prompt_format}" if layout == LAYOUTS[prompt_format] else ""
    task_name = f"{Path(model).name} on {Path(dataset).name}{format_note}"
    return Task(task_name, model, train_rows, eval_rows, layout, max_completion_length)


def _load_tokenizer(model: str) -> tuple[Any, PromptStyle]:
    """Load a model's tokenizer. Also return where an instruction goes: system message, user message or plain text."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        AutoConfig.from_pretrained(model, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # damaged files raise many types of exceptions
        if Path(model).is_dir():
            file_names = sorted(file.name for file in Path(model).iterdir()) or ["no file"]
            file_names_text = ", ".join([*file_names[:8], "..."] if len(file_names) > 8 else file_names)
            fault = f"folder '{model}' needs a config and a tokenizer that can be read; it holds {file_names_text}"
        else:
            fault = f"'{model}' is no folder in '{Path.cwd()}' or beside the recipe, and no hub model within reach"
        raise DataError(
            f"The model {fault} ({reason(error)}). Set --model to a folder written by save_pretrained or to a hub name."
        ) from error
    if not tokenizer.chat_template:
        return tokenizer, "plain"
    try:
        chat_roles = ("system", "user")
        tokenizer.apply_chat_template([{"role": role, "content": "Hi"} for role in chat_roles], tokenize=False)
    except Exception:  # chat templates raise their own exceptions for unknown roles
        return tokenizer, "user"
    return tokenizer, "system"


def _add_prompts(rows: Any, columns: DatasetColumns, instruction: str, style: PromptStyle) -> Any:
    """Add the columns `prompt` and `answer` to a dataset. Columns with names that TRL uses are dropped."""
    added_columns = ["prompt"] if columns.answer is None else ["prompt", "answer"]
    prompt_columns = [columns.prompt] if columns.whole else []
    unwanted_names = (*added_columns, *prompt_columns, *_TRL_COLUMNS)
    kept_columns = [name for name in rows.column_names if name not in unwanted_names]
    dropped_columns = [name for name in rows.column_names if name in unwanted_names]

    def build_row(cells: Mapping[str, Any]) -> dict[str, Any]:
        prompt = cells[columns.prompt]
        return {"prompt": prompt if columns.whole else add_instruction(str(prompt), instruction, style)}

    task_rows = rows.map(build_row, remove_columns=dropped_columns)
    if columns.answer is not None:  # `map` would convert the texts to the type of an old column `answer`
        task_rows = task_rows.add_column("answer", [_answer_text(cell) for cell in rows[columns.answer]])
    return task_rows.select_columns([*added_columns, *kept_columns])


def _answer_text(cell: Any) -> str:
    """Return an answer as text: 4.0 becomes "4". `datasets` reads some integers of JSON files as floats, and dates as times."""
    if isinstance(cell, str):
        return cell
    return str(int(cell) if isinstance(cell, float) and cell.is_integer() else cell).removesuffix(" 00:00:00")


def _check_asked(layout: Layout, prompts: list[str], *, instruction: str | None, whole: bool, usual: PromptFormat) -> None:
    """Refuse a default instruction that does not ask for the layout's tags. Warn if the user's prompts do not."""
    missing_words = find_unasked(layout, prompts)
    if not missing_words or instruction == "":
        return
    words_text = ", ".join(missing_words)
    usual_tags_text = ", ".join(f"<{tag}>" for tag in dict.fromkeys(LAYOUTS[usual].tags))
    if instruction is None and not whole:
        raise RecipeError(
            f"The layout has {words_text}, but no prompt asks for {words_text}. The default instruction '{usual}' asks only "
            f"for {usual_tags_text}. Set 'instruction' to a text that asks for {words_text}. Or set prompt_column to a column of "
            f"whole prompts. If the model writes {words_text} without being asked, set instruction=''."
        )
    noun = "tags" if missing_words[0].startswith("<") else "keys"
    warnings.warn(
        f"None of the first {len(prompts)} prompts asks for the layout's {noun} {words_text}. A model writes them only if it is "
        "asked to or has learnt to. Ask for them in the prompts. If the model has learnt to write them, set instruction=''.",
        UserWarning,
        stacklevel=3,
    )


def add_instruction(question: str, instruction: str, style: PromptStyle) -> Any:
    """Put an instruction before a question, as text or as chat messages. An empty instruction adds nothing."""
    if style == "plain":
        return f"{instruction}\n\nProblem:\n{question}\n\n" if instruction else question
    if style == "system" and instruction:
        return [{"role": "system", "content": instruction}, {"role": "user", "content": question}]
    return [{"role": "user", "content": f"{instruction}\n\n{question}" if instruction else question}]


def render(prompt: Any, tokenizer: Any) -> str:
    """Return a prompt as the model sees it. Conversations are put in the chat template."""
    if isinstance(prompt, str):
        return prompt
    try:
        return tokenizer.apply_chat_template(prompt, tokenize=False)
    except Exception as error:  # chat templates raise their own exceptions for bad conversations
        raise DataError(f"The model's chat template rejects the prompt {prompt!r:.80}: {error}.") from error


def find_unasked(layout: Layout, texts: Sequence[str]) -> list[str]:
    """Return the layout's opening tags and JSON keys that no prompt names. A prefilled tag is left out."""
    searched_words: dict[str, None] = {}
    for part in layout.parts:
        words_of_mark = SEGMENTERS.find(part.segmenter).asks
        if words_of_mark is not None and part.mark != layout.prefilled:
            searched_words.update(dict.fromkeys(words_of_mark(part.mark)))
    return [word for word in searched_words if not any(_holds(prompt, word) for prompt in texts)]


def _holds(text: str, word: str) -> bool:
    """Return whether a text contains a tag or a whole word."""
    return bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)) if word[:1].isalnum() else word in text


@dataclass(frozen=True)
class DatasetColumns:
    """The columns of a dataset that hold prompts and answers."""

    prompt: str
    whole: bool  # whether the prompts in the column are complete, so that they stay unchanged
    answer: str | None
    conversations: bool = False  # True if spanwise, not the user, chose the prompt column `messages`


def read_rows(dataset: str, split: str, *, texts: Collection[str | None] = ()) -> Any:
    """Read one split of a dataset by hub name, folder or file."""
    from datasets import Dataset, DatasetDict, config, load_dataset, load_from_disk

    dataset_path = Path(dataset)
    file_suffix = "" if dataset_path.is_dir() else dataset_path.suffix.lower()
    readable_suffixes = (*_READERS, *SUFFIXES)
    if dataset_path.exists():
        config.HF_UPDATE_DOWNLOAD_COUNTS = False  # stops `datasets` from reporting local reads to a server
    if dataset_path.is_file() != (file_suffix in readable_suffixes):
        file_fault = f"neither in '{Path.cwd()}' nor beside the recipe"
        if dataset_path.is_file():
            file_fault = "not a kind of file that can be read"
        suffixes_text = ", ".join(readable_suffixes)
        raise DataError(
            f"The dataset file '{dataset}' is {file_fault}. Set --dataset to a {suffixes_text} file, a folder or a hub name."
        )
    if dataset_path.is_file() and split != "train":
        raise DataError(
            f"The dataset file '{dataset}' has no splits, so it has no split '{split}'. Leave the split out, or give a folder with "
            f"the files train{file_suffix} and {split}{file_suffix}."
        )
    if file_suffix in SUFFIXES:
        delimited_cells = read_delimited(dataset_path).to_pydict()
        return Dataset.from_dict(
            {name: parse_chats(cells if name in texts else parse_numbers(cells)) for name, cells in delimited_cells.items()}
        )
    reader_name = _READERS.get(file_suffix)
    try:
        if reader_name:
            return load_dataset(reader_name, data_files={split: str(dataset_path)}, split=split)
        if (dataset_path / "dataset_info.json").is_file() or (dataset_path / "dataset_dict.json").is_file():
            saved_dataset = load_from_disk(dataset)
            if isinstance(saved_dataset, DatasetDict):
                return saved_dataset[split]
            if split not in ("train", str(saved_dataset.split)):
                raise ValueError("it was saved without splits")
            return saved_dataset
        if dataset_path.exists():
            return load_dataset(dataset, split=split)
        hub_name, _, hub_config = dataset.partition(":")
        return load_dataset(hub_name, hub_config or None, split=split)
    except Exception as error:  # datasets, pyarrow and the hub client raise exceptions of their own types
        if "StopIteration" in reason(error) or "corresponds to no data" in reason(error):
            raise DataError(_NO_ROWS.format(dataset)) from error
        folder_or_name = "folder" if dataset_path.is_dir() else "name"
        kind_of_dataset = "file" if reader_name else folder_or_name
        raise DataError(
            f"Split '{split}' of the dataset {kind_of_dataset} '{dataset}' cannot be read ({reason(error)}). "
            f"Check --dataset (a file, a folder, or a hub name such as 'owner/name' or 'owner/name:config') and --set split=NAME."
        ) from error


def _add_dotted_columns(rows: Any, names: Collection[str | None]) -> Any:
    """Add columns with names such as `reward_model.ground_truth`, each from a field of a column that holds objects."""
    from datasets import concatenate_datasets

    field_names = rows.features.flatten().keys() - set(rows.column_names)
    dotted_names = [name for name in dict.fromkeys(filter(None, names)) if name in field_names]
    if not dotted_names:
        return rows
    object_columns = [name for name in rows.column_names if any(dotted.startswith(f"{name}.") for dotted in dotted_names)]
    field_rows = rows.select_columns(object_columns).flatten().select_columns(dotted_names)
    return concatenate_datasets([rows, field_rows], axis=1)


def find_columns(
    names: Sequence[str], question: str, prompt: str | None, answer: str | None, instruction: str | None
) -> DatasetColumns:
    """Choose a dataset's columns of prompts and answers. Without a question column, take `prompt` or `messages`."""
    may_be_conversations = False
    if prompt is None and not instruction and question not in names:
        prompt = next((name for name in ("prompt", "messages") if name in names), None)
        may_be_conversations = prompt == "messages"
    if prompt is not None and instruction:
        raise RecipeError(
            f"Prompts of the column '{prompt}' are used unchanged, so the instruction would be ignored. Leave the "
            f"instruction out. Or set question_column={prompt} instead of prompt_column, and the instruction goes before "
            "each prompt."
        )
    if prompt is None and instruction is None and "prompt" in names and question != "prompt":
        warnings.warn(
            f"The dataset has the columns 'prompt' and '{question}'. The model sees the default instruction and then "
            f"'{question}'. To use your prompts unchanged instead, set prompt_column=prompt.",
            UserWarning,
            stacklevel=3,
        )
    return DatasetColumns(question if prompt is None else prompt, prompt is not None, answer, may_be_conversations)


def check_cells(rows: Any, dataset: str, columns: DatasetColumns, *, template: bool) -> None:
    """Refuse a dataset with an unusable question, prompt or answer. The error names the row and the remedy."""
    if not len(rows):
        raise DataError(_NO_ROWS.format(dataset))
    for name in ("image", "images"):
        if name in rows.column_names and any(cell.as_py() for cell in rows.data[name]):
            raise DataError(
                f"The dataset '{dataset}' has a column '{name}', but a recipe trains on text alone. Remove the column. Or write a "
                "script with SpanGRPOTrainer, which can train with images."
            )
    question_advice = " If a column holds prompts in place of questions, write --set prompt_column=NAME."
    option_and_advice = ("prompt_column", "") if columns.whole else ("question_column", question_advice)
    needed_columns = [(columns.prompt, *option_and_advice)]
    if columns.answer is not None:
        needed_columns.append((columns.answer, "answer_column", " If there are no answers, write --set answer_column=null."))
    for name, option, advice in needed_columns:
        if name not in rows.column_names:
            raise DataError(
                f"The dataset '{dataset}' has no column '{name}'; its columns are {', '.join(rows.features.flatten())}. "
                f"Name the right one with --set {option}=NAME.{advice}"
            )
        for row_index, cell in enumerate(rows[name]):
            is_blank = is_empty(cell) or not str(cell).strip()
            remedy = "fill the cell or drop the row." if is_blank else _cell_fault(cell, option, columns, template=template)
            if remedy:
                cell_text = "nothing" if is_blank else f"{cell!r:.80}"
                raise DataError(f"Row {row_index} of the dataset '{dataset}' has {cell_text} in column '{name}'; {remedy}")


def _cell_fault(cell: Any, option: str, columns: DatasetColumns, *, template: bool) -> str | None:
    """Say why a cell of a dataset is no question, prompt or answer. None for a good cell."""
    if option == "prompt_column":
        message_fault = prompt_fault(cell, template=template)
        if not message_fault and columns.conversations and cell[-1]["role"] == "assistant":
            return (
                "a prompt must end before the assistant's answer, but this one includes the answer. Leave that message out."
            )
        return message_fault
    if not isinstance(cell, (list, dict)):
        return None
    if option == "question_column":
        return "a question must be a text. If the column holds whole prompts, name it with prompt_column instead."
    return "an answer must be one text or number. Set answer_column=null to leave the column to your own reward functions."


def set_aside(rows: Any, dataset: str, prompt_column: str, eval_limit: int) -> tuple[Any, Any]:
    """Split a dataset into training rows, in order, and at most `eval_limit` evaluation rows.

    They share no prompt, unless the dataset has fewer than ten. Then rows are set aside one by one, because training would lose
    too much.
    """
    prompts = [str(prompt) for prompt in rows[prompt_column]]
    rows_of_prompt: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of_prompt.setdefault(prompt, []).append(row)
    row_groups = (
        list(rows_of_prompt.values()) if len(rows_of_prompt) >= _FEW_PROMPTS else [[row] for row in range(len(rows))]
    )
    held_out_count = min(HELD_OUT, max(1, len(row_groups) // 5))
    if len(row_groups) < 2 or eval_limit < 1:
        raise DataError(
            f"Training and evaluation need at least one prompt each, but the number of different prompts in '{dataset}' is "
            f"{len(rows_of_prompt)}, and eval_prompts is {eval_limit}. Give a larger dataset, or set eval_prompts to 1 or more."
        )
    prompt_order = np.random.default_rng(0).permutation(len(row_groups)).tolist()
    held_out_rows = [row_groups[index][0] for index in prompt_order[:held_out_count][:eval_limit]]
    training_rows = [row for index in prompt_order[held_out_count:] for row in row_groups[index]]
    if {prompts[row] for row in held_out_rows} & {prompts[row] for row in training_rows}:
        warnings.warn(
            f"The number of different prompts in '{dataset}' is {len(rows_of_prompt)}, so evaluations repeat prompts of the "
            f"training. To evaluate on other prompts, give a dataset with {_FEW_PROMPTS} or more different prompts.",
            UserWarning,
            stacklevel=3,
        )
    return rows.select(sorted(training_rows)), rows.select(sorted(held_out_rows))


def reason(error: BaseException) -> str:
    """Return the first line of the innermost cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    type_name = type(error).__name__
    message = first_line(error)
    return message if message == type_name else f"{type_name}: {message}"
