"""Run by torchrun in test_trl_turns.py: one gradient step per scheme on scripted conversations, saved by the main process.

Usage: launch_two_ranks_turns.py FOLDER
"""

import os
import sys
import warnings

import torch

warnings.simplefilter("ignore")
torch.set_num_threads(1)

from trl_small import step  # noqa: E402
from trl_turns_small import SCHEMES, trainer  # noqa: E402


def main():
    folder = sys.argv[1]
    for name in SCHEMES:
        run = trainer(
            f"{folder}/{name}",
            name,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_generations=8,
        )
        gradient = step(run)
        if run.accelerator.is_main_process:
            log = {key: value for key, value in run.state.log_history[0].items() if key.startswith(("credit/", "rewards/"))}
            torch.save({"gradient": gradient, "log": log}, f"{folder}/{name}.pt")
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort a process that takes itself apart in the ordinary way
