"""What a critic is worth: PPO with GAE and with SAE beside GRPO, the same start, prompts and number of completions.

    python benchmarks/critic.py [--task digits,digits_long,walk] [--seeds 0,1,2,3,4] [--arms gae-1,gae-.95] [--output runs/critic]
    python benchmarks/critic.py --task walk --seeds 100 --rates .0003,.001,.003    # the grid that RATES was chosen from
    python benchmarks/critic.py --table [--charts docs/images]          # trains nothing: tables of the runs that are there

    gae-L              GAE with lambda L
    gae-adaptive-A     GAE, lambda = 1 - 1 / (A length), at least 0 (VAPO)
    sae-start-P        SAE: lambda .95 where the next token is less probable than P, else 1
    sae-end-P          SAE: lambda .95 where the token itself is less probable than P, else 1
    sae-start-P-lam-L  SAE with lambda L
    grpo               GRPO at G = 16: no critic
    rloo               the same without the division by the group's standard deviation
    gae-.95-pairs, sae-start-.2-pairs   as many completions, two of a prompt instead of sixteen: a critic needs no groups
    ...-exact          the values are the true ones (benchmarks/walk_truth.py), on the walks alone that the policy writes itself

The walks (benchmarks/walk_task.py) are trained as a user would train them: a model folder, a file of prompts and a reward function.

First a critic is fitted for each seed on completions of the start, which is not trained meanwhile; every arm with a critic starts
from it. On the walks with three warm starts, a critic is fitted for each start. Only the reward of the solution counts, and it lies
on the solution's last token. What is there already is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import torch
import yaml
from rich.console import Console
from walk_task import WALKS, walk_start, write_prompts

from spanwise.commands.compare.compare import ArmRun
from spanwise.commands.shared.progress import quiet
from spanwise.errors import SpanwiseError
from spanwise.measure import Interval, compare_arms, mean_interval
from spanwise.recipe import load

#: What every run of a task has; chosen on seed 100, by the rewards of training batches only.
TASKS: dict[str, dict[str, Any]] = {
    "digits": {
        "steps": 40,
        "prompts": 16,
        "group_size": 16,
        "learning_rate": 4e-4,
        "entropy": 0.0,
        "entropy_target": None,
        "eval_every": 10,
        "eval_samples": 4,
        "objectives": [{"reward": "correct", "pays": ["solution"]}],
    },
    "digits_long": {
        "steps": 40,
        "prompts": 8,
        "group_size": 16,
        "learning_rate": 4e-4,
        "warmup_steps": 5,
        "entropy": 0.0,
        "entropy_target": None,
        "eval_every": 10,
        "eval_prompts": 256,
        "eval_samples": 1,
        "objectives": [{"reward": "correct", "pays": ["solution"]}],
    },
}
_WALK = {
    "steps": 40,
    "prompts": 4,
    "group_size": 8,
    "warmup_steps": 0,
    "entropy": 0.0,
    "entropy_target": None,
    "eval_every": 0,
    "eval_prompts": 128,
    "eval_samples": 1,
    "layout": {"walk": []},
    "objectives": [{"reward": f"{Path(__file__).with_name('walk_task.py')}:right", "name": "correct", "pays": ["walk"]}],
}
TASKS |= dict.fromkeys(WALKS, _WALK)
#: How many warm starts a walk has: a run takes that of its seed, modulo this.
WALK_STARTS = {name: 2 if name == "walk" else 3 for name in WALKS}
#: What the critic's own training has, and how many steps it is fitted before the policy trains.
CRITICS: dict[str, dict[str, Any]] = {
    "digits": {"learning_rate": 5e-4, "mini_batches": 8},
    "digits_long": {"learning_rate": 1e-3, "mini_batches": 4},
}
AHEAD: dict[str, dict[str, int]] = {
    "digits": {"steps": 20, "prompts": 128, "group_size": 2},
    "digits_long": {"steps": 20, "prompts": 128, "group_size": 2},
}
CRITICS |= {name: {"learning_rate": 1e-3, "mini_batches": 4} for name in WALKS}
AHEAD |= {name: {"steps": 20, "prompts": 32, "group_size": 8} for name in WALKS}
#: The accuracy whose price in samples is looked for.
REACH = {"digits": (0.75, 0.8), "digits_long": (0.7, 0.8), **dict.fromkeys(WALKS, (0.5, 0.7))}
#: The learning rate of each arm of the even walk: of .0001, .0003 and .001 the one with the largest area on seeds 100 and 101.
#: The other walks were not searched for: every arm has .0003 there, the rate of lambda 1, GAE .9936 and SAE on the even walk.
RATES: dict[str, dict[str, float]] = {
    "walk": {
        "grpo": 1e-3, "gae-1": 3e-4, "gae-.95": 1e-4, "gae-0.9936": 3e-4, "sae-start-.2": 3e-4, "sae-start-.2-lam-.8": 1e-4,
    },
}  # fmt: skip
WALK_RATE = 3e-4


def _gae(**options: Any) -> dict[str, Any]:
    return {"method": "gae", "values": "objective", "options": options}


def _sae(boundary: str, threshold: float, lam: float = 0.95) -> dict[str, Any]:
    options = {"boundary": boundary, "threshold": threshold, "lam": lam}
    return {"method": "sae", "values": "objective", "options": options}


_PAIRS = {"group_size": 2}
ARMS: dict[str, dict[str, Any]] = {
    "gae-1": _gae(lam=1.0),
    "gae-.95": _gae(lam=0.95),
    "sae-start-.2": _sae("start", 0.2),
    "sae-start-.5": _sae("start", 0.5),
    "grpo": {"method": "grpo"},
    "gae-adaptive-.05": _gae(length_adaptive_alpha=0.05),
    "sae-end-.2": _sae("end", 0.2),
    "sae-end-.5": _sae("end", 0.5),
    "sae-start-.9": _sae("start", 0.9),
    "sae-end-.9": _sae("end", 0.9),
    "gae-adaptive-.4": _gae(length_adaptive_alpha=0.4),
    "sae-start-.5-lam-.5": _sae("start", 0.5, 0.5),
    "gae-.95-pairs": {**_gae(lam=0.95), **_PAIRS},
    "sae-start-.2-pairs": {**_sae("start", 0.2), **_PAIRS},
    "rloo": {"method": "rloo"},
}
_OF_DIGITS = list(ARMS)
#: The same horizon as SAE .95 has, in tokens, for each walk: .95^(1/L).
for _walk in WALKS.values():
    ARMS[f"gae-{_walk.horizon:.4f}"] = _gae(lam=_walk.horizon)
ARMS["sae-start-.2-lam-.8"] = _sae("start", 0.2, 0.8)
ARMS["sae-start-.2-lam-.5"] = _sae("start", 0.2, 0.5)
_WITH_TRUTH = ["gae-1", "gae-.95", "sae-start-.2", "sae-start-.2-lam-.5"]
_WITH_TRUTH += [f"gae-{walk.horizon:.4f}" for walk in WALKS.values()]
ARMS |= {f"{arm}-exact": ARMS[arm] for arm in _WITH_TRUTH}
#: The arms that are run on a walk if none are named.
_OF_WALK = {
    name: ["gae-1", "gae-.95", f"gae-{walk.horizon:.4f}", "sae-start-.2", *more]
    for name, walk in WALKS.items()
    for more in [["grpo", "sae-start-.2-lam-.8"] if name == "walk" else ["sae-start-.2-lam-.5"]]
}
ARMS_OF = {task: _OF_WALK.get(task, _OF_DIGITS) for task in TASKS}
#: These are run for every seed before any of the others.
FIRST = 6
FIGURES = ("held-out, at the end", "area", "area, all counted")
REFERENCES = ("gae-.95", "grpo")


# ------------------------------------------------------------------------------------------------------------ runs


def critic_seed(task: str, seed: int) -> int:
    """The seed whose critic a seed starts with: its own, or on the walks with three warm starts the first of its warm start."""
    return seed % WALK_STARTS[task] if task in WALKS and task != "walk" else seed


def pretraining(task: str, seed: int, folder: Path) -> ArmRun:
    """The run that fits the critic of a seed on a policy that does not move; its prompts are other ones than the arms'."""
    ahead = AHEAD[task]
    fields = {
        **TASKS[task],
        **_gae(lam=0.95),
        **ahead,
        "critic": {**CRITICS[task], "policy_training_start_step": ahead["steps"]},
        "eval_every": 0,
        "eval_samples": 1,
    }
    return _run("pre", seed, folder, {**fields, "task": task, "seed": 1000 + seed})


def planned(task: str, arm: str, seed: int, folder: Path, *, save: Sequence[int] = (), rate: float | None = None) -> ArmRun:
    """The run of an arm; that of a critic's arm goes on with the critic of its seed."""
    fields = {**TASKS[task], **ARMS[arm], "task": task, "seed": seed}
    if task in WALKS:
        fields["learning_rate"] = rate or RATES.get(task, {}).get(arm.removesuffix("-exact"), WALK_RATE)
    fields["prompts"] = TASKS[task]["prompts"] * TASKS[task]["group_size"] // fields["group_size"]
    if arm.endswith("-exact"):
        fields["critic"] = CRITICS[task]
    if _has_critic(arm):
        fields["critic"] = {**CRITICS[task], "model": str(folder / f"pre-{critic_seed(task, seed)}" / "critic")}
    if seed in save:
        fields["save_every"] = 20
    return _run(arm if rate is None else f"{arm}@{rate:g}", seed, folder, fields)


def _run(arm: str, seed: int, folder: Path, fields: Mapping[str, Any]) -> ArmRun:
    common = {"report": False, "keep_rollouts": 20, "output": str(folder / f"{arm}-{seed}")}
    if (walk := WALKS.get(fields["task"])) is not None:
        prompts = write_prompts(walk, folder / "prompts.jsonl", 8_000)
        model = walk_start(walk, seed=seed % WALK_STARTS[walk.name])
        common |= {"task": "confidence", "model": str(model), "dataset": str(prompts), "max_completion_length": walk.longest}
        fields = {name: value for name, value in fields.items() if name != "task"}
    return ArmRun(arm, seed, load(None, {**common, **fields}))


def _has_critic(arm: str) -> bool:
    return ARMS[arm]["method"] in ("gae", "sae") and not arm.endswith("-exact")


def in_order(tasks: Sequence[str], arms: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, str, int]]:
    """The arms that matter most for all seeds and tasks, then the others; seed by seed, so that an early look has whole pairs."""
    important = list(ARMS)[:FIRST]
    for stage in ([arm for arm in arms if arm in important], [arm for arm in arms if arm not in important]):
        for task in tasks:
            for seed in seeds:
                for arm in stage:
                    yield task, arm, seed


def train_all(
    task: str, arms: Sequence[str], seeds: Sequence[int], output: Path, save: Sequence[int], rates: Sequence[float | None]
) -> None:
    """Train what is missing, one run after the other; a run that fails is named, and the others go on."""
    plan = [(*entry, rate) for rate in rates for entry in in_order([task], arms, seeds)]
    failed: set[Path] = set()
    for count, (task, arm, seed, rate) in enumerate(plan):
        folder = output / task
        needed = [planned(task, arm, seed, folder, save=save, rate=rate)]
        if _has_critic(arm):
            needed.insert(0, pretraining(task, critic_seed(task, seed), folder))
        for run in needed:
            if run.folder in failed:
                break
            if not run.finished() and not _train(run, f"{count + 1}/{len(plan)} {task}"):
                failed.add(run.folder)
                break


def fit_critic(task: str, seed: int, folder: Path) -> None:
    """Fit the critic that a seed starts with, unless it is there."""
    run = pretraining(task, critic_seed(task, seed), folder)
    if not run.finished():
        _train(run, task)


def _train(run: ArmRun, title: str) -> bool:
    """Train one run in this process; whether it ended."""
    from spanwise.commands.train.train import train  # seconds of imports that a look at the tables does not need

    run.folder.parent.mkdir(parents=True, exist_ok=True)
    run.file.write_text(yaml.safe_dump(run.asked(), sort_keys=False))
    started = time.perf_counter()
    try:
        with _knowing() if "-exact" in run.arm else _telling(run):
            final = train(run.recipe, overwrite=True, console=Console(file=io.StringIO()))["final"]
        result = f"accuracy {_accuracy(final):.3f}"
    except SpanwiseError as error:
        final, result = None, f"failed: {error}"
    gc.collect()
    print(
        f"{time.strftime('%H:%M:%S')} {title} {run.folder.name}: {time.perf_counter() - started:.0f} s, {result}", flush=True
    )
    return final is not None


def _knowing() -> Any:
    """Let the critic's part in the trainer give the true values."""
    from walk_truth import ExactInTrl

    return mock.patch("spanwise.modes.critic.critic.CriticInTrl", ExactInTrl)


def _telling(run: ArmRun) -> Any:
    """Let an environment write the states if the run's walk is a told one."""
    walk = WALKS.get(run.folder.parent.name)
    if walk is None or not walk.is_told:
        return contextlib.nullcontext()
    from walk_told import ToldTrainer

    return mock.patch("spanwise.commands.train.train.SpanGRPOTrainer", ToldTrainer)


def _accuracy(figures: Mapping[str, Any]) -> float:
    """Return the accuracy of an evaluation, which a reward function of one's own calls a reward."""
    return float(figures["accuracy"] if "accuracy" in figures else figures["reward/correct"])


# --------------------------------------------------------------------------------------------------------- figures


class Found:
    """What a finished run left: its curves over samples, and the critic's figures by step.

    The accuracy of a training batch is that of new prompts under the policy as it was before it learned from them. There is one for
    every step and it costs nothing; the held-out prompts are asked every tenth step only.

    Args:
        run: that has ended.
        ahead: completions that its critic was fitted on before.
    """

    def __init__(self, run: ArmRun, ahead: int) -> None:
        self.ahead, self.size = ahead, run.recipe.prompts * run.recipe.group_size
        summary = json.loads((run.folder / "summary.json").read_text())
        points = {int(point["step"]) * self.size: _accuracy(point) for point in summary["curve"]}
        self.samples, self.accuracy = np.array(sorted(points)), np.array([points[x] for x in sorted(points)])
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        self.lines = [line for line in lines if "loss" in line]
        self.batches = np.array([line["accuracy"] for line in self.lines])

    def figures(self, reach: Sequence[float]) -> dict[str, float | None]:
        """Accuracy at the end, areas under the curve, what it took to reach an accuracy."""
        spent = self.size * np.arange(len(self.batches))
        late = np.interp(spent, self.ahead + spent, self.batches, left=float(self.accuracy[0]))
        values: dict[str, float | None] = {
            "held-out, at the end": float(self.accuracy[-1]),
            "area": float(self.batches.mean()),
            "area, all counted": float(late.mean()),
        }
        for goal in reach:
            values[f"to {goal:g}"] = self.reached(goal)
        return values

    def reached(self, goal: float, *, window: int = 5) -> float | None:
        """Samples until the mean accuracy of five batches on end first reaches a goal."""
        means = np.convolve(self.batches, np.ones(window) / window, mode="valid")
        above = np.flatnonzero(means >= goal)
        return float(self.size * (above[0] + window)) if len(above) else None

    def metric(self, name: str, first: int, last: int | None) -> float:
        """The mean of a logged metric over some steps; NaN where there is none."""
        values = [line[name] for line in self.lines if line.get(name) is not None][first:last]
        return float(np.mean(values)) if values else float("nan")


def found(
    task: str, arms: Sequence[str], seeds: Sequence[int], output: Path, save: Sequence[int], rates: Sequence[float | None]
) -> dict[str, dict[int, Found]]:
    """The runs that are there, by arm and seed."""
    ahead = AHEAD[task]["steps"] * AHEAD[task]["prompts"] * AHEAD[task]["group_size"]
    there: dict[str, dict[int, Found]] = {}
    for arm, rate in itertools.product(arms, rates):
        for seed in seeds:
            run = planned(task, arm, seed, output / task, save=save, rate=rate)
            if run.finished():
                there.setdefault(run.arm, {})[seed] = Found(run, ahead if _has_critic(arm) else 0)
    return there


# ---------------------------------------------------------------------------------------------------------- tables


def show(task: str, there: dict[str, dict[int, Found]]) -> None:
    """Everything as Markdown."""
    reach = REACH[task]
    runs = {arm: {seed: one.figures(reach) for seed, one in seeds.items()} for arm, seeds in there.items()}
    print(f"\n## {task}\n\n{_figures_table(there, runs, reach)}\n\n{_curve_table(there)}\n\n{_critic_table(there)}")
    for reference in ("gae-1", "sae-start-.2") if task in WALKS else REFERENCES:
        if reference in runs and len(runs) > 1:
            print(f"\nAgainst `{reference}`, paired by seed\n")
            print(_differences_table(runs, reference))


def _figures_table(there: dict[str, dict[int, Found]], runs: Any, reach: Sequence[float]) -> str:
    goals = [f"samples to {goal:g} (with the critic's)" for goal in reach]
    heading = ["arm", "seeds", *FIGURES, *goals]
    rows = []
    for arm, seeds in runs.items():
        cells = [_mean([one[name] for one in seeds.values()]) for name in FIGURES]
        ahead = next(iter(there[arm].values())).ahead
        cells += [_price([one[f"to {goal:g}"] for one in seeds.values()], ahead) for goal in reach]
        rows.append([f"`{arm}`", str(len(seeds)), *cells])
    return _markdown(heading, rows)


def _curve_table(there: dict[str, dict[int, Found]]) -> str:
    """Means of ten batches each; the edges in samples."""
    longest = max(len(one.batches) for seeds in there.values() for one in seeds.values())
    size = next(one.size for seeds in there.values() for one in seeds.values())
    parts = [(first, min(first + 10, longest)) for first in range(0, longest, 10)]
    rows = []
    for arm, seeds in there.items():
        at = [[float(one.batches[first:last].mean()) for one in seeds.values()] for first, last in parts]
        rows.append([f"`{arm}`", *map(_mean, at)])
    edges = [f"{first * size:,} to {last * size:,}" for first, last in parts]
    return _markdown(["accuracy of the batches, samples", *edges], rows)


def _critic_table(there: dict[str, dict[int, Found]]) -> str:
    parts = {"first 5 steps": (0, 5), "steps 6 to 20": (5, 20), "last 20": (-20, None)}
    rows = []
    for arm, seeds in there.items():
        if not any("critic/explained_variance" in line for one in seeds.values() for line in one.lines):
            continue
        explained = [[one.metric("critic/explained_variance", *part) for one in seeds.values()] for part in parts.values()]
        share = [one.metric("critic/share", 2, None) for one in seeds.values()]
        rows.append([f"`{arm}`", *map(_mean, explained), _mean(share)])
    return _markdown(
        ["arm", *(f"explained variance, {part}" for part in parts), "critic's share of the rest of a step"], rows
    )


def _differences_table(runs: Any, reference: str) -> str:
    compared = compare_arms(runs, figures=FIGURES, reference=reference)
    rows = []
    for arm in runs:
        of_arm = {one.figure: one for one in compared.differences if one.a == arm}
        if of_arm:
            cells = [f"{_signed(of_arm[name].interval)}, {of_arm[name].verdict}" for name in FIGURES]
            rows.append([f"`{arm}`", *cells])
    return _markdown([f"minus `{reference}`", *FIGURES], rows)


def _mean(values: Sequence[float | None]) -> str:
    """Mean ± half of the 95 % interval over seeds."""
    interval = _interval(values)
    if interval.count == 0:
        return "-"
    half = "" if interval.low != interval.low else f" ± {_short((interval.high - interval.low) / 2)}"
    return f"{_short(interval.value)}{half}"


def _interval(values: Sequence[float | None]) -> Interval:
    numbers = [float("nan") if value is None else value for value in values]
    return mean_interval(torch.tensor(numbers, dtype=torch.float64))


def _price(values: Sequence[float | None], ahead: int) -> str:
    """Mean samples, where every seed got there."""
    there = [value for value in values if value is not None]
    if len(there) < len(values):
        return f"reached in {len(there)} of {len(values)}"
    mean = float(np.mean(there))
    return f"{mean:,.0f}" + (f" ({mean + ahead:,.0f})" if ahead else "")


def _signed(interval: Interval) -> str:
    bounds = "" if interval.low != interval.low else f" ({interval.low:+.3f}, {interval.high:+.3f})"
    return f"{interval.value:+.3f}{bounds}"


def _short(value: float) -> str:
    return f"{value:.3f}".removeprefix("0") if value >= 0 else f"{value:.3f}"


def _markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [heading, ["---"] * len(heading), *rows])


# ---------------------------------------------------------------------------------------------------------- charts


def draw(task: str, there: dict[str, dict[int, Found]], place: Path) -> None:
    """Curves with pointwise intervals over seeds, three charts side by side: GAE and GRPO, SAE by either boundary."""
    import altair as alt

    sides = {
        "GAE and GRPO": ["gae-1", "gae-.95", "gae-adaptive-.05", "gae-adaptive-.4", "grpo"],
        "SAE, boundary: start": ["gae-.95", "sae-start-.2", "sae-start-.5", "sae-start-.9", "sae-start-.5-lam-.5"],
        "SAE, boundary: end": ["gae-.95", "sae-end-.2", "sae-end-.5", "sae-end-.9"],
    }
    if task in WALKS:
        learned = ["gae-1", "gae-.95", f"gae-{WALKS[task].horizon:.4f}", "sae-start-.2", "grpo@0.0003"]
        sides = {"learned critic": learned, "true values": ["gae-1-exact", "gae-.95-exact@0.0003", "sae-start-.2-exact"]}
    charts = []
    for title, arms in sides.items():
        rows = [row for arm in arms if arm in there for row in _points(arm, there[arm])]
        if not rows:
            continue
        base = alt.Chart(alt.InlineData(values=rows), title=title, width=230, height=200)
        names = [arm for arm in arms if arm in there]
        colour = alt.Color(
            "arm:N",
            scale=alt.Scale(domain=names),
            legend=alt.Legend(orient="bottom", columns=2, title=None, symbolOpacity=1),
        )
        x = alt.X("samples:Q", title="completions", axis=alt.Axis(grid=False, tickCount=4))
        y = alt.Y("accuracy:Q", title="accuracy", scale=alt.Scale(zero=False))
        band = base.mark_area(opacity=0.15).encode(x=x, y=alt.Y("low:Q", title="accuracy"), y2="high:Q", color=colour)
        charts.append(band + base.mark_line(strokeWidth=1.6).encode(x=x, y=y, color=colour))
    if charts:
        place.mkdir(parents=True, exist_ok=True)
        chart = alt.hconcat(*charts).resolve_scale(color="independent", y="shared").configure(background="white")
        chart.save(str(place / f"critic-{task}.svg"))


def _points(arm: str, seeds: dict[int, Found], *, window: int = 5) -> Iterator[dict[str, Any]]:
    """Running means of five batches, with pointwise intervals over seeds."""
    means = {seed: np.convolve(one.batches, np.ones(window) / window, mode="valid") for seed, one in seeds.items()}
    size = next(iter(seeds.values())).size
    for step in range(max(map(len, means.values()))):
        i = _interval([float(values[step]) for values in means.values() if step < len(values)])
        low, high = (i.low, i.high) if i.low == i.low else (i.value, i.value)
        yield {"arm": arm, "samples": size * (step + window / 2), "accuracy": i.value, "low": low, "high": high}


def main() -> None:
    """Run what is missing, then show everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits,digits_long")
    parser.add_argument("--arms", help="default: those that the task is documented with")
    parser.add_argument("--rates", default="chosen", help="learning rates, as in .0003,.001; chosen: those of RATES")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--output", default="runs/critic")
    parser.add_argument(
        "--save", default="0", help="seeds whose runs keep checkpoints, for fidelity along the run; '' for none"
    )
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--critics", action="store_true", help="fit the critics of the seeds, and train no policy")
    parser.add_argument("--charts", help="folder for the curves as SVG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
    rates = [None if rate == "chosen" else float(rate) for rate in options.rates.split(",")]
    seeds, save = ([int(one) for one in text.split(",") if one] for text in (options.seeds, options.save))
    for task in options.task.split(","):
        if options.critics:
            for seed in seeds:
                fit_critic(task, seed, Path(options.output) / task)
            continue
        arms = options.arms.split(",") if options.arms else ARMS_OF[task]
        if not options.table:
            train_all(task, arms, seeds, Path(options.output), save, rates)
        there = found(task, arms, seeds, Path(options.output), save, rates)
        if there:
            show(task, there)
            if options.charts:
                draw(task, there, Path(options.charts))


if __name__ == "__main__":
    main()
