"""The real path: a language model and a dataset of questions, by hub name or from local folders and files."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from spanwise.errors import DataError, RecipeError, unknown
from spanwise.layout import Layout
from spanwise.segment import SEGMENTERS
from spanwise.tasks.rows import DatasetColumns, check_cells, find_columns, read_rows, reason, set_aside
from spanwise.tasks.task import Task

PromptFormat = Literal["confidence", "two_attempts"]
#: Where an instruction can go: no chat template, one without a system message, or one with it.
PromptStyle = Literal["plain", "user", "system"]
#: So many prompts are looked through for the tags of the layout.
_LOOKED_AT = 64
#: What TRL calls its own things when it calls a reward function, or takes for pictures.
_TAKEN = ("completion", "completions", "completion_ids", "prompts", "image", "images", "environment")

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
    """A model and a dataset of questions as a task; of the model only config and tokenizer are read here.

    Args:
        model: hub name or local folder.
        dataset: hub name (`name:config` where the dataset has several), local folder (also one of `save_to_disk`), or a local
            json (an array, or lines), jsonl, parquet, csv or tsv file.
        prompt_format: which instruction and layout to start from: "confidence" (reasoning, answer, analysis, confidence) or
            "two_attempts" (reasoning, answer, reasoning, answer).
        layout: the blocks of a completion; None: those of the prompt format.
        instruction: what goes before each question; None: that of the prompt format. An empty one says that the model knows
            what to write: the question stands alone, and no prompt needs to hold what the layout looks for.
        split: of the dataset, for training.
        eval_split: split for evaluation; None: 512 random rows of `split` are set aside, the same every time, at most a fifth.
        question_column: column with the question.
        prompt_column: column with whole prompts, texts or conversations, which are used as they are; None: `prompt`, else
            `messages`, where the dataset has no question column and no instruction is given.
        answer_column: column with the right answer; None: there are none.
        limit: use at most so many training questions, from the first.
        eval_limit: use at most so many evaluation questions; what is trained on does not hang on it.
        max_completion_length: tokens.

    Returns:
        A task with the columns `prompt`, `answer` and the dataset's own, for reward functions. Prompts are conversations if the
        tokenizer has a chat template (the instruction is the system message, or part of the user's where the template takes no
        system message), else plain text.

    Raises:
        DataError: the model or the dataset cannot be read, a column is missing or has a cell that does not fit, there are too
            few rows, there is no such prompt format.
        RecipeError: an instruction for prompts that are used as they are; the prompt format's own instruction for a layout with
            tags or keys that it does not ask for.
    """
    if prompt_format not in LAYOUTS:
        raise DataError(unknown("prompt format", prompt_format, LAYOUTS))
    tokenizer, style = _tokenizer(model)
    texts = (question_column, prompt_column, "prompt", answer_column)
    rows = read_rows(dataset, split, texts=texts)
    columns = find_columns(rows.column_names, question_column, prompt_column, answer_column, instruction)
    check_cells(rows, dataset, columns, template=style != "plain")
    if eval_split is None:
        rows, held_out = set_aside(rows, dataset, eval_limit)
    else:
        held_out = read_rows(dataset, eval_split, texts=texts)
        check_cells(held_out, dataset, columns, template=style != "plain")
        held_out = held_out.select(range(min(eval_limit, len(held_out))))
    if limit is not None:
        rows = rows.select(range(min(limit, len(rows))))
    said = INSTRUCTIONS[prompt_format] if instruction is None else instruction
    train, evaluation = (_prompts(part, columns, said, style) for part in (rows, held_out))
    own = layout or LAYOUTS[prompt_format]
    seen = [shown(prompt, tokenizer) for prompt in train["prompt"][:_LOOKED_AT]]
    _check_told(own, seen, instruction=instruction, whole=columns.whole, usual=prompt_format)
    return Task(
        name=f"{Path(model).name} on {Path(dataset).name}" + (f", {prompt_format}" if own == LAYOUTS[prompt_format] else ""),
        model=model,
        train=train,
        evaluation=evaluation,
        layout=own,
        max_completion_length=max_completion_length,
    )


def _tokenizer(model: str) -> tuple[Any, PromptStyle]:
    """The tokenizer, and where an instruction can go: no chat template, one without a system message, or one with it."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        AutoConfig.from_pretrained(model, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds, and a damaged file adds its parser's
        if Path(model).is_dir():
            what = f"The model folder '{model}' needs a config and a tokenizer that can be read; it holds {_listing(Path(model))}"
        else:
            what = f"The model '{model}' is neither a folder in '{Path.cwd()}' or beside the recipe, nor a hub model within reach"
        raise DataError(
            f"{what} ({reason(error)}). Set --model to a folder written by save_pretrained or to a hub name."
        ) from error
    if not tokenizer.chat_template:
        return tokenizer, "plain"
    try:
        tokenizer.apply_chat_template(message("system", "s") + message("user", "u"), tokenize=False)
    except Exception:  # a template refuses a role with an exception of its own
        return tokenizer, "user"
    return tokenizer, "system"


def _prompts(part: Any, columns: DatasetColumns, instruction: str, style: PromptStyle) -> Any:
    """The rows with `prompt` and `answer` beside what they have."""
    made = ["prompt"] if columns.answer is None else ["prompt", "answer"]
    whole = [columns.prompt] if columns.whole else []
    kept = [name for name in part.column_names if name not in (*made, *whole, *_TAKEN)]
    options = {"columns": columns, "instruction": instruction, "style": style}
    gone = [name for name in part.column_names if name not in kept]
    return part.map(_row, fn_kwargs=options, remove_columns=gone).select_columns([*made, *kept])


def _row(cells: Mapping[str, Any], *, columns: DatasetColumns, instruction: str, style: PromptStyle) -> dict[str, Any]:
    prompt = cells[columns.prompt]
    row = {"prompt": prompt if columns.whole else asked(str(prompt).strip(), instruction, style)}
    return row if columns.answer is None else {**row, "answer": str(cells[columns.answer])}


def _check_told(layout: Layout, seen: list[str], *, instruction: str | None, whole: bool, usual: PromptFormat) -> None:
    """Refuse our own instruction for other tags than it asks for; warn where the user's prompts hold none of a tag."""
    missing = untold(layout, seen)
    if not missing or instruction == "":
        return
    tags, its = ", ".join(missing), ", ".join(f"<{tag}>" for tag in dict.fromkeys(LAYOUTS[usual].tags))
    if instruction is None and not whole:
        raise RecipeError(
            f"The layout has {tags}, and no prompt asks for that: the usual instruction of '{usual}' asks for {its}. Set "
            "instruction to a text that asks for what the layout looks for, prompt_column to a column of whole prompts, or "
            "instruction='' for a model that knows by itself what to write."
        )
    what = "tags" if missing[0].startswith("<") else "keys"
    warnings.warn(
        f"None of the first {len(seen)} prompts holds {tags} of the layout. A model that has not learnt these {what} before will "
        "not write them; ask for them in the prompts. instruction='' says that it knows them.",
        UserWarning,
        stacklevel=3,
    )


def _listing(folder: Path) -> str:
    names = sorted(file.name for file in folder.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "no file"


def message(role: str, content: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": role, "content": content}]


def asked(question: str, instruction: str, style: PromptStyle) -> Any:
    r"""A question with an instruction before it; with an empty one the question alone."""
    if style == "plain":
        return f"{instruction}\n\nProblem:\n{question}\n\n" if instruction else question
    if style == "system" and instruction:
        return message("system", instruction) + message("user", question)
    return message("user", f"{instruction}\n\n{question}" if instruction else question)


def shown(prompt: Any, tokenizer: Any) -> str:
    """A prompt as the model sees it: a text as it is, a conversation in the tokenizer's chat template."""
    if isinstance(prompt, str):
        return prompt
    try:
        return tokenizer.apply_chat_template(prompt, tokenize=False)
    except Exception as error:  # a template refuses a conversation with an exception of its own
        raise DataError(f"The model's chat template does not take the prompt {prompt!r:.80}: {error}.") from error


def untold(layout: Layout, texts: Sequence[str]) -> list[str]:
    """What a layout looks for and none of the texts holds, opening tags and keys, without what the prompt has opened already."""
    words: dict[str, None] = {}
    for part in layout.parts:
        asks = SEGMENTERS.find(part.segmenter).asks
        if asks is not None and part.mark != layout.prefilled:
            words.update(dict.fromkeys(asks(part.mark)))
    return [word for word in words if not any(_holds(text, word) for text in texts)]


def _holds(text: str, word: str) -> bool:
    """Whether a text has a tag somewhere, or a word that is no part of another one."""
    return bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)) if word[:1].isalnum() else word in text
