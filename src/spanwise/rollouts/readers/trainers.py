"""What other trainers write: verl's dump, texts without ids; verifiers' traces, an episode per line.

Of verifiers also `results.jsonl` of the versions before 1.0.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spanwise.rollouts import cells, schema
from spanwise.rollouts.files import parsed
from spanwise.rollouts.table import AsRecorded, Cut, Ragged, RolloutTable, cut_text, load_tokenizer
from spanwise.rollouts.traces import node_tokens, trace_rewards, trained_traces

VERL_REQUIRED = ("input", "output")
_ROLLOUT_KEY = re.compile(r"(.+)_\d+_\d+", re.DOTALL)
#: Fields of verl's that are no rewards.
_NO_REWARDS = ("gts", "answer", "uid", "request_id")


def read_verl(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read verl's dump: `input`, `output`, `gts`, `score`, `step` and whatever the reward function added.

    `gts` is the gold answer, also under the name `answer`; `score` and every other numeric field are taken for rewards. `uid`
    says which prompt a row belongs to where it has the shape of V1's rollout keys (sample, rollout, output), or where rows of
    one step share it; else the text does.
    """
    rows: list[dict[str, Any]] = []
    cut = cut_text(_outputs(files, rows), tokenizer)
    columns = cells.by_column(rows)
    prompts, steps = columns.pop("input", []), columns.pop("step", [])
    if "gts" in columns:
        columns.setdefault("answer", columns["gts"])
    uids = columns.get("uid", [])
    keys = uids if all(isinstance(uid, str) for uid in uids) else []
    matches = [match for match in map(_ROLLOUT_KEY.fullmatch, keys) if match]
    if len(matches) == len(keys):
        keys = [match[1] for match in matches]
    elif len(set(zip(keys, steps, strict=True))) == len(keys):  # no two rows share one
        keys = []
    return RolloutTable.of(
        "verl",
        path,
        cut,
        prompts=prompts,
        steps=steps,
        keys=keys or None,
        columns=columns,
        rewards={name: values for name, values in columns.items() if name not in _NO_REWARDS},
    )


def _outputs(files: Sequence[Path], rows: list[dict[str, Any]]) -> Iterator[cells.Parts]:
    """What was said in every record, whose other fields go to `rows`; each prompt is kept once."""
    prompts: dict[str, str] = {}
    for row in parsed(files, _row):
        row["input"] = prompts.setdefault(row["input"], row["input"])
        output = row.pop("output")
        rows.append(row)
        yield [(output, True)]


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with its prompt and what was said as text, and its step as a number."""
    for key in VERL_REQUIRED:
        if key not in record:
            raise cells.lacks(key, record)
    read = {
        "input": cells.prompt_text(record["input"]),
        "output": cells.spoken(record["output"]),
        "step": cells.whole(record.get("step"), "step"),
    }
    return {**record, **read}


#: Numbers of `results.jsonl` that are no rewards by that name, where it has no `metrics`.
_LEGACY_FIELDS = ("answer", "reward", "example_id")


def read_verifiers(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read verifiers' episodes, one completion per branch of a trace that trains.

    A branch begins at the first message that was sampled and that no earlier branch of its trace holds, so that every sampled token
    is in one completion; what comes before is its prompt. The branches of a trace are one rollout, with its rewards.
    Token ids are taken where every trace has them and a tokenizer is given to read them with; else the messages are. The
    group is the episode's own, or its task. The rewards are each reward's score, their weighted sum as `reward`, and the
    metrics; a reward whose scoring did not run has failed. Traces of agents that are not trained (a judge) are left out.
    """
    episodes = list(parsed(files, _episode))
    rows = [row for episode, _ in episodes for row in episode]
    own = defaultdict(list, cells.by_column(rows))
    has_ids = tokenizer is not None and bool(rows) and all(own["ids"])
    if tokenizer is not None and has_ids:
        flags = np.array([flag for mask in own["mask"] for flag in mask], dtype=np.bool_)
        cut = Cut(Ragged.of(own["ids"]), flags, load_tokenizer(tokenizer)[1], "")
    else:
        cut = cut_text(own["parts"], tokenizer)
    if any(own["ids"]) and not has_ids:
        note = "Credit is shown per word, as no tokenizer reads the file's token ids; give its folder with --tokenizer."
        cut = cut._replace(note=note)
    sampled = cut.trainable
    logprobs = np.array([value for streams in own["streams"] for value in streams.get("logprobs", ())], dtype=np.float32)
    has_logprobs = has_ids and len(logprobs) == len(sampled) and not np.isnan(logprobs[sampled]).any()
    rollout_n = torch.tensor(own["opens"], dtype=torch.long).cumsum(dim=0) - 1
    traces, branched = sum(own["opens"]), int((rollout_n.bincount() > 1).sum())
    columns = cells.by_column(own["columns"])
    several = (
        f"{branched} of {traces} traces have several branches; each is a row, whose prompt is the part that an earlier one "
        "also has. All branches of a trace together have one vote."
    )
    table = RolloutTable.of(
        "verifiers",
        path,
        cut,
        prompts=own["prompt"],
        steps=own["step"],
        keys=own["key"],
        columns={name: values for name, values in columns.items() if values.count(None) < len(values)},
        rewards=cells.by_column(own["rewards"]),
        notes=[several if branched else "", _silent([stopped for _, stopped in episodes])],
    )
    return replace(
        table,
        tokenizer=Path(tokenizer) if has_ids and tokenizer else None,
        token_values={schema.LOGP: np.where(sampled, logprobs, np.float32(np.nan))} if has_logprobs else {},
        keyed=all(own["keyed"]),
        as_recorded=_advantages(own, cut, has_ids=has_ids) or table.as_recorded,
        rollout_n=rollout_n if branched else None,
    )


def _silent(stopped: Sequence[str | None]) -> str:
    """The sentence on episodes without a completion, with what stopped most of them."""
    reasons = Counter(reason for reason in stopped if reason is not None)
    if not reasons:
        return ""
    reason, count = reasons.most_common(1)[0]
    why = f" {count} of them failed with {reason}." if reason else ""
    return f"{reasons.total()} of {len(stopped)} episodes hold no message that a trained model sampled.{why}"


def _error(record: Mapping[str, Any]) -> str:
    """The first error of an episode, in words; empty where it names none."""
    places = [record, *(trace for trace in record.get("traces") or () if isinstance(trace, Mapping))]
    first = next((one for place in places for one in (*(place.get("errors") or ()), place.get("error")) if one), "")
    words = [first.get(key) for key in ("type", "error", "message")] if isinstance(first, Mapping) else [first]
    return ": ".join(str(word) for word in words if word)


def _episode(record: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """The rows of an episode, and what stopped one in which no model said anything; None: one did."""
    rows = [_legacy(record)] if "completion" in record else list(_branches(record))
    return rows, None if any(text for row in rows for text, _ in row["parts"]) else _error(record)


def _branches(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each branch of its traces: one completion, what it samples that no earlier branch of the trace does.

    Rewards are None where the scoring did not run; a stream has a number for each token; the first branch of a trace opens it.
    """
    for trace in trained_traces(record):
        for n, (before, own) in enumerate(trace.paths):
            tokens = [node_tokens(trace, i) for i in own]
            mask = [flag for part in tokens for flag in part.mask]
            start = mask.index(True) if True in mask else len(mask)
            yield {
                "key": trace.key,
                "step": trace.step,
                "keyed": trace.keyed,
                "prompt": trace.prompt(before),
                "parts": [
                    (cells.said(cells.mapping(trace.nodes[i], "message")), bool(trace.nodes[i].get("sampled"))) for i in own
                ],
                "rewards": trace_rewards(trace),
                "columns": {k: v for k, v in trace.task.items() if not isinstance(v, (dict, list))},
                "ids": [i for part in tokens for i in part.ids][start:],
                "mask": mask[start:],
                "streams": {
                    name: [value for part in tokens for value in part.stream(name)][start:]
                    for name in ("logprobs", "advantages")
                    if any(name in part.streams for part in tokens)
                },
                "opens": n == 0,
            }


def _legacy(record: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a rollout of the versions before 1.0."""
    if "prompt" not in record:
        raise cells.lacks("prompt", record)
    prompt, info = cells.prompt_text(record["prompt"]), record.get("info")
    others = {k: v for k, v in record.items() if k not in _LEGACY_FIELDS and type(v) in (int, float)}
    rewards = {**(cells.mapping(record, "metrics") or others), "reward": record.get("reward")}
    return {
        "key": f"{record.get('task', '')} {record.get('example_id', prompt)}", "step": 0, "keyed": False, "prompt": prompt,
        "parts": cells.completion_parts(record["completion"]),
        "rewards": rewards if record.get("error") is None else dict.fromkeys(rewards),
        "columns": {**(info if isinstance(info, Mapping) else {}), "answer": record.get("answer")},
        "ids": [], "mask": [], "streams": {}, "opens": True,
    }  # fmt: skip


def _advantages(own: Mapping[str, Sequence[Any]], cut: Cut, *, has_ids: bool) -> AsRecorded | None:
    """The advantages of the traces; of each completion their mean, where the tokens are not the file's own.

    A node that was given none beside one that was is read as 0, as verifiers reads it.
    """
    if not any("advantages" in streams for streams in own["streams"]):
        return None
    flat = np.full(len(cut.trainable), np.nan)
    for streams, mask, (first, last) in zip(own["streams"], own["mask"], pairwise(cut.tokens.offsets.tolist()), strict=True):
        if "advantages" in streams:
            values = np.nan_to_num(np.array(streams["advantages"]))
            flat[first:last] = values if has_ids else values[np.array(mask)].mean()
    return AsRecorded(f"{'' if has_ids else 'the mean over tokens of '}the file's 'advantages'", flat, by_token=True)
