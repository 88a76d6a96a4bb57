"""From a recipe to its task, and from a folder to its model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from spanwise.commands.shared.display import warm_up_progress
from spanwise.errors import DataError, RecipeError
from spanwise.recipe import EMBEDDED, Recipe, answer_layout, own_layout
from spanwise.tasks import DIGITS_LAYOUT, TWICE_LAYOUT, Task, digits_task, load_task
from spanwise.tasks.hub import LAYOUTS
from spanwise.tasks.warm_start import shortened

#: The blocks of each task, where a recipe names none.
TASK_LAYOUTS = {"digits": DIGITS_LAYOUT, "digits_twice": TWICE_LAYOUT, **LAYOUTS}


def make_task(recipe: Recipe, console: Console, *, model: Path | None = None) -> Task:
    """The task of a recipe, read by the recipe's blocks: the embedded one (warm-started on first use) or a model and a dataset.

    Args:
        recipe: checked already.
        console: where the warm start is shown.
        model: the folder of the model that is looked at, where that is not the one of the recipe: prompts are written in its
            chat template, and the recipe's model is not looked for.

    Raises:
        RecipeError: the layout has tags that the embedded model does not write, or that no prompt asks for; DataError: what
            `load_task` refuses.
    """
    if recipe.task in EMBEDDED:
        _check_written(recipe)
        task = digits_task(
            recipe.start if recipe.task == "digits" else "twice",
            seed=recipe.seed,
            start_seed=recipe.start_seed,
            settings=None if recipe.start_steps is None else shortened(recipe.start_steps),
            train_size=recipe.steps * recipe.prompts,
            eval_size=recipe.eval_prompts,
            progress=warm_up_progress(console),
        )
    else:
        task = load_task(
            str(model or recipe.model),
            str(recipe.dataset),
            prompt_format=recipe.task,
            layout=own_layout(recipe),
            instruction=recipe.instruction,
            split=recipe.split,
            question_column=recipe.question_column,
            prompt_column=recipe.prompt_column,
            answer_column=recipe.answer_column,
            eval_limit=recipe.eval_prompts,
        )
    return replace(task, layout=answer_layout(recipe, TASK_LAYOUTS[recipe.task]))


def check_prompts(recipe: Recipe, task: Task) -> None:
    """Refuse a dataset with fewer prompts than one step of training takes; TRL would end without a single step.

    Raises:
        DataError: how many there are, how many are needed, and what to set.
    """
    if len(task.train) < recipe.prompts:
        raise DataError(
            f"The dataset '{recipe.dataset}' leaves {len(task.train)} prompts to train on, after the fifth that is kept for "
            f"evaluation (at least 1, at most 512), and a step takes {recipe.prompts}. Add rows, or set --prompts to "
            f"{len(task.train)} or fewer."
        )


def _check_written(recipe: Recipe) -> None:
    """Refuse tags that the embedded model does not know: it has learnt its own before, and its prompts name none."""
    own = own_layout(recipe)
    known = TASK_LAYOUTS[recipe.task].tags
    strange = [f"<{tag}>" for tag in (own.tags if own and own.segmenter == "tags" else ()) if tag not in known]
    if strange:
        raise RecipeError(
            f"The model of the embedded task '{recipe.task}' writes {', '.join(f'<{tag}>' for tag in dict.fromkeys(known))} and "
            f"nothing else, so no completion would hold {', '.join(strange)}. Use its tags in the layout, or train a --model on a "
            "--dataset."
        )


def load_model(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a local folder; a DataError if it holds none."""
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers, safetensors and json each raise their own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"'{folder}' holds no readable model and tokenizer: {reason}") from error
    return model, tokenizer
