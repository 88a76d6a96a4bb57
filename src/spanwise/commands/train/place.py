"""Choose the folder of a run and the checkpoint to resume from. Clean up if the disk is full."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from spanwise.commands.shared.fitted import say
from spanwise.commands.shared.folder import changed, new_folder, newest_folder
from spanwise.disk import refusal, unwritten
from spanwise.engines.changes import MAY_CHANGE, changes
from spanwise.engines.checkpoints import check_contents, find_checkpoint, newest_checkpoint, read_manifest
from spanwise.errors import DataError, RecipeError, SpanwiseError
from spanwise.recipe import Recipe
from spanwise.rollouts.folder import WRITES, check_free, is_first_rank, is_run, metrics_until, sole_writer


def task_name(recipe: Recipe) -> str:
    """Return the name of a run's task or dataset."""
    is_named_by_dataset = recipe.dataset is not None and recipe.own_layout is not None
    return Path(str(recipe.dataset).partition(":")[0]).stem if is_named_by_dataset else recipe.task


def _choose_folder(recipe: Recipe, resume: str | None, overwrite: bool, console: Console) -> tuple[Path, Path | None]:
    """Choose the folder of the run and any checkpoint to resume from."""
    run_name = f"{task_name(recipe)}-{recipe.method}-{recipe.seed}"
    folder = None if recipe.output is None else Path(recipe.output)
    if resume is None:
        if folder is None:
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise RecipeError("You train with several processes, which must share one folder; name it with --output.")
            folder = new_folder(run_name)
            say(console, f"The run goes to {folder}.")
        critic_model = getattr(recipe.modes.get("critic"), "model", None)
        for noun, source in {"model": recipe.model, "dataset": recipe.dataset, "critic": critic_model}.items():
            if overwrite and source and Path(source).exists() and Path(source).resolve().is_relative_to(folder.resolve()):
                path_parts = Path(source).resolve().relative_to(folder.resolve()).parts
                if not path_parts or path_parts[0] in WRITES:
                    raise RecipeError(
                        f"The {noun} '{source}' is part of the run in '{folder}', which --overwrite removes; give another --output."
                    )
        return folder, None
    if overwrite:
        raise RecipeError("--resume continues a run, and --overwrite replaces a run; give only one of them.")
    resumed_run_folder = Path(resume) if is_run(Path(resume)) else None
    if resume == "last":
        resumed_run_folder = folder or newest_folder(run_name)
        if resumed_run_folder is None:
            raise DataError(f"There is no run 'runs/{run_name}-<n>' to resume; name a run with --resume FOLDER.")
    checkpoints_folder = (resumed_run_folder or Path()) / "checkpoints"
    checkpoint, resume_note = find_checkpoint(checkpoints_folder, None if resumed_run_folder else resume)
    if resume_note:
        say(console, resume_note)
    checkpoint_run_folder = _run_of(checkpoint)
    return folder or (checkpoint_run_folder if is_run(checkpoint_run_folder) else new_folder(run_name)), checkpoint


def _run_of(checkpoint: Path) -> Path:
    """Return the run folder of a checkpoint, two levels above it."""
    return (checkpoint if len(checkpoint.parts) > 2 else checkpoint.resolve()).parent.parent


def history_of(checkpoint: Path, new_recipe: Mapping[str, Any], *, per_batch: int) -> tuple[int, list[dict[str, Any]]]:
    """Return the step of a checkpoint, and the metrics up to this step. Refuse a checkpoint of another recipe."""
    recipe_file = _run_of(checkpoint) / "recipe.yaml"
    old_recipe = read_manifest(checkpoint)["settings"]
    # A learning rate schedule depends on `steps`, so the resumed run must keep `steps`.
    has_lr_schedule = not new_recipe["trainer"].get("lr_scheduler_type", "constant").startswith("constant")
    old_step_count = old_recipe.get("steps", new_recipe["steps"])
    must_keep_steps = has_lr_schedule or new_recipe["steps"] < old_step_count
    changeable_fields = set(MAY_CHANGE) - {"steps"} if must_keep_steps else set(MAY_CHANGE)
    if changed_fields := changes(old_recipe, new_recipe, but=changeable_fields):
        advice = f"Resume the run with its own recipe (spanwise train --resume {recipe_file.parent}), or leave out --resume."
        if changed(recipe_file, old_recipe):
            advice = (
                f"'{recipe_file}' was edited after the run began. Undo the edit, or leave out --resume and give another "
                "--output."
            )
        raise DataError(f"'{checkpoint}' belongs to a run of another recipe: {', '.join(changed_fields[:3])}. {advice}")
    check_contents(checkpoint)
    trainer_state = json.loads((checkpoint / "trainer_state.json").read_text())
    checkpoint_step = trainer_state["global_step"] // per_batch
    return checkpoint_step, metrics_until(recipe_file.parent, checkpoint_step)


@contextmanager
def run_folder(
    recipe: Recipe, *, resume: str | None, overwrite: bool, console: Console
) -> Iterator[tuple[Path, Path | None]]:
    """Lock the folder of a run, and yield it with any checkpoint to resume from."""
    folder, checkpoint = _choose_folder(recipe, resume, overwrite, console)
    is_same_run = checkpoint is not None and folder.resolve() == _run_of(checkpoint).resolve()
    with sole_writer(folder):
        if is_first_rank() and not is_same_run:
            check_free(folder, overwrite=overwrite)
        old_checkpoints = set(folder.glob("checkpoints/checkpoint-*"))
        try:
            yield folder, checkpoint
        except Exception as error:
            if refusal(error) is None:
                raise
            raise DataError(_clean_full_disk(folder, old_checkpoints, error)) from error


def _clean_full_disk(run: Path, old_checkpoints: set[Path], error: Exception) -> str:
    """Remove checkpoints that a full disk cut short. Say which file was not written, and how to go on."""
    last_checkpoint, checkpoint_faults = newest_checkpoint(run / "checkpoints")
    damaged_folders = (run / "checkpoints" / checkpoint_name for checkpoint_name in checkpoint_faults)
    half_written_folders = [folder for folder in damaged_folders if folder not in old_checkpoints]
    error_file = error.filename if isinstance(error, OSError) else None
    failed_folder = half_written_folders[0] if half_written_folders else run
    unwritten_file = Path(error_file) if isinstance(error_file, str) else failed_folder
    error_text = str(error) if isinstance(error, SpanwiseError) else unwritten(unwritten_file, error)
    for folder in half_written_folders:
        shutil.rmtree(folder, ignore_errors=True)
    if (run / "summary.json").is_file():
        return f"{error_text} All other files of the run are complete. Write the report with: spanwise report {run}."
    if last_checkpoint is None:
        return f"{error_text} No checkpoint exists, so train again with --overwrite. (--save-every 10 writes checkpoints.)"
    return f"{error_text} Resume from {last_checkpoint.name}: spanwise train --resume {run}."
