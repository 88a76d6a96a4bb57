"""What other trainers write: TRL's completions and verl's rollout dump, texts without token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spanwise.rollouts.cells import by_column, lacks, steps_of, whole
from spanwise.rollouts.files import joined, parsed
from spanwise.rollouts.messages import completion_parts, prompt_text, spoken
from spanwise.rollouts.readers.plain import NAMES, REWARD_STARTS
from spanwise.rollouts.table import RolloutTable
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
    for table in map(pq.read_table, files):
        if not tables or not table.drop_columns(["step"]).equals(tables[-1].drop_columns(["step"])):
            tables.append(table)
    columns = joined(path, tables).to_pydict()
    repeated = len(files) - len(tables)
    steps = steps_of(path, columns.pop("step"))
    prompts, completions = (columns.pop(name) for name in TRL_REQUIRED)
    return RolloutTable.of(
        "TRL",
        path,
        cut_text([completion_parts(completion) for completion in completions], tokenizer),
        prompts=[prompt_text(prompt) for prompt in prompts],
        steps=steps,
        columns=columns,
        rewards={name: column for name, column in columns.items() if name != "answer"},
        notes=[f"{repeated} of {len(files)} files repeat the batch before them and are left out." if repeated else ""],
    )


def read_verl(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read verl's dump: `input`, `output`, `gts`, `score`, `step` and whatever the reward function added.

    `gts` is the gold answer, also under the name `answer`; `score` and every other numeric field are taken for rewards. `uid`
    says which prompt a row belongs to where it has the shape of V1's rollout keys (sample, rollout, output), or where rows of
    one step share it; else the text does.
    """
    columns = by_column(list(parsed(files, _row)))
    prompts, outputs, steps = (columns.pop(name, []) for name in (*VERL_REQUIRED, "step"))
    if "gts" in columns:
        columns.setdefault("answer", columns["gts"])
    uids = columns.get("uid", [])
    keys = [uid for uid in uids if isinstance(uid, str)]
    matches = [match for match in map(_ROLLOUT_KEY.fullmatch, keys) if match]
    named = 0 < len(keys) == len(uids)
    if named and len(matches) == len(keys):
        keys = [match[1] for match in matches]
    elif len(set(zip(keys, steps, strict=False))) == len(keys):
        named = False
    return RolloutTable.of(
        "verl",
        path,
        cut_text([[(output, True)] for output in outputs], tokenizer),
        prompts=prompts,
        steps=steps,
        keys=keys if named else None,
        columns=columns,
        rewards={name: values for name, values in columns.items() if name not in _NO_REWARDS},
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
