"""Write and read the folder of a run: recipe, metrics, rollouts, summary."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml
from filelock import FileLock, Timeout

from spanwise.disk import add_line, write_text, writing
from spanwise.errors import DataError
from spanwise.objective import HIDDEN
from spanwise.rollouts.schema import write_rollouts

#: The folder for the rollouts of training, and the folder for the rollouts of one held-out prompt.
TRAINING, ONE_PROMPT = "rollouts", "one_prompt"
#: The files that only a finished run has.
RESULTS = ("summary.json", "evaluation.parquet", "report.html")
WRITES = (  # all files and folders that a run writes
    "recipe.yaml", "metrics.jsonl", TRAINING, ONE_PROMPT, "checkpoints", "model", "tokenizer", "critic", "laser.json", *RESULTS,
)  # fmt: skip

#: The recipe sections that may hold a secret.
_SECRET_SECTIONS = ("trainer", "objectives")
_SECRET_NAME = re.compile(r"secret|passw|passphrase|credential|(api|access|auth|private|account|hub|hf)_?key|_token$")
_SPECIAL_TOKEN_NAME = re.compile(  # names such as pad_token are no secrets
    r"(^|_)(pad|eos|bos|unk|sep|cls|mask|stop|start|end|begin|special|image|video|audio|think|tool)_token$"
)


def hidden(value: Any, stand_in: str | None = HIDDEN, *, within: str = "") -> Any:
    """Replace the secrets in a recipe by `stand_in`. If that is None, drop them."""
    if isinstance(value, Mapping):
        stand_ins = {name: stand_in for name, field in value.items() if _is_secret(str(name), field, within)}
        section_of_field = {field: within or (field if field in _SECRET_SECTIONS else "") for field in value}
        fields = {name: hidden(field, stand_in, within=section_of_field[name]) for name, field in value.items()}
        return {name: field for name, field in (fields | stand_ins).items() if name not in stand_ins or stand_in is not None}
    return [hidden(list_entry, stand_in, within=within) for list_entry in value] if isinstance(value, list) else value


def _is_secret(name: str, value: Any, within: str) -> bool:
    """Return whether a recipe's setting holds a secret, judged by its name."""
    snake_name = re.sub(r"(?<=[a-z])(?=[A-Z])|-", "_", name).lower()
    has_secret_name = _SECRET_NAME.search(snake_name) is not None and _SPECIAL_TOKEN_NAME.search(snake_name) is None
    is_filled_text = isinstance(value, str) and value != ""
    return within != "" and is_filled_text and (has_secret_name or (within, snake_name) == ("trainer", "token"))


def is_run(path: Path) -> bool:
    """Return whether a folder holds a run, finished or not."""
    return (path / "recipe.yaml").is_file() and (path / "metrics.jsonl").is_file()


def check_free(
    path: str | Path, *, overwrite: bool = False, writes: Sequence[str] = WRITES, option: str = "--output"
) -> None:
    """Refuse a folder in which a new run would overwrite files. With `overwrite`, a folder with a run is allowed."""
    folder = Path(path)
    if is_run(folder) and not overwrite:
        raise DataError(
            f"'{path}' holds a run already. To start a new run, leave out --output or give another folder. To go on with the old "
            "run, add --resume last. To replace the old run, add --overwrite."
        )
    foreign_files = [] if is_run(folder) else [name for name in writes if is_filled(folder / name)]
    if foreign_files:
        file_names_text = ", ".join(foreign_files)
        raise DataError(
            f"'{path}' holds {file_names_text}, which no run of spanwise wrote and a new run would overwrite. "
            f"Give another {option}, or move {file_names_text} away."
        )


def is_filled(path: Path) -> bool:
    """Return whether a file has content, or a folder has entries."""
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0


@contextmanager
def sole_writer(path: str | Path, *, option: str = "--output") -> Iterator[None]:
    """Lock a folder for this process during a `with` block. At the end, remove the folder if it is new and empty."""
    if not is_first_rank():
        yield
        return
    folder = Path(path)
    is_new_folder = not folder.exists()
    with writing(folder, f"The output folder '{folder}'"):
        folder.mkdir(parents=True, exist_ok=True)
    folder_lock = FileLock(folder / ".lock")
    try:
        folder_lock.acquire(timeout=0)
    except Timeout:
        raise DataError(
            f"Another process is writing into '{path}'; wait until it ends, end that process, or give another {option}."
        ) from None
    except (OSError, NotImplementedError):  # the file system has no locks, so the run goes on without one
        pass
    try:
        yield
    finally:
        if not any(file.name != ".lock" for file in folder.iterdir()):
            (folder / ".lock").unlink(missing_ok=True)
            if is_new_folder:
                folder.rmdir()
        folder_lock.release()


def is_first_rank() -> bool:
    """Return whether this process is rank 0, the only rank that writes files."""
    return os.environ.get("RANK", "0") == "0"


class RunFolder:
    """Writes the files of a run into its folder, from `begin` on. Only what `writes` names is ever removed."""

    def __init__(self, path: str | Path, *, writes: Sequence[str] = WRITES) -> None:
        self.path, self.writes = Path(path), tuple(writes)

    def write_recipe(self, recipe: Mapping[str, Any]) -> None:
        """Write the recipe without secrets. `output` is left out, because a user may move the folder."""
        kept_settings = {name: value for name, value in recipe.items() if name != "output"}
        write_text(self.path / "recipe.yaml", yaml.safe_dump(hidden(kept_settings), sort_keys=False, allow_unicode=True))

    def begin(
        self, recipe: Mapping[str, Any], *, step: int | None = None, history: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """Remove the files of an earlier run (or of steps after `step`), and write the recipe and the metrics so far."""
        with writing(self.path, f"The output folder '{self.path}'"):
            for result_path in (self.path / name for name in self.writes if step is None or name in RESULTS):
                if result_path.is_dir() and not result_path.is_symlink():
                    shutil.rmtree(result_path)
                else:
                    result_path.unlink(missing_ok=True)
            for file in (file for kind in (TRAINING, ONE_PROMPT) for file in (self.path / kind).glob("step_*.parquet")):
                if (step_digits := file.stem.removeprefix("step_")).isdecimal() and int(step_digits) > (step or 0):
                    file.unlink()
            self.path.mkdir(parents=True, exist_ok=True)
            self.write_recipe(recipe)
            write_text(self.path / "metrics.jsonl", "".join(json.dumps(dict(line)) + "\n" for line in history))

    def add_metrics(self, line: Mapping[str, Any]) -> None:
        """Append one line to `metrics.jsonl`."""
        add_line(self.path / "metrics.jsonl", json.dumps(dict(line)))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, whose presence marks a run as finished."""
        write_text(self.path / "summary.json", json.dumps(hidden(dict(summary)), indent=2) + "\n")

    def write_rollouts(self, parts: Sequence[pa.Table], *, step: int, kind: str = TRAINING) -> None:
        """Write the rollouts of a batch to `<kind>/step_<step>.parquet`. Each process has a table."""
        write_rollouts(self.path / kind / f"step_{step:06d}.parquet", parts)


def metrics_until(run: Path, step: int) -> list[dict[str, Any]]:
    """Return the metrics of a run up to a step, without the final evaluation. Warn about damaged lines."""
    log_file = run / "metrics.jsonl"
    line_texts = log_file.read_bytes().splitlines() if log_file.is_file() else []
    kept_records: list[dict[str, Any]] = []
    damaged_line_count = 0
    for line_text in line_texts:
        try:
            parsed_line = json.loads(line_text)
            is_after_step = parsed_line["step"] > step or "final" in parsed_line
        except (ValueError, TypeError, KeyError):
            damaged_line_count += 1
            continue
        if is_after_step:
            break
        kept_records.append(parsed_line)
    if damaged_line_count:
        warning = f"{damaged_line_count} of {len(line_texts)} lines of '{log_file}' cannot be read. Such lines are left out."
        warnings.warn(warning, UserWarning, stacklevel=2)
    return kept_records
