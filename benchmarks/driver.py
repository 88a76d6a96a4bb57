"""What a step of the verl adapter costs on the driver, beside verl's own estimator, and what sharding by group would change.

    python benchmarks/driver.py [--tokens 8192] [--prompts 32,64,128,256] [--group 16] [--ask 1024]   # in an environment with verl

For each number of prompts: a batch as V1's trainer holds it (readings packed as text by the reward workers, string ids, an int64
mask), from there to advantages; the same for verl's `grpo`. CPU seconds of one thread and bytes at their peak, the inputs left out;
the growth is a line through the measured sizes, read at `--ask` prompts. A shard is an eighth of the groups on its own.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import resource
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spanwise import Layout, Objective, Reading, Scheme, Scores
from spanwise.engines.verl.carry import Rows, credited, pack
from spanwise.step import Step
from spanwise.types import Spans

LAYOUT = Layout({"solution": ["answer"], "confidence": ["confidence"]})
SCHEME = Scheme(
    "bae",
    LAYOUT,
    [
        Objective("correct", pays="solution"),
        Objective("brier", pays="confidence", given="correct", baseline="outcome", if_missing=-1.0),
    ],
)
STEP = Step(SCHEME)


class Held:
    """A batch of `prompts` groups: lengths uniform in [T/2, T], the last twentieth of each completion its report."""

    def __init__(self, prompts: int, group: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        rows = prompts * group
        length_n = torch.randint(tokens // 2, tokens + 1, (rows,), generator=generator)
        right_n = torch.randint(0, 2, (rows,), generator=generator).double()
        brier_n = -((torch.rand(rows, generator=generator).double() - right_n) ** 2)
        self.uids = np.array([f"{n // group:032x}" for n in range(rows)], dtype=object)
        self.mask_nt = (torch.arange(tokens) < length_n[:, None]).long()
        self.reward_nt = torch.zeros(rows, tokens)
        self.reward_nt[torch.arange(rows), length_n - 1] = right_n.float()
        packed = []
        for n, length in enumerate(length_n.tolist()):
            block_nt = torch.cat([torch.zeros(length - length // 20), torch.ones(length // 20)]).to(torch.int8)[None]
            spans = Spans.of_blocks(LAYOUT.names, block_nt)
            reward_nm = torch.stack([right_n[n], brier_n[n]])[None]
            unknown = torch.full((1, 2, 2), torch.nan, dtype=torch.float64)
            scores = Scores(SCHEME.names, reward_nm, torch.zeros(1, 2, dtype=torch.int8), unknown)
            packed.append(pack(Reading(scores, spans.length_nk, spans.fault_n, spans), [length], masked=True))
        self.rows = Rows(packed)

    def ours(self) -> torch.Tensor:
        """From packed readings to advantages."""
        return credited(self.rows, self.uids, self.mask_nt, STEP).adv_nt

    def shard(self, part: int, of: int) -> torch.Tensor:
        """The same for the groups of one shard."""
        here = slice(len(self.uids) * part // of, len(self.uids) * (part + 1) // of)
        return credited(Rows(self.rows.packed[here]), self.uids[here], self.mask_nt[here], STEP).adv_nt

    def verl(self) -> torch.Tensor:
        """Verl's `grpo`, as its trainer calls it."""
        from verl.trainer.ppo import core_algos  # pyright: ignore[reportMissingImports]

        return core_algos.compute_grpo_outcome_advantage(self.reward_nt, self.mask_nt, index=self.uids)[0]


def measured(call: Callable[[], Any]) -> tuple[float, int]:
    """CPU seconds of this thread, and how far the resident memory rose above where it began."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before, peak, stop = _resident(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            peak[0] = max(peak[0], _resident())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    started = time.thread_time()
    result = call()
    seconds = time.thread_time() - started
    peak[0] = max(peak[0], _resident())
    stop.set()
    watcher.join()
    del result
    return seconds, peak[0] - before


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """Print one row per size and the line at `--ask` prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--prompts", default="32,64,128,256")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--ask", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [int(size) for size in options.prompts.split(",")]
    table: dict[str, list[tuple[float, float]]] = {"spanwise": [], "verl grpo": [], "one shard of 8": []}
    carried = []
    for size in sizes:
        held = Held(size, options.group, options.tokens)
        carried.append(sum(len(text) for text in held.rows.packed))
        whole = held.ours()
        parts = torch.cat([held.shard(part, 8) for part in range(8)])
        assert torch.equal(whole, parts), "a shard of whole groups gives other numbers"
        del whole, parts
        calls = {"spanwise": held.ours, "verl grpo": held.verl, "one shard of 8": partial(held.shard, 3, 8)}
        runs = [{name: measured(call) for name, call in calls.items()} for _ in range(options.repeats)]  # in turn
        for name in calls:
            seconds, peaks = zip(*(run[name] for run in runs), strict=True)
            table[name].append((min(seconds), min(peaks) / 2**20))
            print(f"{size:5d} prompts  {name:15s} {table[name][-1][0]:8.3f} s  {table[name][-1][1]:8.0f} MiB", flush=True)
        del held
    print(f"carried as text: {carried[-1] / len(range(sizes[-1] * options.group)):.0f} characters per completion")
    for name, rows in table.items():
        seconds, peak = (np.polyfit(sizes, [row[i] for row in rows], 1) for i in (0, 1))
        at = [float(np.polyval(line, options.ask)) for line in (seconds, peak)]
        print(f"{options.ask:5d} prompts  {name:15s} {at[0]:8.2f} s  {at[1] / 1024:8.2f} GiB   (by the line)")


if __name__ == "__main__":
    main()
