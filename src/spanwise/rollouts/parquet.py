"""Parquet files of a folder as one table, with the sentence for those that do not fit together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pyarrow as pa

from spanwise.errors import DataError
from spanwise.rollouts.fields import FieldError, whole


def joined(path: Path, tables: Sequence[pa.Table], *, promote: Literal["default", "permissive"]) -> pa.Table:
    """The tables under each other.

    Raises:
        DataError: a column has another type in another file.
    """
    try:
        return pa.concat_tables(tables, promote_options=promote)
    except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise DataError(f"The files of '{path}' do not fit together ({reason}); give one of them.") from None


def steps_of(path: Path, table: pa.Table) -> list[int]:
    """The step of every row; 0 where there is none.

    Raises:
        DataError: a step that is no whole number.
    """
    steps = []
    for row, value in enumerate(table["step"].to_pylist() if "step" in table.column_names else [None] * len(table)):
        try:
            steps.append(whole(value, "step"))
        except FieldError as error:
            raise DataError(f"Completion {row} of '{path}' {error}.") from None
    return steps
