"""Read the dumps of slime's `--save-debug-rollout-data`: a torch file for each rollout, with token ids and masks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spanwise.credit import group_index
from spanwise.errors import DataError
from spanwise.rollouts import cells, schema
from spanwise.rollouts.table import Ragged, RolloutTable, TokenizedTexts, load_tokenizer, tokenize


def read_slime(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read slime's samples; the number of their rollout is the step, `group_index` the group, `label` the answer.

    A reward that is a dictionary gives each of its numbers by name. A sample that slime leaves out of the loss is compared and gets
    no credit. Samples of one `rollout_id` are parts of one rollout. Without a tokenizer the text is cut into words.
    """
    rows = [row for file in files for row in _rows(file)]
    fields = cells.by_column(rows)
    if tokenizer is not None and rows:
        tokens = TokenizedTexts(Ragged.of(fields["ids"]), np.concatenate(fields["mask"]), load_tokenizer(tokenizer)[1], "")
    else:
        masked = next((row for row in rows if not row["mask"].all()), None)
        if masked is not None:
            raise DataError(
                f"{masked['place']} holds tokens that no model sampled, and only its token ids say which; give the folder of the "
                "policy's tokenizer with --tokenizer."
            )
        tokens = tokenize(([(row["response"], True)] for row in rows), tokenizer)
        tokens = tokens._replace(
            note="Credit is shown per word, as no tokenizer reads the file's token ids; give one with --tokenizer."
        )
    groups = fields.get("group", [])
    table = RolloutTable.of(
        "slime",
        path,
        tokens,
        prompts=fields.get("prompt", []),
        steps=fields.get("step", []),
        keys=groups if groups and None not in groups else None,
        columns=cells.by_column([row["columns"] for row in rows]),
        rewards=cells.by_column([row["rewards"] for row in rows]),
    )
    rollout_n = group_index([row["rollout"] or n for n, row in enumerate(rows)])
    logps = fields.get("logp", [])
    has_logps = tokenizer is not None and bool(rows) and all(logp is not None for logp in logps)
    return replace(
        table,
        tokenizer=None if tokenizer is None else Path(tokenizer),
        learned_n=None if all(fields.get("learned", [])) else torch.tensor(fields["learned"]),
        rollout_n=rollout_n if len(rollout_n.unique()) < len(rows) else None,
        token_values={schema.LOGP: np.concatenate(logps)} if has_logps else {},
    )


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the samples of a dump."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch guesses what a file of another program may be
            dump = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch, pickle and zipfile each raise their own types
        raise DataError(
            f"'{file}' is no dump of slime that can be read without running code in it; it is damaged, or of another program. Give "
            "a file of --save-debug-rollout-data."
        ) from error
    samples = dump.get("samples") if isinstance(dump, Mapping) else None
    if not isinstance(samples, list):
        raise DataError(f"'{file}' holds no list 'samples'; give a file of slime's --save-debug-rollout-data.")
    step = dump["rollout_id"] if isinstance(dump.get("rollout_id"), int) else 0
    for n, sample in enumerate(samples):
        place = f"Sample {n} of '{file}'"
        with cells.at_place(place):
            row = _row(sample)
        named = row["rollout"] is not None
        yield {**row, "place": place, "step": step, "rollout": (step, row["rollout"]) if named else None}


def _row(sample: Any) -> dict[str, Any]:
    """Return the fields of a sample that a table has a place for."""
    for name in ("prompt", "tokens", "response", "response_length"):
        if not isinstance(sample, Mapping) or name not in sample:
            raise cells.missing_field(name, sample if isinstance(sample, Mapping) else {})
    length, ids = cells.whole_number(sample["response_length"], "response_length"), _numbers(sample["tokens"])
    mask, logp = _numbers(sample.get("loss_mask")), _numbers(sample.get("rollout_log_probs"))
    for name, values in (("loss_mask", mask), ("rollout_log_probs", logp)):
        if values is not None and len(values) != length:
            raise cells.FieldError(f"has {len(values)} values in '{name}' and a 'response_length' of {length}")
    if ids is None or len(ids) < length:
        raise cells.FieldError(f"has {0 if ids is None else len(ids)} tokens and a 'response_length' of {length}")
    flags = np.ones(length, dtype=np.bool_) if mask is None else np.array(mask, dtype=np.bool_)
    reward, metadata = sample.get("reward"), sample.get("metadata") or {}
    plain = {name: value for name, value in metadata.items() if isinstance(value, str | int | float | None)}
    return {
        "prompt": cells.prompt_text(sample["prompt"]),
        "response": cells.content_text(sample["response"]),
        "ids": ids[len(ids) - length :],
        # slime masks every token of a sample that it leaves out.
        "mask": flags if flags.any() else ~flags,
        "learned": bool(flags.any()) and not sample.get("remove_sample", False),
        "logp": None if logp is None else np.array(logp, dtype=np.float32),
        "group": sample.get("group_index"),
        "rollout": sample.get("rollout_id"),
        "rewards": dict(reward) if isinstance(reward, Mapping) else {"reward": reward},
        "columns": {**plain, "answer": cells.answer_text(sample.get("label")), "status": sample.get("status")},
    }


def _numbers(values: Any) -> list[Any] | None:
    return values.tolist() if hasattr(values, "tolist") else None if values is None else list(values)
