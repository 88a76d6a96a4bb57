"""Write and check the list of a checkpoint's files. Find the checkpoint to resume from.

The list has a digest of each file and the training settings, so that training only resumes with unchanged files and settings.
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

#: The file that lists a checkpoint's files. It is written last, to mark the checkpoint as complete.
MANIFEST = "spanwise.json"


def write_manifest(
    checkpoint: Path,
    *,
    processes: int,
    settings: Mapping[str, Any],
    resumable: bool = True,
    estimator: Mapping[str, Any] | None = None,
) -> None:
    """Write the list of a checkpoint's files with digests and settings. All other files must be on disk."""
    size_by_name, digest_by_name = {}, {}
    for file in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        if file.name.lstrip(".").startswith(MANIFEST):
            continue  # a run killed while saving may have left an unfinished manifest
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        relative_path = file.relative_to(checkpoint).as_posix()
        size_by_name[relative_path], digest_by_name[relative_path] = file.stat().st_size, _digest(file)
    manifest = {
        "files": size_by_name,
        "digests": digest_by_name,
        "processes": processes,
        "resumable": resumable,
        "estimator": estimator,
        "settings": plain(settings),
    }
    with whole_file(checkpoint / MANIFEST) as manifest_path, manifest_path.open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read the list that `write_manifest` wrote."""
    return json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))


def checkpoint_fault(checkpoint: Path) -> str | None:
    """Return the reason why training cannot resume from a checkpoint, or None if it can. No model is loaded."""
    if not checkpoint.is_dir():
        return "the folder does not exist"
    try:
        manifest = read_manifest(checkpoint)
        size_by_name = {str(name): int(size) for name, size in manifest["files"].items()}
        is_resumable = bool(manifest["resumable"])
        _ = int(manifest["processes"]), manifest["estimator"]  # a missing entry raises an error, caught below
        _ = dict(manifest["digests"]), dict(manifest["settings"])
    except FileNotFoundError:
        return f"the folder has no {MANIFEST}, so saving was interrupted, or another trainer wrote the folder"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    for name, size in size_by_name.items():
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
        if (actual_size := (checkpoint / name).stat().st_size) != size:
            return f"{name} is damaged: it has {actual_size} of {size} bytes"
    if not is_resumable:
        return "save_only_model was set, so the checkpoint holds the model without the training state"
    return next((f"{name} is damaged" for name in size_by_name if not _readable(checkpoint / name)), None)


def newest_checkpoint(folder: str | Path) -> tuple[Path | None, dict[str, str]]:
    """Return the newest usable checkpoint (or None), and the faults of newer ones."""
    steps_and_paths = [(path.name.removeprefix("checkpoint-"), path) for path in Path(folder).glob("checkpoint-*")]
    fault_by_name: dict[str, str] = {}
    for _, path in sorted(((int(step), path) for step, path in steps_and_paths if step.isdecimal()), reverse=True):
        fault = checkpoint_fault(path)
        if fault is None:
            return path, fault_by_name
        fault_by_name[path.name] = fault
    return None, fault_by_name


def find_checkpoint(folder: str | Path, path: str | Path | None = None) -> tuple[Path, str]:
    """Return the checkpoint at `path`, or the newest usable one. A note names newer, damaged ones."""
    if path is not None:
        if fault := checkpoint_fault(Path(path)):
            raise DataError(f"'{path}' is not a readable checkpoint: {fault}. Give another checkpoint-<step> folder.")
        return Path(path), ""
    newest_path, fault_by_name = newest_checkpoint(folder)
    faults_text = "; ".join(f"{name}: {fault}" for name, fault in fault_by_name.items())
    if newest_path is None:
        raise DataError(
            f"No checkpoint under '{folder}' is readable ({faults_text}). To start a new run, leave out --resume (in a "
            "script: resume_from_checkpoint)."
            if fault_by_name
            else f"There is no checkpoint under '{folder}'. Train with --save-every 10 (save_steps in a script) to get some."
        )
    resume_note = f"Training resumes from {newest_path.name}, because newer checkpoints are not readable: {faults_text}."
    return newest_path, resume_note if fault_by_name else ""


def check_contents(place: Path) -> None:
    """Refuse a checkpoint whose files changed since they were written."""
    digest_by_name = read_manifest(place)["digests"] if PartialState().is_main_process else {}
    changed_names = (name for name, digest in digest_by_name.items() if _digest(place / name) != digest)
    first_changed_name = [next(changed_names, None)]  # `broadcast_object_list` needs a list
    broadcast_object_list(first_changed_name)
    if first_changed_name[0] is not None:
        raise DataError(
            f"'{place / first_changed_name[0]}' is not the file that was saved with this checkpoint. It is damaged, or "
            f"comes from another run. Put the saved file back, or give another checkpoint-<step> folder of '{place.parent}'."
        )


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def whole_checkpoint(args: Any, requested: str | bool | None, settings: Mapping[str, Any] | None = None) -> str | None:
    """Return the checkpoint to resume from, or None for a new run. Refuse one whose settings or files changed."""
    if requested is None or requested is False:
        return None
    checkpoint, resume_note = find_checkpoint(args.output_dir, None if requested is True else str(requested))
    manifest = read_manifest(checkpoint)
    notes = [resume_note]
    if settings is not None:
        if differences := changes(manifest["settings"], settings):
            raise DataError(
                f"The checkpoint '{checkpoint}' was trained with other settings ({', '.join(differences[:3])}). Restore the "
                "old settings. Or start a new run in another output_dir, without resume_from_checkpoint."
            )
        check_contents(checkpoint)
    if (saved_world_size := manifest["processes"]) != args.world_size:
        notes.append(
            f"The checkpoint '{checkpoint}' was written by {saved_world_size} processes, but you resume with "
            f"{args.world_size} processes. Prompts and tokens will differ from those of an uninterrupted run."
        )
    for note in filter(None, notes):
        warnings.warn(note, UserWarning, stacklevel=3)
    return str(checkpoint)


def restore_estimator(scheme: Scheme, state: Mapping[str, Any] | None, place: Path) -> None:
    """Load the state of a credit method that remembers earlier batches. Refuse a checkpoint without this state."""
    if state is None:
        raise DataError(
            f"Method '{scheme.method}' needs the memory of earlier batches, which the checkpoint '{place}' does not hold. "
            "Start a new run."
        )
    estimator: Any = scheme.entry.estimator
    estimator.load_state_dict(state)


def _readable(file: Path) -> bool:
    """Return whether a checkpoint file can be opened."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as weights_file:
                weights_file.keys()
        elif file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
        elif file.suffix in (".pt", ".pth", ".bin"):
            return zipfile.is_zipfile(file)
    except (OSError, ValueError, SafetensorError):
        return False
    return True
