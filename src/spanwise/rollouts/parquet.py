"""Parquet files, with the sentence for those that are damaged or do not fit together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from jaxtyping import Int, Shaped

from spanwise.errors import DataError
from spanwise.rollouts.fields import FieldError, whole


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Read a parquet file inside; what goes wrong with it is one sentence."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if file.is_file() and file.stat().st_size == 0:
            raise DataError(f"'{file}' is empty.") from error
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise DataError(f"'{file}' is not readable as parquet; it is damaged or cut off ({reason}).") from error


def check_names(file: Path, names: Sequence[str]) -> None:
    """Refuse a table in which a name stands more than once."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"'{file}' has more than one column '{twice}'; each name may stand once.")


def joined(path: Path, tables: Sequence[pa.Table], *, promote: Literal["default", "permissive"]) -> pa.Table:
    """The tables under each other."""
    try:
        return pa.concat_tables(tables, promote_options=promote)
    except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise DataError(f"The files of '{path}' do not fit together ({reason}); give one of them.") from None


def flat(column: pa.ChunkedArray, dtype: Any) -> Shaped[np.ndarray, " v"]:
    """The entries of a column of lists, end to end; NaN at a gap, which only numbers have.

    >>> flat(pa.chunked_array([[[1.0], [None, 2.0]]]), np.float32).tolist()
    [1.0, nan, 2.0]
    """
    values = column.combine_chunks().flatten()
    if values.null_count:
        values = values.cast(pa.float64())
    return values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)


def offsets(column: pa.ChunkedArray) -> Int[np.ndarray, " o"]:
    """Where the lists of a column start in `flat`, and where the last one ends.

    >>> offsets(pa.chunked_array([[[5, 6], []], [[7]]])).tolist()
    [0, 2, 2, 3]
    """
    lengths = column.combine_chunks().value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def steps_of(path: Path, table: pa.Table) -> list[int]:
    """The step of every row; 0 where there is none."""
    steps = []
    for row, value in enumerate(table["step"].to_pylist() if "step" in table.column_names else [None] * len(table)):
        try:
            steps.append(whole(value, "step"))
        except FieldError as error:
            raise DataError(f"Completion {row} of '{path}' {error}.") from None
    return steps
