"""Intervals of bounded figures against Clopper and Pearson, Dirichlet weights, and the truth of nearly certain policies."""

import numpy as np
import pytest
import torch
from scipy import stats

from spanwise.measure import figure_intervals, weighted_mean
from spanwise.measure.intervals import unseen_interval

pytestmark = pytest.mark.usefixtures("unchecked_shapes")  # shape checks take four fifths of the time

ENDS = (([0.0],), ([1.0],))


def evaluated(q, c, prompts, **options):
    formed = torch.ones(len(c), dtype=torch.bool)
    return figure_intervals(q, c, prompts=prompts, well_formed_n=formed, refusal_n=~formed, **options)


@pytest.mark.parametrize(("right", "prompts"), [(100, 100), (99, 100), (0, 50), (3, 50), (25, 50), (290, 300)])
def test_whole_prompts_have_the_interval_of_clopper_and_pearson(right, prompts):
    value_n = (torch.arange(prompts) < right).double().repeat(4)
    interval = unseen_interval(weighted_mean, [value_n], ENDS, torch.arange(prompts).repeat(4), resamples=8000)
    exact = stats.binomtest(right, prompts).proportion_ci(0.95, method="exact")
    assert (interval.low, interval.high) == pytest.approx((exact.low, exact.high), abs=0.005)
    assert interval.value == pytest.approx(right / prompts)


def test_means_between_against_dirichlet_weights():
    rng = np.random.default_rng(0)
    value_p = rng.beta(0.5, 0.2, 60)
    interval = unseen_interval(weighted_mean, [torch.tensor(value_p)], ENDS, range(60), resamples=8000)
    weights = rng.dirichlet(np.ones(61), 40_000)
    low, high = (np.quantile(weights @ np.append(value_p, end), q) for end, q in ((0.0, 0.025), (1.0, 0.975)))
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.004)


@pytest.mark.long
def test_coverage_of_the_auroc_where_few_prompts_err():
    """The policy states .9 or 1 at random and is right 95 % of the time, so the true AUROC is .5."""
    generator, covered = torch.Generator().manual_seed(0), 0
    for trial in range(40):
        q = 0.9 + 0.1 * (torch.rand(100, generator=generator) < 0.5).double()
        c = (torch.rand(100, generator=generator) < 0.95).double()
        interval = evaluated(q, c, range(100), resamples=200, seed=trial)["auroc"]
        covered += not interval.excludes(0.5)
    assert covered >= 37


def test_no_figure_has_width_0():
    same = torch.ones(40, dtype=torch.float64)
    intervals = evaluated(same, same, [n // 2 for n in range(40)])  # 20 prompts, not 40 completions
    assert [name for name, interval in intervals.items() if interval is None] == ["auroc"]
    for interval in filter(None, intervals.values()):
        assert 0.0 <= interval.low < interval.high <= 1.0
        assert interval.low <= interval.value <= interval.high
    assert intervals["accuracy"].low == pytest.approx(0.025 ** (1 / 20), abs=0.02)
    assert intervals["brier"].high == pytest.approx(1 - 0.025 ** (1 / 20), abs=0.02)


def test_prompts_of_different_sizes_and_what_is_missing():
    """A prompt without a verdict is not counted; every other prompt weighs as many samples as it has."""
    c = torch.tensor([1.0, 1.0, 0.0, float("nan"), 1.0])
    intervals = evaluated(torch.full((5,), 0.5), c, ["a", "a", "b", "c", "d"])
    assert (intervals["accuracy"].value, intervals["accuracy"].count, intervals["verdict_rate"].count) == (0.75, 3, 4)
    shuffled = evaluated(torch.full((5,), 0.5), c.flip(0), ["d", "c", "b", "a", "a"])
    assert vars(shuffled["accuracy"]) == pytest.approx(vars(intervals["accuracy"]))
