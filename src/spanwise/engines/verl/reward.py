"""`SpanRewardManager`: finds the blocks of each completion in verl's reward workers, scores them, and packs what it read."""

from __future__ import annotations

import asyncio
import copy
import math
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from omegaconf import open_dict  # pyright: ignore[reportMissingImports]
from verl.experimental.reward_loop.reward_manager.base import (  # pyright: ignore[reportMissingImports]
    RewardManagerBase,
)
from verl.trainer.ppo.reward import load_reward_manager  # pyright: ignore[reportMissingImports]

from spanwise.batch import Batch, Steps
from spanwise.credit.spread import completed
from spanwise.engines.verl import carry, masks
from spanwise.engines.verl.run import vocabulary_of
from spanwise.engines.verl.settings import ANY_REWARD, OWN_MANAGER, filter_metric, scheme_in
from spanwise.objective import Objective
from spanwise.scheme import Scheme
from spanwise.score.items import shared_by
from spanwise.step import ReadBatch, Step
from spanwise.types import Scores


class SpanRewardManager(RewardManagerBase):
    """Scores the objectives of the recipe that `algorithm.spanwise.recipe` names, and packs the reading of every output."""

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any = None, **router: Any) -> None:
        super().__init__(config, tokenizer, compute_score)
        self.scheme, self.vocabulary = scheme_in(config), vocabulary_of(config, tokenizer)
        self.step = Step(self.scheme, self.vocabulary)
        self.marks_rewards = filter_metric(config) == ANY_REWARD
        self.own_manager = _own_manager(config, self.scheme, tokenizer, router)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spanwise-reward")

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Score one rollout, whose outputs are the rows of `data`; what waits for a server shares the loop with other rollouts."""

        def in_thread(function: Any, *arguments: Any) -> Any:
            return asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

        given = any("environment" in (data[n].non_tensor_batch.get("tool_extra_fields") or {}) for n in range(len(data)))
        own = None if self.own_manager is None or given else await self.own_manager.run_single(data)
        batch, length_n, masked = await in_thread(self._batch, data, own)
        with shared_by(int(self.config.reward.num_workers)):
            rows = await self.step.read_waiting(batch, in_thread)
        return await in_thread(self._packed, rows, batch, length_n, masked)

    def _batch(self, data: Any, own: dict[str, Any] | None) -> tuple[Batch, list[int], bool]:
        """Return the outputs of a rollout as a batch, their lengths, and whether all of them say which tokens were sampled."""
        ids_nt = data.batch["responses"]
        length_n = data.batch["attention_mask"][:, -ids_nt.shape[1] :].sum(dim=1).tolist()
        fields = [data[n].non_tensor_batch for n in range(len(data))]
        masks_given = [(row.get("tool_extra_fields") or {}).get(masks.KEY) for row in fields]
        ids = [ids_t[:length].tolist() for ids_t, length in zip(ids_nt, length_n, strict=True)]
        sampled = [[1] * len(row) if mask is None else mask for row, mask in zip(ids, masks_given, strict=True)]
        columns = self._columns(fields, ids)
        if own is not None:  # of the last output, which verl's managers score
            numbers = {**own.get("reward_extra_info", {}), "environment": own["reward_score"]}
            columns |= {name: [None] * (len(ids) - 1) + [number] for name, number in numbers.items()}
        order = torch.arange(len(ids))  # the places of the outputs in their rollout
        steps = Steps(torch.zeros_like(order), order, columns.get("anchor")) if len(ids) > 1 else None
        batch = Batch.jagged(ids, torch.zeros_like(order), sampled=sampled, columns=columns, steps=steps)
        return batch, length_n, all(mask is not None for mask in masks_given)

    def _packed(self, rows: ReadBatch, batch: Batch, length_n: list[int], masked: bool) -> dict[str, Any]:
        """Pack what was read, with one number per objective for verl's own metrics."""
        anchor = None  # most methods compare no states, whatever they are
        if "anchor_s" in self.scheme.entry.inputs:
            anchor = batch.columns.get("anchor")
            if rows.turns is not None and rows.batch.steps is not None:
                anchor = rows.batch.steps.anchor_s
        packed = carry.pack(rows.reading, length_n, masked=masked, turns=rows.turns, anchor=anchor)
        # One number per objective of the last turn; a missing reward counts as `if_missing`.
        objectives, names = self.scheme.objectives, self.scheme.names
        value_nm = completed(rows.reading.scores, objectives)
        last = value_nm[-1].tolist() if len(value_nm) else [math.nan] * len(names)
        score = sum(objective.weight * value for objective, value in zip(objectives, last, strict=True) if value == value)
        info = {**dict(zip(names, last, strict=True)), carry.KEY: packed}
        if self.marks_rewards:
            info[ANY_REWARD] = _mark(rows.reading.scores, objectives)
        return {"reward_score": float(score), "reward_extra_info": info}

    def _columns(self, fields: list[Any], ids: list[list[int]]) -> dict[str, list[Any]]:
        rows = []
        for row, ids_t in zip(fields, ids, strict=True):
            gold = (row.get("reward_model") or {}).get("ground_truth")
            text = {
                "prompts": row.get("raw_prompt"),
                "completions": self.tokenizer.decode(ids_t, skip_special_tokens=True),
                "completion_ids": ids_t,
                "num_turns": row.get("__num_turns__"),
            }
            answer = {} if gold is None else {"answer": gold}
            rows.append({**row, **(row.get("extra_info") or {}), **(row.get("tool_extra_fields") or {}), **answer, **text})
        return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def _mark(scores: Scores, objectives: Sequence[Objective]) -> float:
    """Return a number that two rollouts share only if all rewards that pay anything are the same."""
    paying_m = torch.tensor([objective.weight != 0 for objective in objectives], dtype=torch.bool)
    tables = scores.reward_nm[:, paying_m], scores.status_nm[:, paying_m]
    return float(zlib.crc32(b"".join(table.contiguous().numpy().tobytes() for table in tables)))


def _own_manager(config: Any, scheme: Scheme, tokenizer: Any, router: dict[str, Any]) -> Any:
    """Load the reward manager of the user's configuration, with its function; None if the recipe reads nothing of it."""
    columns = {one.options.get("column", "environment") for one in scheme.objectives if one.reward == "environment"}
    manager = config.algorithm.spanwise.get(OWN_MANAGER)
    if manager is None or not columns:
        return None
    is_named = manager.name != "naive" or config.reward.custom_reward_function.path is not None
    if not is_named and "environment" not in columns:  # another number than a reward manager's, of the agent loop
        return None
    own = copy.deepcopy(config)
    with open_dict(own):
        own.reward.reward_manager = manager
    return load_reward_manager(own, tokenizer, **router)
