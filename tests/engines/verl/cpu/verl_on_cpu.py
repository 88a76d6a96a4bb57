"""verl without a GPU, for tests: a CPU platform, a rollout by transformers' `generate`, and a record of what the losses saw.

verl imports it if `VERL_USE_EXTERNAL_MODULES=verl_on_cpu` is set; `run_verl.py` sets that and the other variables.
All else in a run is verl's own: configuration, Ray, TransferQueue, agent loop, reward loop, FSDP2, loss, weight sync.
"""

from __future__ import annotations

import asyncio
import os
import types
from contextlib import nullcontext
from pathlib import Path

import ray
import torch
import verl.workers.utils.losses as losses
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

RECORD = os.environ.get("VERL_ON_CPU_RECORD")


class _CpuModule(types.ModuleType):
    """`torch.cpu`; functions that only an accelerator has (memory figures, empty_cache) return 0 or do nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        answer = {"mem_get_info": (0, 0), "get_device_name": "CPU"}.get(name, 0)
        return getattr(torch.cpu, name, lambda *_, **__: answer)


def _always(answer):
    """A method that always returns this."""
    return lambda *_, **__: answer


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = _CpuModule("cpu")
    is_available, is_ipc_supported, device_count = _always(True), _always(False), _always(1)
    current_device = _always("cpu")  # verl moves tensors `.to(current_device())`
    communication_backend_name, visible_devices_envvar = _always("gloo"), _always("CUDA_VISIBLE_DEVICES")
    ray_resource_name = _always("GPU")  # a logical one: `ray_init.num_gpus=1`
    ray_noset_envvars = _always(["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"])
    get_device_capability, nvtx_range = _always((None, None)), _always(nullcontext())
    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = _always(None)
    profiler_start = profiler_stop = cudart = _always(None)


def _one_backend_per_device(init):
    """verl asks for `cpu:gloo,<device>:<backend>`, which is `cpu:gloo` twice here; torch takes a device once."""

    def init_process_group(backend=None, *args, **kwargs):
        return init(backend and ",".join(dict.fromkeys(backend.split(","))), *args, **kwargs)

    return init_process_group


torch.distributed.init_process_group = _one_backend_per_device(torch.distributed.init_process_group)


def _eager(load):
    """verl asks for flash attention for every critic, whatever the configuration says."""

    def from_pretrained(*args, **kwargs):
        return load(*args, **{**kwargs, "attn_implementation": "eager"})

    return from_pretrained


AutoModelForTokenClassification.from_pretrained = _eager(AutoModelForTokenClassification.from_pretrained)


@ray.remote
class GenerateServer:
    """Answers the requests that wait together as one batch."""

    def __init__(self, path, seed, max_new_tokens):
        torch.manual_seed(seed)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.max_new_tokens, self.step, self.waiting = max_new_tokens, 0, []

    def load(self, weights, step):
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        assert not unexpected, unexpected
        assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embedding
        self.step = step

    async def generate(self, request_id, prompt_ids, sampling_params, **_):
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((list(prompt_ids), dict(sampling_params), answer))
        if len(self.waiting) == 1:
            asyncio.get_running_loop().call_later(0.1, self._serve)
        return await answer

    def _serve(self):
        waiting, self.waiting = self.waiting, []
        for params in {tuple(sorted(params.items())): params for _, params, _ in waiting}.values():
            rows = [(prompt, answer) for prompt, setting, answer in waiting if setting == params]
            for (_, answer), tokens in zip(rows, self._sample([prompt for prompt, _ in rows], params), strict=True):
                answer.set_result(tokens)

    @torch.inference_mode()
    def _sample(self, prompts, params):
        pad, end = self.model.config.pad_token_id, self.model.config.eos_token_id
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        greedy = params["temperature"] == 0
        heat = 1.0 if greedy else params["temperature"]
        drawn = {"do_sample": True, "temperature": heat, "top_k": 0, "top_p": params["top_p"]}
        how = {"do_sample": False} if greedy else drawn
        limit = params.get("max_tokens", self.max_new_tokens)
        output = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=limit, return_dict_in_generate=True, output_logits=True, **how
        )
        new = output.sequences[:, width:]
        logp = (torch.stack(output.logits, 1).float() / heat).log_softmax(-1).gather(-1, new[..., None])[..., 0]
        for row, row_logp in zip(new.tolist(), logp.tolist(), strict=True):
            size = row.index(end) + 1 if end in row else len(row)
            reason = "completed" if end in row else "length"
            fields = {"global_steps": self.step}
            yield TokenOutput(token_ids=row[:size], log_probs=row_logp[:size], stop_reason=reason, extra_fields=fields)


class GenerateReplica(RolloutReplica):
    async def launch_servers(self):
        name = f"generate_{self.replica_rank}"
        server = GenerateServer.options(name=name).remote(
            self.model_config.path, self.config.seed + self.replica_rank, self.config.response_length
        )
        self.servers, self._server_handle, self._server_address = [server], server, name

    async def _nothing(self, *_, **__):
        return None

    sleep = wake_up = abort_all_requests = resume_generation = clear_kv_cache = _nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = _nothing


class GenerateRollout(BaseRollout):
    """The trainer's side: hands the weights to the server."""

    def __init__(self, *args, replica_rank=None, **options):
        super().__init__(*args, **options)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank is None else replica_rank
        self.is_leader_rank = True

    async def update_weights(self, weights, global_steps=None, **_):
        if hasattr(weights, "__aiter__"):
            weights = [pair async for pair in weights]
        server = ray.get_actor(f"generate_{self.replica_rank}")
        await server.load.remote({name: weight.detach().clone() for name, weight in weights}, global_steps or 0)

    async def resume(self, *_, **__):
        return None

    release = resume


RolloutReplicaRegistry.register("generate", lambda: GenerateReplica)
_ROLLOUT_REGISTRY["generate", "async"] = f"{__name__}.GenerateRollout"


@ray.remote
class Box:
    """Holds the weights between the process that trains and the one that samples."""

    def __init__(self):
        self.weights = asyncio.Queue()

    async def put(self, weights):
        await self.weights.put(weights)

    async def take(self):
        return await self.weights.get()


@CheckpointEngineRegistry.register("box")
class BoxEngine(CheckpointEngine):
    """Carries weights to servers that stand apart from the trainer, where verl would use NCCL."""

    __init__ = init_process_group = finalize = _always(None)
    build_topology = staticmethod(_always(({}, {})))

    def prepare(self):
        self.box = Box.options(name="weights", get_if_exists=True, lifetime="detached").remote()
        return {}

    async def send_weights(self, weights, global_steps=None):
        await self.box.put.remote({name: weight.detach().clone() for name, weight in weights})

    async def receive_weights(self, global_steps=None):
        for pair in (await self.box.take.remote()).items():
            yield pair


FIELDS = ("prompts", "responses", "response_mask", "advantages", "returns", "values", "old_log_probs")


def _recorded(loss, name):
    """Write the fields of every micro-batch as they enter the loss: token ids, mask, advantages and others."""
    folder, count = Path(RECORD or ".") / name, iter(range(10**9))

    def recorded(config, model_output, data, dp_group=None):
        rows = {name: list(column.unbind()) for name, column in data.select(*FIELDS, strict=False).items()}
        folder.mkdir(exist_ok=True)
        torch.save(rows, folder / f"{os.getpid()}-{next(count):05d}.pt")
        return loss(config=config, model_output=model_output, data=data, dp_group=dp_group)

    return recorded


if RECORD:
    losses.ppo_loss = _recorded(losses.ppo_loss, "actor")
    losses.value_loss = _recorded(losses.value_loss, "critic")
