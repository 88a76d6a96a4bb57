"""The bootstrap over prompts, alone and paired, against loops."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from measure_small import on_rows, reports
from spanwise.measure import (
    auroc,
    bootstrap,
    intervals,
    weighted_auroc,
    weighted_ece,
)


def test_bootstrap_against_a_loop_over_prompts():
    q, c, ids = reports()
    got = bootstrap(partial(weighted_auroc, q, c), ids, resamples=300, seed=5)
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(20, (300, 20), generator=generator).tolist()
    values = []
    for prompts in drawn:
        row = torch.cat([(ids == 7 + 3 * p).nonzero().flatten() for p in prompts])
        values.append(auroc(q[row], c[row]))
    assert got.value == auroc(q, c)
    assert (got.low, got.high) == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])))
    assert got.sem == pytest.approx(np.std(values, ddof=1))
    slow = bootstrap(on_rows(auroc, q, c), ids, resamples=300, seed=5)
    assert vars(slow) == pytest.approx(vars(got), abs=1e-12)


def test_bootstrap_in_any_order_and_any_chunks(monkeypatch):
    q, c, ids = reports(seed=3)
    whole = bootstrap(partial(weighted_ece, q, c), ids, resamples=50)
    order = torch.randperm(len(q), generator=torch.Generator().manual_seed(0))
    shuffled = bootstrap(partial(weighted_ece, q[order], c[order]), [f"{i:05}" for i in ids[order].tolist()], resamples=50)
    monkeypatch.setattr(intervals, "_CHUNK", 7 * len(q))
    chunked = bootstrap(partial(weighted_ece, q, c), ids, resamples=50)
    for other in (shuffled, chunked):
        assert vars(other) == pytest.approx(vars(whole), abs=1e-12)


def test_undefined_resamples_are_left_out():
    q, c = torch.tensor([0.9, 0.8, 0.3]), torch.tensor([1.0, 1.0, 0.0])
    got = bootstrap(partial(weighted_auroc, q, c), [1, 2, 3], resamples=500)
    assert (got.value, got.low, got.high) == (1.0, 1.0, 1.0)
    nothing = bootstrap(partial(weighted_auroc, q[:2], c[:2]), [1, 2], resamples=20)
    assert math.isnan(nothing.value)
    assert str(nothing) == "-"
