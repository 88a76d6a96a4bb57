"""Calibration figures, bins and their table against hand-worked numbers, loops and scikit-learn."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss, roc_auc_score

from helpers import NAN, double
from measure_small import on_rows, reports
from oracles import slow_ece
from spanwise.errors import AlignmentError, RecipeError
from spanwise.measure import auroc, ece, figure_intervals, figures, reliability, weighted_ece, weighted_mean, wilson
from spanwise.measure.calibration import weighted_auroc, weighted_gaps

REPORTS = st.lists(st.tuples(st.integers(0, 100), st.booleans()), min_size=1, max_size=40)
BINNINGS = st.sampled_from([{}, {"bins": 4}, {"bins": 15}, {"bins": 1}])


def columns(pairs):
    return torch.tensor([[hundredths / 100, right] for hundredths, right in pairs], dtype=torch.float64).unbind(dim=1)


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


def test_absent_confidence_is_not_zero_and_no_verdict_is_left_out():
    formed, refused = torch.tensor([True, False, True]), torch.tensor([False, False, True])
    values = figures(torch.tensor([0.8, NAN, 0.2]), torch.tensor([1.0, 1.0, 0.0]), well_formed_n=formed, refusal_n=refused)
    shares = dict.fromkeys(("coverage", "accuracy", "format_rate"), 2 / 3)
    expected = {**shares, "refusal_rate": 1 / 3, "brier": 0.04, "auroc": 1}
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    silent = figures(torch.tensor([NAN]), torch.tensor([1.0]), well_formed_n=torch.tensor([False]))
    assert [silent[name] for name in ("ece", "auroc", "refusal_rate")] == [None] * 3
    unjudged = figures(torch.tensor([0.8, 0.1, 0.2]), torch.tensor([1.0, NAN, 0.0]), well_formed_n=formed)
    expected = {"accuracy": 0.5, "coverage": 1.0, "mean_confidence": 0.5}
    assert {name: unjudged[name] for name in expected} == pytest.approx(expected)


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


@given(REPORTS, BINNINGS)
@settings(max_examples=80, deadline=None)
def test_the_table_says_what_the_ece_says_and_leaves_out_what_is_not_known(pairs, binning):
    q, c = columns(pairs)
    more = torch.cat([q, double([NAN, 0.5])]), torch.cat([c, double([1.0, NAN])])
    rows = reliability(*more, prompts=range(len(pairs) + 2), **binning)  # each completion is in one bin
    borders = [number / binning.get("bins", 10) for number in range(binning.get("bins", 10) + 1)]
    assert {(row["low"], row["high"]) for row in rows} <= {*pairwise(borders), (1.0, 1.0)}
    assert all(row["low"] - 1e-9 <= row["confidence"] <= row["high"] + 1e-9 and row["count"] for row in rows)
    size = sum(row["count"] * abs(row["accuracy"] - row["confidence"]) for row in rows)
    assert size / len(q) == pytest.approx(ece(q, c, **binning), abs=1e-12)


@given(REPORTS, BINNINGS, st.randoms())
@settings(max_examples=60, deadline=None)
def test_weights_repeat_completions(pairs, binning, random):
    q, c = columns(pairs)
    weights = [[random.choice([0.0, 0.0, 1.0, 2.0, 3.0]) for _ in pairs] for _ in range(3)]
    weight_rn = torch.tensor(weights, dtype=torch.float64)
    weight_rn[:, 0] += 1
    for fast_r, plain in (
        (weighted_mean(c, weight_rn), lambda q, c: float(c.mean())),
        (weighted_auroc(q, c, weight_rn), auroc),
        (weighted_ece(q, c, weight_rn, **binning), lambda q, c: ece(q, c, **binning)),
    ):
        torch.testing.assert_close(fast_r, on_rows(plain, q, c)(weight_rn), equal_nan=True, atol=1e-12, rtol=0)


def test_nothing_at_all_and_one_prompt():
    empty, one = torch.zeros(0), torch.ones(1)
    assert [math.isnan(figure(empty, empty)) for figure in (ece, auroc)] == [True, True]
    assert reliability(empty, empty) == []
    assert set(figures(empty, empty, well_formed_n=empty.bool()).values()) == {None}
    assert set(figure_intervals(empty, empty, prompts=[], well_formed_n=empty.bool()).values()) == {None}
    assert math.isnan(figure_intervals(one, one, prompts=[0], well_formed_n=one.bool())["accuracy"].low)


def test_figures_with_intervals():
    q, c, prompts = reports(30, 4, seed=3)
    q[::7] = NAN
    c[::11] = NAN
    formed = torch.arange(120) % 9 > 0
    plain = figures(q, c, well_formed_n=formed, refusal_n=~formed)
    intervals = figure_intervals(q, c, prompts=prompts, resamples=200, well_formed_n=formed, refusal_n=~formed)
    assert set(plain) == set(intervals)
    for name, value in plain.items():
        interval = intervals[name]
        assert (interval.value, interval.count) == (value, 30)
        assert name == "ece" or interval.low < value < interval.high
    without = figure_intervals(q, c, prompts=prompts.tolist(), well_formed_n=formed, resamples=50)
    assert without["refusal_rate"] is None


def test_borders_survive_float32(unchecked_shapes):
    # .7 in float32 is just below .7, times 10 just below 7.
    q = torch.arange(0, 101, dtype=torch.float64) / 100
    c = (torch.arange(101) % 3 == 0).double()
    for bins in (10, 20, 100):
        assert ece(q.float(), c.float(), bins=bins) == pytest.approx(ece(q, c, bins=bins), abs=1e-6)
        assert [row["count"] for row in reliability(q.float(), c.float(), bins=bins)] == [100 // bins] * bins + [1]
    with pytest.raises(RecipeError, match="at least 1 bin, not 0"):
        ece(q, c, bins=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_borders_in_16_bits_and_in_whole_numbers(dtype, unchecked_shapes):
    """What .1, .2, ... are rounded to lies in their bins; the next smaller number of the type lies in the bin below."""
    border_n = (torch.arange(1, 11, dtype=torch.float64) / 10).to(dtype)
    below_n = (border_n.view(torch.int16) - 1).view(dtype)
    for confidence_n, lows in ((border_n, range(1, 11)), (below_n, range(10))):
        table = reliability(confidence_n, torch.ones(10, dtype=dtype))
        assert [row["low"] for row in table] == [low / 10 for low in lows]
    assert ece(torch.tensor([1, 0, 1]), torch.tensor([1, 0, 0])) == pytest.approx(1 / 3)


def test_reliability_intervals_are_wilsons():
    q, c = torch.full((8,), 0.35).double(), torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0]).double()
    # If samples of a prompt always agree, eight completions are worth three prompts. Every prompt once: as without prompts.
    for prompts, trials in ((None, 8), ([1, 1, 1, 2, 2, 2, 3, 3], 3), ([*"abcdefgh"], 8)):
        (row,) = reliability(q, c, prompts=prompts)
        assert (row["accuracy_low"], row["accuracy_high"]) == pytest.approx(wilson(trials * 3 / 8, trials))
    # In between: six pairs, squared standard error 6/5 * 4 / 12^2 = 1/30, so (1/4) / (1/30) = 7.5 trials.
    c = torch.tensor([1.0, 1, 1, 0, 1, 1, 0, 0, 0, 0, 1, 0], dtype=torch.float64)
    (half,) = reliability(torch.full((12,), 0.35).double(), c, prompts=[i // 2 for i in range(12)])
    assert half["accuracy_low"] == pytest.approx(wilson(7.5 / 2, 7.5)[0])


def test_a_gap_is_positive_if_answers_are_right_more_often_than_stated():
    q, c = torch.tensor([0.75, 0.75, 0.25, 1.0]), torch.tensor([1.0, 0.0, 0.0, 1.0])  # bins [0, .5), [.5, 1), 1
    assert weighted_gaps(q, c, torch.ones(1, 4), bins=2).tolist() == [[-0.0625, -0.125, 0]]
