"""verifiers' traces: `traces.jsonl` (an episode per line), or `results.jsonl` of the versions before 1.0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from spanwise.rollouts.fields import listed, mapping
from spanwise.rollouts.lines import lacks, parsed, records
from spanwise.rollouts.messages import Parts, completion_parts, prompt_text, said
from spanwise.rollouts.table import AsRecorded, Cut, Ragged, RolloutTable, as_recorded, gaps, recorded
from spanwise.rollouts.text import cut_text, load_tokenizer
from spanwise.rollouts.traces import TracePath, node_tokens, trace_paths, trace_rewards, trained_traces

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
    """One completion: what one branch of a trace samples that no earlier branch does."""

    key: str
    step: int
    prompt: str
    parts: Parts
    ids: list[int]
    mask: list[bool]
    logprobs: list[float]  # of each token; NaN where a sampled one has none, empty where none has
    advantages: list[float]
    rewards: Mapping[str, Any]  # None where the scoring did not run, because something failed before it
    columns: Mapping[str, Any]
    opens: bool  # the trace's first branch
    keyed: bool


def read_verifiers(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read verifiers' episodes, one completion per branch of a trace that trains.

    A branch begins at the first message that was sampled and that no earlier branch of its trace holds, so that every sampled token
    is in one completion; what comes before is its prompt. The branches of a trace are one rollout, with its rewards.
    Token ids are taken where every trace has them and a tokenizer is given to read them with; else the messages are. The
    group is the episode's own, or its task. The rewards are each reward's score, their weighted sum as `reward`, and the
    metrics; a reward whose scoring did not run has failed. Traces of agents that are not trained (a judge) are left out.
    """
    episodes = list(parsed(files, lambda record: [_legacy(record)] if "completion" in record else list(_episode(record))))
    rows = [row for episode in episodes for row in episode]
    cut, has_ids = _cut(rows, tokenizer)
    names = dict.fromkeys(name for row in rows for name in row.rewards)
    rewards = recorded({name: [row.rewards.get(name) for row in rows] for name in names})
    rollout_n = torch.tensor([row.opens for row in rows], dtype=torch.long).cumsum(dim=0) - 1
    traces = int(rollout_n[-1]) + 1 if rows else 0
    branched = int((rollout_n.bincount() > 1).sum())
    return RolloutTable.of(
        "verifiers",
        path,
        cut,
        prompts=[row.prompt for row in rows],
        steps=[row.step for row in rows],
        keys=[row.key for row in rows],
        rewards=rewards,
        notes=[
            f"{branched} of {traces} traces have several branches; each is a row, and what it shares with an earlier one is its "
            f"prompt. The branches of a trace have one vote."
            if branched
            else "",
            _silent(files, episodes),
            gaps(rewards),
        ],
        tokenizer=Path(tokenizer) if has_ids and tokenizer else None,
        columns=_columns([row.columns for row in rows]),
        token_values=_logprobs(rows, cut.trainable) if has_ids else {},
        keyed=all(row.keyed for row in rows),
        as_recorded=_advantages(rows, cut, has_ids=has_ids) or as_recorded(rewards, cut.tokens),
        rollout_n=rollout_n if branched else None,
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
    for _, trace, head in trained_traces(record):
        nodes = listed(trace, "nodes", Mapping, "objects")
        for n, path in enumerate(trace_paths(nodes)):
            ids, mask, streams = _tokens(trace, path)
            yield _Row(
                key=head.key,
                step=head.step,
                prompt=prompt_text([mapping(nodes[i], "message") for i in path.before]),
                parts=[(said(mapping(nodes[i], "message")), bool(nodes[i].get("sampled"))) for i in path.own],
                ids=ids,
                mask=mask,
                **streams,
                rewards=trace_rewards(trace),
                columns={k: v for k, v in head.task.items() if not isinstance(v, (dict, list))},
                opens=n == 0,
                keyed=head.keyed,
            )


def _tokens(trace: Mapping[str, Any], path: TracePath) -> tuple[list[int], list[bool], dict[str, list[float]]]:
    """Ids and trainable flags of a branch from its first sampled token on, and two of its streams."""
    parts = [node_tokens(trace, i) for i in path.own]
    mask = [flag for part in parts for flag in part.mask]
    start = mask.index(True) if True in mask else len(mask)
    streams: dict[str, list[float]] = {}
    for name in ("logprobs", "advantages"):
        known = any(name in part.streams for part in parts)
        unknown = ([float("nan") if flag else 0.0 for flag in part.mask] for part in parts)
        held = [part.streams.get(name, nothing) for part, nothing in zip(parts, unknown, strict=True)]
        streams[name] = [value for values in held for value in values][start:] if known else []
    return [i for part in parts for i in part.ids][start:], mask[start:], streams


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
        opens=True,
        keyed=False,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def _logprobs(rows: Sequence[_Row], trainable: np.ndarray) -> dict[str, np.ndarray]:
    """The log-probabilities, where every sampled token has one."""
    if not all(row.logprobs for row in rows):
        return {}
    flat = np.array([value for row in rows for value in row.logprobs], dtype=np.float32)
    return {} if np.isnan(flat[trainable]).any() else {"logp": np.where(trainable, flat, np.float32(np.nan))}


def _advantages(rows: Sequence[_Row], cut: Cut, *, has_ids: bool) -> AsRecorded | None:
    """The advantages of the traces; of each completion their mean, where the tokens are not the file's own.

    A node that was given none beside one that was is read as 0, as verifiers reads it.
    """
    if not any(row.advantages for row in rows):
        return None
    flat = np.full(len(cut.trainable), np.nan)
    for row, (first, last) in zip(rows, pairwise(cut.tokens.offsets.tolist()), strict=True):
        if row.advantages:
            own = np.nan_to_num(np.array(row.advantages))
            flat[first:last] = own if has_ids else own[np.array(row.mask)].mean()
    return AsRecorded(f"{'' if has_ids else 'the mean over tokens of '}the file's 'advantages'", flat)
