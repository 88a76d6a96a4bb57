"""Read the files that slime writes with `--save-debug-rollout-data`: one torch file per rollout, with token ids and masks."""

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
    """Read slime's samples, with the rollout's number as the step, `group_index` as the group and `label` as the answer.

    A sample that slime leaves out of the loss is compared and gets no credit.
    """
    sample_rows = [row for file in files for row in _read_dump(file)]
    fields = cells.by_column(sample_rows)
    if tokenizer is not None and sample_rows:
        tokens = TokenizedTexts(Ragged.of(fields["ids"]), np.concatenate(fields["mask"]), load_tokenizer(tokenizer)[1], "")
    else:
        masked_row = next((row for row in sample_rows if not row["mask"].all()), None)
        if masked_row is not None:
            raise DataError(
                f"{masked_row['place']} holds tokens that no model sampled, and only its token ids say which; give the folder of "
                "the policy's tokenizer with --tokenizer."
            )
        tokens = tokenize(([(row["response"], True)] for row in sample_rows), tokenizer)
        tokens = tokens._replace(
            note="Credit is shown per word, as no tokenizer reads the file's token ids; give one with --tokenizer."
        )
    group_column = fields.get("group", [])
    rollout_table = RolloutTable.of(
        "slime",
        path,
        tokens,
        prompts=fields.get("prompt", []),
        steps=fields.get("step", []),
        keys=group_column if group_column and None not in group_column else None,
        columns=cells.by_column([row["columns"] for row in sample_rows]),
        rewards=cells.by_column([row["rewards"] for row in sample_rows]),
    )
    rollout_n = group_index([row["rollout"] or n for n, row in enumerate(sample_rows)])
    logps_of_rows = fields.get("logps", [])
    has_logps = tokenizer is not None and bool(sample_rows) and all(row_logps is not None for row_logps in logps_of_rows)
    return replace(
        rollout_table,
        tokenizer=None if tokenizer is None else Path(tokenizer),
        learned_n=None if all(fields.get("learned", [])) else torch.tensor(fields["learned"]),
        rollout_n=rollout_n if len(rollout_n.unique()) < len(sample_rows) else None,
        token_values={schema.LOGP: np.concatenate(logps_of_rows)} if has_logps else {},
    )


def _read_dump(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the samples in a dump of slime as rows of a table."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns about files that other programs saved
            dump = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch, pickle and zipfile each raise their own exceptions
        raise DataError(
            f"'{file}' is not a dump of slime, or it is damaged: torch cannot load it without running code in it. Give a file of "
            "slime's --save-debug-rollout-data."
        ) from error
    samples = dump.get("samples") if isinstance(dump, Mapping) else None
    if not isinstance(samples, list):
        raise DataError(f"'{file}' holds no list 'samples'; give a file of slime's --save-debug-rollout-data.")
    rollout_step = dump["rollout_id"] if isinstance(dump.get("rollout_id"), int) else 0
    for n, sample in enumerate(samples):
        sample_place = f"Sample {n} of '{file}'"
        with cells.at_place(sample_place):
            sample_row = _parse_sample(sample)
        rollout_key = None if sample_row["rollout"] is None else (rollout_step, sample_row["rollout"])
        yield {**sample_row, "place": sample_place, "step": rollout_step, "rollout": rollout_key}


def _parse_sample(sample: Any) -> dict[str, Any]:
    """Return the prompt, the response, the tokens and the rewards of a sample."""
    for name in ("prompt", "tokens", "response", "response_length"):
        if not isinstance(sample, Mapping) or name not in sample:
            raise cells.missing_field(name, sample if isinstance(sample, Mapping) else {})
    response_length, ids = cells.whole_number(sample["response_length"], "response_length"), _to_list(sample["tokens"])
    loss_mask, sampled_logps = _to_list(sample.get("loss_mask")), _to_list(sample.get("rollout_log_probs"))
    for name, values in (("loss_mask", loss_mask), ("rollout_log_probs", sampled_logps)):
        if values is not None and len(values) != response_length:
            raise cells.FieldError(f"has {len(values)} values in '{name}' and a 'response_length' of {response_length}")
    if ids is None or len(ids) < response_length:
        raise cells.FieldError(f"has {0 if ids is None else len(ids)} tokens and a 'response_length' of {response_length}")
    flags = np.ones(response_length, dtype=np.bool_) if loss_mask is None else np.array(loss_mask, dtype=np.bool_)
    raw_reward, answer_text = sample.get("reward"), cells.answer_text(sample.get("label"))
    return {
        "prompt": cells.prompt_text(sample["prompt"]),
        "response": cells.content_text(sample["response"]),
        "ids": ids[len(ids) - response_length :],
        "mask": flags if flags.any() else ~flags,  # if slime leaves a sample out of the loss, it masks every token
        "learned": bool(flags.any()) and not sample.get("remove_sample", False),
        "logps": None if sampled_logps is None else np.array(sampled_logps, dtype=np.float32),
        "group": sample.get("group_index"),
        "rollout": sample.get("rollout_id"),
        "rewards": dict(raw_reward) if isinstance(raw_reward, Mapping) else {"reward": raw_reward},
        "columns": {**cells.scalar_fields(sample.get("metadata")), "answer": answer_text, "status": sample.get("status")},
    }


def _to_list(values: Any) -> list[Any] | None:
    """Convert a tensor, an array or a list of numbers to a list."""
    return values.tolist() if hasattr(values, "tolist") else None if values is None else list(values)
