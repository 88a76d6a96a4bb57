"""Bins and the reliability table: borders, ties, scikit-learn, intervals."""

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve

from spanwise.errors import RecipeError
from spanwise.measure import ece, reliability, wilson


def test_impossible_bins_are_refused(unchecked_shapes):
    q = torch.tensor([0.5])
    with pytest.raises(RecipeError, match="at least 1 bin, not 0"):
        ece(q, q, bins=0)


def test_borders_survive_float32():
    # .7 in float32 is just below .7, times 10 just below 7.
    q = torch.arange(0, 101, dtype=torch.float64) / 100
    c = (torch.arange(101) % 3 == 0).double()
    for bins in (10, 20, 100):
        assert ece(q.float(), c.float(), bins=bins) == pytest.approx(ece(q, c, bins=bins), abs=1e-6)
        assert [row["count"] for row in reliability(q.float(), c.float(), bins=bins)] == [100 // bins] * bins + [1]


def test_borders_of_the_table_which_leaves_out_what_is_not_known():
    q = torch.tensor([0.0, 0.25, 0.5, 0.99, 1.0, 0.5, torch.nan])
    c = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, torch.nan, 1.0])
    rows = reliability(q, c, bins=4, prompts=list("abcdefg"))
    assert [row["low"] for row in rows] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [row["high"] for row in rows] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert [row["count"] for row in rows] == [1] * 5
    assert [row["low"] for row in reliability(q[2:3], c[2:3], bins=4)] == [0.5]  # empty bins are no rows


def test_bins_against_scikit_learn():
    rng = np.random.default_rng(0)
    q = (rng.permutation(400)[:200] + 0.5) / 401  # no ties, nothing on a border of five bins
    c = (rng.random(200) < q).astype(float)
    accuracy_b, confidence_b = calibration_curve(c, q, n_bins=5, strategy="uniform")
    rows = reliability(torch.tensor(q), torch.tensor(c), bins=5)
    np.testing.assert_allclose([row["accuracy"] for row in rows], accuracy_b)
    np.testing.assert_allclose([row["confidence"] for row in rows], confidence_b)


def test_reliability_intervals_are_wilsons():
    q, c = torch.full((8,), 0.35).double(), torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0]).double()
    (row,) = reliability(q, c)
    assert (row["accuracy_low"], row["accuracy_high"]) == pytest.approx(wilson(3, 8))
    # Samples of a prompt that always agree: eight completions are worth three prompts.
    (by_prompt,) = reliability(q, c, prompts=[1, 1, 1, 2, 2, 2, 3, 3])
    assert (by_prompt["accuracy_low"], by_prompt["accuracy_high"]) == pytest.approx(wilson(3 * 3 / 8, 3))
    # Every prompt once is the same as no prompts.
    (once,) = reliability(q, c, prompts=list("abcdefgh"))
    assert once == pytest.approx(row)
    # In between: six pairs, squared standard error 6/5 * 4 / 12^2 = 1/30, so (1/4) / (1/30) = 7.5 trials.
    c = torch.tensor([1.0, 1, 1, 0, 1, 1, 0, 0, 0, 0, 1, 0], dtype=torch.float64)
    (half,) = reliability(torch.full((12,), 0.35).double(), c, prompts=[i // 2 for i in range(12)])
    excess = [1, 0, 1, -1, -1, 0]  # right ones of each pair less 2 * 1/2
    trials = 0.25 / (6 / 5 * sum(e**2 for e in excess) / 12**2)
    assert trials == pytest.approx(7.5)
    assert half["accuracy_low"] == pytest.approx(wilson(7.5 / 2, 7.5)[0])
