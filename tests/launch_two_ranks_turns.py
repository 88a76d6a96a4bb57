"""Run by torchrun in test_trl_turns.py: one gradient step per scheme on scripted conversations, saved by the main process.

Usage: launch_two_ranks_turns.py FOLDER
"""

import sys

import torch

from trl_small import step
from trl_turns_small import SCHEMES, trainer
from two_ranks import end


def main():
    folder = sys.argv[1]
    for name in SCHEMES:
        shape = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_generations": 8}
        run = trainer(f"{folder}/{name}", name, **shape)
        gradient = step(run)
        if run.accelerator.is_main_process:
            log = {key: value for key, value in run.state.log_history[0].items() if key.startswith(("credit/", "rewards/"))}
            torch.save({"gradient": gradient, "log": log}, f"{folder}/{name}.pt")
    end(run)


if __name__ == "__main__":
    main()
