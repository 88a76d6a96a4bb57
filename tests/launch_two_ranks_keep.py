"""Run by torchrun in test_trl_keeping.py: two steps whose run folder is written by one of two processes.

Usage: launch_two_ranks_keep.py FOLDER
"""

import sys

from trl_small import trainer
from two_ranks import end


def main():
    run = trainer(
        f"{sys.argv[1]}/run", per_device_train_batch_size=4, max_steps=2, learning_rate=0.01, keep_rollouts=1, report=True
    )
    run.train()
    end(run)


if __name__ == "__main__":
    main()
