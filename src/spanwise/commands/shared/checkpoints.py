"""`find_checkpoint`: what `--resume` goes on from."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from spanwise.engines.checkpoints import checkpoint_fault, newest_checkpoint
from spanwise.errors import DataError


def find_checkpoint(output: str | Path, resume: str, console: Console | None = None) -> str:
    """The folder to resume from; a DataError if it is not a whole checkpoint."""
    if resume != "last":
        if fault := checkpoint_fault(Path(resume)):
            raise DataError(f"'{resume}' is not a readable checkpoint: {fault}. Give another checkpoint-<step> folder.")
        return resume
    folder = Path(output) / "checkpoints"
    place, faults = newest_checkpoint(folder)
    said = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
    if place is None and not faults:
        raise DataError(f"There is no checkpoint under '{folder}'; train with --save-every 10 to write some.")
    if place is None:
        raise DataError(f"No checkpoint under '{folder}' is readable ({said}); leave out --resume to start anew.")
    if faults and console is not None:
        console.print(f"Resuming from {place.name}; not readable are {said}.", highlight=False, soft_wrap=True)
    return str(place)
