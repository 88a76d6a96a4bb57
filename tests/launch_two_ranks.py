"""Run by torchrun in test_trl_ranks.py: trainings in two processes, which save what each one saw.

Usage: launch_two_ranks.py FOLDER
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
from datasets import Dataset

import two_ranks_steps
from critic_small import state
from spanwise.errors import DivergedError
from trl_critic_small import ONE, Watched, critic_lines, fast, with_critic
from trl_small import SAID, scripted, step, trainer

HALF, QUARTER = {"per_device_train_batch_size": 4}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
#: Two groups of one prompt: the samples of each call, for the first rank and the second.
ASKED = Dataset.from_list([{"prompt": "2+2=", "answer": "4"}] * 2)
USELESS = [SAID[0]] * 4
#: Two steps on one batch: in the second, DPPO drops tokens. TRL logs the policy loss only beside an entropy bonus.
DPPO = {"loss_type": "dppo_tv", "epsilon": 0.01, "num_iterations": 2, "max_steps": 2, "learning_rate": 0.05}
DPPO |= {"entropy_coef": 1e-6}
#: With a critic: one group of eight over all ranks, in two steps of gradient accumulation each.
CRITIC = {"num_generations": 8, "optim": "sgd", "learning_rate": 0.1}
CRITICS = {
    "objective": {"critic": fast()},
    "clipped": {"critic": fast(epochs=2, value_clip=0.2, gae_lambda_value=0.9), "objectives": ONE},
    "sae": {"critic": fast(), "method": "sae", "objectives": ONE},
    "whitened": {"critic": fast(), "objectives": ONE, "credit": {"whiten": True}},
    "waiting": {"critic": fast(policy_training_start_step=1)},
}


def launched(folder):
    """Run this script in two real processes, quietly and with one thread each; the folder that they have written to."""
    # accelerate's own launcher starts several CPU processes only through mpirun; torchrun sets the same variables.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(Path(__file__)), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def resampled(folder, second_call, **options):
    """The gradient and the log of a step; at the first call the first rank's group is useless, and the second rank's is useful."""
    calls = [[*USELESS, *SAID[4:]], second_call]
    extra = {"rollout_func": lambda batch, trainer: scripted(calls.pop(0))(batch, trainer), "train_dataset": ASKED}
    run = trainer(folder, dynamic_sampling="credit", extra=extra, **options)
    return {"gradient": step(run), "log": run.state.log_history[0]}


def train_critic(folder, name):
    run = with_critic(f"{folder}/critic/{name}", **QUARTER, **CRITIC, **CRITICS[name])
    watched = Watched(run)
    run.train()
    kept = {"critic": state(run.critic.model), "policy": state(run.accelerator.unwrap_model(run.model))}
    kept |= {"lines": critic_lines(run), "values": [estimate.value_nts for estimate in watched.estimates]}
    kept |= {"advantages_nt": run.last_rollouts.advantages_nt}
    torch.save(kept, f"{folder}/critic {name}.{run.accelerator.process_index}.pt")


def break_on_one_rank(folder):
    """Train with a critic whose copy on rank 1 alone says NaN at the second batch; return the trainer."""
    run = with_critic(f"{folder}/broken", **QUARTER, **CRITIC)
    learn = run.critic.learn

    def learning(*inputs, **options):
        if run.critic.batches == 1 and run.accelerator.process_index == 1:
            list(run.critic.model.parameters())[-1].data[0] = float("nan")
        return learn(*inputs, **options)

    run.critic.learn = learning
    try:
        run.train()
    except DivergedError:
        torch.save(run.state.global_step, f"{folder}/broken.{run.accelerator.process_index}.pt")
    return run


def main():
    folder = sys.argv[1]
    saved = {
        "useful": resampled(f"{folder}/useful", [*SAID[:4], *USELESS], **QUARTER),
        "useless": resampled(f"{folder}/useless", [*USELESS, *SAID[:4]], dynamic_sampling_rounds=1, **HALF),
    }
    dppo = trainer(f"{folder}/dppo", **HALF, **DPPO)
    dppo.train()
    if dppo.accelerator.is_main_process:
        torch.save({**saved, "dppo": dppo.state.log_history}, f"{folder}/sampling.pt")
    trainer(f"{folder}/run", **HALF, max_steps=2, learning_rate=0.01, keep_rollouts=1, report=True).train()
    two_ranks_steps.train_all(folder)
    for name in CRITICS:
        train_critic(folder, name)
    last = break_on_one_rank(folder)
    last.accelerator.wait_for_everyone()
    last.accelerator.end_training()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort a process that exits normally


if __name__ == "__main__":
    main()
