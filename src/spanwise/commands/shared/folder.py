"""The folder of a run: recipe, metrics, rollouts, summary."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from spanwise.errors import DataError
from spanwise.rollouts import Completions, write_rollouts

#: What a run ends with, in no folder of a run that has not.
RESULTS = ("summary.json", "evaluation.parquet", "report.html")


@contextmanager
def sole_writer(path: str | Path) -> Iterator[None]:
    """Keep a run's folder to this process while the block lasts; the system lets go of it when the process ends, however it does.

    Args:
        path: of the run, made if it does not exist.

    Edge cases:
        Several ranks of one training: the first holds it for all. A file system that cannot lock: nothing is held.

    Raises:
        DataError: another process trains into the folder, or it cannot be written.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    lock = FileLock(Path(path) / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise DataError(
            f"Another process is training into '{path}'; wait until it ends, end it, or give another --output."
        ) from None
    except (OSError, NotImplementedError):  # no locks there; a folder that cannot be written is said by RunFolder
        pass
    try:
        yield
    finally:
        lock.release()


class RunFolder:
    """Writes what a run leaves behind: `recipe.yaml`, `metrics.jsonl`, `rollouts/*.parquet`, `summary.json`, `model/`.

    Args:
        path: made if it does not exist; the `RESULTS` of an earlier run are removed.
        history: lines of `metrics.jsonl` that a resumed run goes on from.
    """

    def __init__(self, path: str | Path, *, history: Iterable[Mapping[str, Any]] = ()) -> None:
        self.path = Path(path)
        try:
            (self.path / "rollouts").mkdir(parents=True, exist_ok=True)
            _replace(self.path / "metrics.jsonl", "".join(json.dumps(dict(line)) + "\n" for line in history))
            for name in RESULTS:
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(path, error) from error

    @property
    def model(self) -> Path:
        """Where the trained model and its tokenizer go."""
        return self.path / "model"

    def write_recipe(self, recipe: Mapping[str, Any]) -> None:
        """Write the recipe as it was resolved."""
        (self.path / "recipe.yaml").write_text(yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True))

    def add_metrics(self, line: Mapping[str, Any]) -> None:
        """Append one line to `metrics.jsonl`."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(line)) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, whole or not at all: it is what says that the run has ended."""
        _replace(self.path / "summary.json", json.dumps(dict(summary), indent=2) + "\n")

    def write_rollouts(self, parts: Sequence[Completions], *, step: int) -> None:
        """Write one generation batch, what each process has of it, to `rollouts/step_<step>.parquet` (`rollouts.schema`)."""
        write_rollouts(self.path / "rollouts" / f"step_{step:06d}.parquet", parts)


def write_page(folder: Path, html: str) -> Path:
    """Write `report.html` into a folder; where it lies.

    Raises:
        DataError: it cannot be written.
    """
    target = folder / "report.html"
    try:
        target.write_text(html, encoding="utf-8")
    except OSError as error:
        raise DataError(f"'{target}' cannot be written: {error.strerror or error}.") from error
    return target


def metrics_until(run: Path, step: int) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl` up to a step, without the final evaluation; none if the file is not there.

    What an interruption cut off in the middle of a line ends them as well.
    """
    file = run / "metrics.jsonl"
    lines: list[dict[str, Any]] = []
    for text in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if line["step"] > step or "final" in line:
            break
        lines.append(line)
    return lines


def _replace(file: Path, text: str) -> None:
    """Write a file so that nobody ever sees half of it."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)


def _unwritable(path: str | Path, error: OSError) -> DataError:
    return DataError(f"The output folder '{path}' cannot be written: {error.strerror or error}.")
