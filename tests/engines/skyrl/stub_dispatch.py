"""The stand-in for SkyRL's GPU workers: a torch policy on the CPU behind the methods of `trainer.dispatch` that `train()` calls.

A critic, if the configuration names one, is SkyRL's own: its model, its worker's forward and backward pass, its loss. What stands
in: `flash_attn`, which SkyRL imports and calls for packed batches only, and the strategy that shards over GPUs.

Everything else of SkyRL is real: the trainer, its batches, padding, mini-batches, advantages, loss reduction and policy losses.
"""

import sys
import warnings
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
from skyrl.backends.skyrl_train.distributed import dispatch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, ppo_critic_loss
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


def critic_worker(cfg):
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


def call_critic(critic, method, *arguments):
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


def log_probs(model, sequences, attention_mask, width):
    """Log-probabilities of the last `width` tokens of each row, as a worker computes them."""
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(input_ids=sequences, attention_mask=attention_mask, position_ids=position_ids).logits
    chosen = sequences[:, -width:, None]
    return logits[:, -width - 1 : -1].float().log_softmax(dim=-1).gather(2, chosen).squeeze(2)


class StubDispatch:
    """`dp` ranks that are really one process; `trained` and `fitted` are the mini-batches that came to policy and critic."""

    def __init__(self, model, cfg, *, dp=1):
        self.model, self.cfg, self.dp = model, cfg, dp
        self.optimizer = torch.optim.Adam(model.parameters(), lr=cfg.trainer.policy.optimizer_config.lr)
        self.trained, self.fitted = [], []
        self.critic = critic_worker(cfg) if cfg.trainer.critic.model.path else None

    async def save_weights_for_sampler(self):
        pass

    def empty_cache(self, model=None):
        pass

    init_weight_sync_state = finalize_pending_saves = empty_cache

    def get_timing_metrics(self):
        return {}

    def get_lcm_dp_size(self):
        return self.dp

    def stage_data(self, model, data, mini_batch_boundaries):
        with patch.object(dispatch.ray, "put", lambda chunk: chunk):
            return dispatch.MeshDispatch.stage_chunks(self.dp, data, mini_batch_boundaries)

    @torch.no_grad()
    def forward(self, model, data):
        if model == "critic":
            return call_critic(self.critic, "forward", data)
        width = data.metadata["response_length"]
        rows = log_probs(self.model, data["sequences"], data["attention_mask"], width).tolist()
        return dispatch.WorkerOutput(loss_fn_outputs=[{"logprobs": row} for row in rows])

    def forward_from_staged(self, model, chunks):
        outputs = [output for chunk in chunks for output in self.forward(model, chunk).loss_fn_outputs]
        return dispatch.WorkerOutput(loss_fn_outputs=outputs)

    def forward_backward_from_staged(self, model, chunks):
        if model == "critic":
            self.fitted.append(chunks)
            parts = [call_critic(self.critic, "forward_backward", chunk).metrics for chunk in chunks]
            return dispatch.WorkerOutput(metrics={key: sum(part[key] for part in parts) / len(parts) for key in parts[0]})
        algorithm = self.cfg.trainer.algorithm
        policy_loss = PolicyLossRegistry.get(algorithm.policy_loss_type)
        total = 0.0
        self.trained.append(chunks)
        for chunk in chunks:
            now = log_probs(self.model, chunk["sequences"], chunk["attention_mask"], chunk.metadata["response_length"])
            loss, _ = policy_loss(
                now, chunk["action_log_probs"], chunk["advantages"], config=algorithm, loss_mask=chunk["loss_mask"]
            )
            loss.backward()
            total += loss.item()
        return dispatch.WorkerOutput(metrics={"policy_loss": total, "final_loss": total})

    def optim_step(self, model):
        if model == "critic":
            return call_critic(self.critic, "optim_step")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)
