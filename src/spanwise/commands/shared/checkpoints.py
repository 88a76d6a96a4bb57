"""The checkpoints of a run: the newest intact one, and what is wrong with the others."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from rich.console import Console
from safetensors import SafetensorError, safe_open

from spanwise.errors import DataError


def find_checkpoint(output: str | Path, resume: str, console: Console | None = None) -> str:
    """The folder to resume from; a DataError if it is not a checkpoint.

    Args:
        output: folder of the run.
        resume: a checkpoint folder, or "last" for the newest intact one of the run.
        console: where the damaged ones that "last" skips are named.
    """
    if resume != "last":
        if fault := _checkpoint_fault(Path(resume)):
            raise DataError(f"'{resume}' is not a readable checkpoint: {fault}. Give another checkpoint-<step> folder.")
        return resume
    place, faults = newest_checkpoint(output)
    said = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
    if place is None and not faults:
        raise DataError(f"There is no checkpoint under '{output}/checkpoints'; train with --save-every 10 to write some.")
    if place is None:
        raise DataError(
            f"No checkpoint under '{output}/checkpoints' is readable ({said}); leave out --resume to start anew."
        )
    if faults and console is not None:
        console.print(f"Resuming from {place.name}; not readable are {said}.", highlight=False, soft_wrap=True)
    return str(place)


def newest_checkpoint(output: str | Path) -> tuple[Path | None, dict[str, str]]:
    """The newest intact checkpoint of a run, None if there is none; and what is wrong with each newer one, by name."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in Path(output).glob("checkpoints/checkpoint-*")}
    found = sorted((path for path, step in steps.items() if step.isdecimal()), key=lambda path: -int(steps[path]))
    faults: dict[str, str] = {}
    for path in found:
        fault = _checkpoint_fault(path)
        if fault is None:
            return path, faults
        faults[path.name] = fault
    return None, faults


def _checkpoint_fault(place: Path) -> str | None:
    """What is wrong with a checkpoint folder, found before a model is loaded."""
    try:
        json.loads((place / "trainer_state.json").read_text())
        for file in place.rglob("*.safetensors"):
            with safe_open(file, framework="pt") as weights:
                weights.keys()
    except FileNotFoundError:
        return "it holds no trainer_state.json"
    except (OSError, ValueError, SafetensorError) as error:
        return f"a file in it is damaged ({str(error).splitlines()[0]})"
    damaged = [file.name for file in (*place.rglob("*.pt"), *place.rglob("*.pth")) if not zipfile.is_zipfile(file)]
    return f"{damaged[0]} is damaged" if damaged else None
