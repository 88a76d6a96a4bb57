"""Critics that a method lacks, that none reads, or that cannot be what was meant."""

import json

import torch

from border.case import case, check, trained
from spanwise.credit import gae
from trl_critic_small import fast, with_critic
from trl_small import config, policy

GAE = {"method": "gae", "objectives": [{"reward": "correct", "pays": ["solution", "confidence"]}]}


def of_other_values(folder):
    (folder / "critic").mkdir()
    about = {"values": ["correct", "brier"], "head": "scalar", "bins": 51, "value_range": [0.0, 1.0], "tokenizer": "0"}
    (folder / "critic" / "critic.json").write_text(json.dumps(about))
    return trained(**GAE, critic={"model": "critic"})(folder)


def of_a_sharded_policy(folder):
    """A policy as ZeRO-3 leaves it in a process: every weight is elsewhere."""
    model = policy()
    for weight in model.parameters():
        weight.data = weight.new_empty(0)
    with_critic(folder, extra={"model": model})


def under_deepspeed(folder):
    """A critic that trains alone at first, in a script that DeepSpeed launched: transformers then sets `deepspeed_plugin`."""
    args = config(folder)
    args.deepspeed_plugin = "ZeRO-2"
    with_critic(folder, fast(policy_training_start_step=2), extra={"args": args})


CASES = {
    "`method: gae` without `critic`": trained(**GAE),
    "`method: bae` with a `critic`": trained(method="bae", critic={}),
    "`critic: {lerning_rate: 0.001}`": trained(**GAE, critic={"lerning_rate": 1e-3}),
    "`critic: {gae_lambda_policy: 0.95}`": trained(**GAE, critic={"gae_lambda_policy": 0.95}),
    "`critic: {mini_batches: 9}` with 8 completions a batch": trained(
        **GAE, prompts=2, group_size=4, critic={"mini_batches": 9}
    ),
    "`CriticConfig(policy_training_start_step=2)` in a run of two generation batches": lambda folder: with_critic(
        folder, fast(policy_training_start_step=2), max_steps=2
    ).train(),
    "`CriticConfig(policy_training_start_step=2)` with `fp16=True`": lambda folder: with_critic(
        folder, fast(policy_training_start_step=2), fp16=True
    ),
    "`CriticConfig(policy_training_start_step=2)` under DeepSpeed": under_deepspeed,
    "`CriticConfig()` with a policy whose weights DeepSpeed ZeRO-3 shards": of_a_sharded_policy,
    "`critic: {model: nowhere}`": trained(**GAE, critic={"model": "nowhere"}),
    "`critic: {model: runs/pre/critic}`, whose values are of other objectives": of_other_values,
    "`gae(..., bootstrap_n=...)` with an infinite value after a completion that was cut off": case(gae)(
        torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(2, 1).bool(), bootstrap_n=torch.tensor([0.0, torch.inf])
    ),
}

test = check(__doc__, CASES)
