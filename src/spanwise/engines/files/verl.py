"""verl's rollout dump (`trainer.rollout_data_dir`): `<step>.jsonl`, text without token ids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from spanwise.engines.files.lines import lacks, records
from spanwise.engines.files.table import RolloutTable, clean, groups, numbers, prompt_text
from spanwise.engines.files.text import cut_text

REQUIRED = ("input", "output")
_ROLLOUT_KEY = re.compile(r"(.+)_\d+_\d+", re.DOTALL)


def read_verl(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read verl's dump: `input`, `output`, `gts`, `score`, `step` and whatever the reward function added.

    `gts` is the gold answer, also under the name `answer`; `score` and every other numeric field are taken for rewards. Where
    `uid` has the shape of V1's rollout keys (sample, rollout, output) it says which prompt a row belongs to, else the text does.

    Raises:
        DataError: a line that is not JSON or lacks a field.
    """
    rows: list[dict[str, Any]] = []
    for file, number, record in records(files):
        for key in REQUIRED:
            if key not in record:
                raise lacks(file, number, key, record)
        rows.append(record)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names if name not in ("input", "output", "step")}
    if "gts" in columns:
        columns.setdefault("answer", columns["gts"])
    prompts = [prompt_text(row["input"]) for row in rows]
    steps = [int(row.get("step") or 0) for row in rows]
    cut = cut_text([[(clean(str(row["output"])), True)] for row in rows], tokenizer)
    scores = {name: values for name, values in columns.items() if name not in ("gts", "answer", "uid", "request_id")}
    return RolloutTable(
        source="verl",
        path=path,
        note=cut.note,
        prompts=prompts,
        group_n=groups(_samples(columns.get("uid"), prompts), steps),
        step_n=torch.tensor(steps, dtype=torch.long),
        tokens=cut.tokens,
        trainable=cut.trainable,
        vocabulary=cut.vocabulary,
        has_ids=False,
        columns=columns,
        rewards={name: reward for name, values in scores.items() if (reward := numbers(values)) is not None},
    )


def _samples(uids: Sequence[Any] | None, prompts: Sequence[str]) -> Sequence[str]:
    matches = [_ROLLOUT_KEY.fullmatch(uid) if isinstance(uid, str) else None for uid in uids or ()]
    return [match[1] for match in matches if match] if uids and all(matches) else prompts
