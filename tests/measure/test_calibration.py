"""Calibration figures against hand-worked numbers, loops, scikit-learn and torchmetrics."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss, roc_auc_score

from measure_small import on_rows, reports
from oracles import slow_ece
from spanwise.errors import AlignmentError
from spanwise.measure import (
    auroc,
    ece,
    figure_intervals,
    figures,
    reliability,
    weighted_auroc,
    weighted_ece,
    weighted_mean,
)

REPORTS = st.lists(st.tuples(st.integers(0, 100), st.booleans()), min_size=1, max_size=40)
BINNINGS = st.sampled_from([{}, {"bins": 4}, {"bins": 15}, {"bins": 1}])


def columns(pairs):
    q = torch.tensor([hundredths / 100 for hundredths, _ in pairs], dtype=torch.float64)
    return q, torch.tensor([float(right) for _, right in pairs], dtype=torch.float64)


@given(st.lists(st.tuples(st.integers(0, 100), st.booleans()), min_size=2, max_size=60))
@settings(max_examples=150, deadline=None)
def test_against_scikit_learn_and_a_loop(pairs):
    q, c = columns(pairs)
    values = figures(q, c, well_formed_n=torch.ones(len(q), dtype=torch.bool))
    assert values["sharpness"] == pytest.approx(np.var(q.numpy()), abs=1e-12)
    assert values["brier"] == pytest.approx(brier_score_loss(c.numpy(), q.numpy(), pos_label=1))
    if 0 < c.sum() < len(c):
        assert auroc(q, c) == pytest.approx(roc_auc_score(c.numpy(), q.numpy()))
    else:
        assert math.isnan(auroc(q, c))
    assert ece(q, c) == pytest.approx(slow_ece(pairs))


def test_absent_confidence_is_not_zero():
    values = figures(
        torch.tensor([0.8, float("nan"), 0.2]), torch.tensor([1.0, 1.0, 0.0]),
        well_formed_n=torch.tensor([True, False, True]), refusal_n=torch.tensor([False, False, True]),
    )  # fmt: skip
    assert values["brier"] == pytest.approx(0.04)
    assert values["coverage"] == pytest.approx(2 / 3)
    assert values["accuracy"] == pytest.approx(2 / 3)
    assert values["refusal_rate"] == pytest.approx(1 / 3)
    assert values["format_rate"] == pytest.approx(2 / 3)
    assert values["auroc"] == 1.0
    silent = figures(torch.tensor([torch.nan]), torch.tensor([1.0]), well_formed_n=torch.tensor([False]))
    assert [silent[name] for name in ("ece", "auroc", "refusal_rate")] == [None] * 3


@pytest.mark.parametrize(
    ("q", "c", "names"),
    [
        ([0.5, 95.0], [1.0, 1.0], "Confidence 95.0 of completion 1"),
        ([0.5, 0.5], [1.0, float("nan")], "Correctness nan of completion 1"),
        ([0.5], [2.0], "Correctness 2.0 of completion 0"),
        ([0.5, 0.5], [1.0], "2 confidences for 1 answers"),
    ],
)
def test_what_is_no_report_is_refused(q, c, names, unchecked_shapes):
    for figure in (ece, auroc):
        with pytest.raises(AlignmentError, match=names):
            figure(torch.tensor(q), torch.tensor(c))
    with pytest.raises(AlignmentError, match="have 2, 1, 1 entries"):
        figures(torch.ones(2), torch.ones(1), well_formed_n=torch.ones(1, dtype=torch.bool))


@pytest.mark.parametrize("bins", [5, 10, 15])
def test_ece_against_torchmetrics(bins):
    classification = pytest.importorskip("torchmetrics.functional.classification")
    rng = np.random.default_rng(bins)
    q = torch.tensor([*((rng.integers(0, 97, 150) + 0.5) / 97), 1.0, 1.0, 1.0], dtype=torch.float64)
    c = torch.tensor((rng.random(153) < 0.6).astype(float))
    theirs = classification.binary_calibration_error(q, c.long(), n_bins=bins, norm="l1")
    assert ece(q, c, bins=bins) == pytest.approx(float(theirs), abs=1e-6)
    assert auroc(q, c) == pytest.approx(float(classification.binary_auroc(q, c.long())), abs=1e-6)


@given(REPORTS, BINNINGS)
@settings(max_examples=80, deadline=None)
def test_the_table_says_what_the_ece_says(pairs, binning):
    q, c = columns(pairs)
    rows = reliability(q, c, **binning)  # each completion is in one bin
    size = sum(row["count"] * abs(row["accuracy"] - row["confidence"]) for row in rows)
    assert size / len(q) == pytest.approx(ece(q, c, **binning), abs=1e-12)


@given(REPORTS, BINNINGS, st.randoms())
@settings(max_examples=60, deadline=None)
def test_weights_repeat_completions(pairs, binning, random):
    q, c = columns(pairs)
    weight_rn = torch.tensor(
        [[random.choice([0.0, 0.0, 1.0, 2.0, 3.0]) for _ in pairs] for _ in range(3)], dtype=torch.float64
    )
    weight_rn[:, 0] += 1
    cases = [
        (weighted_mean(c, weight_rn), lambda q, c: float(c.mean())),
        (weighted_auroc(q, c, weight_rn), auroc),
        (weighted_ece(q, c, weight_rn, **binning), lambda q, c: ece(q, c, **binning)),
    ]
    for fast_r, plain in cases:
        torch.testing.assert_close(fast_r, on_rows(plain, q, c)(weight_rn), equal_nan=True, atol=1e-12, rtol=0)


def test_no_verdict_is_left_out():
    nan = float("nan")
    values = figures(
        torch.tensor([0.8, 0.1, 0.2]), torch.tensor([1.0, nan, 0.0]), well_formed_n=torch.ones(3, dtype=torch.bool)
    )
    assert values["accuracy"] == 0.5
    assert values["coverage"] == 1.0
    assert values["mean_confidence"] == pytest.approx(0.5)


def test_nothing_at_all():
    empty = torch.zeros(0)
    assert math.isnan(ece(empty, empty))
    assert math.isnan(auroc(empty, empty))
    assert reliability(empty, empty) == []
    values = figures(empty, empty, well_formed_n=torch.zeros(0, dtype=torch.bool))
    assert set(values.values()) == {None}
    intervals = figure_intervals(empty, empty, prompts=[], well_formed_n=torch.zeros(0, dtype=torch.bool))
    assert set(intervals.values()) == {None}


def test_figures_with_intervals():
    q, c, prompts = reports(30, 4, seed=3)
    q[::7] = float("nan")
    c[::11] = float("nan")
    formed = torch.arange(120) % 9 > 0
    arguments = {"well_formed_n": formed, "refusal_n": ~formed}
    plain = figures(q, c, **arguments)
    got = figure_intervals(q, c, prompts=prompts, resamples=200, **arguments)
    assert set(plain) == set(got)
    for name, value in plain.items():
        interval = got[name]
        assert interval is not None
        assert interval.value == value
        assert interval.count == 30
        if name != "ece":
            assert interval.low < value < interval.high
    without = figure_intervals(q, c, prompts=prompts.tolist(), well_formed_n=formed, resamples=50)
    assert without["refusal_rate"] is None


def test_one_prompt_has_no_interval():
    one = torch.ones(1)
    alone = figure_intervals(one, one, prompts=[0], well_formed_n=one.bool())["accuracy"]
    assert alone is not None
    assert math.isnan(alone.low)
