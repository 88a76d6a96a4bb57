"""Whether two checkouts compute the same numbers: short seeded runs and credit files, recorded by each and compared digit by digit.

    git worktree add /tmp/before REVISION
    python benchmarks/same_numbers.py record /tmp/numbers/before --source /tmp/before
    python benchmarks/same_numbers.py record /tmp/numbers/after
    python benchmarks/same_numbers.py compare /tmp/numbers/before /tmp/numbers/after

Both recordings are of one machine: processors differ in the last digit. What is recorded: training with every kind of credit (a
baseline per block, one number, a critic, LaSeR, two attempts, fields, turns), its metrics, rollouts and evaluations, and
`spanwise credit` on each run and on the files of other trainers in tests/rollouts/written. Needs nothing of spanwise itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parents[1]
#: A run of a few steps after a warm start cut short.
SHORT = [
    "--steps=4", "--prompts=8", "--group-size=8", "--set=start_steps=150", "--set=eval_every=2", "--set=eval_prompts=32",
    "--set=eval_samples=2", "--set=keep_rollouts=1", "--set=report=false", "--overwrite",
]  # fmt: skip
CRITIC = "--set=critic={learning_rate: 1.0e-3, mini_batches: 2, policy_training_start_step: 1}"
LASER = "--set=laser={token: '<unk>', balanced: false, self_rewarding_warmup: 1}"
RUNS = {
    "bae": ["--method=bae"],
    "bae_hard_log": ["--method=bae", "--start=hard", "--calibration=log_score"],
    "blended": ["--method=bae", "--baseline=blended"],
    "bae_batch": ["--method=bae", "--baseline=batch"],
    "rlcr": ["--method=rlcr"],
    "grpo": ["--method=grpo"],
    "gdpo": ["--method=gdpo"],
    "rloo": ["--method=rloo"],
    "sae": ["recipes/sae.yaml", CRITIC],
    "ppo": ["recipes/ppo.yaml", CRITIC],
    "laser": ["recipes/laser.yaml", LASER],
    "laser_grpo": ["recipes/laser.yaml", LASER, "--method=grpo", "--set=mini_batches=2"],
    "two_attempts": ["recipes/two_attempts.yaml"],
    "fields": ["--task=fields"],
}
CREDIT = {
    "bae": "grpo,rlcr,bae,bae:blended,gdpo",
    "two_attempts": "bae,rlcr,rloo",
    "laser": "bae,grpo",
    "sae": "recorded,grpo",
}
WRITTEN = ("verifiers", "verifiers_branches", "verifiers_failed", "verifiers_stream", "verl")
#: What is no number of the training.
_CLOCK = ("seconds", "share", "per_second", "time", "folder", "output", "recipe", "version", "memory", "tokenizer", "source")


def record(source: Path, output: Path, only: list[str]) -> None:
    """Run everything with the package of `source`; what failed is said and the rest goes on."""
    environment = {**os.environ, "PYTHONPATH": str(source / "src"), "SPANWISE_CACHE": str(output.resolve() / "cache"),
                   "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}  # fmt: skip
    spanwise = [sys.executable, "-m", "spanwise.cli"]
    commands = {f"train/{name}": [*spanwise, "train", *options, *SHORT] for name, options in RUNS.items()}
    commands |= {
        f"credit/{name}": [*spanwise, "credit", str(output.resolve() / "train" / name), f"--methods={methods}"]
        for name, methods in CREDIT.items()
    }
    commands |= {f"credit/{name}": [*spanwise, "credit", f"tests/rollouts/written/{name}"] for name in WRITTEN}
    turns = [
        "benchmarks/turns.py",
        "--seeds",
        "1",
        "--steps",
        "3",
        "--every",
        "1",
        "--arms",
        "gigpo,gigpo_turns,turns,summed",
    ]
    commands["turns"] = [sys.executable, *turns]
    for name, command in commands.items():
        if only and not any(part in name for part in only):
            continue
        place = output.resolve() / name
        process = subprocess.run(
            [*command, f"--output={place}"], cwd=source, env=environment, capture_output=True, text=True, check=False
        )
        print(f"{name}: {'ok' if process.returncode == 0 else process.stderr.strip().splitlines()[-1:]}", flush=True)


def compare(before: Path, after: Path) -> int:
    """Say every difference; the number of them."""
    differences = []
    names = sorted({path.relative_to(root) for root in (before, after) for path in _files(root)})
    for name in names:
        if not (before / name).exists() or not (after / name).exists():
            differences.append(f"{name}: only in {'after' if (after / name).exists() else 'before'}")
            continue
        differences += [f"{name}: {line}" for line in _differ(before / name, after / name)]
    print("\n".join(differences) or f"{len(names)} files: every number is the same, to the last digit")
    return len(differences)


def _files(root: Path) -> Iterator[Path]:
    patterns = ("*.parquet", "metrics.jsonl", "summary.json", "turns/*.json")
    return (path for pattern in patterns for path in root.rglob(pattern) if "cache" not in path.parts[len(root.parts) :])


def _differ(before: Path, after: Path) -> list[str]:
    if before.suffix == ".parquet":
        one, other = pq.read_table(before), pq.read_table(after)
        names = dict.fromkeys([*one.column_names, *other.column_names])
        return [f"column {name}" for name in names if not _same_column(one, other, name)]
    one, other = (list(_leaves(_read(path))) for path in (before, after))
    changed = sorted({key for key, _ in set(one) ^ set(other)})
    return [f"{key}: {[v for k, v in one if k == key][:1]} -> {[v for k, v in other if k == key][:1]}" for key in changed]


def _same_column(one: Any, other: Any, name: str) -> bool:
    if name not in one.column_names or name not in other.column_names:
        return False
    return repr(one[name].to_pylist()) == repr(other[name].to_pylist())


def _read(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if not any(word in name for word in _CLOCK):
                yield from _leaves(inner, f"{key}/{name}")
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _leaves(inner, f"{key}/{place}")
    else:
        yield key, repr(value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("do", choices=["record", "compare"])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--source", type=Path, default=HERE, help="the checkout whose src is run")
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    chosen = parser.parse_args()
    if chosen.do == "record":
        record(chosen.source.resolve(), chosen.folders[0], [part for part in chosen.only.split(",") if part])
    else:
        sys.exit(bool(compare(*chosen.folders)))
