"""Rollouts put into a real TransferQueue by verl's own agent loop worker, as V1 trainers find them."""

import uuid
import warnings

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl_small import ROW, config_of, manager_of, outputs_of, worker_of


def filled(manager, prompts):
    """Run `_agent_loop_postprocess` of verl's worker on every rollout; the batch of all rows, as the replay buffer gives it.

    prompts: one list of rollouts for each prompt; a rollout is a list of texts (its outputs) or (texts, masks).
    """
    worker = worker_of(manager, AgentLoopWorkerTQ.__ray_metadata__.modified_class)
    keys = []
    for rollouts in prompts:
        uid = str(uuid.uuid4())
        for session, rollout in enumerate(rollouts):
            texts, masks = rollout if isinstance(rollout, tuple) else (rollout, None)
            outputs = outputs_of(manager.tokenizer, texts, masks, min_global_steps=0, max_global_steps=0)
            row = {**ROW, "raw_prompt": np.array(["2+2"], dtype=object)}
            coroutine = worker._agent_loop_postprocess(outputs, False, uid=uid, session_id=session, global_steps=0, **row)
            manager.loop.run_until_complete(coroutine)
            keys += [f"{uid}_{session}_{n}" for n in range(len(outputs))]
    tags = tq.kv_list("train")["train"]
    return KVBatchMeta(keys=keys, tags=[tags[key] for key in keys], partition_id="train")


def trainer_of(config, mode="sync"):
    with warnings.catch_warnings(action="ignore"):
        return get_trainer_cls(mode)(config=config)


def made(folder, *overrides, **options):
    """A trainer of V1, made and not run, and the reward manager that it sets."""
    config = config_of(folder, *overrides, **options)
    return trainer_of(config), manager_of(config)


def fetch(batch, *names):
    """The rows of each field."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=[*names])
    return [list(data[name].unbind()) for name in names]


def put(batch, **fields):
    """Write fields as verl's workers do: a row for each row of the batch."""
    nested = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in fields.items()}
    tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=TensorDict(nested, batch_size=len(batch)))


def advantages_of(batch):
    return fetch(batch, "advantages")[0]
