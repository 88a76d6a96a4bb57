"""TRL's completions: what `GRPOTrainer` writes with `log_completions=True`, text without token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from spanwise.engines.files.table import RolloutTable, groups, numbers, prompt_text, spoken
from spanwise.engines.files.text import Parts, cut_text

REQUIRED = ("prompt", "completion")


def read_trl(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read `completions/completions_*.parquet`.

    TRL logs the last generation batch, so a batch that serves several optimiser steps is written several times; repetitions
    are left out. Every numeric column is taken for a reward. Messages of a completion that are not the assistant's count as
    not sampled.
    """
    tables: list[pa.Table] = []
    repeated = 0
    for file in files:
        table = pq.read_table(file)
        same = bool(tables) and _without_step(table).equals(_without_step(tables[-1]))
        repeated += same
        if not same:
            tables.append(table)
    table = pa.concat_tables(tables, promote_options="permissive")
    prompts = [prompt_text(prompt) for prompt in table["prompt"].to_pylist()]
    steps = table["step"].to_pylist() if "step" in table.column_names else [0] * len(table)
    cut = cut_text([completion_parts(completion) for completion in table["completion"].to_pylist()], tokenizer)
    others = {
        name: table[name].to_pylist()
        for name in table.column_names
        if name not in ("step", "prompt", "completion", "advantage")
    }
    note = cut.note
    if repeated:
        note += f" {repeated} of {len(files)} files repeat the batch before them and are left out."
    return RolloutTable(
        source="TRL",
        path=path,
        note=note,
        prompts=prompts,
        group_n=groups(prompts, steps),
        step_n=torch.tensor(steps, dtype=torch.long),
        tokens=cut.tokens,
        trainable=cut.trainable,
        vocabulary=cut.vocabulary,
        has_ids=False,
        columns=others,
        rewards={name: reward for name, values in others.items() if (reward := numbers(values)) is not None},
    )


def completion_parts(completion: Any) -> Parts:
    """A completion as text: a string, or the messages of a conversation.

    >>> completion_parts([{"role": "assistant", "content": "4"}, {"role": "tool", "content": "ok"}])
    [('4', True), ('ok', False)]
    """
    if isinstance(completion, (list, tuple)):
        return [(spoken(m), not isinstance(m, dict) or m.get("role", "assistant") == "assistant") for m in completion]
    return [(spoken(completion), True)]


def _without_step(table: pa.Table) -> pa.Table:
    return table.drop_columns(["step"]) if "step" in table.column_names else table
