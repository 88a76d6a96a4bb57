"""Small real pieces of a verl run: its configuration, a model folder, rollouts as its agent loop makes them."""

import pickle
import warnings
from copy import deepcopy
from functools import cache

import numpy as np
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils import hf_tokenizer
from verl.workers.config import FSDPActorConfig

from tokenizers_small import byte_level

RECIPE = """
layout:
  solution: [reasoning, answer]
  confidence: [analysis, confidence]
objectives:
  - {reward: correct, pays: [solution], if_missing: 0.0}
  - {reward: brier, pays: [confidence], given: correct, baseline: outcome, if_missing: -1.0}
"""
WHOLE = "layout: {all: [answer]}\nmethod: rloo\nobjectives: [{reward: correct, pays: [all]}]\nper: completion\n"
TEXT = "<reasoning>So</reasoning><answer>{}</answer><analysis>x</analysis><confidence>{}</confidence>"
#: The trainer of V0.
V0 = ("trainer.use_v1=False", "data.dataloader_num_workers=0", "data.val_batch_size=1")
#: A row of a dataset.
ROW = {"data_source": "small", "reward_model": {"ground_truth": "4"}, "extra_info": {}}


def actor_config(**more):
    return FSDPActorConfig(**{"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, **more})


@cache
def _defaults():
    """verl's own configuration as Hydra composes it, pickled: to load it takes a hundredth of the time of a deep copy."""
    with warnings.catch_warnings(action="ignore"), initialize_config_module("verl.trainer.config", version_base=None):
        return pickle.dumps(compose("ppo_trainer"))


def config_of(folder, *overrides, recipe=RECIPE, name="spanwise", plain=False):
    """verl's real configuration with Hydra's overrides, a recipe and a tokenizer; `plain`: with verl's own defaults."""
    path = folder / "recipe.yaml"
    path.write_text(recipe)
    if not (folder / "model").is_dir():
        tokenizer = byte_level()
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer.save_pretrained(folder / "model")
    needed = [
        f"algorithm.adv_estimator={name}",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "trainer.n_gpus_per_node=1",
    ]
    needed += [f"+algorithm.spanwise.recipe={path}"] if name == "spanwise" else []
    small = [
        "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "data.max_response_length=64", "data.train_batch_size=2",
    ]  # fmt: skip
    config = pickle.loads(_defaults())
    for override in OverridesParser.create().parse_overrides([*needed, *([] if plain else small), *overrides]):
        is_new = override.is_add() or override.is_force_add()
        OmegaConf.update(config, override.key_or_group, override.value(), force_add=is_new)
    return config


def manager_of(config):
    return load_reward_manager(config, hf_tokenizer(config.actor_rollout_ref.model.path), reward_router_address=None)


class Handle:
    """A reward worker in this process; Ray's handle is all that is replaced."""

    def __init__(self, manager):
        self.compute_score = self
        self.manager = manager

    async def remote(self, data):
        return await self.manager.run_single(data)


def outputs_of(tokenizer, texts, masks=None, **extra):
    outputs = []
    for n, text in enumerate(texts):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else text
        mask = [1] * len(ids) if masks is None else masks[n]
        row = {"prompt_ids": [1, 2], "response_ids": ids, "response_mask": mask, "num_turns": 2, "extra_fields": extra}
        outputs.append(AgentLoopOutput(**row, metrics=AgentLoopMetrics()))
    return outputs


def scored(manager, outputs, **row):
    """verl's own `AgentLoopWorker._compute_score` on the outputs of one rollout."""
    manager.loop.run_until_complete(scoring(manager, outputs, **row))
    return outputs


async def scoring(manager, outputs, **row):
    """`scored`, for a loop that already runs."""
    fields = deepcopy({**ROW, "raw_prompt": "2+2", **row})  # verl's own reward manager adds to `extra_info`
    await worker_of(manager)._compute_score(outputs, kwargs={name: _one(value) for name, value in fields.items()})


def worker_of(manager, kind=AgentLoopWorker, **more):
    """verl's agent loop worker, made and not run, beside one reward worker."""
    worker = kind.__new__(kind)
    usual = {"processor": None, "mm_processor_kwargs": {}, "distillation_enabled": False, "config": manager.config}
    vars(worker).update({**usual, "reward_loop_worker_handles": [Handle(manager)], **more})
    return worker


def _one(value):
    """The value of one row as a dataset's collate returns it: conversations are object arrays."""
    return np.array(value, dtype=object) if isinstance(value, list) else value
