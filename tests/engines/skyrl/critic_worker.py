"""SkyRL's own critic on the CPU: its model, its worker's forward and backward pass, its loss; no GPU, no ranks.

What stands in: `flash_attn`, which SkyRL imports and calls for packed batches only, and the strategy that shards over GPUs.
"""

import sys
import warnings
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import ppo_critic_loss
from skyrl.backends.skyrl_train.workers.worker import CriticWorkerBase


class CpuStrategy:
    def backward(self, loss, model, optimizer):
        loss.backward()

    def optimizer_step(self, optimizer, model, scheduler, name):
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return norm

    def all_reduce(self, values, op="mean", **options):
        return values


def worker(cfg):
    """A worker as SkyRL makes it for `trainer.critic.model.path`, with a new value head on that trunk."""
    path = cfg.trainer.critic.model.path
    assert (Path(path) / "model.safetensors").is_file(), "write_dataset saves the policy's weights there"
    critic = object.__new__(CriticWorkerBase)
    critic.cfg, critic.strategy, critic.critic_loss_fn = cfg.trainer, CpuStrategy(), ppo_critic_loss
    critic._micro_batches_accumulated = 0
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        torch.manual_seed(0)
        critic.model = _wrapper().get_llm_for_sequence_regression(path, "critic", bf16=False, init_value_head=True)
    critic.optimizer = torch.optim.AdamW(critic.model.parameters(), lr=cfg.trainer.critic.optimizer_config.lr)
    critic.scheduler = torch.optim.lr_scheduler.ConstantLR(critic.optimizer, factor=1.0)
    return critic


def call(critic, method, *arguments):
    with patch.object(torch.cuda, "current_device", lambda: "cpu"), warnings.catch_warnings(action="ignore"):
        return getattr(critic, method)(*arguments)


@cache
def _wrapper():
    names = ("flash_attn", "flash_attn.bert_padding")
    package, padding = (ModuleType(name) for name in names)
    package.__spec__, padding.__spec__ = (ModuleSpec(name, None) for name in names)
    padding.pad_input = padding.unpad_input = None
    stubs = dict(zip(names, (package, padding), strict=True))
    with patch.dict(sys.modules, {name: module for name, module in stubs.items() if name not in sys.modules}):
        from skyrl.backends.skyrl_train.workers import model_wrapper
    return model_wrapper
