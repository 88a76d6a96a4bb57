"""What a file of this package records, for those who show it: the numbers of every completion, the tokens of a few."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Float
from torch import Tensor

from spanwise.errors import DataError
from spanwise.rollouts import schema
from spanwise.rollouts.parquet import readable


def read_numbers(file: Path) -> pa.Table:
    """The columns with one number per completion: credit, rewards, spans, steps; no text and nothing per token.

    Raises:
        DataError: the file cannot be read, or is of another version.
    """
    with readable(file):
        opened = _opened(file)
        return opened.read(columns=[one.name for one in opened.schema_arrow if _is_number(one.type)])


def read_rows(file: Path, rows: Sequence[int] | None = None) -> pa.Table:
    """Some completions with all that the file holds of them.

    Args:
        file: of any size; only the parts that a row lies in are read, one at a time.
        rows: their numbers, ascending; None: all.

    Raises:
        DataError: the file cannot be read, or is of another version.
    """
    with readable(file):
        opened = _opened(file)
        if rows is None:
            return opened.read()
        wanted = np.asarray(rows, dtype=np.int64)
        found, first = [opened.schema_arrow.empty_table()], 0
        for part in range(opened.num_row_groups):
            last = first + opened.metadata.row_group(part).num_rows
            here = wanted[(wanted >= first) & (wanted < last)] - first
            if len(here):
                found.append(opened.read_row_group(part).take(pa.array(here)))
            first = last
        return pa.concat_tables(found)


def numbers(table: pa.Table, name: str) -> Float[Tensor, " n"]:
    """A column as float64; NaN for null.

    >>> numbers(pa.table({"reward/correct": [1.0, None]}), "reward/correct")
    tensor([1., nan], dtype=torch.float64)

    Raises:
        DataError: there is no such column.
    """
    if name not in table.column_names:
        raise DataError(f"The rollouts have no column '{name}'; they have {', '.join(table.column_names) or 'none'}.")
    return torch.tensor(table[name].cast(pa.float64()).to_numpy(), dtype=torch.float64)


def _opened(file: Path) -> pq.ParquetFile:
    opened = pq.ParquetFile(file)
    schema.check(file, opened.schema_arrow)
    return opened


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)
