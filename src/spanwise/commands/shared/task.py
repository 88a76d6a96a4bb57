"""From a recipe to its task, and from a folder to its model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from spanwise.commands.shared.display import warm_up_progress
from spanwise.errors import DataError
from spanwise.recipe import EMBEDDED, Recipe, answer_layout
from spanwise.tasks import Task, digits_task, load_task
from spanwise.tasks.warm_start import shortened


def make_task(recipe: Recipe, console: Console) -> Task:
    """The task of a recipe, read by the recipe's blocks: the embedded one (warm-started on first use) or a model and a dataset."""
    if recipe.task in EMBEDDED:
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
            str(recipe.model),
            str(recipe.dataset),
            prompt_format=recipe.task,
            split=recipe.split,
            question_column=recipe.question_column,
            answer_column=recipe.answer_column,
            eval_limit=recipe.eval_prompts,
        )
    return replace(task, layout=answer_layout(recipe, task.layout))


def load_model(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a local folder; a DataError if it holds none."""
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers, safetensors and json each raise their own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"'{folder}' holds no readable model and tokenizer: {reason}") from error
    return model, tokenizer
