"""The folder of a run: recipe, metrics, rollouts, summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from spanwise.engines.trl import Rollouts
from spanwise.errors import DataError
from spanwise.types import Status


class RunFolder:
    """Writes what a run leaves behind: `recipe.yaml`, `metrics.jsonl`, `rollouts/*.parquet`, `summary.json`, `model/`.

    Args:
        path: made if it does not exist.
        keep: continue the metrics of an earlier run (resume) instead of starting anew.
    """

    def __init__(self, path: str | Path, *, keep: bool = False) -> None:
        self.path = Path(path)
        try:
            (self.path / "rollouts").mkdir(parents=True, exist_ok=True)
            if not keep:
                (self.path / "metrics.jsonl").write_text("")
        except OSError as error:
            raise DataError(f"The output folder '{path}' cannot be written: {error.strerror or error}.") from error

    @property
    def model(self) -> Path:
        """Where the trained model and its tokenizer go."""
        return self.path / "model"

    def write_recipe(self, recipe: Mapping[str, Any]) -> None:
        """Write the recipe as it was resolved."""
        (self.path / "recipe.yaml").write_text(yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True))

    def add_metrics(self, line: Mapping[str, Any]) -> None:
        """Append one line to `metrics.jsonl`."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(line)) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        (self.path / "summary.json").write_text(json.dumps(dict(summary), indent=2) + "\n")

    def write_rollouts(self, rollouts: Rollouts, *, step: int) -> None:
        """Write one generation batch to `rollouts/step_<step>.parquet`, a row per completion."""
        pq.write_table(rollout_table(rollouts, step=step), self.path / "rollouts" / f"step_{step:06d}.parquet")


def rollout_table(rollouts: Rollouts, *, step: int) -> pa.Table:
    """One row per completion: ids, text, block spans, rewards, statuses, credit, advantages per token.

    Columns `start/<block>`, `end/<block>` (half-open, in tokens), `credit/<block>`, `reward/<objective>` (null where absent) and
    `status/<objective>` repeat per block and objective; `outcome` is the first objective's reward, what later ones are given.
    """
    scores, spans = rollouts.scores, rollouts.spans
    lengths = [int(row.nonzero().max()) + 1 if bool(row.any()) else 0 for row in rollouts.mask_nt]

    def cut(matrix: Any) -> list[list[Any]]:
        return [row[:length] for row, length in zip(matrix.tolist(), lengths, strict=True)]

    columns: dict[str, Any] = {
        "step": [step] * len(lengths),
        "prompt": [prompt if isinstance(prompt, str) else json.dumps(prompt) for prompt in rollouts.prompts],
        "completion_ids": cut(rollouts.ids_nt),
        "trainable": cut(rollouts.mask_nt),
        "text": ["".join(block[""] or "" for block in text.values() if block is not None) for text in rollouts.text],
        "fault": spans.fault_n.tolist(),
    }
    for k, name in enumerate(spans.names):
        columns[f"start/{name}"] = spans.start_nk[:, k].tolist()
        columns[f"end/{name}"] = spans.end_nk[:, k].tolist()
        columns[f"credit/{name}"] = rollouts.credit.block_nk[:, k].tolist()
    columns["credit/stop"] = rollouts.credit.stop_n.tolist()
    for m, name in enumerate(scores.names):
        columns[f"reward/{name}"] = [None if value != value else value for value in scores.reward_nm[:, m].tolist()]
        columns[f"status/{name}"] = [Status(value).name.lower() for value in scores.status_nm[:, m].tolist()]
    columns["outcome"] = columns[f"reward/{scores.names[0]}"]
    columns["advantages"] = cut(rollouts.advantages_nt)
    return pa.table(columns)
