"""`train`: from a recipe to a trained model and its folder."""

from __future__ import annotations

import json
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

from spanwise.commands.shared.checkpoints import find_checkpoint
from spanwise.commands.shared.display import figure_table, pull_note
from spanwise.commands.shared.folder import check_removable, new_folder, newest_folder
from spanwise.commands.shared.runs import changed
from spanwise.commands.shared.samples import unmeasured
from spanwise.commands.shared.task import check_prompts, make_task
from spanwise.commands.train.recorder import Recorder
from spanwise.commands.train.refused import room_to_train
from spanwise.credit import method
from spanwise.disk import whole_folder
from spanwise.engines.trl import CRITIC, SpanGRPOConfig, SpanGRPOTrainer
from spanwise.engines.trl.keeping import steps_per_batch
from spanwise.errors import DataError, RecipeError, unknown
from spanwise.modes.critic.critic import megabytes
from spanwise.recipe import EMBEDDED, Recipe, answer_tags, check_begins, is_scored, resolved, scheme_of
from spanwise.report import unmeasured_sentences
from spanwise.rollouts.folder import RunFolder, check_free, is_first_rank, is_run, metrics_until, sole_writer
from spanwise.scheme import Scheme
from spanwise.tasks import Task


def train(
    recipe: Recipe,
    *,
    console: Console | None = None,
    resume: str | None = None,
    overwrite: bool = False,
    title: str = "train",
) -> dict[str, Any]:
    """Train as the recipe says; write the run's folder; return what `summary.json` holds.

    It is resumed only under the recipe of the checkpoint, save for what is watched and kept (`runs.changed`).
    """
    console = console or Console()
    torch.set_num_threads(recipe.threads)
    started = time.perf_counter()
    _check_names(recipe)
    check_begins(recipe)
    place, checkpoint = _place(recipe, resume, overwrite, console)
    in_place = checkpoint is not None and place.resolve() == _run_of(checkpoint).resolve()
    recipe = recipe.model_copy(update={"output": str(place)})
    with sole_writer(place), room_to_train(place):
        if is_first_rank() and not in_place:
            check_free(place, overwrite=overwrite)
        task = make_task(recipe, console)
        check_prompts(recipe, task)
        scheme = scheme_of(recipe, task.layout, recipe.max_completion_length or task.max_completion_length)
        asked = resolved(recipe, scheme)
        args = trainer_config(recipe, task)
        step, history = (0, []) if checkpoint is None else _history(checkpoint, args, asked, console)
        folder = RunFolder(place)
        recorder = Recorder(recipe, task, folder, console, title, history, per_batch=steps_per_batch(args))
        trainer = _trainer(recipe, task, scheme, args, recorder)
        main = trainer.accelerator.is_main_process
        if main and checkpoint is None:
            folder.begin(asked)
        elif main:
            folder.go_on(asked, step=step, history=history)
        if trainer.critic is not None and main:
            sizes = [megabytes(trainer.critic.model), megabytes(trainer.accelerator.unwrap_model(trainer.model))]
            said = f"Weights, gradients and optimizer: critic {sizes[0]:.3g} MB, policy {sizes[1]:.3g} MB."
            console.print(said, highlight=False, soft_wrap=True)
        note = pull_note(scheme, group_size=recipe.group_size)
        if note and main:
            console.print(note, highlight=False, soft_wrap=True)
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            recorder.live.close()
        summary = recorder.summary(trainer, seconds=time.perf_counter() - started)
        with whole_folder(folder.model):
            trainer.save_model(str(folder.model))
        if main and trainer.critic is not None:
            with whole_folder(folder.path / CRITIC):
                trainer.critic.save(folder.path / CRITIC, trainer.processing_class, state=False)
        if main:
            folder.write_summary(summary)  # last of what the run leaves: it says that all is there
            absent = unmeasured(task.layout.keys, answer_tags(recipe), scored=is_scored(recipe))
            _show(summary, console, title=f"{title}: {recipe.output}", absent=absent)
        if recipe.report and main:
            from spanwise.commands.report.report import report_folder  # a second of imports that only the end needs

            console.print(f"Report: {report_folder(folder.path)}", highlight=False, soft_wrap=True)
    return summary


def _trainer(recipe: Recipe, task: Task, scheme: Scheme, args: SpanGRPOConfig, recorder: Recorder) -> SpanGRPOTrainer:
    """The trainer of a recipe, followed by the recorder in the place of TRL's own progress."""
    trainer = SpanGRPOTrainer(
        model=task.model,
        args=args,
        train_dataset=task.train,
        processing_class=AutoTokenizer.from_pretrained(task.model, padding_side="left", trust_remote_code=False),
        scheme=scheme,
        critic=recipe.critic,
        callbacks=[recorder],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    recorder.trainer = trainer
    return trainer


def _show(summary: Mapping[str, Any], console: Console, *, title: str, absent: Mapping[str, str]) -> None:
    columns = {"start": dict(summary["start"]), "end": dict(summary["final"])}
    if absent and summary["batches"]:  # the rewards say what these figures cannot
        for column, batch in zip(columns.values(), (summary["batches"][0], summary["batches"][-1]), strict=True):
            column.update({f"mean reward, {k.split('/')[1]}": v for k, v in batch.items() if k.startswith("rewards/")})
    console.print(figure_table(title, columns, absent=absent))
    for sentence in unmeasured_sentences(absent):
        console.print(sentence, highlight=False, soft_wrap=True)
    if not summary["tokens_per_second"]:
        console.print("No step was left to train.")
        return
    console.print(
        f"{summary['seconds']:.0f} s, {summary['tokens_per_second']:.0f} tokens/s; "
        f"segment + score + credit took {summary['spanwise_share']:.2%} of the training steps."
    )


def _place(recipe: Recipe, resume: str | None, overwrite: bool, console: Console) -> tuple[Path, Path | None]:
    """The folder of the run, and the checkpoint that it goes on from."""
    name = f"{recipe.task}-{recipe.method}-{recipe.seed}"
    place = None if recipe.output is None else Path(recipe.output)
    if resume is None:
        if place is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RecipeError("Several processes that train together need one folder; name it with --output.")
        if place is None:
            place = new_folder(name)
            console.print(f"The run goes to {place}.", highlight=False, soft_wrap=True)
        if overwrite:
            read_from = {"model": recipe.model, "dataset": recipe.dataset, "critic": recipe.critic and recipe.critic.model}
            check_removable(place, **read_from)
        return place, None
    if overwrite:
        raise RecipeError("--resume goes on with a run and --overwrite replaces it; give one of them.")
    source = Path(resume) if is_run(Path(resume)) else None
    if resume == "last":
        source = place or newest_folder(name)
        if source is None:
            raise DataError(f"There is no run 'runs/{name}-<n>' to go on with; say which one with --resume FOLDER.")
    checkpoint = Path(find_checkpoint(source or "", "last" if source else resume, console))
    written = _run_of(checkpoint)
    return place or (written if is_run(written) else new_folder(name)), checkpoint


def _run_of(checkpoint: Path) -> Path:
    """The folder of the run that wrote a checkpoint, if it lies there still."""
    return (checkpoint if len(checkpoint.parts) > 2 else checkpoint.resolve()).parent.parent


def _history(
    checkpoint: Path, args: SpanGRPOConfig, asked: Mapping[str, Any], console: Console
) -> tuple[int, list[dict[str, Any]]]:
    """The step of a checkpoint and the metrics of the run that wrote it, until then; a DataError if that had another recipe."""
    file = _run_of(checkpoint) / "recipe.yaml"
    changes = changed(file, asked)
    if changes:
        raise DataError(
            f"'{checkpoint}' is of a run of another recipe ({', '.join(changes[:3])}). Go on with that run under its own: "
            f"spanwise train --resume {file.parent}; or leave out --resume."
        )
    if not file.is_file():
        said = f"'{file}' is not there to say under which recipe {checkpoint.name} was trained: it is taken to be this one."
        console.print(said, highlight=False, soft_wrap=True)
    step = json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] // steps_per_batch(args)
    return step, list(metrics_until(file.parent, step))


def _check_names(recipe: Recipe) -> None:
    """Refuse loggers and options that nobody knows, before anything is made."""
    if recipe.report_to not in ("none", "all", *INTEGRATION_TO_CALLBACK):
        raise RecipeError(unknown("logger for report_to", recipe.report_to, ["none", "all", *INTEGRATION_TO_CALLBACK]))
    if recipe.report_to in INTEGRATION_TO_CALLBACK and recipe.report_to not in get_available_reporting_integrations():
        raise RecipeError(
            f"report_to is '{recipe.report_to}', which is not installed; install it, or set report_to to none."
        )
    if recipe.critic is None and "value_nt" in method(recipe.method).required:
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


#: What TRL counts in optimizer steps and the recipe in generation batches, and what the run itself writes.
_OWN_FIELD = {
    "max_steps": "steps", "save_steps": "save_every", "logging_steps": "steps (a line for each generation batch)",
    "keep_rollouts": "keep_rollouts", "report": "report",
}  # fmt: skip


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
