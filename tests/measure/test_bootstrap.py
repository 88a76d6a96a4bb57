"""The bootstrap over prompts, alone and paired, against loops."""

import math
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch

from measure_small import on_rows, reports
from spanwise.errors import AlignmentError
from spanwise.measure import (
    auroc,
    bootstrap,
    ece,
    paired_bootstrap,
    sem,
    weighted_auroc,
    weighted_ece,
    weighted_mean,
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


def test_bootstrap_agrees_with_the_standard_error_by_prompt():
    _, c, ids = reports(prompts=60, seed=2)
    got = bootstrap(partial(weighted_mean, c), ids, resamples=4000)
    assert got.sem == pytest.approx(sem(c, ids), rel=0.06)
    # Copies of every sample change nothing: it is prompts that are drawn.
    copied = bootstrap(partial(weighted_mean, c.repeat(3)), ids.repeat(3), resamples=4000)
    assert copied.sem == pytest.approx(got.sem, rel=1e-9)


def test_bootstrap_in_any_order_and_any_chunks(monkeypatch):
    q, c, ids = reports(seed=3)
    whole = bootstrap(partial(weighted_ece, q, c), ids, resamples=50)
    order = torch.randperm(len(q), generator=torch.Generator().manual_seed(0))
    shuffled = bootstrap(partial(weighted_ece, q[order], c[order]), [f"{i:05}" for i in ids[order].tolist()], resamples=50)
    monkeypatch.setattr(import_module("spanwise.measure.bootstrap"), "_CHUNK", 7 * len(q))
    chunked = bootstrap(partial(weighted_ece, q, c), ids, resamples=50)
    for other in (shuffled, chunked):
        assert vars(other) == pytest.approx(vars(whole), abs=1e-12)


def test_undefined_resamples_are_counted():
    q, c = torch.tensor([0.9, 0.8, 0.3]), torch.tensor([1.0, 1.0, 0.0])
    got = bootstrap(partial(weighted_auroc, q, c), [1, 2, 3], resamples=500)
    # A resample has no wrong answer with probability (2/3)^3, no right one with (1/3)^3: a third in all.
    assert got.undefined == pytest.approx(500 / 3, abs=60)
    assert (got.value, got.low, got.high) == (1.0, 1.0, 1.0)
    nothing = bootstrap(partial(weighted_auroc, q[:2], c[:2]), [1, 2], resamples=20)
    assert math.isnan(nothing.value)
    assert str(nothing) == "-"


def test_paired_bootstrap_cancels_what_prompts_share():
    rng = np.random.default_rng(0)
    hard = np.repeat(rng.normal(size=30), 4)
    a, b = torch.tensor(hard + 0.1), torch.tensor(hard)
    ids = torch.tensor(np.repeat(np.arange(30), 4))
    got = paired_bootstrap(partial(weighted_mean, a), partial(weighted_mean, b), ids, ids)
    assert (got.value, got.low, got.high) == pytest.approx((0.1, 0.1, 0.1))
    assert bootstrap(partial(weighted_mean, a), ids).sem > 0.1
    # Other numbers of samples and other orders: the same prompts are drawn for both.
    flipped = paired_bootstrap(
        partial(weighted_mean, a), partial(weighted_mean, b[::4].flip(0)), ids, ids[::4].flip(0).tolist()
    )
    assert (flipped.low, flipped.high) == pytest.approx((0.1, 0.1))


def test_paired_bootstrap_against_a_loop():
    q, c, ids = reports(seed=4)
    q2, c2, _ = reports(seed=6)
    got = paired_bootstrap(partial(weighted_ece, q, c), partial(weighted_ece, q2, c2), ids, ids, resamples=100, seed=2)
    values = []
    for prompts in torch.randint(20, (100, 20), generator=torch.Generator().manual_seed(2)).tolist():
        row = torch.cat([(ids == 7 + 3 * p).nonzero().flatten() for p in prompts])
        values.append(ece(q[row], c[row]) - ece(q2[row], c2[row]))
    assert got.value == pytest.approx(ece(q, c) - ece(q2, c2))
    assert (got.low, got.high) == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])))


def test_paired_bootstrap_needs_the_same_prompts():
    figure = partial(weighted_mean, torch.ones(2))
    with pytest.raises(AlignmentError, match=r"2 and 2 prompts, 1 of them shared; prompt 1 is not in the second"):
        paired_bootstrap(figure, figure, [1, 2], [2, 3])
