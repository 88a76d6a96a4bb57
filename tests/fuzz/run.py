"""`make fuzz`: hostile completions by the million through everything that reads one, and how the time grows with the length.

    PYTHONPATH=tests:examples python tests/fuzz/run.py [--completions 1000000] [--segmenters 100000] [--giants 10] [--seed 0]
        [--no-linear]

Prints a line per family of tokenizers, segmenter and layout, and whatever did not hold: the seed of a batch makes it again.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from itertools import product
from tempfile import TemporaryDirectory

import linear
import numpy as np
import segmenters
import torch
from checks import Cell, check, kept, others
from hostile import LAYOUTS, families, giants, rows

HEAD = (
    f"{'tokenizer':28} {'segmenter':9} {'layout':12} {'completions':>11} {'tokens':>11} {'MB':>7} {'faults':>7} {'asked':>7} "
    f"{'seconds':>8} {'MB/s':>6}  worst"
)


def fuzzed(cell: Cell, name: str, count: int, *, batch: int, large: int, seed: int) -> tuple[str, list[str]]:
    failures: list[str] = []
    spent, worst = 0.0, (0.0, "")
    for number, first in enumerate(range(0, count, batch)):
        chunk = rows(f"{seed}/{name}/{number}", min(batch, count - first), cell.family, cell.layout)
        start = time.perf_counter()
        try:
            if number % 100 == 0:
                with TemporaryDirectory() as folder:
                    kept(cell, chunk[:64], folder)
            check(cell, chunk, sample=64)
        except Exception:
            failures.append(f"batch '{seed}/{name}/{number}' of {len(chunk)}: {traceback.format_exc(limit=-2)}")
        spent += time.perf_counter() - start
    for shape, chunk in giants(f"{seed}/{name}/giants", large, cell.family, cell.layout):
        start = time.perf_counter()
        try:
            _, reading = check(cell, chunk, sample=0)
            others(reading.text[0])
        except Exception:
            failures.append(f"a giant of '{shape}' in '{name}': {traceback.format_exc(limit=-2)}")
        took = time.perf_counter() - start
        spent, worst = spent + took, max(worst, (took, f"{len(chunk[0][0]) / 2**20:.2f} MB of {shape}"))
    completions, tokens, size, faults = cell.seen.tolist()
    line = (
        f"{cell.family.name:28} {cell.layout.segmenter:9} {name.rpartition('/')[2]:12} {completions:11,} {tokens:11,} "
        f"{size / 1e6:7.1f} {faults / max(completions, 1):7.1%} {cell.verifier.asked:7,} {spent:8.1f} {size / 1e6 / spent:6.2f}  "
        f"{worst[0]:.2f} s: {worst[1]}"
    )
    return line, failures


def by_segmenters(count: int, seed: int) -> list[str]:
    """A line per segmenter: about `count` completions in all, on three families of tokenizers."""
    every_family = families()
    cells = [(name, layout, words) for name, (layouts, words) in segmenters.SOUPS.items() for layout in layouts]
    each = -(-count // sum(len(segmenters.read_by(every_family, name)) for name, *_ in cells))
    failures: list[str] = []
    for name, layout, words in cells:
        start, seen = time.perf_counter(), np.zeros(2, dtype=np.int64)
        chosen = segmenters.read_by(every_family, name)
        for family, first in product(chosen, range(0, each, 256)):
            place = f"{seed}/{name}/{family.name}/{first}"
            try:
                seen += segmenters.check(layout, family, segmenters.rows(place, min(256, each - first), family, words))
            except Exception:
                failures.append(f"segmenter {name}, batch '{place}', {layout.blocks}: {traceback.format_exc(limit=-2)}")
        took, size = time.perf_counter() - start, each * len(chosen)
        share = f"{seen[1] / size:7.1%} faults {took:7.1f} s"
        print(f"{name:15} {size:9,} completions {seen[0]:11,} tokens {share}", flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--completions", type=int, default=1_000_000)
    parser.add_argument("--segmenters", type=int, default=100_000, help="completions for all other segmenters together")
    parser.add_argument("--giants", type=int, default=10, help="in each cell")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-linear", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = {f"{family.name}/{name}": Cell(family, layout) for family in families() for name, layout in LAYOUTS.items()}
    each = -(-options.completions // len(cells))
    print(HEAD, flush=True)
    failures: list[str] = []
    for name, cell in cells.items():
        line, problems = fuzzed(cell, name, each, batch=options.batch, large=options.giants, seed=options.seed)
        failures += problems
        print(f"{line}{f'  {len(problems)} FAILURES' if problems else ''}", flush=True)
    seen = sum(cell.seen for cell in cells.values())
    print(
        f"{seen[0]:,} completions, {seen[1]:,} tokens, {seen[2] / 1e6:,.1f} MB, {seen[3]:,} malformed: {len(failures)} failures"
    )
    failures += by_segmenters(options.segmenters, options.seed)
    print(f"{len(failures)} failures in all")
    print("\n".join(failures))
    if not options.no_linear:
        print()
        linear.table()
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
