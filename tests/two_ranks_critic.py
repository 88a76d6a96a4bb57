"""Runs with a critic in two processes, which `launch_two_ranks.py` starts; each process saves what it has of them."""

import torch

from critic_small import state
from spanwise.errors import DivergedError
from trl_critic_small import ONE, Watched, critic_lines, fast, with_critic

#: One group of eight over all ranks, in two steps of gradient accumulation each.
SHAPE = {"num_generations": 8, "optim": "sgd", "learning_rate": 0.1}
CASES = {
    "objective": {"critic": fast()},
    "clipped": {"critic": fast(epochs=2, value_clip=0.2, gae_lambda_value=0.9), "objectives": ONE},
    "sae": {"critic": fast(), "method": "sae", "objectives": ONE},
    "whitened": {"critic": fast(), "objectives": ONE, "credit": {"whiten": True}},
    "waiting": {"critic": fast(policy_training_start_step=1)},
}


def break_on_one_rank(run):
    """The copy of the critic of rank 1 alone says NaN at the second batch."""
    learn = run.critic.learn

    def learning(*inputs, **options):
        if run.critic.batches == 1 and run.accelerator.process_index == 1:
            list(run.critic.model.parameters())[-1].data[0] = float("nan")
        return learn(*inputs, **options)

    run.critic.learn = learning


def train_all(folder):
    """Run all cases, and one that breaks; return the last trainer."""
    shape = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **SHAPE}
    for name, options in CASES.items():
        run = with_critic(f"{folder}/critic/{name}", **shape, **options)
        watched = Watched(run)
        run.train()
        kept = {"critic": state(run.critic.model), "policy": state(run.accelerator.unwrap_model(run.model))}
        kept |= {"lines": critic_lines(run), "values": [estimate.value_nts for estimate in watched.estimates]}
        kept |= {"advantages_nt": run.last_rollouts.advantages_nt}
        torch.save(kept, f"{folder}/critic {name}.{run.accelerator.process_index}.pt")
    run = with_critic(f"{folder}/broken", **shape)
    break_on_one_rank(run)
    try:
        run.train()
    except DivergedError:
        torch.save(run.state.global_step, f"{folder}/broken.{run.accelerator.process_index}.pt")
    return run
