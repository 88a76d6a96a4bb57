"""`SpanRewardManager`, which finds and scores blocks in verl's reward workers."""

from __future__ import annotations

import asyncio
import copy
import math
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from omegaconf import open_dict  # pyright: ignore[reportMissingImports]
from verl.experimental.reward_loop.reward_manager.base import (  # pyright: ignore[reportMissingImports]
    RewardManagerBase,
)
from verl.trainer.ppo.reward import load_reward_manager  # pyright: ignore[reportMissingImports]

from spanwise.batch import Batch, Steps
from spanwise.credit.spread import fill_missing
from spanwise.credit.trajectories.rollouts import worth_of_turns
from spanwise.engines.shared import columns_of
from spanwise.engines.verl import carry, masks
from spanwise.engines.verl.run import vocabulary_of
from spanwise.engines.verl.settings import ANY_REWARD, OWN_MANAGER, filter_metric, paid_results, scheme_in, user_chose_reward
from spanwise.scheme import Scheme
from spanwise.score.items import REWARD_WORKERS
from spanwise.step import TURNS, ReadBatch, Step


class SpanRewardManager(RewardManagerBase):
    """Scores completions by the recipe in `algorithm.spanwise.recipe`. Packs their blocks and rewards as text."""

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any = None, **router: Any) -> None:
        super().__init__(config, tokenizer, compute_score)
        self.scheme, self.vocabulary = scheme_in(config), vocabulary_of(config, tokenizer)
        self.step = Step(self.scheme, self.vocabulary)
        self.filter_metric = filter_metric(config)
        self.own_columns = paid_results(self.scheme)
        user_manager = config.algorithm.spanwise.get(OWN_MANAGER)
        self.user_chose_reward = user_chose_reward(config, user_manager and user_manager.name)
        # If the user chose no reward, verl's reward manager fills only the column `environment`. The agent loop fills the rest.
        used_columns = self.own_columns if self.user_chose_reward else self.own_columns & {"environment"}
        self.own_manager = None
        if user_manager is not None and used_columns:
            user_config = copy.deepcopy(config)
            with open_dict(user_config):
                user_config.reward.reward_manager = user_manager
            self.own_manager = load_reward_manager(user_config, tokenizer, **router)
        # A new thread has its own context variables, so `REWARD_WORKERS` is set there.
        self._thread = ThreadPoolExecutor(1, "spanwise-reward", REWARD_WORKERS.set, (int(config.reward.num_workers),))

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Score one rollout, whose outputs are the rows of `data`. Slow rewards of many rollouts run concurrently."""

        def in_thread(function: Any, *arguments: Any) -> Any:
            return asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

        _mark_responses(data)
        field_dicts = [data[n].non_tensor_batch for n in range(len(data))]
        agent_field_dicts = [_agent_fields(row) for row in field_dicts]
        turn_dicts = [turn for fields in agent_field_dicts for turn in fields.get(TURNS) or ()]
        agent_names = {name for fields in (*agent_field_dicts, *turn_dicts) for name in fields}
        user_gives_column = self.user_chose_reward and not self.own_columns <= agent_names
        user_result = None
        if self.own_manager is not None and (user_gives_column or not _has_agent_reward(field_dicts)):
            user_result = await self.own_manager.run_single(data)
        rollout_batch, length_n, has_masks = await in_thread(self._batch, data, user_result)
        REWARD_WORKERS.set(int(self.config.reward.num_workers))
        scored_batch = await self.step.read_waiting(rollout_batch, in_thread)
        return await in_thread(self._packed, scored_batch, rollout_batch, length_n, has_masks)

    def _batch(self, data: Any, own_result: dict[str, Any] | None) -> tuple[Batch, list[int], bool]:
        """Build a batch from the outputs of a rollout. Return it with lengths, and whether all have masks."""
        ids_nt = data.batch["responses"]
        attention_mask_nt = data.batch["attention_mask"][:, -ids_nt.shape[1] :]
        length_n = attention_mask_nt.sum(dim=1).tolist()
        field_dicts = [data[n].non_tensor_batch for n in range(len(data))]
        agent_masks = [_agent_fields(row).get(masks.KEY) for row in field_dicts]
        ids_by_output = [ids_t[:length].tolist() for ids_t, length in zip(ids_nt, length_n, strict=True)]
        sampled_masks = [
            [1] * len(ids) if mask is None else mask for ids, mask in zip(ids_by_output, agent_masks, strict=True)
        ]
        batch_columns = self._columns(field_dicts, ids_by_output)
        if own_result is not None:  # verl's own reward managers score only the last output
            extra_info = own_result.get("reward_extra_info", {})
            # A result of verl's reward manager replaces a dataset column of the same name only if an objective reads it.
            added_results = {name: value for name, value in extra_info.items() if name not in (*batch_columns, "answer")}
            reward_results = {name: extra_info[name] for name in self.own_columns & extra_info.keys()}
            reward_columns = {**added_results, **reward_results, "environment": own_result["reward_score"]}
            if _has_agent_reward(field_dicts):
                del reward_columns["environment"]
            batch_columns |= {name: [None] * (len(ids_by_output) - 1) + [number] for name, number in reward_columns.items()}
        output_number_n = torch.arange(len(ids_by_output))
        rollout_n = torch.zeros_like(output_number_n)
        steps = Steps(rollout_n, output_number_n, batch_columns.get("anchor")) if len(ids_by_output) > 1 else None
        batch = Batch.jagged(ids_by_output, rollout_n, sampled=sampled_masks, columns=batch_columns, steps=steps)
        return batch, length_n, all(mask is not None for mask in agent_masks)

    def _packed(self, read_batch: ReadBatch, batch: Batch, length_n: list[int], masked: bool) -> dict[str, Any]:
        """Return a rollout's total reward, each objective's reward and the packed blocks, in the dict that verl expects."""
        turn_state_s = None  # only methods that compare turns by state need states
        if "anchor_s" in self.scheme.entry.inputs:
            turn_state_s = batch.columns.get("anchor")
            if read_batch.turns is not None and read_batch.batch.steps is not None:
                turn_state_s = read_batch.batch.steps.anchor_s
        reward_m = read_batch.worth_nm(self.scheme)[0].tolist()
        objective_rewards = list(zip(self.scheme.objectives, reward_m, strict=True))
        total_reward = sum(objective.weight * reward for objective, reward in objective_rewards if not math.isnan(reward))
        extra_info: dict[str, Any] = {  # verl's means skip None, but its filter of groups needs numbers
            objective.name: None if math.isnan(reward) and objective.name != self.filter_metric else reward
            for objective, reward in objective_rewards
        }
        extra_info[carry.KEY] = carry.pack(
            read_batch.reading, length_n, masked=masked, turns=read_batch.turns, anchor=turn_state_s
        )
        if self.filter_metric == ANY_REWARD:
            # verl leaves texts, unlike numbers, out of its validation means. Its group filter turns them into numbers.
            extra_info[ANY_REWARD] = str(_mark_rewards(read_batch, self.scheme))
        return {"reward_score": float(total_reward), "reward_extra_info": extra_info}

    def _columns(self, row_fields: list[Any], ids: list[list[int]]) -> dict[str, list[Any]]:
        row_dicts = []
        for row, ids_t in zip(row_fields, ids, strict=True):
            # verl's agent loop converts lists, such as the messages of a prompt, to arrays.
            row = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}
            gold_answer = (row.get("reward_model") or {}).get("ground_truth")
            text_columns = {
                "prompts": row.get("raw_prompt"),
                "completions": self.tokenizer.decode(ids_t, skip_special_tokens=True),
                "completion_ids": ids_t,
                "num_turns": row.get("__num_turns__"),
            }
            answer_column = {} if gold_answer is None else {"answer": gold_answer}
            extra_fields = {**(row.get("extra_info") or {}), **_agent_fields(row)}
            row_dicts.append({**row, **extra_fields, **answer_column, **text_columns})
        return columns_of(row_dicts, flat=False)


def _agent_fields(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that an agent loop gave to one of its outputs."""
    return row.get("tool_extra_fields") or {}


def _has_agent_reward(rows: list[dict[str, Any]]) -> bool:
    """Return whether an agent loop gave its own reward. That reward replaces the one of the user's reward manager."""
    return any("environment" in _agent_fields(row) for row in rows)


def _mark_responses(data: Any) -> None:
    """Mark the response tokens at the end of the attention mask, where verl's reward managers look for them.

    verl pads prompt and response together. So its mask is shifted if a rollout's outputs have prompts of different lengths.
    """
    length_n = data.non_tensor_batch.get("response_len")
    if length_n is not None:
        width = data.batch["responses"].shape[1]
        is_response_nt = torch.arange(width) < torch.tensor(length_n.tolist())[:, None]
        prompt_mask_nt = data.batch["attention_mask"][:, :-width]
        data.batch["attention_mask"] = torch.cat([prompt_mask_nt, is_response_nt.to(prompt_mask_nt.dtype)], dim=1)


def _mark_rewards(read_batch: ReadBatch, scheme: Scheme) -> float:
    """Return a number that is equal for rollouts with equal rewards. Rewards of weight 0 do not count.

    Return NaN if turns may get credit from this rollout alone: their rewards differ or are summed. verl then keeps the group.
    """
    scores, steps = read_batch.reading.scores, read_batch.batch.steps
    reward_sm = fill_missing(scores, scheme.objectives)
    if steps is not None and len(reward_sm):
        kind = scheme.entry.kind
        reward_sm, _ = worth_of_turns(scores, steps.trajectory_s, steps.step_s, objectives=scheme.objectives, kind=kind)
    has_weight_m = torch.tensor([objective.weight != 0 for objective in scheme.objectives], dtype=torch.bool)
    rewards_m = [set(column_s[~column_s.isnan()].tolist()) for column_s in reward_sm[:, has_weight_m].unbind(dim=1)]
    sums_turn_rewards = scheme.entry.kind == "step" and len(reward_sm) > 1 and any(rewards - {0.0} for rewards in rewards_m)
    if sums_turn_rewards or any(len(rewards) > 1 for rewards in rewards_m):
        return math.nan
    return float(zlib.crc32(repr([sorted(rewards) for rewards in rewards_m]).encode()))
