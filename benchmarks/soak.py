"""Two hours of training on the embedded task with everything on: does the memory of the run and of its workers stay flat?

A critic, evaluations, checkpoints, recorded rollouts, and an answer check that sends every completion to Math-Verify as a question
never asked before, some of which hang. Memory is what a process has allocated and holds (RssAnon; libraries are files, and not in
it), every ten seconds, of the training process and of each worker.

    python benchmarks/soak.py --hours 2 --output runs/soak      # prints the table of docs/reliability.md
    python benchmarks/soak.py --table runs/soak/memory.jsonl    # prints it once more
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

RECIPE = """\
task: digits
method: sae
critic: {learning_rate: 1.0e-3}
objectives:
  - {reward: "soak_reward.py:fresh", pays: [solution], name: correct}
  - {reward: brier, pays: [confidence], given: correct}
steps: 1000000
prompts: 4
group_size: 8
eval_every: 100
eval_prompts: 64
save_every: 100
keep_rollouts: 20
trainer: {save_total_limit: 2}
"""
REWARD = '''\
"""Right or wrong, asked anew each time: "7" against "7" becomes "7+31/64" against "7+31/64", which no cache has an answer to."""

import itertools

from spanwise.score import MathVerifier

count = itertools.count(1)
verifier = MathVerifier(workers=2, deadline=1.0, cache=4096)  # full before memory is looked at
HANGS = r"$9^{9^{9^{9}}}$"


def fresh(blocks, answer):
    pairs, said = [], [(block["solution"] or {}).get("answer") for block in blocks]
    for gold, text in zip(answer, said):
        n = next(count)
        pairs.append((f"{gold}+{n}/64", f"{(text or '').strip() or '?'}+{n}/64"))
    verdicts = verifier.equal(pairs)
    n = next(count)
    if n % 50 == 0:  # an answer that hangs, and costs a worker
        verifier.equal([("4", HANGS + " " * (n % 5000))])
    return [None if verdict.value != verdict.value else verdict.value for verdict in verdicts]
'''
SECONDS = 10.0


def main() -> None:
    """Train for some hours and print the table, or the table of an earlier time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--output", type=Path, default=Path("runs/soak"))
    parser.add_argument("--table", type=Path, help="a memory.jsonl written before")
    options = parser.parse_args()
    file = options.table or options.output / "memory.jsonl"
    if options.table is None:
        soak(options.output, seconds=options.hours * 3600)
    table([json.loads(line) for line in file.read_text().splitlines()])


def soak(place: Path, *, seconds: float) -> None:
    """Train into a folder for so long, and write down what each process holds."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "soak.yaml").write_text(RECIPE)
    (place / "soak_reward.py").write_text(REWARD)
    run = place / "run"
    command = [sys.executable, "-m", "spanwise.cli", "train", str(place / "soak.yaml"), "--output", str(run), "--overwrite"]
    with (place / "train.log").open("w") as log, (place / "memory.jsonl").open("w") as out:
        training = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        started = time.time()
        while time.time() - started < seconds and training.poll() is None:
            time.sleep(SECONDS)
            memory = {pid: megabytes(pid) for pid in (training.pid, *children(training.pid))}
            line = {"seconds": time.time() - started, "step": steps(run), "parent": memory.pop(training.pid)}
            print(json.dumps({**line, "workers": memory}), file=out, flush=True)
        if training.poll() is not None:
            sys.exit(f"The training ended by itself with exit code {training.returncode}; see {place / 'train.log'}.")
        training.terminate()
        training.wait()


def children(pid: int) -> Iterator[int]:
    """The processes that a process started and that are alive."""
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        yield from map(int, thread.read_text().split())


def megabytes(pid: int) -> float | None:
    """Memory of its own that a process holds, in MB; None where it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return next((int(line.split()[1]) / 1000 for line in lines if line.startswith("RssAnon:")), None)


def steps(run: Path) -> int:
    """How far a run is."""
    file = run / "metrics.jsonl"
    last = file.read_text().splitlines()[-1:] if file.is_file() else []
    return json.loads(last[0])["step"] if last else 0


def table(lines: list[dict]) -> None:
    """Medians by ten minutes, and the growth from the second of them to the last."""
    print("| minutes | steps | training, MB | a worker, MB | workers started so far |\n| --- | --- | --- | --- | --- |")
    pids: set[str] = set()
    rows = []
    for tenth in range(int(lines[-1]["seconds"] // 600) + 1):
        part = [line for line in lines if line["seconds"] // 600 == tenth]
        if len(part) < 30:  # the last, begun just now
            continue
        parent = [line["parent"] for line in part if line["parent"]]
        workers = [value for line in part for value in line["workers"].values() if value]
        pids |= {pid for line in part for pid in line["workers"]}
        rows.append((statistics.median(parent), statistics.median(workers)))
        print(
            f"| {tenth * 10} to {tenth * 10 + 10} | {part[-1]['step']} | {rows[-1][0]:.1f} | {rows[-1][1]:.1f} | {len(pids)} |"
        )
    if len(rows) > 2:
        growth = [f"{last / first - 1:+.1%}" for first, last in zip(rows[1], rows[-1], strict=True)]
        print(f"\nFrom minutes 10 to 20 to the last ten: training {growth[0]}, a worker {growth[1]}.")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
