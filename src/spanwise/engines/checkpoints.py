"""Write checkpoints with a list of their files, and find the newest complete checkpoint.

The list has the digest of each file and the training settings, so that training resumes from unchanged files and settings only.
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
    checkpoint: Path,
    *,
    processes: int,
    resumable: bool = True,
    estimator: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write the list of a checkpoint's files with sizes and digests, after the files are on disk; secrets are left out."""
    sizes, digests = {}, {}
    # A killed run may have left an unfinished list, which is no part of the checkpoint.
    for file in sorted(
        path for path in checkpoint.rglob("*") if path.is_file() and not path.name.lstrip(".").startswith(MANIFEST)
    ):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        name = file.relative_to(checkpoint).as_posix()
        sizes[name], digests[name] = file.stat().st_size, _digest(file)
    manifest = {
        "files": sizes,
        "digests": digests,
        "processes": processes,
        "resumable": resumable,
        "estimator": estimator,
        "settings": None if settings is None else plain(settings),
    }
    with whole_file(checkpoint / MANIFEST) as list_path, list_path.open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read the list that `write_manifest` wrote."""
    return json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))


def checkpoint_fault(checkpoint: Path) -> str | None:
    """Return the fault that keeps training from resuming at a checkpoint, or None; no model is loaded."""
    if not checkpoint.is_dir():
        return "the folder does not exist"
    try:
        manifest = read_manifest(checkpoint)
        sizes = {str(name): int(size) for name, size in manifest["files"].items()}
        resumable, _, _ = bool(manifest["resumable"]), int(manifest["processes"]), manifest["estimator"]
    except FileNotFoundError:
        return f"the folder lacks {MANIFEST}, which is written last: saving was cut off, or another trainer wrote the folder"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    for name, size in sizes.items():
        actual = (checkpoint / name).stat().st_size if (checkpoint / name).is_file() else None
        if actual != size:
            return f"{name} is missing" if actual is None else f"{name} is damaged: it has {actual} of {size} bytes"
    if not resumable:
        return "the checkpoint holds a model only, because save_only_model was set"
    return next((f"{name} is damaged" for name in sizes if not _readable(checkpoint / name)), None)


def newest_checkpoint(folder: str | Path) -> tuple[Path | None, dict[str, str]]:
    """Return the newest complete checkpoint of a folder, or None, and the fault of each newer checkpoint by name."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in Path(folder).glob("checkpoint-*")}
    newest_first = sorted((path for path, step in steps.items() if step.isdecimal()), key=lambda path: -int(steps[path]))
    faults: dict[str, str] = {}
    for path in newest_first:
        fault = checkpoint_fault(path)
        if fault is None:
            return path, faults
        faults[path.name] = fault
    return None, faults


def find_checkpoint(folder: str | Path, path: str | Path | None = None) -> tuple[Path, str]:
    """Return the given checkpoint, or the newest complete one of a folder, and a sentence about newer, damaged checkpoints."""
    if path is not None:
        if fault := checkpoint_fault(Path(path)):
            raise DataError(f"'{path}' is not a readable checkpoint: {fault}. Give another checkpoint-<step> folder.")
        return Path(path), ""
    newest, faults = newest_checkpoint(folder)
    damaged = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
    if newest is None and not faults:
        raise DataError(
            f"There is no checkpoint under '{folder}'; train with --save-every 10 (save_steps in a script) to write some."
        )
    if newest is None:
        raise DataError(
            f"No checkpoint under '{folder}' is readable ({damaged}); to start anew leave out --resume (in a script: "
            "resume_from_checkpoint)."
        )
    return newest, f"Training resumes from {newest.name}; newer checkpoints are not readable: {damaged}." if damaged else ""


def check_contents(place: Path) -> str:
    """Refuse a checkpoint whose files changed since they were written; return a note if it has no digests."""
    digests = read_manifest(place).get("digests")
    if digests is None:
        return f"The checkpoint '{place}' comes from an earlier version without file digests or settings, so nothing is checked."
    changed: list[str | None] = [None]  # all processes wait for the broadcast; only the main process reads the files
    if PartialState().is_main_process:
        changed = [next((name for name, digest in digests.items() if _digest(place / name) != digest), None)]
    broadcast_object_list(changed)
    if changed[0] is not None:
        raise DataError(
            f"'{place / changed[0]}' is not what was written into this checkpoint: it is damaged, or of another run. Put the file "
            f"back, or give another checkpoint-<step> folder of '{place.parent}'."
        )
    return ""


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def whole_checkpoint(args: Any, requested: str | bool | None, settings: Mapping[str, Any] | None = None) -> str | None:
    """Return the checkpoint that `resume_from_checkpoint` names; given `settings`, refuse changed settings and files."""
    if requested is None or requested is False:
        return None
    place, note = find_checkpoint(args.output_dir, None if requested is True else str(requested))
    if note:
        warnings.warn(note, UserWarning, stacklevel=3)
    manifest = read_manifest(place)
    if settings is not None:
        if changed := changes(manifest.get("settings") or settings, settings):
            raise DataError(
                f"The checkpoint '{place}' was trained with other settings ({', '.join(changed[:3])}). Set them back, or start "
                "anew in another output_dir, without resume_from_checkpoint."
            )
        if note := check_contents(place):
            warnings.warn(note, UserWarning, stacklevel=3)
    saved_world_size = manifest["processes"]
    if saved_world_size != args.world_size:
        warnings.warn(
            f"The checkpoint '{place}' was written by {saved_world_size} processes, but you resume with {args.world_size}: prompts "
            f"and tokens will not be drawn as in an uninterrupted run.",
            UserWarning,
            stacklevel=3,
        )
    return str(place)


def restore_estimator(scheme: Scheme, state: Mapping[str, Any] | None, place: Path) -> None:
    """Load the state of a method that remembers earlier batches from a checkpoint."""
    if state is None:
        raise DataError(
            f"The checkpoint '{place}' has no state of method '{scheme.method}', which remembers earlier batches; start anew."
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
