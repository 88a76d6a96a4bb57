"""verifiers' traces: `traces.jsonl` (an episode per line), or `results.jsonl` of the versions before 1.0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from spanwise.engines.files.lines import lacks, records
from spanwise.engines.files.table import Ragged, RolloutTable, check_length, clean, groups, numbers, prompt_text, spoken
from spanwise.engines.files.text import Parts, cut_text, load_tokenizer
from spanwise.engines.files.trl import completion_parts
from spanwise.score import Reward
from spanwise.types import Status

_LEGACY_FIELDS = (
    "prompt",
    "completion",
    "answer",
    "reward",
    "example_id",
    "task",
    "error",
    "error_chain",
    "metrics",
    "info",
)
_NOT_RAN = object()  # scoring did not run, because something failed before it


class _Row(NamedTuple):
    """One completion: the last branch of one trace."""

    key: str
    step: int
    prompt: str
    parts: Parts
    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    rewards: Mapping[str, Any]
    failed: bool
    columns: Mapping[str, Any]
    branches: int


def read_verifiers(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read verifiers' episodes, one completion per trace: its last branch, from the first message that was sampled on.

    Token ids are taken where every trace has them and a tokenizer is given to read them with; else the messages are. The
    group is the episode's own, or its task. The rewards are each reward's score, their weighted sum as `reward`, and the
    metrics; a reward whose scoring did not run has failed. Traces of agents that are not trained (a judge) are left out.

    Raises:
        DataError: a line that is not JSON or lacks a field, ids and mask of different lengths.
    """
    rows: list[_Row] = []
    without = 0
    for file, number, record in records(files):
        found = list(_episode(file, number, record) if "completion" not in record else [_legacy(file, number, record)])
        without += not found
        rows += found
    notes = []
    if tokenizer is not None and rows and all(row.ids for row in rows):
        vocabulary = load_tokenizer(tokenizer)[1]
        tokens, has_ids = Ragged.of([row.ids for row in rows]), True
        trainable = np.array([flag for row in rows for flag in row.mask], dtype=np.bool_)
    else:
        tokens, trainable, vocabulary, note = cut_text([row.parts for row in rows], tokenizer)
        has_ids = False
        if any(row.ids for row in rows):
            note = "Credit is shown per word, as no tokenizer reads the file's token ids; give its folder with --tokenizer."
        notes.append(note)
    branched = sum(row.branches > 1 for row in rows)
    if branched:
        notes.append(f"{branched} of {len(rows)} traces have several branches; the last one is shown.")
    if without:
        notes.append(f"{without} episodes hold no message that a trained model sampled.")
    return RolloutTable(
        source="verifiers",
        path=path,
        note=" ".join(notes),
        prompts=[row.prompt for row in rows],
        group_n=groups([row.key for row in rows], [row.step for row in rows]),
        step_n=torch.tensor([row.step for row in rows], dtype=torch.long),
        tokens=tokens,
        trainable=trainable,
        vocabulary=vocabulary,
        has_ids=has_ids,
        columns=_columns([row.columns for row in rows]),
        rewards=_rewards(rows),
        token_values=_logprobs(rows, trainable) if has_ids else {},
    )


def _episode(file: Path, number: int, record: Mapping[str, Any]) -> Iterator[_Row]:
    """The traces of an episode; before episodes, a line was a trace."""
    traces = record.get("traces", [record] if "nodes" in record else None)
    if traces is None:
        raise lacks(file, number, "traces", dict(record))
    work = (record.get("run") or {}).get("work") or {}
    for trace in traces:
        agent = trace.get("agent") or {}
        path, branches = _last_branch(trace.get("nodes") or [])
        first = next((i for i, node in enumerate(path) if node.get("sampled")), None)
        if first is None or not agent.get("trainable", True):
            continue
        task = trace.get("task") or record.get("task") or {}
        data = task.get("data") or {}
        prompt = prompt_text([node.get("message") or {} for node in path[:first]])
        group = (record.get("group") or {}).get("id") or task.get("key") or task.get("hash") or prompt
        ids, mask, logprobs = _tokens(path, file, number)
        yield _Row(
            key=f"{group} {agent.get('name', '')}",
            step=int(work.get("step") or 0),
            prompt=prompt,
            parts=[(_said(node.get("message") or {}), bool(node.get("sampled"))) for node in path[first:]],
            ids=ids,
            mask=mask,
            logprobs=logprobs,
            rewards=_trace_rewards(trace),
            failed=bool(trace.get("errors")),
            columns={k: v for k, v in data.items() if not isinstance(v, (dict, list))},
            branches=branches,
        )


def _last_branch(nodes: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], int]:
    """The path to the last leaf, and how many leaves there are; an attempt to shorten the history is no leaf of its own."""
    parents = {node.get("parent") for node in nodes}
    leaves = [i for i in range(len(nodes)) if i not in parents]
    links = {i: nodes[i].get("semantic_parents") or [] for i in leaves}
    rewritten = [i for i in leaves if any(link.get("type") == "compaction_attempt" for link in links[i])]
    leaves = [i for i in leaves if i not in rewritten] or leaves
    at: int | None = leaves[-1] if leaves else None
    path: list[Mapping[str, Any]] = []
    while at is not None:
        path.append(nodes[at])
        parent = nodes[at].get("parent")
        at = parent if parent is None or parent < at else None  # a parent comes before its child
    return path[::-1], len(leaves)


def _tokens(path: Sequence[Mapping[str, Any]], file: Path, number: int) -> tuple[list[int], list[bool], list[float]]:
    """Ids, trainable flags and log-probabilities (of the trainable ones) from the first sampled token on."""
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    for node in path:
        node_ids, node_mask = node.get("token_ids") or [], node.get("mask") or []
        check_length("mask", len(node_mask), len(node_ids), file=file, row=number - 1)
        ids += node_ids
        mask += [bool(flag) for flag in node_mask]
        logprobs += node.get("logprobs") or []
    start = mask.index(True) if True in mask else len(mask)
    return ids[start:], mask[start:], logprobs if len(logprobs) == sum(mask) else []


def _said(message: Mapping[str, Any]) -> str:
    """What a message says: reasoning, content, calls of tools."""
    calls = [f"{call.get('name', '')}({call.get('arguments', '')})" for call in message.get("tool_calls") or []]
    parts = [message.get("reasoning_content") or "", spoken(message), *calls]
    return clean("\n".join(part for part in parts if part))


def _trace_rewards(trace: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    total, ran = 0.0, False
    for name, reward in (trace.get("rewards") or {}).items():
        if reward is None:
            found[name] = _NOT_RAN
            continue
        score, weight = (reward["score"], reward.get("weight", 1.0)) if isinstance(reward, Mapping) else (reward, 1.0)
        found[name] = score
        total, ran = total + score * weight, True
    for name, value in (trace.get("metrics") or {}).items():
        found.setdefault(name, _NOT_RAN if value is None else value)
    found.setdefault("reward", total if ran else _NOT_RAN)
    return found


def _legacy(file: Path, number: int, record: Mapping[str, Any]) -> _Row:
    if "prompt" not in record:
        raise lacks(file, number, "prompt", dict(record))
    prompt = prompt_text(record["prompt"])
    metrics = record.get("metrics") or {k: v for k, v in record.items() if k not in _LEGACY_FIELDS and _is_number(v)}
    failed = record.get("error") is not None
    rewards = {**metrics, "reward": record.get("reward")}
    info = record.get("info") if isinstance(record.get("info"), Mapping) else {}
    return _Row(
        key=f"{record.get('task', '')} {record.get('example_id', prompt)}",
        step=0,
        prompt=prompt,
        parts=completion_parts(record["completion"]),
        ids=[],
        mask=[],
        logprobs=[],
        rewards={name: _NOT_RAN if failed or value is None else value for name, value in rewards.items()},
        failed=failed,
        columns={**(info or {}), "answer": record.get("answer")},
        branches=1,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def _rewards(rows: Sequence[_Row]) -> dict[str, Reward]:
    rewards = {}
    for name in dict.fromkeys(name for row in rows for name in row.rewards):
        found = [row.rewards.get(name, _NOT_RAN if row.failed else None) for row in rows]
        values = [None if value is _NOT_RAN else value for value in found]
        if numbers(values) is not None:
            status = [Status.ERROR if value is _NOT_RAN else Status.ABSENT for value in found]
            rewards[name] = Reward.of(values, status=status)
    return rewards


def _logprobs(rows: Sequence[_Row], trainable: np.ndarray) -> dict[str, np.ndarray]:
    if not all(row.logprobs for row in rows):
        return {}
    flat = np.full(len(trainable), np.nan, dtype=np.float32)
    flat[trainable] = [value for row in rows for value in row.logprobs]
    return {"logp": flat}
