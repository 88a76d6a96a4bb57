"""V0's trainer, made and not run, and a batch as its rollout returns it."""

import warnings
from types import SimpleNamespace

import numpy as np
from verl.trainer.ppo import ray_trainer
from verl_small import ROW, outputs_of, worker_of


def trainer_of(config):
    """verl's `RayPPOTrainer`, made and not run."""
    with warnings.catch_warnings(action="ignore"):
        roles = {ray_trainer.Role.ActorRollout: None}
        return ray_trainer.RayPPOTrainer(config, None, roles, None, train_dataset=[0] * 8, val_dataset=[0])


def batch_of(manager, prompts, width=64):
    """A batch as V0's rollout returns it, with the arrays that `fit` adds."""
    rollout_config = SimpleNamespace(prompt_length=4, response_length=width)
    worker = worker_of(manager, tokenizer=manager.tokenizer, rollout_config=rollout_config)
    outputs, uids = [], []
    for uid, texts in prompts:
        ids, mask = texts if isinstance(texts, tuple) else (texts, None)
        (output,) = outputs_of(manager.tokenizer, [ids], None if mask is None else [mask])
        coroutine = worker._agent_loop_postprocess(output, False, **ROW, raw_prompt="2+2")
        outputs.append(manager.loop.run_until_complete(coroutine))
        uids.append(uid)
    batch = worker._postprocess(outputs)
    batch.non_tensor_batch["uid"] = np.array(uids, dtype=object)
    batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
    return batch


def credited(config, batch):
    return ray_trainer.compute_advantage(batch, adv_estimator=config.algorithm.adv_estimator, config=config.algorithm)
