"""verifiers' traces: `traces.jsonl` (an episode per line), or `results.jsonl` of the versions before 1.0."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from spanwise.rollouts import schema
from spanwise.rollouts.cells import by_column, lacks, listed, mapping
from spanwise.rollouts.files import parsed, records
from spanwise.rollouts.messages import Parts, completion_parts, prompt_text, said
from spanwise.rollouts.table import AsRecorded, Cut, Ragged, RolloutTable
from spanwise.rollouts.text import cut_text, load_tokenizer
from spanwise.rollouts.traces import NodeTokens, node_tokens, trace_paths, trace_rewards, trained_traces

#: What `results.jsonl` holds beside what its rewards are called, where it has no `metrics`.
_LEGACY_FIELDS = [
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
]


class _Row(NamedTuple):
    """One completion: what one branch of a trace samples that no earlier branch does.

    Rewards are None where the scoring did not run, because something failed before it. A stream has a number for each token, NaN at
    sampled ones of which none is known. `opens`: it is the trace's first branch.
    """

    key: str
    step: int
    keyed: bool
    prompt: str
    parts: Parts
    rewards: Mapping[str, Any]
    columns: Mapping[str, Any]
    ids: Sequence[int] = ()
    mask: Sequence[bool] = ()
    streams: Mapping[str, list[float]] = MappingProxyType({})
    opens: bool = True


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
    rollout_n = torch.tensor([row.opens for row in rows], dtype=torch.long).cumsum(dim=0) - 1
    traces = int(rollout_n[-1]) + 1 if rows else 0
    branched = int((rollout_n.bincount() > 1).sum())
    columns = by_column([row.columns for row in rows])
    table = RolloutTable.of(
        "verifiers",
        path,
        cut,
        prompts=[row.prompt for row in rows],
        steps=[row.step for row in rows],
        keys=[row.key for row in rows],
        columns={name: values for name, values in columns.items() if values.count(None) < len(values)},
        rewards=by_column([row.rewards for row in rows]),
        notes=[
            f"{branched} of {traces} traces have several branches; each is a row, and what it shares with an earlier one is its "
            f"prompt. The branches of a trace have one vote."
            if branched
            else "",
            _silent(files, episodes),
        ],
    )
    return replace(
        table,
        tokenizer=Path(tokenizer) if has_ids and tokenizer else None,
        token_values=_logprobs(rows, cut.trainable) if has_ids else {},
        keyed=all(row.keyed for row in rows),
        as_recorded=_advantages(rows, cut, has_ids=has_ids) or table.as_recorded,
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
    said = (first.get(key) for key in ("type", "error", "message")) if isinstance(first, Mapping) else (first,)
    return ": ".join(str(word) for word in said if word)


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
            tokens = [node_tokens(trace, i) for i in path.own]
            mask = [flag for part in tokens for flag in part.mask]
            start = mask.index(True) if True in mask else len(mask)
            yield _Row(
                key=head.key,
                step=head.step,
                keyed=head.keyed,
                prompt=prompt_text([mapping(nodes[i], "message") for i in path.before]),
                parts=[(said(mapping(nodes[i], "message")), bool(nodes[i].get("sampled"))) for i in path.own],
                rewards=trace_rewards(trace),
                columns={k: v for k, v in head.task.items() if not isinstance(v, (dict, list))},
                ids=[i for part in tokens for i in part.ids][start:],
                mask=mask[start:],
                streams={name: own for name in ("logprobs", "advantages") if (own := _stream(tokens, name)[start:])},
                opens=n == 0,
            )


def _stream(tokens: Sequence[NodeTokens], name: str) -> list[float]:
    """A number for each token of some nodes; none if no node has any."""
    if not any(name in part.streams for part in tokens):
        return []
    unknown = ([math.nan if flag else 0.0 for flag in part.mask] for part in tokens)
    return [value for part, nothing in zip(tokens, unknown, strict=True) for value in part.streams.get(name, nothing)]


def _legacy(record: Mapping[str, Any]) -> _Row:
    if "prompt" not in record:
        raise lacks("prompt", record)
    prompt, info = prompt_text(record["prompt"]), record.get("info")
    others = {k: v for k, v in record.items() if k not in _LEGACY_FIELDS and type(v) in (int, float)}
    rewards = {**(mapping(record, "metrics") or others), "reward": record.get("reward")}
    return _Row(
        key=f"{record.get('task', '')} {record.get('example_id', prompt)}",
        step=0,
        keyed=False,
        prompt=prompt,
        parts=completion_parts(record["completion"]),
        rewards=rewards if record.get("error") is None else dict.fromkeys(rewards),
        columns={**(info if isinstance(info, Mapping) else {}), "answer": record.get("answer")},
    )


def _logprobs(rows: Sequence[_Row], trainable: np.ndarray) -> dict[str, np.ndarray]:
    """The log-probabilities, where every sampled token has one."""
    if not all("logprobs" in row.streams for row in rows):
        return {}
    flat = np.array([value for row in rows for value in row.streams["logprobs"]], dtype=np.float32)
    return {} if np.isnan(flat[trainable]).any() else {schema.LOGP: np.where(trainable, flat, np.float32(np.nan))}


def _advantages(rows: Sequence[_Row], cut: Cut, *, has_ids: bool) -> AsRecorded | None:
    """The advantages of the traces; of each completion their mean, where the tokens are not the file's own.

    A node that was given none beside one that was is read as 0, as verifiers reads it.
    """
    if not any("advantages" in row.streams for row in rows):
        return None
    flat = np.full(len(cut.trainable), np.nan)
    for row, (first, last) in zip(rows, pairwise(cut.tokens.offsets.tolist()), strict=True):
        if "advantages" in row.streams:
            own = np.nan_to_num(np.array(row.streams["advantages"]))
            flat[first:last] = own if has_ids else own[np.array(row.mask)].mean()
    return AsRecorded(f"{'' if has_ids else 'the mean over tokens of '}the file's 'advantages'", flat)
