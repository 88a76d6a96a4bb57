"""Run by torchrun in test_trl_ranks.py: trainings in two processes, which save what each one saw.

Usage: launch_two_ranks.py FOLDER
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
from datasets import Dataset

import two_ranks_critic
import two_ranks_steps
from trl_small import SAID, scripted, step, trainer

#: Two groups of one prompt: the samples of each call, for the first rank and the second.
ASKED = Dataset.from_list([{"prompt": "2+2=", "answer": "4"}] * 2)
USELESS = [SAID[0]] * 4
#: Two steps on one batch: in the second, DPPO drops tokens. TRL logs the policy loss only beside an entropy bonus.
DPPO = {"loss_type": "dppo_tv", "epsilon": 0.01, "num_iterations": 2, "max_steps": 2, "learning_rate": 0.05}
DPPO |= {"entropy_coef": 1e-6}


def resampled(folder, second_call, **options):
    """The gradient and the log of a step; at the first call the first rank's group is useless, and the second rank's is useful."""
    calls = [[*USELESS, *SAID[4:]], second_call]
    extra = {"rollout_func": lambda batch, trainer: scripted(calls.pop(0))(batch, trainer), "train_dataset": ASKED}
    run = trainer(folder, dynamic_sampling="credit", extra=extra, **options)
    return {"gradient": step(run), "log": run.state.log_history[0]}


def launched(folder):
    """Run this script in two real processes, quietly and with one thread each; the folder that they have written to."""
    # accelerate's own launcher starts several CPU processes only through mpirun; torchrun sets the same variables.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(Path(__file__)), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def end(run):
    """End a trainer's process once all processes are done."""
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort a process that exits normally


def main():
    folder = sys.argv[1]
    half, quarter = {"per_device_train_batch_size": 4}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    saved = {
        "useful": resampled(f"{folder}/useful", [*SAID[:4], *USELESS], **quarter),
        "useless": resampled(f"{folder}/useless", [*USELESS, *SAID[:4]], dynamic_sampling_rounds=1, **half),
    }
    dppo = trainer(f"{folder}/dppo", **half, **DPPO)
    dppo.train()
    if dppo.accelerator.is_main_process:
        torch.save({**saved, "dppo": dppo.state.log_history}, f"{folder}/sampling.pt")
    trainer(f"{folder}/run", **half, max_steps=2, learning_rate=0.01, keep_rollouts=1, report=True).train()
    two_ranks_steps.train_all(folder)
    end(two_ranks_critic.train_all(folder))


if __name__ == "__main__":
    main()
