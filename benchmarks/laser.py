"""A spoken confidence against a score read off one reserved token (LaSeR), and both together, on the embedded task.

    python benchmarks/laser.py [--arms outcome,blended,laser,...] [--seeds 0,1,2,3,4] [--output runs/laser]
    python benchmarks/laser.py --table [--charts docs/images]     # trains nothing: tables and pictures of the runs that are there
    python benchmarks/laser.py --cost                             # what the score costs of a training step

    outcome     bae: `brier` pays the confidence block, compared given the verdict (OCB); what it says is its confidence
    blended     the same with the blended baseline
    laser       nothing pays what the confidence block says; the loss of the score, and its mixing into the solution's advantage
    unbalanced  laser with a squared error in which every answer weighs the same
    both        outcome and laser
    both_unbalanced  outcome and unbalanced

All arms pay the same price on malformed tags, have the same budget (120 batches of 16 prompts x 16 completions) and start from the
same policy; every one ends with 512 held-out prompts x 8 samples. What is there already is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from rich.console import Console
from transformers import TrainerCallback

from spanwise.commands.shared.samples import Samples, read_samples
from spanwise.commands.train.train import train
from spanwise.measure import compare_arms, ece, reliability
from spanwise.recipe import Recipe, load

ARMS = ("outcome", "blended", "laser", "unbalanced", "both", "both_unbalanced")
SEEDS = (0, 1, 2, 3, 4)
#: Tuned on seeds 100 and 101 by the rollouts of the last 20 training batches.
LASER: Mapping[str, Any] = {"token": "<unk>", "alpha": 0.1, "self_rewarding_warmup": 40}
FIGURES = ("accuracy", "ece", "brier", "auroc", "format_rate")
FORMAT = {"reward": "format", "weight": 0.25, "options": {"empty": True}}
LAYOUT = {"solution": ["reasoning", "answer"], "confidence": ["analysis", "confidence"]}


def recipe_of(arm: str, seed: int, folder: Path | None, **changes: Any) -> Recipe:
    """What an arm trains."""
    spoken = {"reward": "brier", "pays": ["confidence"], "given": "correct", "if_missing": -1.0}
    spoken["baseline"] = "blended" if arm == "blended" else "outcome"
    objectives = [
        {"reward": "correct", "pays": ["solution"], "if_missing": 0.0},
        *([] if arm in ("laser", "unbalanced") else [spoken]),
        *(
            {"reward": "format", "name": f"{block}_format", "pays": [block], "weight": 0.25, "options": {"empty": True}}
            for block in LAYOUT
        ),
    ]
    laser = (
        None if arm in ("outcome", "blended") else {**LASER, **({"balanced": False} if arm.endswith("unbalanced") else {})}
    )
    fields = {"method": "bae", "layout": LAYOUT, "objectives": objectives, "laser": laser, "seed": seed, "report": False}
    return load(None, {**fields, "output": None if folder is None else str(folder), **changes})


def train_all(arms: Sequence[str], seeds: Sequence[int], output: Path) -> None:
    """Train what is missing, one run after the other."""
    for seed, arm in itertools.product(seeds, arms):
        folder = output / f"{arm}-{seed}"
        if not (folder / "summary.json").exists():
            summary = train(
                recipe_of(arm, seed, folder, eval_every=0, keep_rollouts=20), console=Console(quiet=True), overwrite=True
            )
            print(f"{time.strftime('%H:%M:%S')} {folder.name}: {summary['seconds']:.0f} s", flush=True)


# ------------------------------------------------------------------------------------------------------------ tables


def ways(arm: str, samples: Samples) -> dict[str, Samples]:
    """The confidences that an arm was trained to have, as the evaluations they give."""
    samples_by_name = {} if arm in ("laser", "unbalanced") else {f"{arm}, spoken": samples}
    return samples_by_name if samples.score_n is None else {**samples_by_name, f"{arm}, score": samples.by_score()}


def evaluated(arms: Sequence[str], seeds: Sequence[int], output: Path) -> dict[str, dict[int, dict[str, float | None]]]:
    """Figures and votes of every confidence, by seed; NaN-free."""
    runs: dict[str, dict[int, dict[str, float | None]]] = {}
    for arm, seed in itertools.product(arms, seeds):
        if (output / f"{arm}-{seed}" / "evaluation.parquet").is_file():
            for way, samples in ways(arm, read_samples(output / f"{arm}-{seed}")).items():
                values = {name: value for name, value in samples.figures().items() if name in FIGURES}
                curves = samples.votes(budgets=(8,), resamples=1)
                votes = {
                    f"vote of 8, {name}": curves[name].intervals[-1].value for name in ("majority", "weighted", "maxconf")
                }
                runs.setdefault(way, {})[seed] = {**values, **votes}
    return runs


def show(arms: Sequence[str], seeds: Sequence[int], output: Path) -> None:
    """The table of means with intervals over seeds, and differences to `outcome, spoken` paired by seed."""
    runs = evaluated(arms, seeds, output)
    if not runs:
        raise SystemExit(f"There is no run of {', '.join(arms)} in '{output}'; leave out --table to train them.")
    comparison = compare_arms(runs, reference="outcome, spoken")
    differences = [d.sentence() for d in comparison.differences]
    print(comparison.markdown(), *differences, sep="\n")
    print("ECE of `laser, score` by seed, its weights undone:", mended(seeds, output))


def mended(seeds: Sequence[int], output: Path) -> str:
    """ECE by seed of the balanced score with its weights undone: odds times right over wrong in the last training batches kept."""
    lines = list[str]()
    for seed in seeds:
        folder = output / f"laser-{seed}"
        last = sorted((folder / "rollouts").glob("*.parquet"))[-3:]
        right = torch.tensor([c or 0.0 for file in last for c in pq.read_table(file)["reward/correct"].to_pylist()])
        share, samples = float(right.mean()), read_samples(folder).by_score()
        if samples is not None:
            q_n, correct_n = samples.confidence_n, samples.correct[samples.first]
            q_n = share * q_n / (share * q_n + (1 - share) * (1 - q_n))
            known_n = ~(q_n.isnan() | correct_n.isnan())
            lines.append(f"{ece(q_n[known_n], correct_n[known_n]):.3f}")
    return ", ".join(lines)


# ------------------------------------------------------------------------------------------------------------- chart

#: What is drawn, and what the legend calls it.
DRAWN = {"outcome, spoken": "spoken", "laser, score": "LaSeR", "unbalanced, score": "LaSeR, not balanced"}


def draw(seeds: Sequence[int], output: Path, place: Path) -> None:
    """Accuracy against confidence in ten bins of at least 30 completions, all seeds together, on white and on dark."""
    import altair as alt

    points = list[dict[str, Any]]()
    for way, called in DRAWN.items():
        arm = way.split(",")[0]
        every = [ways(arm, read_samples(output / f"{arm}-{seed}"))[way] for seed in seeds]
        q_n = torch.cat([one.confidence_n for one in every])
        correct_n = torch.cat([one.correct[one.first] for one in every])
        bins = [one for one in reliability(q_n, correct_n) if one["count"] >= 30]
        points += [{"way": called, "confidence": one["confidence"], "accuracy": one["accuracy"]} for one in bins]
    even = alt.Chart(alt.InlineData(values=[{"confidence": q, "accuracy": q} for q in (0, 1)]))
    for name, background, ink in (("laser", "white", "#333"), ("laser-dark", "#16181d", "#ccc")):
        unit = alt.Scale(domain=[0, 1])
        x, y = alt.X("confidence:Q", scale=unit, axis=alt.Axis(grid=False)), alt.Y("accuracy:Q", scale=unit)
        colour = alt.Color(
            "way:N", scale=alt.Scale(domain=list(DRAWN.values())), legend=alt.Legend(orient="bottom", title=None)
        )
        lines = alt.Chart(alt.InlineData(values=points), width=320, height=300).mark_line(point=True)
        diagonal = even.mark_line(strokeDash=[4, 4], color="#888").encode(x=x, y=y)
        chart = (diagonal + lines.encode(x=x, y=y, color=colour)).configure(background=background)
        text: dict[str, Any] = {"labelColor": ink, "titleColor": ink}
        chart = chart.configure_view(stroke=None).configure_axis(**text).configure_legend(**text)
        place.mkdir(parents=True, exist_ok=True)
        chart.save(str(place / f"{name}.png"), scale_factor=2)


# -------------------------------------------------------------------------------------------------------------- cost


class _EverySecond(TrainerCallback):
    """A run whose every second step has no score; the processor seconds of each step, generation included."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.mine = trainer, trainer.parts
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self._started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Switch, and start the clock."""
        self.trainer.parts = self.mine if state.global_step % 2 == 0 else {}
        self._started = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop it."""
        self.seconds[bool(self.trainer.parts)].append(time.process_time() - self._started)
        self.trainer.parts = self.mine


def cost(steps: int) -> None:
    """How much longer a step is with the score: the median over pairs of neighbouring steps of a run that learns nothing."""
    from spanwise.commands.train import train as module  # its trainer is given one more callback

    print("| | a step, times the one after it without a score | share of the step |\n|---|---|---|")
    for name, options in (("loss", {"mix": 0.0}), ("loss and mixing", {"self_rewarding_warmup": 0})):
        made, switches = module.SpanGRPOTrainer, list[_EverySecond]()

        def watched(**parts: Any) -> Any:
            trainer = made(**parts)  # noqa: B023 - called in this turn of the loop
            switches.append(_EverySecond(trainer))  # noqa: B023
            trainer.add_callback(switches[0])  # noqa: B023
            return trainer

        module.SpanGRPOTrainer = watched
        try:
            with tempfile.TemporaryDirectory() as folder:
                small = {"eval_every": 0, "eval_prompts": 1, "eval_samples": 1, "keep_rollouts": 0, "learning_rate": 1e-12}
                laser = {"token": LASER["token"], "alpha": LASER["alpha"], **options}
                recipe = recipe_of("outcome", 0, Path(folder) / "run", steps=steps, laser=laser, **small)
                train(recipe, console=Console(quiet=True), overwrite=True)
        finally:
            module.SpanGRPOTrainer = made
        seconds = switches[0].seconds
        pairs = list(zip(seconds[True], seconds[False], strict=False))[2:]
        ratios = sorted(on / off for on, off in pairs)
        ranks = [
            len(ratios) / 2 + z * math.sqrt(len(ratios)) / 2 for z in (0.0, -1.96, 1.96)
        ]  # a median's own 95 % interval
        middle, low, high = (ratios[min(max(round(rank), 0), len(ratios) - 1)] for rank in ranks)
        print(
            f"| {name} | {middle:.3f} ({low:.3f}, {high:.3f}) | {1 - 1 / middle:.1%} ({1 - 1 / low:.1%}, {1 - 1 / high:.1%}) |"
        )


def main() -> None:
    """Train and show, or show alone, or measure the cost."""
    options = argparse.ArgumentParser(description="A spoken confidence, LaSeR, and both.")
    options.add_argument("--arms", default=",".join(ARMS))
    options.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    options.add_argument("--output", type=Path, default=Path("runs/laser"))
    options.add_argument("--table", action="store_true", help="train nothing")
    options.add_argument("--charts", type=Path, help="a folder for the picture")
    options.add_argument("--cost", action="store_true", help="of a training step")
    options.add_argument("--steps", type=int, default=300, help="of --cost")
    asked = options.parse_args()
    arms, seeds = asked.arms.split(","), [int(seed) for seed in asked.seeds.split(",")]
    if asked.cost:
        if asked.steps < 12:
            options.error(f"--steps is {asked.steps}; a median of pairs of steps needs at least 12.")
        cost(asked.steps)
        return
    if not asked.table:
        train_all(arms, seeds, asked.output)
    show(arms, seeds, asked.output)
    if asked.charts:
        draw(seeds, asked.output, asked.charts)


if __name__ == "__main__":
    main()
