"""Calibration figures against hand-worked numbers and scikit-learn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss, roc_auc_score

from spanwise.errors import AlignmentError
from spanwise.measure import auroc, brier, ece, figures


@given(st.lists(st.tuples(st.integers(0, 100), st.booleans()), min_size=2, max_size=60))
@settings(max_examples=150, deadline=None)
def test_against_scikit_learn_and_a_loop(pairs):
    q = torch.tensor([hundredths / 100 for hundredths, _ in pairs], dtype=torch.float64)
    c = torch.tensor([float(right) for _, right in pairs], dtype=torch.float64)
    assert brier(q, c) == pytest.approx(brier_score_loss(c.numpy(), q.numpy(), pos_label=1))
    if 0 < c.sum() < len(c):
        assert auroc(q, c) == pytest.approx(roc_auc_score(c.numpy(), q.numpy()))
    else:
        assert math.isnan(auroc(q, c))
    gaps = np.zeros(11)
    for hundredths, right in pairs:  # integer arithmetic: .29 and .3 fall where a human puts them
        gaps[hundredths // 10] += float(right) - hundredths / 100
    assert ece(q, c) == pytest.approx(np.abs(gaps).sum() / len(pairs))


def test_exactly_one_has_its_own_bin():
    # Two right at .95 and one wrong at 1.0: apart (2 * .05 + 1) / 3; merged it would be |2 - 2.9| / 3.
    q, c = torch.tensor([0.95, 0.95, 1.0]).double(), torch.tensor([1.0, 1.0, 0.0]).double()
    assert ece(q, c) == pytest.approx((2 * 0.05 + 1.0) / 3)


def test_absent_confidence_is_not_zero():
    values = figures(
        torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.8, float("nan"), 0.2]),
        well_formed_n=torch.tensor([True, False, True]), refusal_n=torch.tensor([False, False, True]),
    )  # fmt: skip
    assert values["brier"] == pytest.approx(0.04)
    assert values["coverage"] == pytest.approx(2 / 3)
    assert values["accuracy"] == pytest.approx(2 / 3)
    assert values["refusal_rate"] == pytest.approx(1 / 3)
    assert values["format_rate"] == pytest.approx(2 / 3)
    assert values["auroc"] == 1.0


def test_nothing_stated_gives_none():
    nan = float("nan")
    values = figures(torch.tensor([1.0]), torch.tensor([nan]), well_formed_n=torch.tensor([False]))
    assert values["ece"] is None
    assert values["auroc"] is None
    assert values["refusal_rate"] is None


def test_out_of_range_is_refused():
    with pytest.raises(AlignmentError, match=r"95.0 of completion 1"):
        ece(torch.tensor([0.5, 95.0]), torch.tensor([1.0, 1.0]))
