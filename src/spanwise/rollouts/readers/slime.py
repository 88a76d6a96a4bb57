"""Read the rollouts that slime writes with `--save-debug-rollout-data`."""

from __future__ import annotations

import reprlib
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spanwise.disk import whole_file
from spanwise.errors import DataError
from spanwise.rollouts import cells, schema
from spanwise.rollouts.collected import PER_WORD, Collected
from spanwise.rollouts.files import ReadingProgress
from spanwise.rollouts.table import AsRecorded, RolloutTable, tokenize

#: The metadata entry for the advantages of `spanwise credit --write`.
_ADVANTAGES = "spanwise_advantages"


def read_slime(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read slime's samples. A sample that slime leaves out of the loss is compared and gets no credit."""
    samples = Collected()
    responses = _read_responses(files, samples, keep_ids=tokenizer is not None)
    if tokenizer is None:
        tokens = tokenize(responses)._replace(note=PER_WORD)
    else:
        deque(responses, maxlen=0)
        tokens = samples.load_tokens(tokenizer)
    groups = samples.values("group")
    ungrouped_count = groups.count(None)
    no_group_note = (
        f"{ungrouped_count} of {len(groups)} samples have no group_index, so samples with the same prompt form a group."
    )
    rollout_keys = [("sample", n) if raw_id is None else raw_id for n, raw_id in enumerate(samples.values("rollout"))]
    group_keys, table_notes = (None, [no_group_note]) if ungrouped_count else (groups, [])
    rollout_table = samples.table("slime", path, tokens, keys=group_keys, rollouts=rollout_keys, notes=table_notes)
    learned_flags = samples.values("learned")
    logp_v = samples.tokens.numbers(schema.LOGP)
    training_record = rollout_table.as_recorded
    if (advantage_v := samples.tokens.numbers("advantages")) is not None:
        training_record = AsRecorded(f"the file's '{_ADVANTAGES}'", advantage_v, shares=True, by_token=True)
    return replace(
        rollout_table,
        tokenizer=None if tokenizer is None else Path(tokenizer),
        learned_n=None if all(learned_flags) else torch.tensor(learned_flags),
        # Samples are turns only if rollouts consist of several. Otherwise, a sample may hold all turns of a rollout.
        rollout_n=rollout_table.rollout_n if rollout_table.has_split_rollouts else None,
        as_recorded=training_record,
        token_values={} if logp_v is None or np.isnan(logp_v).any() else {schema.LOGP: logp_v},
    )


def _read_responses(files: Sequence[Path], samples: Collected, *, keep_ids: bool) -> Iterator[cells.Parts]:
    """Yield each response, and add the other fields of its sample to `samples`. Refuse tool output without `keep_ids`."""
    progress = ReadingProgress(files)
    for file in files:
        for row in _read_dump(file):
            if not keep_ids and not row["mask"].all():
                raise DataError(
                    f"{row['place']} holds tokens that no model sampled, such as a tool's output. Only the token ids show "
                    "where they are, so give the folder of the policy's tokenizer with --tokenizer."
                )
            sample_fields = {name: row[name] for name in ("prompt", "step", "group", "rollout", "learned")}
            samples.append(sample_fields, row["rewards"], row["columns"])
            if keep_ids:  # a dump has advantages only if `spanwise credit --write` added them
                per_token = {schema.LOGP: row["logps"], "advantages": row["advantages"]}
                samples.tokens.append(row["ids"], row["mask"], per_token)
            yield [(row["response"], True)]
        progress.add(file.stat().st_size)


def write_samples(file: Path, source: Path, advantage_rows: Iterator[Sequence[float]]) -> None:
    """Copy a dump of slime, and add advantages to its samples."""
    dump = _load(source)
    for sample in dump["samples"]:
        sample["metadata"] = {**(sample.get("metadata") or {}), _ADVANTAGES: list(next(advantage_rows))}
    with whole_file(file) as temporary_file:
        torch.save(dump, temporary_file)


def _load(file: Path) -> dict[str, Any]:
    """Load a dump of slime, without running code in it."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns about files that other programs saved
            dump = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch, pickle and zipfile each raise their own exceptions
        raise DataError(
            f"'{file}' is not a dump of slime, or it is damaged: torch cannot load it without running code in it. "
            "Give a file of slime's --save-debug-rollout-data."
        ) from error
    if not isinstance(dump, dict) or not isinstance(dump.get("samples"), list):
        raise DataError(f"'{file}' holds no list 'samples'; give a file of slime's --save-debug-rollout-data.")
    return dump


def _read_dump(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the samples in a dump of slime as rows of a table."""
    dump = _load(file)
    samples = dump["samples"]
    rollout_step = dump["rollout_id"] if isinstance(dump.get("rollout_id"), int) else 0
    for n in range(len(samples)):
        sample = samples[n]
        samples[n] = None  # frees the memory of the sample once it is read
        sample_place = f"Sample {n} of '{file}'"
        with cells.at_place(sample_place):
            sample_row = _parse_sample(sample)
        yield {**sample_row, "place": sample_place, "step": rollout_step}


def _parse_sample(sample: Any) -> dict[str, Any]:
    """Return the prompt, the response, the tokens and the rewards of a sample."""
    for name in ("prompt", "tokens", "response", "response_length"):
        if not isinstance(sample, Mapping) or name not in sample:
            raise cells.missing_field(name, sample if isinstance(sample, Mapping) else {})
    response_length = cells.whole_number(sample["response_length"], "response_length")
    token_ids = _to_array(sample, "tokens", np.int32)
    loss_mask = _to_array(sample, "loss_mask", np.bool_)
    sampled_logps = _to_array(sample, "rollout_log_probs", np.float32)
    metadata = cells.object_field(sample, "metadata")
    advantages = _to_array(metadata, _ADVANTAGES, np.float64)
    number_lists = (("loss_mask", loss_mask), ("rollout_log_probs", sampled_logps), (_ADVANTAGES, advantages))
    for name in ("group_index", "rollout_id"):
        if not isinstance(sample.get(name), int | str | None):
            raise cells.FieldError(f"'{name}' is {reprlib.repr(sample[name])}, but it must be a number")
    for name, values in number_lists:
        if values is not None and len(values) != response_length:
            raise cells.FieldError(f"'{name}' has {len(values)} values, but 'response_length' is {response_length}")
    if token_ids is None or not 0 <= response_length <= len(token_ids):
        raise cells.FieldError(
            f"'tokens' has {0 if token_ids is None else len(token_ids)} ids, but 'response_length' is {response_length}"
        )
    is_in_loss = np.ones(response_length, dtype=np.bool_) if loss_mask is None else loss_mask
    raw_reward = sample.get("reward")
    label_columns = {} if sample.get("label") is None else {"answer": cells.answer_text(sample["label"])}
    return {
        "prompt": cells.prompt_text(sample["prompt"]),
        "response": cells.content_text(sample["response"]),
        "ids": token_ids[len(token_ids) - response_length :],
        "mask": is_in_loss if is_in_loss.any() else ~is_in_loss,  # slime masks all tokens of samples that the loss skips
        "learned": bool(is_in_loss.any()) and not sample.get("remove_sample", False),
        "logps": sampled_logps,
        "advantages": advantages,
        "group": sample.get("group_index"),
        "rollout": sample.get("rollout_id"),
        "rewards": dict(raw_reward) if isinstance(raw_reward, Mapping) else {"reward": raw_reward},
        "columns": {**cells.scalar_fields(metadata), **label_columns, "status": sample.get("status")},
    }


def _to_array(sample: Mapping[str, Any], name: str, dtype: type[np.generic]) -> np.ndarray | None:
    """Return a field of a sample as an array, or None if it is missing."""
    if sample.get(name) is None:
        return None
    try:
        numbers = np.asarray(sample[name])
        typed_numbers = numbers.astype(dtype)
    except (TypeError, ValueError, OverflowError):  # NumPy raises an error for texts, and for lists of different lengths
        numbers = typed_numbers = np.array(None)
    if numbers.ndim != 1 or numbers.dtype.kind not in "biuf" or (dtype is np.int32 and (typed_numbers != numbers).any()):
        raise cells.FieldError(f"'{name}' is {reprlib.repr(sample[name])}, but it must be a list of numbers")
    return typed_numbers
