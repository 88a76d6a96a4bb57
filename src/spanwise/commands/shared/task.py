"""Build the task of a recipe, and load the model of a folder."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from spanwise.commands.shared.progress import quiet, warm_up_progress
from spanwise.engines.checkpoints import newest_checkpoint
from spanwise.errors import DataError, RecipeError, first_line
from spanwise.fidelity.rerolls import Roller
from spanwise.recipe import EMBEDDED, SCRIPT, Recipe, answer_layout, check_written, load
from spanwise.tasks import Task, digits_task, load_task, task_layout, task_start
from spanwise.tasks.embedded import embedded
from spanwise.tasks.warm_start import shortened

#: TRL's sampling options that a recipe may set under `trainer`. Evaluations use these options, too.
SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty")


def make_task(recipe: Recipe, console: Console, *, model: Path | None = None) -> Task:
    """Build the task of a recipe, with its prompts and start model. The model of a built-in task is trained once."""
    quiet()
    if recipe.task == SCRIPT:
        raise RecipeError(
            "A script trained this run, and only that script knows its prompts. Say which prompts to use: "
            "--set task=confidence --set dataset=FILE, or --recipe FILE."
        )
    warm_start = task_start(recipe)
    layout = task_layout(recipe)
    if warm_start is not None:
        check_written(recipe, layout)
        task = digits_task(
            warm_start,
            seed=recipe.seed,
            start_seed=recipe.start_seed,
            settings=None if recipe.start_steps is None else shortened(recipe.start_steps),
            train_size=recipe.steps * recipe.prompts,
            eval_size=recipe.eval_prompts,
            progress=warm_up_progress(console),
        )
    else:
        task = load_task(
            str(model or recipe.model),  # a trained model's folder has its own chat template
            str(recipe.dataset),
            prompt_format=cast(Any, recipe.task),
            layout=recipe.own_layout,
            eval_limit=recipe.eval_prompts,
            **recipe.model_dump(include={"instruction", "split", "question_column", "prompt_column", "answer_column"}),
        )
    return replace(task, layout=answer_layout(recipe, layout))


def run_or_model(folder: Path, recipe: Path | None, overrides: Mapping[str, Any]) -> tuple[Path, Recipe]:
    """Return the folder of a model, and the recipe to evaluate it with."""
    if not folder.is_dir():
        raise DataError(
            f"'{folder}' is no folder. Give the folder of a run, a checkpoint or a model. Download a model of the hub first: "
            "hf download NAME --local-dir FOLDER."
        )
    possible_runs = (folder, *run_above(folder))
    run_folder = next((path for path in possible_runs if (path / "recipe.yaml").is_file()), None)
    model_folder = folder / "model" if (folder / "model").is_dir() else folder
    if run_folder == folder == model_folder and not (folder / "config.json").is_file():
        checkpoint, _ = newest_checkpoint(folder / "checkpoints")
        checkpoint_text = f"use its newest checkpoint, '{checkpoint}'" if checkpoint else "it has no checkpoint either"
        raise DataError(f"The run in '{folder}' has no model yet, because it has not ended; {checkpoint_text}.")
    recipe_file = recipe or (None if run_folder is None else run_folder / "recipe.yaml")
    recipe_changes = dict(overrides)
    task_is_embedded = recipe_changes.get("task", EMBEDDED[0]) in EMBEDDED
    has_own_prompts = recipe_changes.get("dataset") or not task_is_embedded
    if recipe_file is None and "model" not in recipe_changes and has_own_prompts:
        recipe_changes["model"] = str(model_folder)
    return model_folder, load(recipe_file, recipe_changes)


def run_above(folder: Path) -> list[Path]:
    """Return a list of the run folder that holds a model folder or checkpoint. Without a run folder, the list is empty."""
    if folder.name == "model":
        return [folder.parent]
    return [folder.parent.parent] if folder.parent.name == "checkpoints" else []


def model_and_task(folder: Path, recipe: Recipe, console: Console) -> tuple[Any, Any, Task]:
    """Load a local model and its tokenizer, and build the task of a recipe for it."""
    torch.set_num_threads(recipe.threads)
    model, tokenizer = load_model(folder)
    start_settings = task_start(recipe)
    if start_settings is None:
        return model, tokenizer, make_task(recipe, console, model=folder)
    task_tokenizer = embedded(start_settings).course.tokenizer()
    if tokenizer.get_vocab() != task_tokenizer.get_vocab():
        raise DataError(
            f"The model in '{folder}' is not for the embedded task '{recipe.task}': its tokenizer has {len(tokenizer)} ids, "
            f"but the task's has {len(task_tokenizer)}. Say which prompts to use: --recipe FILE, or --set dataset=FILE."
        )
    return model, tokenizer, make_task(recipe, console)


def task_roller(model: Any, tokenizer: Any, task: Task, recipe: Recipe) -> Roller:
    """Build the `Roller` that samples completions of a task."""
    max_length = recipe.max_completion_length or task.max_completion_length
    given_options = {name: recipe.trainer[name] for name in SAMPLING if name in recipe.trainer}
    if given_options.get("top_k") == -1:  # in vLLM, -1 switches `top_k` off
        given_options["top_k"] = 0
    if not recipe.trainer.get("use_vllm"):  # `generate` does not know vLLM's options
        given_options |= _mapping(recipe.trainer.get("generation_kwargs"))
    template_options = _mapping(recipe.trainer.get("chat_template_kwargs"))
    correct_entries = [objective for objective in recipe.objectives or () if objective.get("reward") == "correct"]
    own_options = (correct_entries or [{}])[-1].get("options") or {}  # the last `correct` objective, as in `answer_tags`
    answer_tags = recipe.answer_tags
    verdict_options = {"tag": answer_tags["answer"], **recipe.verifier, **own_options}
    return Roller(
        model,
        tokenizer,
        task,
        recipe.temperature,
        max_length,
        given_options,
        template_options,
        verdict_options,
        answer_tags["confidence"],
    )


def _mapping(written: Any) -> dict[str, Any]:
    """Return an option of TRL as a dictionary. The option may be JSON text."""
    return json.loads(written) if isinstance(written, str) else dict(written or {})


def load_model(source: Path | str) -> tuple[Any, Any]:
    """Load a model, on the GPU if there is one, and its tokenizer. A `Path` is a local folder. May raise a DataError."""
    quiet()
    try:
        load_options: dict[str, Any] = {"local_files_only": isinstance(source, Path), "trust_remote_code": False}
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(str(source), **load_options)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            model = AutoModelForImageTextToText.from_pretrained(str(source), **load_options)  # the model reads images
        tokenizer = AutoTokenizer.from_pretrained(str(source), **load_options)
    except Exception as error:  # transformers, safetensors and json raise different error types
        raise DataError(f"'{source}' holds no readable model and tokenizer: {first_line(error)}.") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # TRL does the same
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer
