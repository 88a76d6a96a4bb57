"""What a file of this package records, for those who show it: the numbers of every completion, the tokens of a few."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Float
from torch import Tensor

from spanwise.errors import DataError
from spanwise.rollouts import schema
from spanwise.rollouts.files import readable


def read_numbers(file: Path) -> pa.Table:
    """The columns with one number per completion: credit, rewards, spans, steps; no text and nothing per token."""
    with readable(file):
        opened = _opened(file)
        return opened.read(columns=[one.name for one in opened.schema_arrow if _is_number(one.type)])


def read_rows(file: Path, rows: Sequence[int] | None = None) -> pa.Table:
    """Some completions, by ascending numbers, or all, with all that the file holds of them."""
    with readable(file):
        opened = _opened(file)
        return opened.read() if rows is None else pa.concat_tables(_taken(opened, np.asarray(rows, dtype=np.int64)))


def _taken(opened: pq.ParquetFile, rows: np.ndarray) -> Iterator[pa.Table]:
    """The rows of each part of a file; only the parts that have any are read."""
    yield opened.schema_arrow.empty_table()
    last = 0
    for part in range(opened.num_row_groups):
        first, last = last, last + opened.metadata.row_group(part).num_rows
        here = rows[(rows >= first) & (rows < last)] - first
        if len(here):
            yield opened.read_row_group(part).take(pa.array(here))


def numbers(table: pa.Table, name: str) -> Float[Tensor, " n"]:
    """A column as float64; NaN for null.

    >>> numbers(pa.table({"reward/correct": [1.0, None]}), "reward/correct")
    tensor([1., nan], dtype=torch.float64)
    """
    return torch.tensor(column_of(table, name).cast(pa.float64()).to_numpy(), dtype=torch.float64)


def column_of(table: pa.Table, name: str) -> pa.ChunkedArray:
    """A column; a DataError if there is none."""
    if name not in table.column_names:
        raise DataError(f"The rollouts have no column '{name}'; they have {', '.join(table.column_names) or 'none'}.")
    return table[name]


def recorded_credit(table: pa.Table) -> dict[str, dict[str, Tensor]]:
    """Method -> block -> credit of each completion, as reports take it: NaN where it has no such block, and `stop`.

    >>> table = pa.table({"credit/bae/a": [0.5, None], "credit/bae/stop": [0.0, -1.0], "advantages/bae": [[0.5], [-1.0]]})
    >>> recorded_credit(table)["bae"]["stop"].tolist()
    [nan, -1.0]
    """
    found = {}
    for method in schema.methods_in(table.column_names):
        blocks = schema.behind(table.column_names, "credit", method)
        credit = {block: numbers(table, schema.column("credit", method, block)) for block in blocks}
        stop_n = credit.pop(schema.STOP, None)
        found[method] = credit if stop_n is None else with_stop(credit, stop_n)
    return found


def recorded_rewards(table: pa.Table) -> dict[str, Tensor]:
    """Objective -> reward of each completion, NaN where there is none."""
    return {name: numbers(table, schema.column("reward", name)) for name in schema.behind(table.column_names, "reward")}


def credit_figures(credit_n: Float[Tensor, " n"]) -> dict[str, Any]:
    """Of the credit of a block: how many completions have it, its mean size, the share of exactly 0, lowest and highest.

    >>> credit_figures(torch.tensor([0.5, 0.0, torch.nan]))
    {'completions': 2, 'mean_abs': 0.25, 'zero_share': 0.5, 'lowest': 0.0, 'highest': 0.5}
    """
    here_n = credit_n[~credit_n.isnan()].double()
    if not len(here_n):
        return {"completions": 0, **dict.fromkeys(("mean_abs", "zero_share", "lowest", "highest"))}
    zero_n, low, high = (here_n == 0).double(), float(here_n.min()), float(here_n.max())
    return {
        "completions": len(here_n), "mean_abs": float(here_n.abs().mean()), "zero_share": float(zero_n.mean()),
        "lowest": low, "highest": high,
    }  # fmt: skip


def with_stop(block_n: Mapping[str, Float[Tensor, " n"]], stop_n: Float[Tensor, " n"]) -> dict[str, Float[Tensor, " n"]]:
    """The credit of each block, and under `stop` that of leaving out every paid block: NaN where it is 0.

    Example:
        >>> with_stop({"all": torch.tensor([.5, .5])}, torch.tensor([0., -1.]))
        {'all': tensor([0.5000, 0.5000]), 'stop': tensor([nan, -1.])}
    """
    charged = {schema.STOP: stop_n.masked_fill(stop_n == 0, torch.nan)} if bool((stop_n != 0).any()) else {}
    return {**block_n, **charged}


def _opened(file: Path) -> pq.ParquetFile:
    opened = pq.ParquetFile(file)
    schema.check(file, opened.schema_arrow)
    return opened


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)
