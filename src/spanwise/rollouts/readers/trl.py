"""TRL's completions: what `GRPOTrainer` writes with `log_completions=True`, text without token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from spanwise.rollouts.messages import completion_parts, prompt_text
from spanwise.rollouts.parquet import joined, steps_of
from spanwise.rollouts.table import RolloutTable, as_recorded, gaps, recorded
from spanwise.rollouts.text import cut_text

REQUIRED = ("prompt", "completion")


def read_trl(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read `completions/completions_*.parquet`.

    TRL logs the last generation batch, so a batch that serves several optimiser steps is written several times; repetitions
    are left out. Every numeric column is taken for a reward, but for what a trainer made of rewards (`advantage`, and
    `credit/<block>` of spanwise's own). Messages of a completion that are not the assistant's count as not sampled; of the
    assistant's, reasoning and calls of tools are part of what it said.

    Raises:
        DataError: files whose columns differ in type, a step that is no whole number.
    """
    tables: list[pa.Table] = []
    repeated = 0
    for file in files:
        table = pq.read_table(file)
        same = bool(tables) and _without_step(table).equals(_without_step(tables[-1]))
        repeated += same
        if not same:
            tables.append(table)
    table = joined(path, tables, promote="permissive")
    columns = {
        name: table[name].to_pylist()
        for name in table.column_names
        if name not in ("step", "prompt", "completion", "advantage") and not name.startswith("credit/")
    }
    rewards = recorded(columns)
    cut = cut_text([completion_parts(completion) for completion in table["completion"].to_pylist()], tokenizer)
    made = recorded({
        name: table[name].to_pylist() for name in table.column_names if name == "advantage" or name.startswith("credit/")
    })  # fmt: skip
    trained = as_recorded({**rewards, **made}, cut.tokens)
    by_block = {name.removeprefix("credit/"): one.value_n.numpy() for name, one in made.items() if name != "advantage"}
    if trained is not None and by_block:
        trained = trained._replace(says="the file's 'credit/...' of each block", by_block=by_block)
    again = f"{repeated} of {len(files)} files repeat the batch before them and are left out." if repeated else ""
    return RolloutTable.of(
        "TRL",
        path,
        cut,
        prompts=[prompt_text(prompt) for prompt in table["prompt"].to_pylist()],
        steps=steps_of(path, table),
        rewards=rewards,
        notes=[again, gaps(rewards)],
        columns=columns,
        as_recorded=trained,
    )


def _without_step(table: pa.Table) -> pa.Table:
    return table.drop_columns(["step"]) if "step" in table.column_names else table
