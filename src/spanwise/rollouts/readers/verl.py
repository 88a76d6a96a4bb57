"""verl's rollout dump (`trainer.rollout_data_dir`): `<step>.jsonl`, text without token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spanwise.rollouts.fields import whole
from spanwise.rollouts.lines import lacks, parsed
from spanwise.rollouts.messages import prompt_text, spoken
from spanwise.rollouts.table import RolloutTable, as_recorded, gaps, recorded
from spanwise.rollouts.text import cut_text

REQUIRED = ("input", "output")
_ROLLOUT_KEY = re.compile(r"(.+)_\d+_\d+", re.DOTALL)


class _Row(NamedTuple):
    prompt: str
    output: str
    step: int
    record: Mapping[str, Any]


def read_verl(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read verl's dump: `input`, `output`, `gts`, `score`, `step` and whatever the reward function added.

    `gts` is the gold answer, also under the name `answer`; `score` and every other numeric field are taken for rewards. `uid`
    says which prompt a row belongs to where it has the shape of V1's rollout keys (sample, rollout, output), or where rows of
    one step share it; else the text does.
    """
    rows = list(parsed(files, _row))
    names = dict.fromkeys(name for row in rows for name in row.record)
    columns = {name: [row.record.get(name) for row in rows] for name in names if name not in ("input", "output", "step")}
    if "gts" in columns:
        columns.setdefault("answer", columns["gts"])
    steps = [row.step for row in rows]
    keys = _keys(columns.get("uid", ()), steps)
    skipped = ("gts", "answer", "uid", "request_id")
    rewards = recorded({name: values for name, values in columns.items() if name not in skipped})
    cut = cut_text([[(row.output, True)] for row in rows], tokenizer)
    return RolloutTable.of(
        "verl",
        path,
        cut,
        prompts=[row.prompt for row in rows],
        steps=steps,
        keys=keys,
        rewards=rewards,
        notes=[gaps(rewards)],
        columns=columns,
        keyed=keys is not None,
        as_recorded=as_recorded(rewards, cut.tokens),
    )


def _row(record: Mapping[str, Any]) -> _Row:
    for key in REQUIRED:
        if key not in record:
            raise lacks(key, record)
    return _Row(prompt_text(record["input"]), spoken(record["output"]), whole(record.get("step"), "step"), record)


def _keys(uids: Sequence[Any], steps: Sequence[int]) -> list[str] | None:
    """What says which prompt a row belongs to; None if nothing but its text does."""
    known = [uid for uid in uids if isinstance(uid, str)]
    if not known or len(known) < len(uids):
        return None
    matches = [_ROLLOUT_KEY.fullmatch(uid) for uid in known]
    if all(matches):
        return [match[1] for match in matches if match]
    return known if len(set(zip(known, steps, strict=True))) < len(known) else None
