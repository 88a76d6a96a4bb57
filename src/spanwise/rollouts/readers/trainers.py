"""Read the rollout files of verl (its dumps hold no token ids) and of verifiers: its traces, and `results.jsonl` before 1.0."""

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
#: Matches the rollout keys of verl's V1 trainer, which begin with the id of the prompt.
_ROLLOUT_KEY = re.compile(r"(.+)_\d+_\d+", re.DOTALL)
#: The fields of a verl dump that never hold a reward.
_NO_REWARDS = ("gts", "answer", "uid", "request_id")


def read_verl(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read verl's dump; completions are grouped by `uid`, or by its prompt id in verl V1, or else by the prompt's text."""
    rows: list[dict[str, Any]] = []
    tokens = tokenize(_read_outputs(files, rows), tokenizer)
    row_columns = cells.by_column(rows)
    prompts, steps = row_columns.pop("input", []), row_columns.pop("step", [])
    if "gts" in row_columns:
        row_columns.setdefault("answer", row_columns["gts"])
    uids = row_columns.get("uid", [])
    group_ids = uids if all(isinstance(uid, str) for uid in uids) else []
    key_matches = [match for match in map(_ROLLOUT_KEY.fullmatch, group_ids) if match]
    if len(key_matches) == len(group_ids):
        group_ids = [match[1] for match in key_matches]
    elif len(set(zip(group_ids, steps, strict=True))) == len(group_ids):  # if every row has its own uid, uids form no groups
        group_ids = []
    return RolloutTable.of(
        "verl",
        path,
        tokens,
        prompts=prompts,
        steps=steps,
        keys=group_ids or None,
        columns=row_columns,
        rewards={name: values for name, values in row_columns.items() if name not in _NO_REWARDS},
    )


def _read_outputs(files: Sequence[Path], rows: list[dict[str, Any]]) -> Iterator[cells.Parts]:
    """Yield the output of every verl record, and append the record's other fields to `rows`."""
    shared_prompts: dict[str, str] = {}
    for row in parse_records(files, _parse_verl):
        row["input"] = shared_prompts.setdefault(row["input"], row["input"])
        output_text = row.pop("output")
        rows.append(row)
        yield [(output_text, True)]


def _parse_verl(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a verl record with prompt and output as text and the step as a number."""
    for key in VERL_REQUIRED:
        if key not in record:
            raise cells.missing_field(key, record)
    return {
        **record,
        "input": cells.prompt_text(record["input"]),
        "output": cells.content_text(record["output"]),
        "step": cells.whole_number(record.get("step"), "step"),
    }


#: The numeric fields of `results.jsonl` that are not metrics, for records without `metrics`.
_LEGACY_FIELDS = ("answer", "reward", "example_id")


def read_verifiers(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read verifiers' episodes: each trained branch of a trace is a completion, and all branches of a trace are one rollout.

    Token ids are read if every trace has them and a tokenizer is given, otherwise messages.
    """
    episodes = list(parse_records(files, _parse_episode))
    branch_rows = [row for episode, _ in episodes for row in episode]
    fields = defaultdict(list, cells.by_column(branch_rows))
    has_ids = tokenizer is not None and bool(branch_rows) and all(fields["ids"])
    if tokenizer is not None and has_ids:
        sampled_flags = np.array([flag for mask in fields["mask"] for flag in mask], dtype=np.bool_)
        tokens = TokenizedTexts(Ragged.of(fields["ids"]), sampled_flags, load_tokenizer(tokenizer)[1], "")
    else:
        tokens = tokenize(fields["parts"], tokenizer)
    if any(fields["ids"]) and not has_ids:
        word_note = "Credit is shown per word, as no tokenizer reads the file's token ids; give its folder with --tokenizer."
        tokens = tokens._replace(note=word_note)
    is_sampled_v = tokens.trainable
    logprobs = np.array([value for streams in fields["streams"] for value in streams.get("logprobs", ())], dtype=np.float32)
    has_logprobs = has_ids and len(logprobs) == len(is_sampled_v) and not np.isnan(logprobs[is_sampled_v]).any()
    rollout_n = torch.tensor(fields["opens"], dtype=torch.long).cumsum(dim=0) - 1
    trace_count, branched_count = sum(fields["opens"]), int((rollout_n.bincount() > 1).sum())
    task_columns = cells.by_column(fields["columns"])
    branch_note = (
        f"{branched_count} of {trace_count} traces have several branches. Each branch is a row; its prompt is the part that it "
        "shares with an earlier branch. All branches of a trace together have one vote."
    )
    rollout_table = RolloutTable.of(
        "verifiers",
        path,
        tokens,
        prompts=fields["prompt"],
        steps=fields["step"],
        keys=fields["key"],
        columns={name: values for name, values in task_columns.items() if values.count(None) < len(values)},
        rewards=cells.by_column(fields["rewards"]),
        notes=[branch_note if branched_count else "", _unanswered_note([error for _, error in episodes])],
    )
    return replace(
        rollout_table,
        tokenizer=Path(tokenizer) if has_ids and tokenizer else None,
        token_values={schema.LOGP: np.where(is_sampled_v, logprobs, np.float32(np.nan))} if has_logprobs else {},
        keyed=all(fields["keyed"]),
        as_recorded=_read_advantages(fields, tokens, has_ids=has_ids) or rollout_table.as_recorded,
        rollout_n=rollout_n if branched_count else None,
    )


def _unanswered_note(errors: Sequence[str | None]) -> str:
    """Tell the user how many episodes have no completion, and their most frequent error; `errors` holds None for others."""
    error_counts = Counter(error for error in errors if error is not None)
    if not error_counts:
        return ""
    error, error_count = error_counts.most_common(1)[0]
    cause_text = f" {error_count} of them failed with {error}." if error else ""
    return f"{error_counts.total()} of {len(errors)} episodes hold no message that a trained model sampled.{cause_text}"


def _first_error(record: Mapping[str, Any]) -> str:
    """Return the first error of an episode or its traces as text; empty if there is none."""
    episode_and_traces = [record, *(trace for trace in record.get("traces") or () if isinstance(trace, Mapping))]
    failure = next((e for entry in episode_and_traces for e in (*(entry.get("errors") or ()), entry.get("error")) if e), "")
    error_texts = [failure.get(key) for key in ("type", "error", "message")] if isinstance(failure, Mapping) else [failure]
    return ": ".join(str(text) for text in error_texts if text)


def _parse_episode(record: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """Return the rows of an episode and, if no model sampled anything, the error that stopped the episode."""
    episode_rows = [_legacy_row(record)] if "completion" in record else list(_branch_rows(record))
    return episode_rows, None if any(text for row in episode_rows for text, _ in row["parts"]) else _first_error(record)


def _branch_rows(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row per trained branch of an episode; the completion starts at the first sampled token that no earlier branch has."""
    for trace in trained_traces(record):
        for n, (earlier_nodes, nodes) in enumerate(trace.paths):
            tokens_of_nodes = [node_tokens(trace, i) for i in nodes]
            sampled_flags = [flag for node in tokens_of_nodes for flag in node.mask]
            first_sampled = sampled_flags.index(True) if True in sampled_flags else len(sampled_flags)
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
                "ids": [i for node in tokens_of_nodes for i in node.ids][first_sampled:],
                "mask": sampled_flags[first_sampled:],
                "streams": {
                    name: [value for node in tokens_of_nodes for value in node.stream(name)][first_sampled:]
                    for name in ("logprobs", "advantages")
                    if any(name in node.streams for node in tokens_of_nodes)
                },
                "opens": n == 0,  # True for the first branch of a trace
            }


def _legacy_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a rollout that verifiers before 1.0 wrote."""
    if "prompt" not in record:
        raise cells.missing_field("prompt", record)
    prompt, info_field = cells.prompt_text(record["prompt"]), record.get("info")
    other_fields = {key: value for key, value in record.items() if key not in _LEGACY_FIELDS and type(value) in (int, float)}
    rewards = {**(cells.object_field(record, "metrics") or other_fields), "reward": record.get("reward")}
    return {
        "key": f"{record.get('task', '')} {record.get('example_id', prompt)}", "step": 0, "keyed": False, "prompt": prompt,
        "parts": cells.completion_parts(record["completion"]),
        "rewards": rewards if record.get("error") is None else dict.fromkeys(rewards),
        "columns": {**(info_field if isinstance(info_field, Mapping) else {}), "answer": record.get("answer")},
        "ids": [], "mask": [], "streams": {}, "opens": True,
    }  # fmt: skip


def _read_advantages(fields: Mapping[str, Sequence[Any]], tokens: TokenizedTexts, *, has_ids: bool) -> AsRecorded | None:
    """Return the advantages that traces record, or their mean per completion if the text was split into other tokens."""
    if not any("advantages" in streams for streams in fields["streams"]):
        return None
    credit_v = np.full(len(tokens.trainable), np.nan)
    for streams, mask, (row_start, row_end) in zip(
        fields["streams"], fields["mask"], pairwise(tokens.ids.offsets.tolist()), strict=True
    ):
        if "advantages" in streams:
            row_advantages = np.nan_to_num(np.array(streams["advantages"]))  # verifiers reads a missing advantage as 0, too
            credit_v[row_start:row_end] = row_advantages if has_ids else row_advantages[np.array(mask)].mean()
    return AsRecorded(f"{'' if has_ids else 'the mean over tokens of '}the file's 'advantages'", credit_v, by_token=True)
