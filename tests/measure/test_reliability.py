"""Bins and the reliability table: borders, ties, scikit-learn, intervals."""

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve

from spanwise.errors import RecipeError
from spanwise.measure import ece, reliability, wilson


def test_exactly_one_has_its_own_bin():
    # Two right at .95 and one wrong at 1.0: apart (2 * .05 + 1) / 3; merged it would be |2 - 2.9| / 3.
    q, c = torch.tensor([0.95, 0.95, 1.0]).double(), torch.tensor([1.0, 1.0, 0.0]).double()
    assert ece(q, c) == pytest.approx((2 * 0.05 + 1.0) / 3)


def test_impossible_bins_are_refused(unchecked_shapes):
    q = torch.tensor([0.5])
    with pytest.raises(RecipeError, match="at least 1 bin, not 0"):
        ece(q, q, bins=0)
    with pytest.raises(RecipeError, match="equal mass have none of their own"):
        ece(q, q, scheme="mass", one="own")
    with pytest.raises(RecipeError, match="scheme 'wide'"):
        reliability(q, q, scheme="wide")


def test_one_in_the_last_bin_merges():
    # As above, but .95, .95 and 1.0 share a bin: |2 - 2.9| / 3.
    q, c = torch.tensor([0.95, 0.95, 1.0]).double(), torch.tensor([1.0, 1.0, 0.0]).double()
    assert ece(q, c, one="last") == pytest.approx(0.9 / 3)
    assert ece(q, c, one="own") == ece(q, c)


def test_borders_survive_float32():
    # .7 in float32 is just below .7, times 10 just below 7.
    q = torch.arange(0, 101, dtype=torch.float64) / 100
    c = (torch.arange(101) % 3 == 0).double()
    for bins in (10, 20, 100):
        assert ece(q.float(), c.float(), bins=bins) == pytest.approx(ece(q, c, bins=bins), abs=1e-6)
        assert reliability(q.float(), c.float(), bins=bins).count_b.tolist() == [100 // bins] * bins + [1]


def test_borders_of_the_table():
    q = torch.tensor([0.5])
    own, last = reliability(q, q, bins=4), reliability(q, q, bins=4, one="last")
    assert own.low_b.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert own.high_b.tolist() == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert (last.low_b.tolist(), last.high_b.tolist()) == ([0.0, 0.25, 0.5, 0.75], [0.25, 0.5, 0.75, 1.0])
    assert bool(own.accuracy_b[0].isnan())


def test_equal_mass_by_hand():
    # Ranks with ties in the middle: {.1}, {.4 x3}, {.9 x2}: 1/2, 5/2, 5 of 6, so two bins hold 4 and 2.
    q = torch.tensor([0.9, 0.4, 0.1, 0.4, 0.9, 0.4], dtype=torch.float64)
    c = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0]).double()
    table = reliability(q, c, scheme="mass", bins=2)
    assert table.count_b.tolist() == [4, 2]
    assert (table.low_b.tolist(), table.high_b.tolist()) == ([0.1, 0.9], [0.4, 0.9])
    assert ece(q, c, scheme="mass", bins=2) == pytest.approx((abs(1 - 1.3) + abs(2 - 1.8)) / 6)


@pytest.mark.parametrize(("scheme", "strategy"), [("width", "uniform"), ("mass", "quantile")])
def test_bins_against_scikit_learn(scheme, strategy):
    rng = np.random.default_rng(0)
    q = (rng.permutation(400)[:200] + 0.5) / 401  # no ties, nothing on a border of five bins
    c = (rng.random(200) < q).astype(float)
    accuracy_b, confidence_b = calibration_curve(c, q, n_bins=5, strategy=strategy)
    table = reliability(torch.tensor(q), torch.tensor(c), bins=5, scheme=scheme, one="last")
    np.testing.assert_allclose(table.accuracy_b.numpy(), accuracy_b)
    np.testing.assert_allclose(table.confidence_b.numpy(), confidence_b)


def test_reliability_intervals_are_wilsons():
    q, c = torch.full((8,), 0.35).double(), torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0]).double()
    table = reliability(q, c)
    assert (float(table.accuracy_low_b[3]), float(table.accuracy_high_b[3])) == pytest.approx(wilson(3, 8))
    assert (float(table.accuracy_low_b[0]), float(table.accuracy_high_b[0])) == (0.0, 1.0)
    narrow = reliability(q, c, level=0.5)
    assert (float(narrow.accuracy_low_b[3]), float(narrow.accuracy_high_b[3])) == pytest.approx(wilson(3, 8, level=0.5))
    # Samples of a prompt that always agree: eight completions are worth three prompts.
    by_prompt = reliability(q, c, prompts=[1, 1, 1, 2, 2, 2, 3, 3])
    low, high = float(by_prompt.accuracy_low_b[3]), float(by_prompt.accuracy_high_b[3])
    assert (low, high) == pytest.approx(wilson(3 * 3 / 8, 3))
    # Every prompt once is the same as no prompts.
    once = reliability(q, c, prompts=list("abcdefgh"))
    torch.testing.assert_close(once.accuracy_low_b, table.accuracy_low_b)
    # In between: six pairs, squared standard error 6/5 * 4 / 12^2 = 1/30, so (1/4) / (1/30) = 7.5 trials.
    c = torch.tensor([1.0, 1, 1, 0, 1, 1, 0, 0, 0, 0, 1, 0], dtype=torch.float64)
    half = reliability(torch.full((12,), 0.35).double(), c, prompts=[i // 2 for i in range(12)])
    excess = [1, 0, 1, -1, -1, 0]  # right ones of each pair less 2 * 1/2
    trials = 0.25 / (6 / 5 * sum(e**2 for e in excess) / 12**2)
    assert trials == pytest.approx(7.5)
    assert float(half.accuracy_low_b[3]) == pytest.approx(wilson(7.5 / 2, 7.5)[0])
