"""What other trainers write: TRL's completions and verl's rollout dump, texts without token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spanwise.rollouts.cells import lacks, whole
from spanwise.rollouts.files import joined, parsed, steps_of
from spanwise.rollouts.messages import completion_parts, prompt_text, spoken
from spanwise.rollouts.roles import NAMES, REWARD_STARTS
from spanwise.rollouts.table import RolloutTable, as_trained, gaps, is_made, recorded
from spanwise.rollouts.text import cut_text

TRL_REQUIRED, VERL_REQUIRED = ("prompt", "completion"), ("input", "output")
_ROLLOUT_KEY = re.compile(r"(.+)_\d+_\d+", re.DOTALL)
#: Fields of verl's that are no rewards.
_NO_REWARDS = ("gts", "answer", "uid", "request_id")


def is_trl(found: pa.Schema) -> bool:
    """Whether a parquet file is TRL's: a prompt, a completion and a step in each row, and its advantage, as all but old ones have.

    >>> own = {"step": pa.int64(), "prompt": pa.string(), "completion": pa.string()}
    >>> [is_trl(pa.schema(columns)) for columns in (own, {**own, "group_id": pa.int64()}, {"prompt": pa.string()})]
    [True, False, False]
    """
    if not {"step", *TRL_REQUIRED} <= set(found.names):
        return False
    kind = found.field("completion").type
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if listed and not pa.types.is_struct(kind.value_type):  # a list of completions
        return False
    others = (name in ("rewards", *NAMES["group"]) or name.startswith(REWARD_STARTS) for name in found.names)
    return "advantage" in found.names or not any(others)


def read_trl(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read `completions/completions_*.parquet`.

    TRL logs the last generation batch, so a batch that serves several optimiser steps is written several times; repetitions
    are left out. Every numeric column is taken for a reward, but for `answer` and what a trainer made of rewards (`advantage`, and
    `credit/<block>` of spanwise's own). Messages of a completion that are not the assistant's count as not sampled; of the
    assistant's, reasoning and calls of tools are part of what it said.
    """
    tables: list[pa.Table] = []
    for file in files:
        table = pq.read_table(file)
        if not tables or not _without_step(table).equals(_without_step(tables[-1])):
            tables.append(table)
    repeated = len(files) - len(tables)
    table = joined(path, tables, promote="permissive")
    columns = {name: table[name].to_pylist() for name in table.column_names if name not in ("step", *TRL_REQUIRED)}
    rewards = recorded({name: column for name, column in columns.items() if name != "answer" and not is_made(name)})
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
        columns={name: column for name, column in columns.items() if not is_made(name)},
        as_recorded=as_trained(rewards, cut.tokens, columns),
    )


def _without_step(table: pa.Table) -> pa.Table:
    return table.drop_columns(["step"]) if "step" in table.column_names else table


def read_verl(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read verl's dump: `input`, `output`, `gts`, `score`, `step` and whatever the reward function added.

    `gts` is the gold answer, also under the name `answer`; `score` and every other numeric field are taken for rewards. `uid`
    says which prompt a row belongs to where it has the shape of V1's rollout keys (sample, rollout, output), or where rows of
    one step share it; else the text does.
    """
    rows = list(parsed(files, _row))
    names = dict.fromkeys(name for row in rows for name in row if name not in ("input", "output", "step"))
    columns = {name: [row.get(name) for row in rows] for name in names}
    if "gts" in columns:
        columns.setdefault("answer", columns["gts"])
    steps = [row["step"] for row in rows]
    rewards = recorded({name: values for name, values in columns.items() if name not in _NO_REWARDS})
    cut = cut_text([[(row["output"], True)] for row in rows], tokenizer)
    return RolloutTable.of(
        "verl",
        path,
        cut,
        prompts=[row["input"] for row in rows],
        steps=steps,
        keys=_keys(columns.get("uid", ()), steps),
        rewards=rewards,
        notes=[gaps(rewards)],
        columns=columns,
        as_recorded=as_trained(rewards, cut.tokens),
    )


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with its prompt and what was said as text, and its step as a number."""
    for key in VERL_REQUIRED:
        if key not in record:
            raise lacks(key, record)
    read = {
        "input": prompt_text(record["input"]),
        "output": spoken(record["output"]),
        "step": whole(record.get("step"), "step"),
    }
    return {**record, **read}


def _keys(uids: Sequence[Any], steps: Sequence[int]) -> list[str] | None:
    """What says which prompt a row belongs to; None if nothing but its text does."""
    known = [uid for uid in uids if isinstance(uid, str)]
    if not known or len(known) < len(uids):
        return None
    matches = [_ROLLOUT_KEY.fullmatch(uid) for uid in known]
    if all(matches):
        return [match[1] for match in matches if match]
    return known if len(set(zip(known, steps, strict=True))) < len(known) else None
