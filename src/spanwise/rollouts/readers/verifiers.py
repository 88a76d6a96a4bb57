"""verifiers' traces: `traces.jsonl` (an episode per line), or `results.jsonl` of the versions before 1.0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spanwise.rollouts.fields import FieldError, listed, mapping, whole
from spanwise.rollouts.lines import lacks, parsed, records
from spanwise.rollouts.messages import Parts, completion_parts, prompt_text, said
from spanwise.rollouts.table import AsRecorded, Cut, Ragged, RolloutTable, as_recorded, finite, gaps, recorded
from spanwise.rollouts.text import cut_text, load_tokenizer

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


class _Row(NamedTuple):
    """One completion: the last branch of one trace."""

    key: str
    step: int
    prompt: str
    parts: Parts
    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    advantages: list[float]  # of the sampled tokens; empty where nobody has said any
    rewards: Mapping[str, Any]  # None where the scoring did not run, because something failed before it
    columns: Mapping[str, Any]
    branches: int
    keyed: bool


def read_verifiers(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read verifiers' episodes, one completion per trace: its last branch, from the first message that was sampled on.

    Token ids are taken where every trace has them and a tokenizer is given to read them with; else the messages are. The
    group is the episode's own, or its task. The rewards are each reward's score, their weighted sum as `reward`, and the
    metrics; a reward whose scoring did not run has failed. Traces of agents that are not trained (a judge) are left out.

    Raises:
        DataError: a line that is not JSON, lacks a field or holds something else in it, ids and mask of different lengths.
    """
    episodes = list(parsed(files, lambda record: [_legacy(record)] if "completion" in record else list(_episode(record))))
    rows = [row for episode in episodes for row in episode]
    cut, has_ids = _cut(rows, tokenizer)
    names = dict.fromkeys(name for row in rows for name in row.rewards)
    rewards = recorded({name: [row.rewards.get(name) for row in rows] for name in names})
    branched = sum(row.branches > 1 for row in rows)
    return RolloutTable.of(
        "verifiers",
        path,
        cut,
        prompts=[row.prompt for row in rows],
        steps=[row.step for row in rows],
        keys=[row.key for row in rows],
        rewards=rewards,
        notes=[
            f"{branched} of {len(rows)} traces have several branches; the last one is shown." if branched else "",
            _silent(files, episodes),
            gaps(rewards),
        ],
        tokenizer=Path(tokenizer) if has_ids and tokenizer else None,
        columns=_columns([row.columns for row in rows]),
        token_values=_logprobs(rows, cut.trainable) if has_ids else {},
        keyed=all(row.keyed for row in rows),
        as_recorded=_advantages(rows, cut, has_ids=has_ids) or as_recorded(rewards, cut.tokens),
    )


def _silent(files: Sequence[Path], episodes: Sequence[Sequence[_Row]]) -> str:
    """The sentence on episodes without a completion, with what stopped most of them."""
    without = {n for n, rows in enumerate(episodes) if not any(text for row in rows for text, _ in row.parts)}
    if not without:
        return ""
    stopped = Counter(_error(record) for n, (_, _, record) in enumerate(records(files)) if n in without)
    reason, held = stopped.most_common(1)[0]
    told = f" {held} of them failed with {reason}." if reason else ""
    return f"{len(without)} of {len(episodes)} episodes hold no message that a trained model sampled.{told}"


def _error(record: Mapping[str, Any]) -> str:
    """The first error of an episode, in words; empty where it names none."""
    places = [record, *(trace for trace in record.get("traces") or () if isinstance(trace, Mapping))]
    errors = [one for place in places for one in [*(place.get("errors") or ()), place.get("error")] if one]
    if not errors:
        return ""
    first = errors[0]
    if not isinstance(first, Mapping):
        return str(first)
    return ": ".join(str(first[key]) for key in ("type", "error", "message") if first.get(key))


def _cut(rows: Sequence[_Row], tokenizer: str | Path | None) -> tuple[Cut, bool]:
    """The completions as tokens, and whether these are the file's own ids."""
    if tokenizer is not None and rows and all(row.ids for row in rows):
        trainable = np.array([flag for row in rows for flag in row.mask], dtype=np.bool_)
        return Cut(Ragged.of([row.ids for row in rows]), trainable, load_tokenizer(tokenizer)[1], ""), True
    cut = cut_text([row.parts for row in rows], tokenizer)
    if any(row.ids for row in rows):
        note = "Credit is shown per word, as no tokenizer reads the file's token ids; give its folder with --tokenizer."
        cut = cut._replace(note=note)
    return cut, False


def _episode(record: Mapping[str, Any]) -> Iterator[_Row]:
    """The traces of an episode; before episodes, a line was a trace."""
    if "traces" not in record and "nodes" not in record:
        raise lacks("traces", record)
    traces = listed(record, "traces", Mapping, "objects") if "traces" in record else [record]
    work = mapping(mapping(record, "run"), "work")
    for trace in traces:
        agent = mapping(trace, "agent")
        path, branches = _last_branch(listed(trace, "nodes", Mapping, "objects"))
        first = next((i for i, node in enumerate(path) if node.get("sampled")), None)
        if first is None or not agent.get("trainable", True):
            continue
        task = mapping(trace, "task") or mapping(record, "task")
        prompt = prompt_text([mapping(node, "message") for node in path[:first]])
        own = mapping(record, "group").get("id")
        ids, mask, streams = _tokens(path)
        yield _Row(
            key=f"{own or task.get('key') or task.get('hash') or prompt} {agent.get('name', '')}",
            step=whole(work.get("step"), "step"),
            prompt=prompt,
            parts=[(said(mapping(node, "message")), bool(node.get("sampled"))) for node in path[first:]],
            ids=ids,
            mask=mask,
            **streams,
            rewards=_trace_rewards(trace),
            columns={k: v for k, v in mapping(task, "data").items() if not isinstance(v, (dict, list))},
            branches=branches,
            keyed=bool(own),
        )


def _last_branch(nodes: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], int]:
    """The path to the last leaf, and how many leaves there are; an attempt to shorten the history is no leaf of its own."""
    parents = [None if node.get("parent") is None else whole(node["parent"], "parent") for node in nodes]
    inner = set(parents)
    leaves = [i for i in range(len(nodes)) if i not in inner]
    links = {i: listed(nodes[i], "semantic_parents", Mapping, "objects") for i in leaves}
    rewritten = [i for i in leaves if any(link.get("type") == "compaction_attempt" for link in links[i])]
    leaves = [i for i in leaves if i not in rewritten] or leaves
    at: int | None = leaves[-1] if leaves else None
    path: list[Mapping[str, Any]] = []
    while at is not None:
        path.append(nodes[at])
        parent = parents[at]
        at = parent if parent is None or 0 <= parent < at else None  # a parent comes before its child
    return path[::-1], len(leaves)


def _tokens(path: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool], dict[str, list[float]]]:
    """Ids and trainable flags from the first sampled token on, and what the sampled tokens have: log-probabilities, advantages."""
    ids: list[int] = []
    mask: list[bool] = []
    streams: dict[str, list[float]] = {"logprobs": [], "advantages": []}
    for node in path:
        node_ids, node_mask = listed(node, "token_ids", int, "ids"), listed(node, "mask", int, "flags")
        if len(node_ids) != len(node_mask):
            sizes = f"{len(node_ids)} tokens and {len(node_mask)} values of 'mask'"
            raise FieldError(f"has {sizes} in one node; there must be one for each token")
        ids += node_ids
        mask += [bool(flag) for flag in node_mask]
        for name, values in streams.items():
            values += listed(node, name, (int, float), "numbers")
    start = mask.index(True) if True in mask else len(mask)
    held = {name: values if len(values) == sum(mask) else [] for name, values in streams.items()}
    return ids[start:], mask[start:], held


def _trace_rewards(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Every reward and metric by name, and the weighted sum of the rewards as `reward`; None where scoring did not run."""
    found: dict[str, Any] = {}
    total, ran = 0.0, False
    for name, reward in mapping(trace, "rewards").items():
        score, weight = (reward.get("score"), reward.get("weight")) if isinstance(reward, Mapping) else (reward, None)
        found[name] = score
        value, factor = finite(score), 1.0 if weight is None else finite(weight)
        if factor is None:
            raise FieldError(f"has {weight!r} as 'weight' of the reward '{name}', which must be a number")
        if value is not None:
            total, ran = total + value * factor, True
    for name, value in mapping(trace, "metrics").items():
        found.setdefault(name, value)
    found.setdefault("reward", total if ran else None)
    return found


def _legacy(record: Mapping[str, Any]) -> _Row:
    if "prompt" not in record:
        raise lacks("prompt", record)
    prompt = prompt_text(record["prompt"])
    others = {k: v for k, v in record.items() if k not in _LEGACY_FIELDS and _is_number(v)}
    rewards = {**(mapping(record, "metrics") or others), "reward": record.get("reward")}
    failed = record.get("error") is not None
    info = record.get("info")
    return _Row(
        key=f"{record.get('task', '')} {record.get('example_id', prompt)}",
        step=0,
        prompt=prompt,
        parts=completion_parts(record["completion"]),
        ids=[],
        mask=[],
        logprobs=[],
        advantages=[],
        rewards={name: None if failed else value for name, value in rewards.items()},
        columns={**(info if isinstance(info, Mapping) else {}), "answer": record.get("answer")},
        branches=1,
        keyed=False,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def _logprobs(rows: Sequence[_Row], trainable: np.ndarray) -> dict[str, np.ndarray]:
    if not all(row.logprobs for row in rows):
        return {}
    flat = np.full(len(trainable), np.nan, dtype=np.float32)
    flat[trainable] = [value for row in rows for value in row.logprobs]
    return {"logp": flat}


def _advantages(rows: Sequence[_Row], cut: Cut, *, has_ids: bool) -> AsRecorded | None:
    """The advantages of the traces; of each completion their mean, where the tokens are not the file's own."""
    if not any(row.advantages for row in rows):
        return None
    flat = np.full(len(cut.trainable), np.nan)
    for row, (first, last) in zip(rows, pairwise(cut.tokens.offsets.tolist()), strict=True):
        here = flat[first:last]
        if not has_ids:
            here[:] = np.mean(row.advantages) if row.advantages else np.nan
        elif row.advantages:
            here[:] = 0.0
            here[cut.trainable[first:last]] = row.advantages
    return AsRecorded(f"{'' if has_ids else 'the mean over tokens of '}the file's 'advantages'", flat)
