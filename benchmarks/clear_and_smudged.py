"""What the arms of a comparison say on the prompts that can be known and on those that cannot.

A prompt of the embedded task with a smudged operator hides a coin: reading it as `+` is right with probability .7. Without one, a
trained policy is nearly always right. The ECE of both together can hide that a baseline is off on either.

    python benchmarks/clear_and_smudged.py runs/easy-log_score-g4
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from spanwise.commands.shared.samples import Samples, read_samples
from spanwise.measure import compare_arms, ece
from spanwise.tasks import digits_task


def figures(samples: Samples, smudged_p: Tensor) -> dict[str, float | None]:
    """Accuracy, mean confidence and ECE of the clear and the smudged prompts; the share of reports of .95 or more."""
    correct_n, confidence_n = samples.correct[samples.first], samples.confidence_n
    known_n = ~(correct_n.isnan() | confidence_n.isnan())
    values: dict[str, float | None] = {}
    for name, here_p in (("clear", ~smudged_p), ("smudged", smudged_p)):
        here_n = known_n & here_p[samples.prompt_n]
        values[f"{name} accuracy"] = float(correct_n[here_n].mean())
        values[f"{name} confidence"] = float(confidence_n[here_n].mean())
        values[f"{name} ece"] = ece(confidence_n[here_n], correct_n[here_n])
    values["says .95 or more"] = float((confidence_n[known_n] >= 0.95).double().mean())
    return values


def finished(folder: Path, arm: str, seeds: list[int]) -> Iterator[tuple[int, Samples]]:
    """The evaluations of an arm that are there."""
    for seed in seeds:
        if (folder / f"{arm}-{seed}" / "evaluation.parquet").is_file():
            yield seed, read_samples(folder / f"{arm}-{seed}")


def main() -> None:
    """Print the table and the paired differences."""
    options = argparse.ArgumentParser(description="What the arms say on clear and on smudged prompts.")
    options.add_argument("folder", type=Path, help="of spanwise compare")
    folder = options.parse_args().folder
    summary = json.loads((folder / "summary.json").read_text())
    task = digits_task(summary["recipe"].get("start", "easy"), seed=0, train_size=1)
    smudged_p = torch.tensor(["~" in prompt for prompt in task.evaluation["prompt"]])
    runs = {
        arm: {seed: figures(samples, smudged_p) for seed, samples in finished(folder, arm, summary["seeds"])}
        for arm in summary["arms"]
    }
    comparison = compare_arms(runs, reference=summary["reference"])
    print(comparison.markdown(), *comparison.sentences("clear"), sep="\n")


if __name__ == "__main__":
    main()
