"""Where warm-started models are kept: whole folders or none, each file known by its digest."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from spanwise.disk import refusal
from spanwise.errors import DataError

_RECORD = "warm_start.json"
_logger = logging.getLogger(__name__)


def default_cache_folder() -> Path:
    """`$SPANWISE_CACHE`, else `$XDG_CACHE_HOME/spanwise`, else `~/.cache/spanwise`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", {"SPANWISE_CACHE": "/data/warm"}):
        ...     default_cache_folder().as_posix()
        '/data/warm'
    """
    if own := os.environ.get("SPANWISE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "spanwise"


def is_intact(folder: Path) -> bool:
    """Whether a cached folder is there and every file is as it was written; logs a notice if it is there and is not."""
    if not folder.exists():
        return False
    try:
        files = json.loads((folder / _RECORD).read_text())["files"]
        broken = [name for name, digest in files.items() if _digest(folder / name) != digest]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        broken = [f"{_RECORD} ({type(error).__name__})"]
    if broken:
        _logger.warning("The cached warm start '%s' is damaged (%s); it is built again.", folder, ", ".join(broken))
    return not broken


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "missing"


def save(model: Any, tokenizer: Any, folder: Path, *, record: dict[str, Any]) -> None:
    """Write beside the target and rename, so that a reader sees the whole folder or none."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".writing-", ignore_cleanup_errors=True) as scratch:
            fresh = Path(scratch) / folder.name
            with _quiet():
                model.save_pretrained(fresh)
                tokenizer.save_pretrained(fresh)
            files = {file.name: _digest(file) for file in sorted(fresh.iterdir())}
            (fresh / _RECORD).write_text(json.dumps({**record, "files": files}, indent=2))
            shutil.rmtree(folder, ignore_errors=True)
            fresh.rename(folder)
    except Exception as error:
        reason = refusal(error) or (error.strerror or str(error) if isinstance(error, OSError) else None)
        if reason is None:
            raise
        if is_intact(folder):  # another process finished the same warm start first
            return
        raise DataError(
            f"The warm start cannot be written to '{folder}' ({reason}); set SPANWISE_CACHE to a folder you may write to."
        ) from error


def load(folder: Path) -> Any:
    """The model of a cached folder."""
    from transformers import AutoModelForCausalLM

    with _quiet():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bars of transformers, which would cut through ours."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
