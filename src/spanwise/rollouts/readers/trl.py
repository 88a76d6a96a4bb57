"""TRL's completions: what `GRPOTrainer` writes with `log_completions=True`, text without token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from spanwise.rollouts.messages import completion_parts, prompt_text
from spanwise.rollouts.parquet import joined, steps_of
from spanwise.rollouts.roles import NAMES
from spanwise.rollouts.said import REWARD_STARTS
from spanwise.rollouts.table import RolloutTable, as_trained, gaps, is_made, recorded
from spanwise.rollouts.text import cut_text

REQUIRED = ("prompt", "completion")


def is_trl(found: pa.Schema) -> bool:
    """Whether a parquet file is TRL's: a prompt, a completion and a step in each row, and its advantage, as all but old ones have.

    >>> own = {"step": pa.int64(), "prompt": pa.string(), "completion": pa.string()}
    >>> [is_trl(pa.schema(columns)) for columns in (own, {**own, "group_id": pa.int64()}, {"prompt": pa.string()})]
    [True, False, False]
    """
    if not {"step", *REQUIRED} <= set(found.names):
        return False
    kind = found.field("completion").type
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if listed and not pa.types.is_struct(kind.value_type):  # a list of completions
        return False
    return "advantage" in found.names or not any(
        name in ("rewards", *NAMES["group"]) or name.startswith(REWARD_STARTS) for name in found.names
    )


def read_trl(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read `completions/completions_*.parquet`.

    TRL logs the last generation batch, so a batch that serves several optimiser steps is written several times; repetitions
    are left out. Every numeric column is taken for a reward, but for `answer` and what a trainer made of rewards (`advantage`, and
    `credit/<block>` of spanwise's own). Messages of a completion that are not the assistant's count as not sampled; of the
    assistant's, reasoning and calls of tools are part of what it said.
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
    held = {name: table[name].to_pylist() for name in table.column_names if name not in ("step", *REQUIRED)}
    columns = {name: values for name, values in held.items() if not is_made(name)}
    rewards = recorded(
        {name: values for name, values in columns.items() if name != "answer"}
    )  # a gold answer may be a number
    cut = cut_text([completion_parts(completion) for completion in table["completion"].to_pylist()], tokenizer)
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
        as_recorded=as_trained(held, rewards, cut.tokens),
    )


def _without_step(table: pa.Table) -> pa.Table:
    return table.drop_columns(["step"]) if "step" in table.column_names else table
