"""`train`: from a recipe to a trained model and its folder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from math import gcd
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer, PrinterCallback, ProgressCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from spanwise.commands.shared.display import figure_table, pull_note
from spanwise.commands.shared.fitted import say
from spanwise.commands.shared.samples import unmeasured
from spanwise.commands.shared.task import make_task
from spanwise.commands.train.place import history_of, run_folder
from spanwise.commands.train.recorder import Recorder
from spanwise.credit import method
from spanwise.disk import whole_folder
from spanwise.engines.trl import CRITIC, SpanGRPOConfig, SpanGRPOTrainer
from spanwise.engines.trl.keeping import steps_per_batch
from spanwise.errors import DataError, RecipeError, unknown
from spanwise.modes.critic.critic import megabytes
from spanwise.recipe import EMBEDDED, Recipe, resolved, scheme_of
from spanwise.report import unmeasured_sentences
from spanwise.rollouts.folder import RunFolder
from spanwise.tasks import Task

#: What TRL counts in optimizer steps and the recipe in generation batches, and what the run itself writes.
_OWN_FIELD = {
    "max_steps": "steps", "save_steps": "save_every", "logging_steps": "steps (a line for each generation batch)",
    "keep_rollouts": "keep_rollouts", "report": "report",
}  # fmt: skip


def train(
    recipe: Recipe,
    *,
    console: Console | None = None,
    resume: str | None = None,
    overwrite: bool = False,
    title: str = "train",
) -> dict[str, Any]:
    """Train as the recipe says; write the run's folder; return what `summary.json` holds.

    It is resumed only under the recipe of the checkpoint, save for what is watched and kept (`shared.folder.changed`).
    """
    console = console or Console()
    torch.set_num_threads(recipe.threads)
    started = time.perf_counter()
    check_recipe(recipe)
    with run_folder(recipe, resume=resume, overwrite=overwrite, console=console) as (place, checkpoint):
        recipe, folder = recipe.model_copy(update={"output": str(place)}), RunFolder(place)
        task = make_task(recipe, console)
        args = trainer_config(recipe, task)
        scheme = scheme_of(recipe, task.layout, recipe.max_completion_length or task.max_completion_length)
        asked = resolved(recipe, scheme)
        per_batch = int(args.logging_steps)  # a line of the log is a generation batch
        step, history = (None, []) if checkpoint is None else history_of(checkpoint, asked, console, per_batch=per_batch)
        recorder = Recorder(recipe, task, folder, console, title, history, per_batch=per_batch)
        trainer = recorder.trainer = SpanGRPOTrainer(
            model=task.model,
            args=args,
            train_dataset=task.train,
            processing_class=AutoTokenizer.from_pretrained(task.model, padding_side="left", trust_remote_code=False),
            scheme=scheme,
            critic=recipe.modes.get("critic"),
            callbacks=[recorder],
        )
        trainer.remove_callback(PrinterCallback)  # the recorder stands in the place of TRL's own progress
        trainer.remove_callback(ProgressCallback)
        main, critic = trainer.accelerator.is_main_process, trainer.critic
        if main:
            folder.begin(asked, step=step, history=history)
            if critic is not None:
                sizes = [megabytes(critic.model), megabytes(trainer.accelerator.unwrap_model(trainer.model))]
                say(console, f"Weights, gradients and optimizer: critic {sizes[0]:.3g} MB, policy {sizes[1]:.3g} MB.")
            say(console, *filter(None, [pull_note(scheme, group_size=recipe.group_size)]))
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            recorder.live.close()
        summary = recorder.summary(seconds=time.perf_counter() - started)
        with whole_folder(place / "model"):
            trainer.save_model(str(place / "model"))
        if main:
            if critic is not None:
                with whole_folder(place / CRITIC):
                    critic.save(place / CRITIC, trainer.processing_class, state=False)
            folder.write_summary(summary)  # last of what the run leaves: it says that all is there
            absent = unmeasured(task.layout.keys, recipe.answer_tags, scored=recipe.is_scored)
            _show(summary, console, title=f"{title}: {place}", absent=absent)
            if recipe.report:
                from spanwise.commands.report.report import report_folder  # a second of imports that only the end needs

                say(console, f"Report: {report_folder(place)}")
    return summary


def _show(summary: Mapping[str, Any], console: Console, *, title: str, absent: Mapping[str, str]) -> None:
    """Print the figures of start and end, and what the run took."""
    columns = {"start": dict(summary["start"]), "end": dict(summary["final"])}
    if absent and summary["batches"]:  # the rewards say what these figures cannot
        for column, batch in zip(columns.values(), (summary["batches"][0], summary["batches"][-1]), strict=True):
            column.update({f"mean reward, {k.split('/')[1]}": v for k, v in batch.items() if k.startswith("rewards/")})
    say(console, *figure_table(title, columns, absent=absent), *unmeasured_sentences(absent))
    if not summary["tokens_per_second"]:
        console.print("No step was left to train.")
        return
    console.print(
        f"{summary['seconds']:.0f} s, {summary['tokens_per_second']:.0f} tokens/s; "
        f"segment + score + credit took {summary['spanwise_share']:.2%} of the training steps."
    )


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


def trainer_config(recipe: Recipe, task: Task) -> SpanGRPOConfig:
    """The TRL configuration a recipe stands for; `recipe.trainer` has the last word."""
    if len(task.train) < recipe.prompts:  # TRL would end without a single step
        raise DataError(
            f"The dataset '{recipe.dataset}' leaves {len(task.train)} prompts to train on, after the fifth that is kept for "
            f"evaluation (at least 1, at most 512), and a step takes {recipe.prompts}. Add rows, or set --prompts to "
            f"{len(task.train)} or fewer."
        )
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
