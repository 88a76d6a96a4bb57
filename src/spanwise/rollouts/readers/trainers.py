"""Read the rollout files of other trainers: verl's dumps, which hold no token ids, and verifiers' traces.

The `results.jsonl` of verifiers before 1.0 is read, too.
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
from spanwise.rollouts.files import parse_records
from spanwise.rollouts.table import AsRecorded, Ragged, RolloutTable, TokenizedTexts, load_tokenizer, tokenize
from spanwise.rollouts.traces import node_tokens, trace_rewards, trained_traces

VERL_REQUIRED = ("input", "output")
_ROLLOUT_KEY = re.compile(r"(.+)_\d+_\d+", re.DOTALL)
#: Fields of a verl dump that are not rewards.
_NO_REWARDS = ("gts", "answer", "uid", "request_id")


def read_verl(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read verl's dump: `input`, `output`, `gts`, `score`, `step` and the fields that the reward function added.

    `gts` is the gold answer, also under the name `answer`; `score` and every other numeric field are taken for rewards. `uid`
    says which prompt a row belongs to where it has the shape of V1's rollout keys (sample, rollout, output), or where rows of
    one step share it; else the text does.
    """
    rows: list[dict[str, Any]] = []
    tokens = tokenize(_outputs(files, rows), tokenizer)
    columns = cells.by_column(rows)
    prompts, steps = columns.pop("input", []), columns.pop("step", [])
    if "gts" in columns:
        columns.setdefault("answer", columns["gts"])
    uids = columns.get("uid", [])
    keys = uids if all(isinstance(uid, str) for uid in uids) else []
    rollout_keys = [rollout_key for rollout_key in map(_ROLLOUT_KEY.fullmatch, keys) if rollout_key]
    if len(rollout_keys) == len(keys):
        keys = [rollout_key[1] for rollout_key in rollout_keys]
    elif len(set(zip(keys, steps, strict=True))) == len(keys):  # no two rows share a uid
        keys = []
    return RolloutTable.of(
        "verl",
        path,
        tokens,
        prompts=prompts,
        steps=steps,
        keys=keys or None,
        columns=columns,
        rewards={name: values for name, values in columns.items() if name not in _NO_REWARDS},
    )


def _outputs(files: Sequence[Path], rows: list[dict[str, Any]]) -> Iterator[cells.Parts]:
    """Yield the output of every record and append the other fields to `rows`."""
    prompts: dict[str, str] = {}
    for row in parse_records(files, _row):
        row["input"] = prompts.setdefault(row["input"], row["input"])
        output = row.pop("output")
        rows.append(row)
        yield [(output, True)]


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a verl record with prompt and output as text and the step as a number."""
    for key in VERL_REQUIRED:
        if key not in record:
            raise cells.missing_field(key, record)
    texts = {
        "input": cells.prompt_text(record["input"]),
        "output": cells.content_text(record["output"]),
        "step": cells.whole_number(record.get("step"), "step"),
    }
    return {**record, **texts}


#: Numeric fields of `results.jsonl` that are not rewards, for records without `metrics`.
_LEGACY_FIELDS = ("answer", "reward", "example_id")


def read_verifiers(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read verifiers' episodes, one completion per branch of a trace that trains.

    A branch begins at the first message that was sampled and that no earlier branch of its trace holds, so that every sampled token
    is in one completion; what comes before is its prompt. The branches of a trace are one rollout, with its rewards.
    Token ids are taken where every trace has them and a tokenizer is given to read them with; else the messages are. The
    group is the episode's own, or its task. The rewards are each reward's score, their weighted sum as `reward`, and the
    metrics; a reward whose scoring did not run has failed. Traces of agents that are not trained (a judge) are left out.
    """
    episodes = list(parse_records(files, _episode))
    rows = [row for episode, _ in episodes for row in episode]
    fields = defaultdict(list, cells.by_column(rows))
    has_ids = tokenizer is not None and bool(rows) and all(fields["ids"])
    if tokenizer is not None and has_ids:
        sampled_flags = np.array([flag for mask in fields["mask"] for flag in mask], dtype=np.bool_)
        tokens = TokenizedTexts(Ragged.of(fields["ids"]), sampled_flags, load_tokenizer(tokenizer)[1], "")
    else:
        tokens = tokenize(fields["parts"], tokenizer)
    if any(fields["ids"]) and not has_ids:
        note = "Credit is shown per word, as no tokenizer reads the file's token ids; give its folder with --tokenizer."
        tokens = tokens._replace(note=note)
    sampled = tokens.trainable
    logprobs = np.array([value for streams in fields["streams"] for value in streams.get("logprobs", ())], dtype=np.float32)
    has_logprobs = has_ids and len(logprobs) == len(sampled) and not np.isnan(logprobs[sampled]).any()
    rollout_n = torch.tensor(fields["opens"], dtype=torch.long).cumsum(dim=0) - 1
    trace_count, branched = sum(fields["opens"]), int((rollout_n.bincount() > 1).sum())
    columns = cells.by_column(fields["columns"])
    branch_note = (
        f"{branched} of {trace_count} traces have several branches; each is a row, whose prompt is the part that an earlier one "
        "also has. All branches of a trace together have one vote."
    )
    table = RolloutTable.of(
        "verifiers",
        path,
        tokens,
        prompts=fields["prompt"],
        steps=fields["step"],
        keys=fields["key"],
        columns={name: values for name, values in columns.items() if values.count(None) < len(values)},
        rewards=cells.by_column(fields["rewards"]),
        notes=[branch_note if branched else "", _silent([errors for _, errors in episodes])],
    )
    return replace(
        table,
        tokenizer=Path(tokenizer) if has_ids and tokenizer else None,
        token_values={schema.LOGP: np.where(sampled, logprobs, np.float32(np.nan))} if has_logprobs else {},
        keyed=all(fields["keyed"]),
        as_recorded=_advantages(fields, tokens, has_ids=has_ids) or table.as_recorded,
        rollout_n=rollout_n if branched else None,
    )


def _silent(errors: Sequence[str | None]) -> str:
    """Return the note on episodes without a completion, with the most frequent error."""
    reasons = Counter(reason for reason in errors if reason is not None)
    if not reasons:
        return ""
    reason, count = reasons.most_common(1)[0]
    cause = f" {count} of them failed with {reason}." if reason else ""
    return f"{reasons.total()} of {len(errors)} episodes hold no message that a trained model sampled.{cause}"


def _error(record: Mapping[str, Any]) -> str:
    """Return the text of an episode's first error; empty if there is none."""
    records = [record, *(trace for trace in record.get("traces") or () if isinstance(trace, Mapping))]
    first = next((e for place in records for e in (*(place.get("errors") or ()), place.get("error")) if e), "")
    words = [first.get(key) for key in ("type", "error", "message")] if isinstance(first, Mapping) else [first]
    return ": ".join(str(word) for word in words if word)


def _episode(record: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """Return the rows of an episode and, if no model sampled anything, the error that stopped the episode."""
    rows = [_legacy(record)] if "completion" in record else list(_branches(record))
    return rows, None if any(text for row in rows for text, _ in row["parts"]) else _error(record)


def _branches(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one row per branch of an episode's traces; the completion starts at the branch's first own sampled token.

    Rewards are None where the scoring did not run; a stream has a number for each token; the first branch of a trace opens it.
    """
    for trace in trained_traces(record):
        for n, (earlier_nodes, nodes) in enumerate(trace.paths):
            tokens = [node_tokens(trace, i) for i in nodes]
            sampled_flags = [flag for node in tokens for flag in node.mask]
            start = sampled_flags.index(True) if True in sampled_flags else len(sampled_flags)
            yield {
                "key": trace.key,
                "step": trace.step,
                "keyed": trace.keyed,
                "prompt": trace.prompt(earlier_nodes),
                "parts": [
                    (cells.message_text(cells.object_field(trace.nodes[i], "message")), bool(trace.nodes[i].get("sampled")))
                    for i in nodes
                ],
                "rewards": trace_rewards(trace),
                "columns": {key: v for key, v in trace.task.items() if not isinstance(v, (dict, list))},
                "ids": [i for node in tokens for i in node.ids][start:],
                "mask": sampled_flags[start:],
                "streams": {
                    name: [value for node in tokens for value in node.stream(name)][start:]
                    for name in ("logprobs", "advantages")
                    if any(name in node.streams for node in tokens)
                },
                "opens": n == 0,
            }


def _legacy(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a rollout that verifiers before 1.0 wrote."""
    if "prompt" not in record:
        raise cells.missing_field("prompt", record)
    prompt, info = cells.prompt_text(record["prompt"]), record.get("info")
    other_fields = {key: value for key, value in record.items() if key not in _LEGACY_FIELDS and type(value) in (int, float)}
    rewards = {**(cells.object_field(record, "metrics") or other_fields), "reward": record.get("reward")}
    return {
        "key": f"{record.get('task', '')} {record.get('example_id', prompt)}", "step": 0, "keyed": False, "prompt": prompt,
        "parts": cells.completion_parts(record["completion"]),
        "rewards": rewards if record.get("error") is None else dict.fromkeys(rewards),
        "columns": {**(info if isinstance(info, Mapping) else {}), "answer": record.get("answer")},
        "ids": [], "mask": [], "streams": {}, "opens": True,
    }  # fmt: skip


def _advantages(own: Mapping[str, Sequence[Any]], tokens: TokenizedTexts, *, has_ids: bool) -> AsRecorded | None:
    """Return the advantages of the traces, or their mean per completion if the text was cut into other tokens.

    A node that was given none beside one that was is read as 0, as verifiers reads it.
    """
    if not any("advantages" in streams for streams in own["streams"]):
        return None
    token_values = np.full(len(tokens.trainable), np.nan)
    for streams, mask, (first, last) in zip(own["streams"], own["mask"], pairwise(tokens.ids.offsets.tolist()), strict=True):
        if "advantages" in streams:
            values = np.nan_to_num(np.array(streams["advantages"]))
            token_values[first:last] = values if has_ids else values[np.array(mask)].mean()
    return AsRecorded(f"{'' if has_ids else 'the mean over tokens of '}the file's 'advantages'", token_values, by_token=True)
