"""Run by torchrun in test_trl_ranks.py: one gradient step per case, saved by the main process.

Usage: launch_two_ranks.py FOLDER ROWS_PER_RANK ACCUMULATION
"""

import sys

import torch
from datasets import Dataset

from spanwise import Laser, Objective
from trl_small import LAYOUT, SAID, SAID_WITH_TOOLS, scripted, step, trainer
from two_ranks import end

WHOLE = [Objective("correct", pays=LAYOUT.names, options={"verify": "exact"})]

CASES = {
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "tools": True},
    "bnpo": {"loss_type": "bnpo"},
}
#: The length that a share is counted in is that of all ranks' completions.
SHARES = {"batch": {"loss_type": "dapo", "tools": True, "extra": {"credit": {"per": "batch"}}}}
#: A score's reference, its weights of right and wrong and the groups it is mixed in are those of all ranks.
SCORE = Laser("?", beta=1.0, mix=0.25, self_rewarding_warmup=0, threshold=0.0, scale="none")
SCORES = {"laser": {"extra": {"credit": {"laser": SCORE}}}}
#: A method per token compares tokens of all ranks, so their masks are gathered too.
TOKENS = {
    "reinforce++": {"tools": True, "extra": {"method": "reinforce++", "objectives": WHOLE, "credit": {"per": "completion"}}}
}


#: Two groups that ask the same; what is sampled call by call, for the first rank and the second.
ASKED = Dataset.from_list([{"prompt": "2+2=", "answer": "4"}] * 2)
USELESS = [SAID[0]] * 4


def resampled():
    """A rollout function whose first rank samples a useless group at first; the second rank's is useful."""
    calls = [[*USELESS, *SAID[4:]], [*SAID[:4], *USELESS]]
    return lambda batch, trainer: scripted(calls.pop(0))(batch, trainer)


def main():
    folder, rows, accumulation = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for name, options in {**CASES, **SHARES, **SCORES, **TOKENS}.items():
        run = trainer(
            f"{folder}/{name}",
            said=SAID_WITH_TOOLS if options.get("tools") else SAID,
            per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation, num_generations=8, **options,
        )  # fmt: skip
        gradient = step(run)
        if run.accelerator.is_main_process:
            log = {key: value for key, value in run.state.log_history[0].items() if key.startswith("credit/")}
            kept = run.last_rollouts.advantages_nt
            torch.save({"gradient": gradient, "log": log, "advantages_nt": kept}, f"{folder}/{name}.pt")
    run = trainer(
        f"{folder}/sampling",
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        dynamic_sampling="credit",
        extra={"rollout_func": resampled(), "train_dataset": ASKED},
    )
    gradient = step(run)
    if run.accelerator.is_main_process:
        log = {key: value for key, value in run.state.log_history[0].items() if key.startswith("sampling/")}
        torch.save({"gradient": gradient, "log": log}, f"{folder}/sampling.pt")
    end(run)


if __name__ == "__main__":
    main()
