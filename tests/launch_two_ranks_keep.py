"""Run by torchrun in test_trl_keeping.py: two steps whose run folder is written by one of two processes.

Usage: launch_two_ranks_keep.py FOLDER
"""

import os
import sys
import warnings

import torch

warnings.simplefilter("ignore")
torch.set_num_threads(1)

from trl_small import trainer  # noqa: E402


def main():
    run = trainer(
        f"{sys.argv[1]}/run", per_device_train_batch_size=4, max_steps=2, learning_rate=0.01, keep_rollouts=1, report=True
    )
    run.train()
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort a process that takes itself apart in the ordinary way
