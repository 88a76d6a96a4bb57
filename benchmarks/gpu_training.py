"""A policy of 100 million parameters on the task `fields`, K = 16: one number against credit by field, some minutes each.

    make gpu                                      # after benchmarks/gpu.py
    python benchmarks/gpu_training.py --width 64 --layers 2 --prompts 8 --seconds 60      # a small size, on a CPU

    one_number   the fields' rewards added up, minus the group's mean, over its standard deviation (`grpo`)
    by_field     each field's reward minus the group's mean pays the value of that field and the form (`bae`)

The arms have the `per` of their methods: completion and block.

The policy is trained from random weights on objects that are mostly wrong: the warm start of `fields`, at another size. Then both
arms go through `spanwise train`, each in a process of its own: the same model by its folder, the same prompts in the same order
from a file, the same learning rate. Training ends after some seconds of steps; evaluations do not count. The arms are compared
on prompts set aside, at evaluations that both have. The learning rate is half of what was best for both arms at width 64 and two
layers, and falls as 1 / width and as 1 / the root of the layers. It was not searched for at any other size.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import disable_progress_bars
from rich.console import Console
from transformers import TrainerCallback

from spanwise.commands.shared.progress import quiet, warm_up_progress
from spanwise.commands.train.train import train
from spanwise.recipe import load, scheme_of
from spanwise.tasks import Fields, warm_start
from spanwise.tasks.embedded import Course, embedded
from spanwise.tasks.warm_start import shortened

FIELDS = Fields(16)
METHODS = {"one_number": "grpo", "by_field": "bae"}
#: The table has the evaluations near these shares of the completions that both arms have.
SHARES = (1 / 8, 1 / 4, 1 / 2, 1)
#: More steps than any arm gets to; its time ends before.
MOST_STEPS = 100_000


class TimeLimit(TrainerCallback):
    """Ends a training when its optimizer steps, each with its sampling, have taken some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds_left = seconds
        self.started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start to measure a step."""
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the step's time off what is left, and end the training if nothing is."""
        self.seconds_left -= time.perf_counter() - self.started
        control.should_training_stop = control.should_training_stop or self.seconds_left <= 0


def course_of(width: int, layers: int) -> Course:
    """Return the warm start of the fields with a policy of another size."""
    course, shape = embedded(FIELDS).course, {"width": width, "heads": max(2, width // 64), "layers": layers}
    return dataclasses.replace(course, shape=shape, key={**course.key, **shape})


def usual_rate(width: int, layers: int) -> float:
    """Return a learning rate for both arms; docs/evidence_tables.md has the best for K = 16 at width 64 and two layers."""
    return 1e-3 * (64 / width) * (2 / layers) ** 0.5


def start_policy(width: int, layers: int, folder: Path, device: str, steps: int | None = None) -> str:
    """Train the warm start, or find it in the folder; `steps` shortens each of its two stages."""
    settings = None if steps is None else shortened(steps)
    progress = warm_up_progress(Console())
    options = {"cache_folder": folder, "progress": progress, "settings": settings, "device": device}
    return str(warm_start(course_of(width, layers), **options))


def write_prompts(file: Path, rows: int, seed: int) -> None:
    """Write prompts with their right objects, from which `spanwise train` sets some aside for evaluation."""
    problems = FIELDS.source.training(rows, rng=np.random.default_rng([seed, 2]))
    pairs = zip(problems.prompts, FIELDS.answers(problems), strict=True)
    file.write_text("".join(json.dumps({"question": prompt, "answer": answer}) + "\n" for prompt, answer in pairs))


def recipe_fields(arm: str) -> dict[str, Any]:
    """Return an arm's layout and objectives of the task `fields`, written out for a model and a dataset by name."""
    scheme = scheme_of(load(None, {"task": "fields", "fields": 16, "method": METHODS[arm]}), FIELDS.layout, FIELDS.longest)
    return scheme.plain()


def train_arm(arm: str, policy: str, dataset: Path, seconds: float, **fields: Any) -> dict[str, Any]:
    """Train an arm for some seconds; return its curve on held-out prompts by completions, and what it took."""
    quiet()
    disable_progress_bars()
    recipe = load(None, {
        **recipe_fields(arm), "model": policy, "dataset": str(dataset), "instruction": "", "steps": MOST_STEPS,
        "max_completion_length": FIELDS.longest, "micro_batch": fields["prompts"] * fields["group_size"], "warmup_steps": 0,
        "entropy_target": None, "eval_samples": 2, "save_every": 0, "keep_rollouts": 0, "report": False, **fields,
    })  # fmt: skip
    summary = train(recipe, console=Console(quiet=True), overwrite=True, callbacks=[TimeLimit(seconds)])
    per_step = recipe.prompts * recipe.group_size
    return {
        "curve": {point["step"] * per_step: fields_right(point) for point in summary["curve"]},
        "format": summary["final"]["format_rate"],
        "completions": summary["steps"] * per_step,
        "seconds": summary["step_seconds"],
        "bytes": peak_bytes(),
    }


def fields_right(figures: Mapping[str, Any]) -> float:
    """Return the share of the fields that follow from the prompt and are right."""
    return float(np.mean([figures[f"reward/equals.{name}"] for name in FIELDS.knowable]))


def peak_bytes() -> int:
    """Return the most memory that tensors on the GPU have taken, or without one the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def table_lines(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Write the figures of the arms as a table of Markdown, a line each; rows of equal completions are evaluations of all arms."""
    shared = sorted(set.intersection(*(set(arm["curve"]) for arm in arms.values())))
    equal = [min(shared, key=lambda place, share=share: abs(place - share * shared[-1])) for share in SHARES]
    rows = {
        **{
            f"fields right after {place:,} completions": [f"{arm['curve'][place]:.3f}" for arm in arms.values()]
            for place in sorted({0, *equal})
        },
        "fields right at the end of its time": [f"{arm['curve'][arm['completions']]:.3f}" for arm in arms.values()],
        "well-formed objects at the end": [f"{arm['format']:.3f}" for arm in arms.values()],
        "completions": [f"{arm['completions']:,}" for arm in arms.values()],
        "seconds of steps": [f"{arm['seconds']:.0f}" for arm in arms.values()],
        "peak memory, GB": [f"{arm['bytes'] / 1e9:.2f}" for arm in arms.values()],
    }
    head = ["held-out prompts", *(f"`{arm}`" for arm in arms)]
    return [
        f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *([name, *row] for name, row in rows.items()))
    ]


def in_own_process(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function in a fresh process, whose memory is its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments, **options).result()


def main() -> None:
    """Train the warm start and both arms, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=300.0, help="of training steps, for each arm")
    parser.add_argument(
        "--limit", type=float, default=960.0, help="seconds for all; arms get less if the warm start took long"
    )
    parser.add_argument("--prompts", type=int, default=32, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--rate", type=float, help="learning rate of both arms; default: by width and layers")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and sampling")
    parser.add_argument("--eval-every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--eval-prompts", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16_384, help="prompts in the file, those set aside included")
    parser.add_argument("--start-steps", type=int, help="of each of the two stages of the warm start, for a quick look")
    parser.add_argument("--output", default="runs/gpu")
    options = parser.parse_args()
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.perf_counter()
    policy = in_own_process(start_policy, options.width, options.layers, folder, device, options.start_steps)
    start_seconds = time.perf_counter() - started
    print(f"warm start: {policy}, {start_seconds:.0f} s", flush=True)
    seconds = min(options.seconds, (options.limit - start_seconds) / 2.5)  # of 2.5 shares half a share is for evaluations
    write_prompts(folder / "prompts.jsonl", options.rows, options.seed)
    fields = {
        "prompts": options.prompts, "group_size": options.group, "seed": options.seed, "eval_every": options.eval_every,
        "eval_prompts": options.eval_prompts, "learning_rate": options.rate or usual_rate(options.width, options.layers),
    }  # fmt: skip
    arms = {}
    for arm in METHODS:
        print(f"{arm}: {seconds:.0f} s of steps, and its evaluations", flush=True)
        arguments = (arm, policy, folder / "prompts.jsonl", seconds)
        arms[arm] = in_own_process(train_arm, *arguments, output=str(folder / arm), **fields)
    (folder / "arms.json").write_text(json.dumps({**vars(options), **fields, "arms": arms}))
    print(
        f"\nOf {FIELDS.count} fields the {len(FIELDS.knowable)} that follow from the prompt count. Learning rate "
        f"{fields['learning_rate']:.2g}, seed {options.seed}.\n"
    )
    print("\n".join(table_lines(arms)))


if __name__ == "__main__":
    main()
