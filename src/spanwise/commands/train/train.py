"""`train`: from a recipe to a trained model and its folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from math import gcd
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer, PrinterCallback, ProgressCallback

from spanwise.commands.shared.checkpoints import find_checkpoint
from spanwise.commands.shared.display import figure_table, pull_note
from spanwise.commands.shared.folder import RunFolder, metrics_until, sole_writer
from spanwise.commands.shared.task import check_prompts, make_task
from spanwise.commands.train.recorder import Recorder
from spanwise.engines.trl import SpanGRPOConfig, SpanGRPOTrainer
from spanwise.errors import RecipeError, unknown
from spanwise.recipe import EMBEDDED, Recipe, resolved, scheme_of
from spanwise.scheme import Scheme
from spanwise.tasks import Task


def train(
    recipe: Recipe, *, console: Console | None = None, resume: str | None = None, title: str = "train"
) -> dict[str, Any]:
    """Train as the recipe says; write the run's folder; return what `summary.json` holds.

    Args:
        recipe: checked already.
        console: where progress is shown.
        resume: a checkpoint folder, or "last" for the newest intact one of the run.
        title: name in the progress line.

    Raises:
        SpanwiseError: anything in the recipe, the data or the checkpoint that cannot work, or a folder that another process is
            training into, as one sentence.
    """
    console = console or Console()
    torch.set_num_threads(recipe.threads)
    started = time.perf_counter()
    checkpoint = None if resume is None else find_checkpoint(recipe.output, resume, console)
    task = make_task(recipe, console)
    check_prompts(recipe, task)
    scheme = scheme_of(recipe, task.layout, recipe.max_completion_length or task.max_completion_length)
    with sole_writer(recipe.output):
        history = [] if checkpoint is None else _history(Path(checkpoint), recipe)
        folder = RunFolder(recipe.output, history=history)
        folder.write_recipe(resolved(recipe, scheme))
        recorder = Recorder(recipe, task, folder, console, title, history)
        trainer = _trainer(recipe, task, scheme, recorder)
        main = trainer.accelerator.is_main_process
        note = pull_note(scheme, group_size=recipe.group_size)
        if note and main:
            console.print(note, highlight=False, soft_wrap=True)
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        finally:
            recorder.live.close()
        summary = recorder.summary(trainer, seconds=time.perf_counter() - started)
        trainer.save_model(str(folder.model))
        if main:
            folder.write_summary(summary)  # last of what the run leaves: it says that all is there
            _show(summary, console, title=f"{title}: {recipe.output}")
        if recipe.report and main:
            from spanwise.commands.report.report import report_folder  # a second of imports that only the end needs

            console.print(f"Report: {report_folder(folder.path)}", highlight=False, soft_wrap=True)
    return summary


def _trainer(recipe: Recipe, task: Task, scheme: Scheme, recorder: Recorder) -> SpanGRPOTrainer:
    """The trainer of a recipe, followed by the recorder in the place of TRL's own progress."""
    trainer = SpanGRPOTrainer(
        model=task.model,
        args=trainer_config(recipe, task),
        train_dataset=task.train,
        processing_class=AutoTokenizer.from_pretrained(task.model, padding_side="left"),
        scheme=scheme,
        callbacks=[recorder],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    recorder.trainer = trainer
    return trainer


def _show(summary: Mapping[str, Any], console: Console, *, title: str) -> None:
    console.print(figure_table(title, {"start": summary["start"], "end": summary["final"]}))
    console.print(
        f"{summary['seconds']:.0f} s, {summary['tokens_per_second']:.0f} tokens/s; "
        f"segment + score + credit took {summary['spanwise_share']:.2%} of the training steps."
    )


def _history(checkpoint: Path, recipe: Recipe) -> list[dict[str, Any]]:
    """The metrics of the run that wrote a checkpoint, up to that checkpoint."""
    step = json.loads((checkpoint / "trainer_state.json").read_text())["global_step"]
    return metrics_until(checkpoint.resolve().parent.parent, step // recipe.mini_batches)


def trainer_config(recipe: Recipe, task: Task) -> SpanGRPOConfig:
    """The TRL configuration a recipe stands for; `recipe.trainer` has the last word."""
    on_cpu = not torch.cuda.is_available()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    mini = recipe.prompts * recipe.group_size // recipe.mini_batches
    micro = recipe.micro_batch or (mini // world if recipe.task in EMBEDDED else gcd(mini // world, 4))
    options = {
        "output_dir": str(Path(recipe.output) / "checkpoints"),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": max(1, mini // (micro * world)),
        "steps_per_generation": max(1, mini // (micro * world)) * recipe.mini_batches,
        "num_generations": recipe.group_size,
        "max_completion_length": recipe.max_completion_length or task.max_completion_length,
        "max_steps": recipe.steps * recipe.mini_batches,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": recipe.warmup_steps * recipe.mini_batches,
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
        "logging_steps": recipe.mini_batches,
        "save_strategy": "steps" if recipe.save_every else "no",
        "save_steps": recipe.save_every * recipe.mini_batches or 1,
        "report_to": recipe.report_to,
        "disable_tqdm": True,
    }
    if recipe.report_to not in ("none", "all") and find_spec(recipe.report_to) is None:
        raise RecipeError(
            f"report_to is '{recipe.report_to}', which is not installed: pip install {recipe.report_to}, or none."
        )
    for name in recipe.trainer:
        if name not in SpanGRPOConfig.__dataclass_fields__:
            raise RecipeError(unknown("trainer option", name, SpanGRPOConfig.__dataclass_fields__))
    return SpanGRPOConfig(**{**options, **recipe.trainer})
