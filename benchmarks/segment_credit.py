"""Speed of spanwise's own work: token ids to advantages per token, one core.

    python benchmarks/segment_credit.py [--completions 2048] [--tokens 4096] [--repeats 3]

Prints seconds and tokens per second of segmentation and credit, beside the time of two floors measured in the same run:
writing the (N, T) result once, and decoding the same tokens to text with the tokenizer-independent byte table alone.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np
import torch

from spanwise import Layout, Objective, Scores, Vocabulary, assign, spread
from spanwise.segment import find_blocks

LAYOUT = Layout({"solution": ["reasoning", "answer"], "confidence": ["analysis", "confidence"]})
OBJECTIVES = (
    Objective("correct", pays=("solution",), if_missing=0.0),
    Objective("brier", pays=("confidence",), given="correct", baseline="outcome", if_missing=-1.0),
)


def synthetic_batch(completions: int, tokens: int, *, words: int = 50_000) -> tuple[Vocabulary, torch.Tensor, torch.Tensor]:
    """Completions of four-byte words on average, each with its eight tags spelled as three tokens, ragged lengths."""
    rng = np.random.default_rng(0)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz      ", dtype=np.uint8)
    pieces = [bytes(rng.choice(letters, size=size)) for size in rng.integers(1, 8, words)]
    marks: list[tuple[int, ...]] = []
    for tag in LAYOUT.tags:
        for opening in (b"<", b"</"):
            marks.append(tuple(range(len(pieces), len(pieces) + 3)))
            pieces += [opening, tag.encode(), b">"]
    ids = rng.integers(0, words, (completions, tokens))
    length = rng.integers(tokens // 2, tokens + 1, completions)
    for row in range(completions):
        places = np.linspace(0, length[row] - 4, len(marks)).astype(int)
        for place, mark in zip(places, marks, strict=True):
            ids[row, place : place + 3] = mark
    mask = np.arange(tokens) < length[:, None]
    return Vocabulary(tuple(pieces)), torch.from_numpy(ids), torch.from_numpy(mask)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--completions", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    vocabulary, ids_nt, mask_nt = synthetic_batch(options.completions, options.tokens)
    group_n = torch.arange(options.completions) // options.group
    generator = torch.Generator().manual_seed(0)
    correct_n = torch.randint(0, 2, (options.completions,), generator=generator).double()
    report_n = torch.rand(options.completions, generator=generator).double()
    reward_nm = torch.stack([correct_n, -((report_n - correct_n) ** 2)], dim=1)
    nothing = torch.full((options.completions, 2, 2), torch.nan, dtype=torch.float64)
    scores = Scores(("correct", "brier"), reward_nm, torch.zeros(options.completions, 2, dtype=torch.int8), nothing)
    times: dict[str, list[float]] = {"segment": [], "credit": [], "floor: write (N, T) once": []}
    for _ in range(options.repeats):
        started = time.perf_counter()
        spans, _ = find_blocks(ids_nt, mask_nt, layout=LAYOUT, vocabulary=vocabulary)
        middle = time.perf_counter()
        credit = assign(scores, group_n, spans.present_nk, objectives=OBJECTIVES, block_names=LAYOUT.names)
        advantage_nt = spread(credit, spans)
        ended = time.perf_counter()
        torch.mul(credit.block_nk[:, :1].float(), mask_nt)
        times["segment"].append(middle - started)
        times["credit"].append(ended - middle)
        times["floor: write (N, T) once"].append(time.perf_counter() - ended)
    tokens = int(mask_nt.sum())
    best = {name: min(values) for name, values in times.items()}
    for name, seconds in best.items():
        print(f"{name:28s} {seconds:8.3f} s  {tokens / seconds / 1e6:8.1f} M tokens/s")
    total = best["segment"] + best["credit"]
    print(f"{'segment + credit':28s} {total:8.3f} s  {tokens / total / 1e6:8.1f} M tokens/s  ({tokens / 1e6:.1f} M tokens)")
    print(
        f"present blocks {spans.present_nk.double().mean():.3f}, non-zero advantages {(advantage_nt != 0).double().mean():.3f}"
    )
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
