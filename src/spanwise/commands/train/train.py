"""`train`: from a recipe to a trained model and its folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console

from spanwise.commands.shared.display import figure_table, pull_note
from spanwise.commands.shared.samples import unmeasured
from spanwise.commands.shared.task import make_task
from spanwise.commands.train.place import history_of, run_folder
from spanwise.commands.train.recorder import Recorder
from spanwise.commands.train.trainer import check_prompts, check_recipe, make_trainer, trainer_config
from spanwise.disk import whole_folder
from spanwise.engines.trl import CRITIC
from spanwise.modes.critic.critic import megabytes
from spanwise.recipe import Recipe, resolved, scheme_of
from spanwise.report import unmeasured_sentences
from spanwise.rollouts.folder import RunFolder


def train(
    recipe: Recipe,
    *,
    console: Console | None = None,
    resume: str | None = None,
    overwrite: bool = False,
    title: str = "train",
) -> dict[str, Any]:
    """Train as the recipe says; write the run's folder; return what `summary.json` holds.

    It is resumed only under the recipe of the checkpoint, save for what is watched and kept (`shared.runs.changed`).
    """
    console = console or Console()
    torch.set_num_threads(recipe.threads)
    started = time.perf_counter()
    check_recipe(recipe)
    with run_folder(recipe, resume=resume, overwrite=overwrite, console=console) as (place, checkpoint):
        recipe = recipe.model_copy(update={"output": str(place)})
        task = make_task(recipe, console)
        check_prompts(recipe, task)
        args = trainer_config(recipe, task)
        scheme = scheme_of(recipe, task.layout, recipe.max_completion_length or task.max_completion_length)
        asked = resolved(recipe, scheme)
        per_batch = int(args.logging_steps)  # a line of the log is a generation batch
        step, history = (0, []) if checkpoint is None else history_of(checkpoint, asked, console, per_batch=per_batch)
        folder = RunFolder(place)
        recorder = Recorder(recipe, task, folder, console, title, history, per_batch=per_batch)
        trainer = make_trainer(recipe, task, scheme, args, recorder)
        main = trainer.accelerator.is_main_process
        if main and checkpoint is None:
            folder.begin(asked)
        elif main:
            folder.begin(asked, step=step, history=history)
        notes = [pull_note(scheme, group_size=recipe.group_size)]
        if trainer.critic is not None:
            sizes = [megabytes(trainer.critic.model), megabytes(trainer.accelerator.unwrap_model(trainer.model))]
            notes = [f"Weights, gradients and optimizer: critic {sizes[0]:.3g} MB, policy {sizes[1]:.3g} MB.", *notes]
        for note in filter(None, notes if main else ()):
            console.print(note, highlight=False, soft_wrap=True)
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            recorder.live.close()
        summary = recorder.summary(trainer, seconds=time.perf_counter() - started)
        with whole_folder(place / "model"):
            trainer.save_model(str(place / "model"))
        if main:
            if trainer.critic is not None:
                with whole_folder(folder.path / CRITIC):
                    trainer.critic.save(folder.path / CRITIC, trainer.processing_class, state=False)
            folder.write_summary(summary)  # last of what the run leaves: it says that all is there
            absent = unmeasured(task.layout.keys, recipe.answer_tags, scored=recipe.is_scored)
            _show(summary, console, title=f"{title}: {recipe.output}", absent=absent)
        if recipe.report and main:
            from spanwise.commands.report.report import report_folder  # a second of imports that only the end needs

            console.print(f"Report: {report_folder(folder.path)}", highlight=False, soft_wrap=True)
    return summary


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
