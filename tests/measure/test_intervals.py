"""Intervals against SciPy, published widths and loops: Student's t, Wilson, by prompt, the bootstrap, seeds needed."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.integrate import quad
from scipy.special import ndtr

from forked import run
from helpers import NAN
from measure_small import on_rows, reports
from spanwise.errors import AlignmentError, RecipeError
from spanwise.measure import auroc, bootstrap, intervals, mean_interval, weighted_auroc, weighted_ece, weighted_mean, wilson
from spanwise.measure.compare import seeds_needed
from spanwise.measure.intervals import prompt_index


def test_wilson_half_widths_as_published_and_bounds_of_scipy():
    published = {(16, 32): 0.164, (64, 128): 0.085, (128, 256): 0.061, (6, 128): 0.038}
    for successes, count in (*published, (0, 10), (10, 10)):
        low, high = wilson(successes, count)
        expected = stats.binomtest(successes, count).proportion_ci(method="wilson")
        assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-12)
        assert (high - low) / 2 == pytest.approx(published.get((successes, count), (high - low) / 2), abs=5e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(RecipeError, match="5 successes in 4 trials"):
        wilson(5, 4)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_sem_is_that_of_prompts(rows):
    mean = sum(v for _, v in rows) / len(rows)
    groups = {p: sum(v - mean for r, v in rows if r == p) for p, _ in rows}
    expected = math.nan
    if len(groups) > 1:
        expected = math.sqrt(sum(e**2 for e in groups.values()) * len(groups) / (len(groups) - 1)) / len(rows)
    for order in (rows, rows[::-1]):
        value_n = torch.tensor([float(v) for _, v in order], dtype=torch.float64)
        assert mean_interval(value_n, [f"prompt {p}" for p, _ in order]).sem == pytest.approx(
            expected, abs=1e-12, nan_ok=True
        )


def test_mean_interval_against_scipy():
    value_n = torch.tensor([0.71, 0.66, 0.78, 0.69, 0.70]).double()
    for level in (0.95, 0.5):
        bounds = stats.t.interval(level, 4, loc=value_n.mean().item(), scale=stats.sem(value_n.numpy()))
        ours = mean_interval(value_n, level=level)
        assert (ours.value, ours.low, ours.high, ours.count) == pytest.approx((value_n.mean().item(), *bounds, 5))
    single = mean_interval(torch.tensor([0.5, NAN]))
    assert (single.value, single.count, math.isnan(single.low), single.excludes(0.0)) == (0.5, 1, True, False)
    assert str(single) == "0.500"


def test_scipy_is_loaded_only_when_it_is_used():
    done = run("import sys, spanwise.report; print('scipy.stats' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_bad_arguments_are_sentences(unchecked_shapes):
    figure = partial(weighted_mean, torch.ones(2))
    with pytest.raises(RecipeError, match="not 0"):
        bootstrap(figure, [1, 2], resamples=0)
    with pytest.raises(RecipeError, match="95"):
        mean_interval(torch.ones(2), level=95)
    with pytest.raises(AlignmentError, match="1 prompt ids for 2 completions"):
        mean_interval(torch.ones(2), [1])


def test_prompt_index_sorts_ids_of_any_kind():
    """1, 1.0 and True are one id, as a group is one; which of them comes first may not change the order, and so the resamples."""
    assert prompt_index(torch.tensor([10, 9, 10]), 3).tolist() == [1, 0, 1]
    assert prompt_index([("b", 1), "a", ("a", 2), "a"], 4).tolist() == [2, 0, 1, 0]
    for one in (1, 1.0, True, np.int64(1)):
        assert prompt_index([one, 0, 2.5, 1.0, "1"], 5).tolist() == [1, 0, 2, 1, 3]


def power_by_definition(shift, df, alpha):
    """P(|Z + shift| > limit s) for a normal Z and s^2 = chi^2 / df, integrated over s."""
    limit, reach = stats.t.ppf(1 - alpha / 2, df), 12 / math.sqrt(2 * df)
    low, high = max(0.0, 1 - reach), 1 + reach

    def rejects(s):
        return math.sqrt(df) * stats.chi.pdf(math.sqrt(df) * s, df) * ndtr([shift - limit * s, -shift - limit * s]).sum()

    edge = [abs(shift) / limit] if low < abs(shift) / limit < high else None
    return quad(rejects, low, high, points=edge, epsabs=1e-13, epsrel=1e-13, limit=200)[0]


@pytest.mark.parametrize(
    ("effect", "power", "alpha"),
    [(0.5, 0.8, 0.05), (1.0, 0.8, 0.05), (2.0, 0.9, 0.01), (0.3, 0.5, 0.1), (6.0, 0.8, 0.004), (100.0, 0.8, 0.05)],
)
def test_seeds_needed_against_the_definition_of_power(effect, power, alpha):
    n = seeds_needed(effect * 0.02, 0.02, power=power, alpha=alpha)
    assert n == seeds_needed(-effect, 1.0, power=power, alpha=alpha)
    assert power_by_definition(effect * math.sqrt(n), n - 1, alpha) >= power
    assert n == 2 or power_by_definition(effect * math.sqrt(n - 1), n - 2, alpha) < power


def test_seeds_needed_at_the_ends():
    needed = {0.5: 34, 0.0: None, 1e-9: None, 100.0: 2}  # Cohen's d of .5: 34 pairs
    assert {effect: seeds_needed(effect, 1.0, alpha=0.05) for effect in needed} == needed
    assert seeds_needed(0.1, 1.0, alpha=0.05, most=500) is None


def test_bootstrap_against_a_loop_over_prompts():
    q, c, ids = reports()
    figure, options = partial(weighted_auroc, q, c), {"resamples": 300, "seed": 5}
    interval = bootstrap(figure, ids, **options)
    drawn = torch.randint(20, (300, 20), generator=torch.Generator().manual_seed(5)).tolist()
    rows = [torch.cat([(ids == 7 + 3 * p).nonzero().flatten() for p in prompts]) for prompts in drawn]
    values = [auroc(q[row], c[row]) for row in rows]
    assert interval.value == auroc(q, c)
    assert (interval.low, interval.high) == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])))
    assert interval.sem == pytest.approx(np.std(values, ddof=1))
    narrow = bootstrap(figure, ids, level=0.5, **options)
    assert (narrow.low, narrow.high) == pytest.approx(tuple(np.quantile(values, [0.25, 0.75])))
    slow = bootstrap(on_rows(auroc, q, c), ids, **options)
    assert vars(slow) == pytest.approx(vars(interval), abs=1e-12)
    assert not any(interval.excludes(value) for value in (interval.low, interval.value, interval.high))
    assert all(interval.excludes(value) for value in (interval.low - 1e-9, interval.high + 1e-9))


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
    interval = bootstrap(partial(weighted_auroc, q, c), [1, 2, 3], resamples=500)
    assert (interval.value, interval.low, interval.high) == (1.0, 1.0, 1.0)
    nothing = bootstrap(partial(weighted_auroc, q[:2], c[:2]), [1, 2], resamples=20)
    assert math.isnan(nothing.value)
    assert str(nothing) == "-"
