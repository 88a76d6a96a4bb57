"""Checkpoints: write the list of a checkpoint's files last, and find the newest checkpoint with all of its files.

The list has the digest of each file and the settings that it was trained under, so that training goes on from these alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError, safe_open

from spanwise.disk import whole_file
from spanwise.engines.changes import changes, plain
from spanwise.errors import DataError
from spanwise.scheme import Scheme

#: The list of a checkpoint's files. A checkpoint without it was cut off while it was written.
MANIFEST = "spanwise.json"


def write_manifest(
    place: Path,
    *,
    processes: int,
    resumable: bool = True,
    estimator: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write the list of a checkpoint's files with sizes and digests, after the files are on disk; no secret is in it."""
    sizes, digests = {}, {}
    # A killed run may have left an unfinished list, which is no part of the checkpoint.
    for file in sorted(
        path for path in place.rglob("*") if path.is_file() and not path.name.lstrip(".").startswith(MANIFEST)
    ):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        name = file.relative_to(place).as_posix()
        sizes[name], digests[name] = file.stat().st_size, _digest(file)
    about = {
        "files": sizes,
        "digests": digests,
        "processes": processes,
        "resumable": resumable,
        "estimator": estimator,
        "settings": None if settings is None else plain(settings),
    }
    with whole_file(place / MANIFEST) as beside, beside.open("w", encoding="utf-8") as file:
        json.dump(about, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(place: Path) -> dict[str, Any]:
    """Read the list that `write_manifest` wrote."""
    return json.loads((place / MANIFEST).read_text(encoding="utf-8"))


def checkpoint_fault(place: Path) -> str | None:
    """Return the fault of a checkpoint, found before a model is loaded; None if training can go on from it."""
    if not place.is_dir():
        return "there is no such folder"
    try:
        about = read_manifest(place)
        sizes = {str(name): int(size) for name, size in about["files"].items()}
        resumable, _, _ = bool(about["resumable"]), int(about["processes"]), about["estimator"]
    except FileNotFoundError:
        return f"it holds no {MANIFEST}, which is written last, so saving was cut off or another trainer wrote it"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    for name, size in sizes.items():
        actual = (place / name).stat().st_size if (place / name).is_file() else None
        if actual != size:
            return f"{name} is missing" if actual is None else f"{name} is damaged, it has {actual} bytes of {size}"
    if not resumable:
        return "it holds a model only, as save_only_model asked for"
    return next((f"{name} is damaged" for name in sizes if not _readable(place / name)), None)


def newest_checkpoint(folder: str | Path) -> tuple[Path | None, dict[str, str]]:
    """Return the newest whole checkpoint of a folder (None if there is none), and the fault of each newer one by name."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in Path(folder).glob("checkpoint-*")}
    newest_first = sorted((path for path, step in steps.items() if step.isdecimal()), key=lambda path: -int(steps[path]))
    faults: dict[str, str] = {}
    for path in newest_first:
        fault = checkpoint_fault(path)
        if fault is None:
            return path, faults
        faults[path.name] = fault
    return None, faults


def find_checkpoint(folder: str | Path, asked: str | Path | None = None) -> tuple[Path, str]:
    """Return the checkpoint asked for, or the newest whole one of a folder, and a sentence about newer, damaged ones."""
    if asked is not None:
        if fault := checkpoint_fault(Path(asked)):
            raise DataError(f"'{asked}' is not a readable checkpoint: {fault}. Give another checkpoint-<step> folder.")
        return Path(asked), ""
    place, faults = newest_checkpoint(folder)
    damaged = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
    if place is None and not faults:
        raise DataError(
            f"There is no checkpoint under '{folder}'; train with --save-every 10 (save_steps in a script) to write some."
        )
    if place is None:
        raise DataError(
            f"No checkpoint under '{folder}' is readable ({damaged}); to start anew leave out --resume (in a script: "
            "resume_from_checkpoint)."
        )
    return place, f"Resuming from {place.name}; not readable are {damaged}." if damaged else ""


def check_contents(place: Path) -> str:
    """Refuse a checkpoint whose files changed since they were written; return a note if it has no digests."""
    written = read_manifest(place).get("digests")
    if written is None:
        return f"'{place}' was written by an earlier version, without file digests or settings, so it is used unchecked."
    fault: list[str | None] = [None]  # all processes wait here; only the first one reads the files
    if PartialState().is_main_process:
        fault = [next((name for name, digest in written.items() if _digest(place / name) != digest), None)]
    broadcast_object_list(fault)
    if fault[0] is not None:
        raise DataError(
            f"'{place / fault[0]}' is not what was written into this checkpoint: it is damaged, or of another run. Put the file "
            f"back, or give another checkpoint-<step> folder of '{place.parent}'."
        )
    return ""


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def whole_checkpoint(args: Any, asked: str | bool | None, settings: Mapping[str, Any] | None = None) -> str | None:
    """Return the checkpoint that `resume_from_checkpoint` asks for; with `settings` refuse other settings and changed files."""
    if asked is None or asked is False:
        return None
    place, note = find_checkpoint(args.output_dir, None if asked is True else str(asked))
    if note:
        warnings.warn(note, UserWarning, stacklevel=3)
    about = read_manifest(place)
    if settings is not None:
        if different := changes(about.get("settings") or settings, settings):
            raise DataError(
                f"'{place}' was trained with other settings ({', '.join(different[:3])}). Set them back, or start anew in "
                "another output_dir, without resume_from_checkpoint."
            )
        if note := check_contents(place):
            warnings.warn(note, UserWarning, stacklevel=3)
    before = about["processes"]
    if before != args.world_size:
        warnings.warn(
            f"'{place}' was written by {before} processes and you resume with {args.world_size}: prompts and tokens will "
            f"not be drawn as in an uninterrupted run.",
            UserWarning,
            stacklevel=3,
        )
    return str(place)


def restore_estimator(scheme: Scheme, state: Mapping[str, Any] | None, place: Path) -> None:
    """Load the state of a method that remembers earlier batches from a checkpoint."""
    if state is None:
        raise DataError(
            f"'{place}' holds no state of the method '{scheme.method}', which remembers earlier batches; start anew."
        )
    estimator: Any = scheme.entry.estimator
    estimator.load_state_dict(state)


def _readable(file: Path) -> bool:
    """Check that a file can be read in the format of its suffix; its content is not compared."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as weights:
                weights.keys()
        elif file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
        elif file.suffix in (".pt", ".pth", ".bin"):
            return zipfile.is_zipfile(file)
    except (OSError, ValueError, SafetensorError):
        return False
    return True
