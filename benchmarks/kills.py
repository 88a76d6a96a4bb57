"""Kill -9 a training again and again, go on each time, and hold what is left at the end against a run that nobody touched.

Two runs of the embedded task with a critic and an entropy target. The first is killed at random moments, start-up among them. The
second is killed while a checkpoint is written: the moment that a file of it appears, each file in turn. What must be equal, to the
last bit: the weights of the policy and of the critic, both optimizers, the schedule, the random numbers, every line of the metrics
but its clocks, every recorded rollout.

    python benchmarks/kills.py --output runs/kills          # prints the table of docs/reliability.md; 20 kills of each kind
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from spanwise.engines.checkpoints import newest_checkpoint

RECIPE = """\
method: sae
steps: 300
prompts: 2
group_size: 8
start_steps: 100
eval_prompts: 2
eval_samples: 2
eval_every: 5
save_every: 1
keep_rollouts: 1
report: false
values: objective
objectives: [{reward: correct, pays: [solution]}, {reward: brier, pays: [confidence], if_missing: -1.0}]
critic: {learning_rate: 1.0e-3, epochs: 2, mini_batches: 2, warmup_steps: 3, policy_training_start_step: 1}
trainer: {save_total_limit: 2}
"""
#: The files of a checkpoint in the order in which they are written.
FILES = (
    "config.json", "model.safetensors", "tokenizer.json", "optimizer.pt", "scheduler.pt", "critic/model.safetensors",
    "critic/optimizer.pt", "rng_state.pth", "trainer_state.json", "entropy_ctrl_state.json", ".spanwise.json.*", "spanwise.json",
)  # fmt: skip
CLOCKS = ("seconds", "time", "share", "memory", "runtime", "per_second")


def main() -> None:
    """Run all three and print what differs: nothing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/kills"))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    place = options.output
    place.mkdir(parents=True, exist_ok=True)
    (place / "recipe.yaml").write_text(RECIPE)
    rng = random.Random(options.seed)
    whole = place / "whole"
    started = time.time()
    if not (whole / "summary.json").is_file():
        finish(start(whole, fresh=True))
    print(f"A run of 300 steps that nobody touched: {time.time() - started:.0f} s.", flush=True)
    print("\n| killed | times | before anything was saved | left a checkpoint half written | different at the end |")
    print("| --- | --- | --- | --- | --- |")
    for name, aimed in (("at random moments", False), ("while a checkpoint was written", True)):
        run = place / ("aimed" if aimed else "random")
        shutil.rmtree(run, ignore_errors=True)
        outcomes = [killed_once(run, aimed_at(run, n) if aimed else at_random(run, n, rng)) for n in range(options.kills)]
        finish(start(run, fresh=newest_checkpoint(run / "checkpoints")[0] is None))
        halves = [fault for _, fault in outcomes if fault]
        early = sum(not begun for begun, _ in outcomes)
        print(
            f"| {name} | {len(outcomes)} | {early} | {len(halves)} | {', '.join(differences(run, whole)) or 'nothing'} |",
            flush=True,
        )
        (place / f"{run.name}.json").write_text(json.dumps(outcomes, indent=1))


def start(run: Path, *, fresh: bool) -> subprocess.Popen[bytes]:
    """Begin a run, or go on with it."""
    how = [str(run.parent / "recipe.yaml"), "--output", str(run), "--overwrite"] if fresh else ["--resume", str(run)]
    with (run.parent / f"{run.name}.log").open("ab") as log:
        command = [sys.executable, "-m", "spanwise.cli", "train", *how]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end, which must be a good one."""
    if process.wait():
        sys.exit(f"A run ended with exit code {process.returncode}; see its log.")


def killed_once(run: Path, moment: Callable[[subprocess.Popen[bytes]], None]) -> tuple[bool, str]:
    """Start or go on, kill at a moment; whether training had begun, and what is wrong with the newest checkpoint."""
    before, there = newest_checkpoint(run / "checkpoints")[0], saved(run)
    process = start(run, fresh=before is None)
    moment(process)
    begun = saved(run) != there
    if process.poll() is not None:
        sys.exit(f"A run ended by itself, with exit code {process.returncode}, before it could be killed; see its log.")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    faults = newest_checkpoint(run / "checkpoints")[1]
    return begun, "; ".join(f"{name}: {fault}" for name, fault in faults.items())


def saved(run: Path) -> dict[str, int]:
    """Every file of the checkpoints, and when it was written."""
    return {str(file): file.stat().st_mtime_ns for file in (run / "checkpoints").rglob("*") if file.is_file()}


def number(checkpoint: Path) -> int:
    """Its step."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def at_random(run: Path, n: int, rng: random.Random) -> Callable[[subprocess.Popen[bytes]], None]:
    """Every fourth kill within eight seconds of the start, the others within two of the first line of metrics."""

    def moment(process: subprocess.Popen[bytes]) -> None:
        early, before = n % 4 == 0, lines(run)
        while not early and lines(run) <= before and process.poll() is None:
            time.sleep(0.01)
        until = time.time() + rng.uniform(0, 8.0 if early else 2.0)
        while time.time() < until and process.poll() is None:
            time.sleep(0.002)

    return moment


def lines(run: Path) -> int:
    """How many lines of metrics there are."""
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def aimed_at(run: Path, n: int) -> Callable[[subprocess.Popen[bytes]], None]:
    """The moment that the n-th file appears in the checkpoint after the newest."""
    file = FILES[n % len(FILES)]

    def moment(process: subprocess.Popen[bytes]) -> None:
        newest = newest_checkpoint(run / "checkpoints")[0]
        place = run / "checkpoints" / f"checkpoint-{1 if newest is None else number(newest) + 1}"
        for left in place.glob(file):  # by a kill before
            left.unlink()
        while not any(place.glob(file)) and process.poll() is None:
            pass

    return moment


def differences(run: Path, whole: Path) -> list[str]:
    """The names of all that differs between two runs."""
    last = Path("checkpoints") / "checkpoint-300"
    weights = (
        "model/model.safetensors",
        "critic/model.safetensors",
        last / "model.safetensors",
        last / "critic/model.safetensors",
    )
    unequal = [str(file) for file in weights if not same(load_file(run / file), load_file(whole / file))]
    for name in ("optimizer.pt", "scheduler.pt", "critic/optimizer.pt", "rng_state.pth"):
        left, right = (torch.load(place / last / name, weights_only=False) for place in (run, whole))
        unequal += [] if same(left, right) else [name]
    unequal += [] if metrics(run) == metrics(whole) else ["metrics.jsonl"]
    rollouts = {place: sorted(file.name for file in (place / "rollouts").glob("*.parquet")) for place in (run, whole)}
    unequal += [] if rollouts[run] == rollouts[whole] else ["names of rollouts"]
    for name in rollouts[whole]:
        left, right = (pq.read_table(place / "rollouts" / name) for place in (run, whole))
        unequal += [] if left.equals(right) else [f"rollouts/{name}"]
    entropies = [(place / last / "entropy_ctrl_state.json").read_text() for place in (run, whole)]
    return unequal + ([] if entropies[0] == entropies[1] else ["entropy_ctrl_state.json"])


def metrics(run: Path) -> list[dict[str, Any]]:
    """Every line without its clocks."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not any(word in name for word in CLOCKS)} for line in lines]


def same(left: Any, right: Any) -> bool:
    """Whether two things that torch saved are equal to the last bit."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    return bool((left == right).all()) if hasattr(left, "all") else left == right


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
