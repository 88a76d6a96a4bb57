"""Read the rollouts of verl and verifiers."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spanwise.rollouts import cells, schema
from spanwise.rollouts.collected import PER_WORD, Collected
from spanwise.rollouts.columns import ColumnBuilder
from spanwise.rollouts.files import parse_records
from spanwise.rollouts.table import AsRecorded, RolloutTable, TokenizedTexts, tokenize
from spanwise.rollouts.traces import branch_tokens, node_tokens, trace_rewards, trained_traces

VERL_REQUIRED = ("input", "output")
#: Matches the rollout keys of verl's V1 trainer, which begin with the id of the prompt.
_ROLLOUT_KEY = re.compile(r"(.+)_\d+_\d+", re.DOTALL)
_NO_REWARDS = ("gts", "answer", "uid", "request_id")
#: The numbers per token to read from a trace.
_KEPT_NUMBERS = ("logprobs", "advantages")


def read_verl(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read verl's dump. Groups are formed by the prompt ids in `uid`, or by the prompts if the ids form no groups."""
    column_builder = ColumnBuilder()
    tokens = tokenize(_read_outputs(files, column_builder), tokenizer)
    row_columns = column_builder.columns
    prompts = row_columns.pop("input", [])
    steps = row_columns.pop("step", [])
    if "gts" in row_columns:
        row_columns.setdefault("answer", row_columns["gts"])
    uid_cells = row_columns.get("uid", [])
    uids = [str(uid) for uid in uid_cells if uid is not None and uid == uid]
    group_ids = [] if (missing_uid_count := len(uid_cells) - len(uids)) else uids
    key_matches = [match for match in map(_ROLLOUT_KEY.fullmatch, group_ids) if match]
    if len(key_matches) == len(group_ids):
        group_ids = [match[1] for match in key_matches]
    elif len(set(zip(group_ids, steps, strict=True))) == len(group_ids):  # each row has its own id, so ids form no groups
        group_ids = []
    uid_note = f"{missing_uid_count} of {len(uid_cells)} rows have no uid, so rows with the same prompt form a group."
    rewards = {name: values for name, values in row_columns.items() if name not in _NO_REWARDS}
    return RolloutTable.of(
        "verl",
        path,
        tokens,
        prompts=prompts,
        steps=steps,
        keys=group_ids or None,
        columns=row_columns,
        rewards=rewards,
        notes=[uid_note] if missing_uid_count else [],
    )


def _read_outputs(files: Sequence[Path], rows: ColumnBuilder) -> Iterator[cells.Parts]:
    """Yield the output of every verl record, and append the record's other fields to `rows`."""
    for row in parse_records(files, _parse_verl):
        output_text = row.pop("output")
        rows.append(row)
        yield [(output_text, True)]


def _parse_verl(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a verl record with prompt and output as text and the step as a number."""
    for required_field in VERL_REQUIRED:
        if required_field not in record:
            raise cells.missing_field(required_field, record)
    return {
        **record,
        "input": cells.prompt_text(record["input"]),
        "output": cells.content_text(record["output"]),
        "step": cells.whole_number(record.get("step"), "step"),
    }


#: Fields of old `results.jsonl` records that are no metrics.
_LEGACY_FIELDS = ("answer", "reward", "example_id")


def read_verifiers(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read verifiers' episodes. Each trained branch of a trace is a completion; a trace's branches are one rollout."""
    branches = Collected()
    episode_errors: list[str | None] = []
    branch_texts = _read_branches(files, branches, episode_errors, keep_ids=tokenizer is not None)
    has_token_ids = False
    if tokenizer is None:
        tokens = tokenize(branch_texts)
    else:
        deque(branch_texts, maxlen=0)
        has_token_ids = len(branches.fields) > 0 and all(branches.values("has_ids"))
        if has_token_ids:
            tokens = branches.load_tokens(tokenizer)
        else:  # without token ids, read the files again and tokenize their texts
            tokens = tokenize(_read_branches(files, Collected(), [], keep_ids=False), tokenizer)
    if tokenizer is None and any(branches.values("has_ids")):
        tokens = tokens._replace(note=PER_WORD)
    logp_v = branches.tokens.numbers("logprobs") if has_token_ids else None
    if logp_v is not None and (np.isnan(logp_v) & tokens.trainable).any():
        logp_v = None  # log-probabilities are used only if every sampled token has one
    is_first_branch_n = torch.tensor(branches.values("is_first_branch"), dtype=torch.long)
    trace_n = is_first_branch_n.cumsum(dim=0) - 1
    trace_count = int(is_first_branch_n.sum())
    branched_trace_count = int((trace_n.bincount() > 1).sum())
    branch_note = (
        f"{branched_trace_count} of {trace_count} traces have several branches. Each branch is one row. If branches share tokens, "
        "only the first branch trains them. A baseline's mean counts all branches of a trace as one completion."
    )
    task_columns = branches.columns.columns
    branches.columns.columns = {name: values for name, values in task_columns.items() if values.count(None) < len(values)}
    table_notes = [branch_note if branched_trace_count else "", _unanswered_note(episode_errors)]
    rollout_table = branches.table("verifiers", path, tokens, keys=branches.values("key"), notes=table_notes)
    return replace(
        rollout_table,
        tokenizer=Path(tokenizer) if has_token_ids and tokenizer else None,
        token_values={} if logp_v is None else {schema.LOGP: logp_v},
        keyed=all(branches.values("keyed")),
        as_recorded=_recorded_advantages(branches, tokens, has_ids=has_token_ids) or rollout_table.as_recorded,
        rollout_n=trace_n if branched_trace_count else None,
    )


def _read_branches(
    files: Sequence[Path], branches: Collected, errors: list[str | None], *, keep_ids: bool
) -> Iterator[cells.Parts]:
    """Yield the text of each branch (path of messages), and add its fields to `branches` and each error to `errors`."""
    for episode_rows, error in parse_records(files, _parse_episode):
        errors.append(error)
        for row in episode_rows:
            text_parts, token_ids, rewards, columns = (row.pop(name) for name in ("parts", "ids", "rewards", "columns"))
            is_sampled = np.array(row.pop("mask"), np.bool_)
            per_token = {name: np.array(values) for name, values in row.pop("numbers").items()}
            mean_advantage = math.nan
            if "advantages" in per_token:
                per_token["advantages"] = np.nan_to_num(per_token["advantages"])  # tokens without a recorded advantage get 0
                mean_advantage = per_token["advantages"][is_sampled].mean() if is_sampled.any() else math.nan
            if "logprobs" in per_token:
                per_token["logprobs"] = np.where(is_sampled, per_token["logprobs"], np.nan)
            row |= {"has_ids": bool(token_ids), "mean_advantage": float(mean_advantage)}
            branches.append(row, rewards, columns)
            if keep_ids:
                branches.tokens.append(token_ids, is_sampled, per_token)
            yield text_parts


def _unanswered_note(errors: Sequence[str | None]) -> str:
    """Tell the user how many episodes have no completion, and their most frequent error."""
    error_counts = Counter(error for error in errors if error is not None)
    if not error_counts:
        return ""
    commonest_error, error_count = error_counts.most_common(1)[0]
    failed_count = error_counts.total()
    cause_text = f" ({error_count} failed with {commonest_error})" if commonest_error else ""
    return f"{failed_count} of {len(errors)} episodes hold no message that a trained model sampled{cause_text}."


def _first_error(record: Mapping[str, Any]) -> str:
    """Return the text of the first error in an episode."""
    traces = [trace for trace in record.get("traces") or () if isinstance(trace, Mapping)]
    error_lists = ((*(source.get("errors") or ()), source.get("error")) for source in (record, *traces))
    first_error = next(filter(None, chain.from_iterable(error_lists)), "")
    if not isinstance(first_error, Mapping):
        return str(first_error)
    return ": ".join(str(first_error[key]) for key in ("type", "error", "message") if first_error.get(key))


def _parse_episode(record: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """Return the rows of an episode. If no model sampled anything, return the error that stopped it, too."""
    episode_rows = [_legacy_row(record)] if "completion" in record else list(_branch_rows(record))
    return episode_rows, None if any(text for row in episode_rows for text, _ in row["parts"]) else _first_error(record)


def _branch_rows(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each trained branch of an episode, with its messages from the first newly sampled one on."""
    for trace in trained_traces(record):
        task_columns = {field_name: field for field_name, field in trace.task.items() if not isinstance(field, (dict, list))}
        task_columns["answer"] = cells.answer_text(trace.task.get("answer"))
        for n, (earlier_nodes, nodes) in enumerate(trace.paths):
            tokens = branch_tokens([node_tokens(trace, i) for i in nodes])
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
                "columns": task_columns,
                "ids": _id_array(tokens.ids),
                "mask": tokens.mask,
                "numbers": {name: values for name, values in tokens.number_lists.items() if name in _KEPT_NUMBERS},
                "is_first_branch": n == 0,
            }


def _id_array(ids: Sequence[int]) -> array:
    """Return token ids as a compact array."""
    try:
        return array("i", ids)
    except OverflowError:
        raise cells.FieldError(f"no tokenizer has the token id {max(ids, key=abs)}") from None


def _legacy_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a rollout that verifiers before 1.0 wrote."""
    if "prompt" not in record:
        raise cells.missing_field("prompt", record)
    prompt = cells.prompt_text(record["prompt"])
    info_field = record.get("info")
    number_fields = {
        key: value for key, value in record.items() if key not in _LEGACY_FIELDS and type(value) in (int, float)
    }
    rewards = {**(cells.object_field(record, "metrics") or number_fields), "reward": record.get("reward")}
    return {
        "key": f"{record.get('task', '')} {record.get('example_id', prompt)}", "step": 0, "keyed": False, "prompt": prompt,
        "parts": cells.completion_parts(record["completion"]),
        "rewards": rewards if record.get("error") is None else dict.fromkeys(rewards),
        "columns": {**(info_field if isinstance(info_field, Mapping) else {}), "answer": record.get("answer")},
        "ids": array("i"), "mask": [], "numbers": {}, "is_first_branch": True,
    }  # fmt: skip


def _recorded_advantages(branches: Collected, tokens: TokenizedTexts, *, has_ids: bool) -> AsRecorded | None:
    """Return each token's recorded advantage. If the file's token ids are not used, return the completion's mean."""
    mean_advantages = np.array(branches.values("mean_advantage"))
    advantage_v = branches.tokens.numbers("advantages") if has_ids else np.repeat(mean_advantages, tokens.ids.lengths)
    if advantage_v is None or np.isnan(mean_advantages).all():
        return None
    description = "the file's 'advantages'" if has_ids else "the mean of the file's 'advantages' in each completion"
    return AsRecorded(description, advantage_v, by_token=True)
