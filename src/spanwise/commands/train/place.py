"""Choose the folder of a run and the checkpoint that it resumes from; clean up when the disk is full."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from spanwise.commands.shared.fitted import say
from spanwise.commands.shared.folder import changed, new_folder, newest_folder, read_fields
from spanwise.disk import refusal, unwritten
from spanwise.engines.changes import MAY_CHANGE
from spanwise.engines.checkpoints import check_contents, find_checkpoint, newest_checkpoint, read_manifest
from spanwise.errors import DataError, RecipeError, SpanwiseError
from spanwise.recipe import Recipe
from spanwise.rollouts.folder import WRITES, check_free, is_first_rank, is_run, metrics_until, sole_writer


def task_name(recipe: Recipe) -> str:
    """Return the name of a run's task, or of its dataset if the completions have blocks of their own."""
    named_by_dataset = recipe.dataset is not None and recipe.own_layout is not None
    return Path(str(recipe.dataset).partition(":")[0]).stem if named_by_dataset else recipe.task


def _place(recipe: Recipe, resume: str | None, overwrite: bool, console: Console) -> tuple[Path, Path | None]:
    """Return the folder of the run, and the checkpoint that it resumes from."""
    name = f"{task_name(recipe)}-{recipe.method}-{recipe.seed}"
    place = None if recipe.output is None else Path(recipe.output)
    if resume is None:
        if place is None:
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise RecipeError("Several processes that train together need one folder; name it with --output.")
            place = new_folder(name)
            say(console, f"The run goes to {place}.")
        critic = getattr(recipe.modes.get("critic"), "model", None)
        for kind, source in {"model": recipe.model, "dataset": recipe.dataset, "critic": critic}.items():
            if overwrite and source and Path(source).exists() and Path(source).resolve().is_relative_to(place.resolve()):
                parts = Path(source).resolve().relative_to(place.resolve()).parts
                if not parts or parts[0] in WRITES:
                    raise RecipeError(
                        f"The {kind} '{source}' is part of the run in '{place}', which --overwrite removes; give another --output."
                    )
        return place, None
    if overwrite:
        raise RecipeError("--resume continues a run, and --overwrite replaces a run; give one of the two.")
    run = Path(resume) if is_run(Path(resume)) else None
    if resume == "last":
        # Earlier versions named a run on a user's dataset after its task.
        run = place or newest_folder(name) or newest_folder(f"{recipe.task}-{recipe.method}-{recipe.seed}")
        if run is None:
            raise DataError(f"There is no run 'runs/{name}-<n>' to resume; name a run with --resume FOLDER.")
    checkpoint, note = find_checkpoint((run or Path()) / "checkpoints", None if run else resume)
    if note:
        say(console, note)
    written = _run_of(checkpoint)
    return place or (written if is_run(written) else new_folder(name)), checkpoint


def _run_of(checkpoint: Path) -> Path:
    """Return the folder of the run that wrote a checkpoint, if the checkpoint still lies in it."""
    return (checkpoint if len(checkpoint.parts) > 2 else checkpoint.resolve()).parent.parent


def history_of(
    checkpoint: Path, asked: Mapping[str, Any], console: Console, *, per_batch: int
) -> tuple[int, list[dict[str, Any]]]:
    """Return the step of a checkpoint and the metrics up to it; raise a DataError if recipe or files have changed."""
    # Checkpoints of earlier versions hold no recipe: the file of the run stands in.
    file = _run_of(checkpoint) / "recipe.yaml"
    before = read_manifest(checkpoint).get("settings") or (read_fields(file) if file.is_file() else None)
    if before is None:
        note = f"'{file}' is missing, so the recipe of {checkpoint.name} is unknown: the current recipe is assumed."
        say(console, note)
    elif different := changed(before, asked, but=set(MAY_CHANGE) - _length(before, asked)):
        way = f"Resume that run with its own recipe: spanwise train --resume {file.parent}; or leave out --resume."
        if changed(file, before):
            way = f"'{file}' was edited later: undo the edit, or leave out --resume and give another --output."
        raise DataError(f"'{checkpoint}' belongs to a run of another recipe ({', '.join(different[:3])}). {way}")
    say(console, *filter(None, [check_contents(checkpoint)]))
    step = json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] // per_batch
    return step, metrics_until(file.parent, step)


def _length(before: Mapping[str, Any], asked: Mapping[str, Any]) -> set[str]:
    """Return {"steps"} if a resumed run must keep its number of steps, else an empty set."""
    # A schedule plans the learning rate over all steps.
    planned = not asked["trainer"].get("lr_scheduler_type", "constant").startswith("constant")
    return {"steps"} if planned or asked["steps"] < before.get("steps", asked["steps"]) else set()


@contextmanager
def run_folder(
    recipe: Recipe, *, resume: str | None, overwrite: bool, console: Console
) -> Iterator[tuple[Path, Path | None]]:
    """Yield the folder of the run and the checkpoint that it resumes from, and keep other writers out of the folder."""
    place, checkpoint = _place(recipe, resume, overwrite, console)
    goes_on = checkpoint is not None and place.resolve() == _run_of(checkpoint).resolve()
    with sole_writer(place):
        if is_first_rank() and not goes_on:
            check_free(place, overwrite=overwrite)
        before = set(place.glob("checkpoints/checkpoint-*"))
        try:
            yield place, checkpoint
        except Exception as error:
            if refusal(error) is None:
                raise
            raise DataError(_stopped(place, before, error)) from error


def _stopped(run: Path, before: set[Path], error: Exception) -> str:
    """Remove half-written files; return the sentence that names the file which could not be written and the way to go on."""
    newest, faults = newest_checkpoint(run / "checkpoints")
    half_written = [place for name in faults if (place := run / "checkpoints" / name) not in before]
    named = error.filename if isinstance(error, OSError) else None
    file = Path(named) if isinstance(named, str) else (*half_written, run)[0]
    sentence = str(error) if isinstance(error, SpanwiseError) else unwritten(file, error)
    for place in half_written:  # half-written checkpoints take room and cannot be used
        shutil.rmtree(place, ignore_errors=True)
    if (run / "summary.json").is_file():
        return f"{sentence} All else is there: spanwise report {run} writes what is missing."
    if newest is None:
        return (
            f"{sentence} There is no checkpoint to resume from (--save-every 10 writes some): train again with --overwrite."
        )
    return f"{sentence} Resume from {newest.name}: spanwise train --resume {run}."
