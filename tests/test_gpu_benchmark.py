"""benchmarks/gpu.py at its smallest size on the CPU; docs/gpu.md's numbers of waits are what is counted."""

import re
from pathlib import Path

import torch
from estimators import Batch, rows
from gpu import Waits, estimators, moved, overlapped, waits_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "gpu.md"


def test_the_page_says_how_often_each_estimator_waits_at_any_size():
    row = r"^\| ([^|]+) \| (\d+)(?:, and (\d+) for each 32 completions)? \|"
    written = {name: (int(count), int(more or 0)) for name, count, more in re.findall(row, PAGE.read_text(), re.M)}
    for size in ((32, 16), (64, 128)):
        batch = moved(Batch(*size), torch.device("cpu"))
        waits = {name: sum(waits_of(call).values()) for name, call, _, _ in rows(batch, None)}
        assert waits == {name: count + more * size[0] // 32 for name, (count, more) in written.items()}


def test_waits_are_counted_by_hand():
    x = torch.tensor([1.0, 2.0, 3.0])
    with Waits() as waits:
        bool(x.any())  # one number is asked for
        x[x > 1]  # its size depends on the values
        x[:2] * 2
    assert waits.counts == {"_local_scalar_dense": 1, "index": 1}


def test_it_runs_at_its_smallest_size(capsys):
    estimators(Batch(32, 16), torch.device("cpu"), 1)
    overlapped(2, 64, 64, 1, torch.device("cpu"))
    seen = capsys.readouterr().out
    assert seen.count(" 0.0e+00 ") == 9  # here the device is the CPU itself
    assert "% of the segmentation is hidden" in seen
