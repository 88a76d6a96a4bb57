"""What verl's V1 driver takes for a step, on a real TransferQueue: verl's `grpo`, spanwise, and verl's own metrics.

    python benchmarks/driver.py [--tokens 2048,8192] [--prompts 64,256,1024] [--group 16]   # in an environment with verl

Made rows lie in the queue, as verl's workers leave them: the readings packed as text, string ids, an int64 mask. Then verl's own
`_compute_advantage` and `_compute_metrics` run in this process, which is the driver: seconds by the clock, and memory at its peak
above what the process held before. The parts are measured in turn, and the least of the repeats counts.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import resource
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from spanwise import Layout, Objective, Reading, Scheme, Scores
from spanwise.engines.verl.carry import KEY, Rows, pack
from spanwise.types import Spans

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / part) for part in (".", "engines/verl")]

#: What verl notes of a row.
TAG = {"min_global_steps": 0, "max_global_steps": 0, "is_padding": False}
LAYOUT = Layout({"solution": ["answer"], "confidence": ["confidence"]})
SCHEME = Scheme(
    "bae",
    LAYOUT,
    [
        Objective("correct", pays="solution"),
        Objective("brier", pays="confidence", given="correct", baseline="outcome", if_missing=-1.0),
    ],
)


class MadeRows:
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


def measured(call: Callable[[], Any]) -> tuple[float, int]:
    """Seconds by the clock, and how far the resident memory rose above where it began."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before, peak, stop = _resident(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            peak[0] = max(peak[0], _resident())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    started = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - started
    peak[0] = max(peak[0], _resident())
    stop.set()
    watcher.join()
    del result
    return seconds, peak[0] - before


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def fill(batch: MadeRows, prompts: int, group: int) -> Any:
    """Put a made batch into the queue, one group at a time; return its keys, as the replay buffer gives them."""
    import transfer_queue as tq  # pyright: ignore[reportMissingImports]
    from tensordict import TensorDict  # pyright: ignore[reportMissingImports]
    from transfer_queue import KVBatchMeta  # pyright: ignore[reportMissingImports]
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict  # pyright: ignore[reportMissingImports]

    keys, length_n = [], batch.mask_nt.sum(dim=1)
    for prompt in range(prompts):
        rows = range(prompt * group, (prompt + 1) * group)
        uids = [batch.uids[n] for n in rows]
        fields = list_of_dict_to_tensordict(
            [
                {
                    "uid": batch.uids[n],
                    "num_turns": 2,
                    "extra_fields": {"reward_extra_info": {KEY: batch.rows.packed[n]}},
                    "prompts": torch.ones(256, dtype=torch.int64),
                    "responses": torch.ones(int(length_n[n]), dtype=torch.int64),
                    "response_mask": batch.mask_nt[n, : length_n[n]],
                    "rm_scores": batch.reward_nt[n, : length_n[n]],
                    "old_log_probs": torch.zeros(int(length_n[n])),
                }
                for n in rows
            ]
        )
        names = [f"{uid}_{n}_0" for n, uid in enumerate(uids)]
        values = TensorDict(fields, batch_size=group)
        tq.kv_batch_put(keys=names, partition_id="train", fields=values, tags=[TAG] * group)
        keys += names
    return KVBatchMeta(keys=keys, tags=[TAG] * len(keys), partition_id="train")


def compare(tokens: list[int], prompts: list[int], *, group: int, repeats: int) -> None:
    """Print one line per size and part; a queue runs."""
    import transfer_queue as tq  # pyright: ignore[reportMissingImports]
    from queue_small import trainer_of
    from verl_small import config_of

    with tempfile.TemporaryDirectory() as folder:
        ours = trainer_of(config_of(Path(folder), "data.max_response_length=16384"))
        verls = trainer_of(config_of(Path(folder), "data.max_response_length=16384", name="grpo"))
        for trainer in (ours, verls):
            trainer.use_critic = False
            trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
        for length, n_prompts in itertools.product(tokens, prompts):
            rows = MadeRows(n_prompts, group, length)
            keys = fill(rows, n_prompts, group)
            del rows
            parts = {
                "verl grpo": lambda keys=keys: verls._compute_advantage(keys, {}),
                "spanwise": lambda keys=keys: ours._compute_advantage(keys, {}),
                "verl's metrics": lambda keys=keys: verls._compute_metrics(keys, {}, {"step": 1.0}, 0, 0),
            }
            runs = [{name: measured(call) for name, call in parts.items()} for _ in range(repeats)]
            for name in parts:
                seconds, peaks = zip(*(run[name] for run in runs), strict=True)
                size = f"{n_prompts * group:6d} x {length:5d}"
                print(f"{size}  {name:20s} {min(seconds):7.2f} s  {min(peaks) / 2**20:7.0f} MiB", flush=True)
            tq.kv_clear(keys=keys.keys, partition_id="train")


def main() -> None:
    """Start Ray and a queue, and print one line per size and part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="2048,8192")
    parser.add_argument("--prompts", default="64,256,1024")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import ray  # pyright: ignore[reportMissingImports]
    import transfer_queue as tq  # pyright: ignore[reportMissingImports]
    import verl.trainer.main_ppo  # pyright: ignore[reportMissingImports]  # noqa: F401

    ray.init(num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    tq.init()
    tokens, prompts = ([int(word) for word in words.split(",")] for words in (options.tokens, options.prompts))
    compare(tokens, prompts, group=options.group, repeats=options.repeats)
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
