"""Run by torchrun in test_trl_ranks.py: one gradient step per case, saved by the main process, and longer runs.

Usage: launch_two_ranks.py FOLDER
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
from datasets import Dataset

import trl_turns_small as turns
import two_ranks_critic
import two_ranks_steps
from spanwise import Laser, Objective
from trl_small import LAYOUT, SAID, SAID_WITH_TOOLS, scripted, step, trainer

WHOLE = [Objective("correct", pays=LAYOUT.names, options={"verify": "exact"})]
SHAPE = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}

CASES = {"dr_grpo": {"loss_type": "dr_grpo"}, "dapo": {"loss_type": "dapo", "tools": True}, "bnpo": {"loss_type": "bnpo"}}
#: A score's reference, its weights of right and wrong and the groups it is mixed in are those of all ranks.
SCORE = Laser("?", beta=1.0, mix=0.25, self_rewarding_warmup=0, threshold=0.0, scale="none")
#: Numbers over all ranks: the length that a share is counted in, what a method per token compares, and a score.
SHARED = {
    "batch": {"loss_type": "dapo", "tools": True, "extra": {"credit": {"per": "batch"}}},
    "reinforce++": {"tools": True, "extra": {"method": "reinforce++", "objectives": WHOLE, "credit": {"per": "completion"}}},
    "laser": {"extra": {"credit": {"laser": SCORE}}},
}


#: Two groups of one prompt: the samples of each call, for the first rank and the second.
ASKED = Dataset.from_list([{"prompt": "2+2=", "answer": "4"}] * 2)
USELESS = [SAID[0]] * 4


def resampled():
    """A rollout function whose first rank samples a useless group at first; the second rank's is useful."""
    calls = [[*USELESS, *SAID[4:]], [*SAID[:4], *USELESS]]
    return lambda batch, trainer: scripted(calls.pop(0))(batch, trainer)


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


def case(folder, name, **shape):
    """A trainer of one group of eight."""
    options = {**CASES, **SHARED}[name]
    return trainer(folder, scripts=SAID_WITH_TOOLS if "tools" in options else SAID, num_generations=8, **options, **shape)


def keep(folder, name, run):
    """Train one step; the main process saves its record of it."""
    record = {"gradient": step(run), "advantages_nt": run.last_rollouts.advantages_nt}
    if run.accelerator.is_main_process:
        log = run.state.log_history[0].items()
        record["log"] = {key: value for key, value in log if key.startswith(("credit/", "rewards/", "sampling/"))}
        torch.save(record, f"{folder}/{name}.pt")


def main():
    folder = sys.argv[1]
    for name in (*CASES, *SHARED):
        keep(folder, name, case(f"{folder}/{name}", name, **SHAPE))
    for name in turns.SCHEMES:
        keep(folder, f"turns {name}", turns.trainer(f"{folder}/turns {name}", name, num_generations=8, **SHAPE))
    extra = {"rollout_func": resampled(), "train_dataset": ASKED}
    keep(folder, "sampling", trainer(f"{folder}/sampling", dynamic_sampling="credit", extra=extra, **SHAPE))
    options = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 0.01}
    run = trainer(f"{folder}/run", **options, keep_rollouts=1, report=True)
    run.train()
    two_ranks_steps.train_all(folder)
    end(two_ranks_critic.train_all(folder))


if __name__ == "__main__":
    main()
