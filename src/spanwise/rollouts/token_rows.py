"""Collect numbers per token in temporary files, to save memory."""

from __future__ import annotations

import tempfile
import weakref
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
from jaxtyping import Int, Shaped

from spanwise.disk import writing


class DiskArray:
    """A growing array of numbers in a temporary file."""

    def __init__(self, dtype: Any) -> None:
        self.dtype, self._size = np.dtype(dtype), 0
        with self._writing():
            self._file = tempfile.TemporaryFile(prefix="spanwise-")  # noqa: SIM115 - it lives as long as the array
        weakref.finalize(self, _close, self._file)

    def __len__(self) -> int:
        return self._size

    def extend(self, numbers: Any) -> None:
        """Append numbers to the array."""
        new_numbers = np.ascontiguousarray(numbers, self.dtype)
        with self._writing():
            self._file.write(new_numbers.data)
        self._size += new_numbers.size

    def read(self) -> Shaped[np.ndarray, " v"]:
        """Return the file's numbers as an array that is read on use. Changes to the array are not written to the file."""
        with self._writing():
            self._file.flush()
        return np.asarray(np.memmap(self._file, self.dtype, mode="c")) if self._size else np.empty(0, self.dtype)

    @staticmethod
    def _writing() -> Any:
        folder = tempfile.gettempdir()
        return writing(folder, f"The temporary file of tokens in '{folder}' (set TMPDIR to use another folder)")


def _close(file: IO[bytes]) -> None:
    """Close a temporary file. Ignore a full disk, because the unwritten numbers are no longer needed."""
    with suppress(OSError):
        file.close()


def disk_zeros(size: int, dtype: Any) -> Shaped[np.ndarray, " v"]:
    """Return an array of zeros that lies in a temporary file."""
    with tempfile.TemporaryFile(prefix="spanwise-") as file:
        return np.asarray(np.memmap(file, dtype, mode="w+", shape=(size,))) if size else np.empty(0, dtype)


@dataclass
class TokenRows:
    """Collects the tokens of completions, stored end to end."""

    ids: DiskArray = field(default_factory=lambda: DiskArray(np.int32))
    trainable: DiskArray = field(default_factory=lambda: DiskArray(np.bool_))
    lengths: array = field(default_factory=lambda: array("q", [0]))
    _numbers: dict[str, DiskArray] = field(default_factory=dict)

    def append(self, ids: Any, trainable: Any, numbers: Mapping[str, Sequence[float] | np.ndarray | None]) -> None:
        """Add the tokens of a completion and their numbers such as `logprobs`."""
        for name, token_numbers in numbers.items():
            if token_numbers is not None:
                if name not in self._numbers:
                    self._numbers[name] = DiskArray(np.float64 if name == "advantages" else np.float32)
                self._fill(self._numbers[name]).extend(token_numbers)
        self.ids.extend(ids)
        self.trainable.extend(trainable)
        self.lengths.append(len(ids))

    @property
    def offsets(self) -> Int[np.ndarray, " o"]:
        """The index of each completion's first token, followed by the total number of tokens."""
        return np.cumsum(self.lengths, dtype=np.int64)

    def numbers(self, name: str) -> Shaped[np.ndarray, " v"] | None:
        """Return numbers such as `logprobs` of all tokens, with NaN for missing ones. None if all are."""
        return self._fill(self._numbers[name]).read() if name in self._numbers else None

    def _fill(self, numbers: DiskArray) -> DiskArray:
        """Append NaN until there is a number for every token."""
        numbers.extend(np.full(len(self.ids) - len(numbers), np.nan))
        return numbers
