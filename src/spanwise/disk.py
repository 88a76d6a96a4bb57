"""Write files whole or not at all. An error names the file, the reason and the free space in one sentence."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spanwise.errors import DataError, RecipeError, SpanwiseError, lacking

#: The operating system's error numbers for a full disk, a full quota and a file that is too large.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNITS = ((10**9, "GB"), (10**6, "MB"))
#: Words that show that an error comes from torch's archive writer.
_TORCH_PHRASES = ("PytorchStreamWriter", "inline_container", "iostream error")


def refusal(error: BaseException) -> str | None:
    """Return the operating system's reason for a failed write. Any other error gives None.

    Python and pyarrow raise an OSError, safetensors and tokenizers their own errors that end with its number, torch a RuntimeError.
    """
    causes: list[BaseException] = []
    current_cause: BaseException | None = error
    while current_cause is not None and current_cause not in causes:
        causes.append(current_cause)
        current_cause = current_cause.__cause__ or current_cause.__context__
    for cause in causes:
        os_error_match = re.search(r"\(os error (\d+)\)", str(cause))
        parsed_error_number = int(os_error_match[1]) if os_error_match else None
        error_number = cause.errno if isinstance(cause, OSError) else parsed_error_number
        if error_number in (*_NO_ROOM, errno.EROFS):
            return os.strerror(error_number)
    runtime_error_texts = [str(cause) for cause in causes if isinstance(cause, RuntimeError)]
    is_torch_error = any(phrase in text for text in runtime_error_texts for phrase in _TORCH_PHRASES)
    return "PyTorch could not write all of the file" if is_torch_error else None


def unwritten(place: Path, error: Exception, what: str | None = None) -> str:
    """Build the error message for a file or folder that cannot be written."""
    refusal_reason = refusal(error)
    place_name = f"'{place}'" if what is None else what
    failure_reason = refusal_reason or getattr(error, "strerror", None) or error
    error_sentence = f"{place_name} cannot be written: {failure_reason}"
    if refusal_reason in (None, os.strerror(errno.EROFS)):
        return f"{error_sentence}."
    with suppress(OSError, StopIteration):  # some systems do not say how much space is free
        existing_folder = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
        free_bytes = shutil.disk_usage(existing_folder).free
        unit_bytes, unit_name = next(((size, unit) for size, unit in _UNITS if free_bytes >= size / 10), (1, "bytes"))
        error_sentence += f"; {free_bytes / unit_bytes:.{int(unit_bytes > 1)}f} {unit_name} are free there"
    return f"{error_sentence}. Make room there."


@contextmanager
def writing(place: str | Path, what: str | None = None) -> Iterator[None]:
    """Raise a one-sentence `DataError` if the code in the `with` block cannot write its file."""
    try:
        yield
    except SpanwiseError:
        raise
    except Exception as error:
        if refusal(error) is None and not isinstance(error, OSError):
            raise
        raise DataError(unwritten(Path(place), error, what)) from error


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which replaces the file after the `with` block, and is removed if the block fails."""
    temporary_file = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            yield temporary_file
            if temporary_file.exists():
                temporary_file.replace(file)
    finally:
        with suppress(OSError):  # if the folder cannot be reached, there is no temporary file to remove
            temporary_file.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: Path) -> Iterator[None]:
    """If the `with` block fails, remove the folder that it writes."""
    try:
        with writing(folder):
            yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def read_text(path: str | Path, what: str, advice: str = "") -> str:
    """Read a text file that a recipe names. Raise RecipeError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        failure_reason = getattr(error, "strerror", None) or error
        raise RecipeError(f"{what} cannot be read: {failure_reason}. {advice}".rstrip()) from error


def read_yaml(path: str | Path, what: str, advice: str = "") -> Any:
    """Read a YAML file that a recipe names, or the recipe itself. Raise a RecipeError if it cannot be read."""
    try:
        import yaml  # imported here, because spanwise can be installed without pyyaml
    except ModuleNotFoundError as error:
        raise lacking(what, error) from error
    try:
        return yaml.safe_load(read_text(path, what, advice))
    except yaml.YAMLError as error:
        raise RecipeError(f"{what} is not valid YAML: {' '.join(str(error).split())}. {advice}".rstrip()) from error
    except RecursionError as error:
        raise RecipeError(f"{what} is nested too deeply to be read.") from error


def write_text(file: Path, text: str) -> None:
    """Write a text file whole or not at all. Raise DataError if it cannot be written."""
    with whole_file(file) as temporary_file:
        temporary_file.write_text(text, encoding="utf-8")


def add_line(file: Path, text: str) -> None:
    """Append a line to a text file. If the line cannot be written whole, undo it and raise a DataError."""
    with writing(file):
        file_size_before = file.stat().st_size if file.exists() else 0
        try:
            with file.open("a", encoding="utf-8") as stream:
                stream.write(f"{text}\n")
        except OSError:
            os.truncate(file, file_size_before)
            raise
