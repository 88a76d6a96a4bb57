"""The trainer that a recipe stands for, and what is refused before it is made."""

from __future__ import annotations

import os
from math import gcd
from pathlib import Path

import torch
from transformers import AutoTokenizer, PrinterCallback, ProgressCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from spanwise.commands.train.recorder import Recorder
from spanwise.credit import method
from spanwise.engines.trl import SpanGRPOConfig, SpanGRPOTrainer
from spanwise.engines.trl.keeping import steps_per_batch
from spanwise.errors import DataError, RecipeError, unknown
from spanwise.recipe import EMBEDDED, Recipe
from spanwise.scheme import Scheme
from spanwise.tasks import Task

#: What TRL counts in optimizer steps and the recipe in generation batches, and what the run itself writes.
_OWN_FIELD = {
    "max_steps": "steps", "save_steps": "save_every", "logging_steps": "steps (a line for each generation batch)",
    "keep_rollouts": "keep_rollouts", "report": "report",
}  # fmt: skip


def check_recipe(recipe: Recipe) -> None:
    """Refuse loggers and options that nobody knows, and what would never begin, before anything is made."""
    for mode in recipe.modes.values():
        mode.check_steps(recipe.steps)
    loggers = ["none", "all", *INTEGRATION_TO_CALLBACK]
    if recipe.report_to not in loggers:
        raise RecipeError(unknown("logger for report_to", recipe.report_to, loggers))
    if recipe.report_to not in (*loggers[:2], *get_available_reporting_integrations()):
        raise RecipeError(
            f"report_to is '{recipe.report_to}', which is not installed; install it, or set report_to to none."
        )
    if "critic" not in recipe.modes and "value_nt" in method(recipe.method).required:
        raise RecipeError(
            f"Method '{recipe.method}' needs a critic and the recipe has none. Write critic: {{learning_rate: 1.0e-5}}, or use a "
            "method that compares completions, such as 'bae' or 'grpo'."
        )
    for name in recipe.trainer:
        if name not in SpanGRPOConfig.__dataclass_fields__:
            raise RecipeError(unknown("trainer option", name, SpanGRPOConfig.__dataclass_fields__))
        if name in _OWN_FIELD:
            raise RecipeError(
                f"trainer: {{{name}: {recipe.trainer[name]}}} would part what the run counts from what it trains; the recipe's own "
                f"field for it is {_OWN_FIELD[name]}."
            )


def check_prompts(recipe: Recipe, task: Task) -> None:
    """Refuse a dataset with fewer prompts than one step of training takes; TRL would end without a single step."""
    if len(task.train) < recipe.prompts:
        raise DataError(
            f"The dataset '{recipe.dataset}' leaves {len(task.train)} prompts to train on, after the fifth that is kept for "
            f"evaluation (at least 1, at most 512), and a step takes {recipe.prompts}. Add rows, or set --prompts to "
            f"{len(task.train)} or fewer."
        )


def trainer_config(recipe: Recipe, task: Task) -> SpanGRPOConfig:
    """The TRL configuration a recipe stands for; `recipe.trainer` has the last word."""
    on_cpu = not torch.cuda.is_available()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    mini = recipe.prompts * recipe.group_size // recipe.mini_batches
    micro = recipe.micro_batch or (mini // world if recipe.task in EMBEDDED else gcd(mini // world, 4))
    options = {
        "output_dir": str(Path(recipe.output or "") / "checkpoints"),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": max(1, mini // (micro * world)),
        "steps_per_generation": max(1, mini // (micro * world)) * recipe.mini_batches,
        "num_generations": recipe.group_size,
        "max_completion_length": recipe.max_completion_length or task.max_completion_length,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "epsilon": recipe.clip,
        "entropy_coef": recipe.entropy,
        "use_adaptive_entropy": recipe.entropy_target is not None,
        "entropy_target": recipe.entropy_target or 0.0,
        "entropy_coef_delta": 5e-4,
        "temperature": recipe.temperature,
        "seed": recipe.seed,
        "use_cpu": on_cpu,
        "bf16": not on_cpu,
        "activation_checkpointing": not on_cpu,
        "save_strategy": "steps" if recipe.save_every else "no",
        "report_to": recipe.report_to,
        "disable_tqdm": True,
    }
    asked = {**options, **recipe.trainer}
    per_batch = steps_per_batch(SpanGRPOConfig(**asked))
    counted = {
        "max_steps": recipe.steps * per_batch,
        "warmup_steps": recipe.warmup_steps * per_batch,
        "logging_steps": per_batch,
        "save_steps": recipe.save_every * per_batch or 1,
    }
    return SpanGRPOConfig(**{**counted, **asked})


def make_trainer(recipe: Recipe, task: Task, scheme: Scheme, args: SpanGRPOConfig, recorder: Recorder) -> SpanGRPOTrainer:
    """The trainer of a recipe, followed by the recorder in the place of TRL's own progress."""
    trainer = SpanGRPOTrainer(
        model=task.model,
        args=args,
        train_dataset=task.train,
        processing_class=AutoTokenizer.from_pretrained(task.model, padding_side="left", trust_remote_code=False),
        scheme=scheme,
        critic=recipe.modes.get("critic"),
        callbacks=[recorder],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    recorder.trainer = trainer
    return trainer
