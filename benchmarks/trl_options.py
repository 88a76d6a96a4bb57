"""Two options of the TRL trainer on the embedded task: who shares an importance ratio, and which groups are sampled anew.

    python benchmarks/trl_options.py [--study ratio_level|dynamic_sampling] [--arms token,block,...] [--seeds 0,1,2,3,4]
    python benchmarks/trl_options.py --study ratio_level --table      # trains nothing: the table of the runs that are there

The study `ratio_level`, in which a batch is trained on in four mini-batches, twice, so that seven of eight updates have ratios:

    token            the ratio of a token is its own (TRL's default)
    block            the tokens of a block share the geometric mean of their ratios
    sequence         the tokens of the completion share it (GSPO-token)
    block_tight      block, with a clip of .05 in place of .2
    sequence_tight   sequence, with the same clip

The study `dynamic_sampling`, in which useless groups give way to groups of other prompts, at most three times for a batch:

    off       no group is exchanged
    correct   a group is useless if all of its answers are right, or all wrong (DAPO)
    credit    a group is useless if no block gets credit

Everything else is recipes/confidence.yaml, 60 steps of 16 prompts x 16 completions. Every run ends with 512 held-out prompts x 8
samples. Runs that are there already are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from spanwise.commands.shared.samples import read_samples
from spanwise.commands.train.train import train
from spanwise.measure import compare_arms
from spanwise.recipe import load

SEEDS = (0, 1, 2, 3, 4)
FIGURES = ("accuracy", "ece", "brier", "format_rate")
Lines = Sequence[Mapping[str, Any]]


def _levels(level: str, **more: Any) -> dict[str, Any]:
    return {"mini_batches": 4, "trainer": {"importance_sampling_level": level, "num_iterations": 2}, **more}


#: Study -> arm -> what the arm changes in the recipe. The first arm is the one that the others are compared with.
STUDIES: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "ratio_level": {
        "token": _levels("token"),
        "block": _levels("block"),
        "sequence": _levels("sequence"),
        "block_tight": _levels("block", clip=0.05),
        "sequence_tight": _levels("sequence", clip=0.05),
    },
    "dynamic_sampling": {
        "off": {},
        "correct": {"trainer": {"dynamic_sampling": "correct"}},
        "credit": {"trainer": {"dynamic_sampling": "credit"}},
    },
}


def mean_of(lines: Lines, name: str, default: float | None = None) -> float:
    """Return the mean of a metric over the lines of a run."""
    values = [line[name] for line in lines if name in line]
    return fmean(values) if values or default is None else default


#: Study -> what else is shown of a run's metrics.
SHOWN: Mapping[str, Mapping[str, Callable[[Lines], float]]] = {
    "ratio_level": {"clipped": lambda lines: mean_of(lines, "clip_ratio/region_mean")},
    "dynamic_sampling": {
        "groups sampled per group trained": lambda lines: mean_of(lines, "sampling/groups", 1.0),
        "one answer for all": lambda lines: mean_of(lines, "credit/correct/unanimous"),
        "useless": lambda lines: mean_of(lines, "sampling/useless", 0.0),
    },
}


def train_all(study: str, arms: Sequence[str], seeds: Sequence[int], output: Path) -> None:
    """Train what is missing, one run after the other."""
    fixed = {"steps": 60, "eval_every": 0, "report": False, "keep_rollouts": 0}
    for seed, arm in itertools.product(seeds, arms):
        folder = output / f"{arm}-{seed}"
        if (folder / "summary.json").exists():
            continue
        changes = {**fixed, **STUDIES[study][arm], "seed": seed, "output": str(folder)}
        summary = train(load(Path("recipes/confidence.yaml"), changes), console=Console(quiet=True), overwrite=True)
        print(f"{time.strftime('%H:%M:%S')} {folder.name}: {summary['seconds']:.0f} s", flush=True)


def show(study: str, arms: Sequence[str], seeds: Sequence[int], output: Path) -> None:
    """Print the means over seeds with intervals, and the differences to the study's first arm paired by seed."""
    runs: dict[str, dict[int, dict[str, float | None]]] = {}
    for arm, seed in itertools.product(arms, seeds):
        folder = output / f"{arm}-{seed}"
        if (folder / "evaluation.parquet").is_file():
            figures = {name: value for name, value in read_samples(folder).figures().items() if name in FIGURES}
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            runs.setdefault(arm, {})[seed] = {**figures, **{name: of(lines) for name, of in SHOWN[study].items()}}
    if not runs:
        raise SystemExit(f"There is no run of {', '.join(arms)} in '{output}'; leave out --table to train them.")
    comparison = compare_arms(runs, reference=next(iter(STUDIES[study])))
    print(comparison.markdown(), *(difference.sentence() for difference in comparison.differences), sep="\n")


def main() -> None:
    """Train and show, or show alone."""
    options = argparse.ArgumentParser(description="Who shares an importance ratio, and which groups are sampled anew.")
    options.add_argument("--study", default="ratio_level")
    options.add_argument("--arms", help="all of the study, if it is left out")
    options.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    options.add_argument("--output", type=Path)
    options.add_argument("--table", action="store_true", help="train nothing")
    arguments = options.parse_args()
    if arguments.study not in STUDIES:
        options.error(f"--study is {arguments.study}; it is one of {', '.join(STUDIES)}.")
    arms = arguments.arms.split(",") if arguments.arms else list(STUDIES[arguments.study])
    seeds, output = [int(seed) for seed in arguments.seeds.split(",")], arguments.output or Path("runs") / arguments.study
    if not arguments.table:
        train_all(arguments.study, arms, seeds, output)
    show(arguments.study, arms, seeds, output)


if __name__ == "__main__":
    main()
