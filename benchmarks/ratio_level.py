"""One importance ratio for each token, for each block or for the completion, on the embedded task with several updates of a batch.

    python benchmarks/ratio_level.py [--arms token,block,sequence] [--seeds 0,1,2,3,4] [--output runs/ratio_level]
    python benchmarks/ratio_level.py --table      # trains nothing: the table of the runs that are there

    token          the ratio of a token is its own (TRL's default)
    block          the tokens of a block share the geometric mean of their ratios
    sequence       the tokens of the completion share it (GSPO-token)
    block_tight    block, with a clip of .05 in place of .2
    sequence_tight sequence, with the same clip

Everything else is recipes/confidence.yaml, 60 steps of it. A batch of 16 prompts x 16 completions is trained on in four
mini-batches, twice, so that seven of eight updates have ratios other than 1. Every run ends with 512 held-out prompts x 8 samples. Runs that are
there already are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console

from spanwise.commands.shared.samples import read_samples
from spanwise.commands.train.train import train
from spanwise.measure import compare_arms
from spanwise.recipe import load

ARMS = ("token", "block", "sequence")
SEEDS = (0, 1, 2, 3, 4)
TIGHT = 0.05
FIGURES = ("accuracy", "ece", "brier", "format_rate")
#: Logged by TRL at every update: the share of tokens (or of completions, if they share one ratio) whose ratio is clipped.
CLIPPED = "clip_ratio/region_mean"


def train_all(arms: Sequence[str], seeds: Sequence[int], output: Path) -> None:
    """Train what is missing, one run after the other."""
    for seed, arm in itertools.product(seeds, arms):
        folder = output / f"{arm}-{seed}"
        if (folder / "summary.json").exists():
            continue
        level, _, tight = arm.partition("_")
        options = {"importance_sampling_level": level, "num_iterations": 2}
        changes = {
            "trainer": options,
            "mini_batches": 4,
            "seed": seed,
            "output": str(folder),
            **({"clip": TIGHT} if tight else {}),
        }
        recipe = load(
            Path("recipes/confidence.yaml"), {"steps": 60, "eval_every": 0, "report": False, "keep_rollouts": 0, **changes}
        )
        summary = train(recipe, console=Console(quiet=True), overwrite=True)
        print(f"{time.strftime('%H:%M:%S')} {folder.name}: {summary['seconds']:.0f} s", flush=True)


def clipped(folder: Path) -> float:
    """Return the mean share of clipped ratios over the updates of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return fmean(line[CLIPPED] for line in lines if CLIPPED in line)


def show(arms: Sequence[str], seeds: Sequence[int], output: Path) -> None:
    """Print the means over seeds with intervals, and the differences to `token` paired by seed."""
    runs: dict[str, dict[int, dict[str, float | None]]] = {}
    for arm, seed in itertools.product(arms, seeds):
        folder = output / f"{arm}-{seed}"
        if (folder / "evaluation.parquet").is_file():
            figures = {name: value for name, value in read_samples(folder).figures().items() if name in FIGURES}
            runs.setdefault(arm, {})[seed] = {**figures, "clipped": clipped(folder)}
    if not runs:
        raise SystemExit(f"There is no run of {', '.join(arms)} in '{output}'; leave out --table to train them.")
    comparison = compare_arms(runs, reference="token")
    print(comparison.markdown(), *(difference.sentence() for difference in comparison.differences), sep="\n")


def main() -> None:
    """Train and show, or show alone."""
    options = argparse.ArgumentParser(description="An importance ratio per token, per block or per completion.")
    options.add_argument("--arms", default=",".join(ARMS))
    options.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    options.add_argument("--output", type=Path, default=Path("runs/ratio_level"))
    options.add_argument("--table", action="store_true", help="train nothing")
    arguments = options.parse_args()
    arms, seeds = arguments.arms.split(","), [int(seed) for seed in arguments.seeds.split(",")]
    if not arguments.table:
        train_all(arms, seeds, arguments.output)
    show(arms, seeds, arguments.output)


if __name__ == "__main__":
    main()
