"""What a full disk stops in the middle of a training: one sentence, nothing half written, and how to go on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spanwise.disk import refusal, unwritten
from spanwise.engines.checkpoints import newest_checkpoint
from spanwise.errors import DataError, SpanwiseError


@contextmanager
def room_to_train(run: Path) -> Iterator[None]:
    """Train inside; where the system refuses to write, whoever asked it to, say so and how to go on.

    The checkpoint that was being written goes, as it takes room and cannot be used; those before it stay.
    """
    before = set(run.glob("checkpoints/checkpoint-*"))
    try:
        yield
    except Exception as error:
        if refusal(error) is None:
            raise
        said = str(error) if isinstance(error, SpanwiseError) else _said(run, before, error)
        raise DataError(f"{said} {_how_to_go_on(run, before)}") from error


def _said(run: Path, before: set[Path], error: Exception) -> str:
    """What a library was writing: the file that it names, else the new checkpoint, else the run."""
    named = error.filename if isinstance(error, OSError) else None
    begun = _half_written(run, before)
    place = Path(named) if isinstance(named, str) else begun[0] if begun else run
    return unwritten(place, error)


def _how_to_go_on(run: Path, before: set[Path]) -> str:
    """Remove what is half written, and say what can be gone on from."""
    for place in _half_written(run, before):
        shutil.rmtree(place, ignore_errors=True)
    if (run / "summary.json").is_file():
        return f"All else is there: spanwise report {run} writes what is missing."
    newest, _ = newest_checkpoint(run / "checkpoints")
    if newest is None:
        return "There is no checkpoint to go on from (--save-every 10 writes some): train again with --overwrite."
    return f"Go on from {newest.name}: spanwise train --resume {run}."


def _half_written(run: Path, before: set[Path]) -> list[Path]:
    """The checkpoints that this training began and did not end."""
    _, faults = newest_checkpoint(run / "checkpoints")
    return [place for name in faults if (place := run / "checkpoints" / name) not in before]
