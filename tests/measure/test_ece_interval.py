"""The interval of an ECE against its definition in loops, and how often it covers the truth where a bootstrap does not."""

import math
from dataclasses import replace
from functools import partial
from statistics import NormalDist

import numpy as np
import pytest
import torch
from scipy.stats import binom, t

from measure_small import reports
from spanwise.errors import AlignmentError
from spanwise.measure import Reports, bootstrap, ece, ece_difference, ece_interval, figure_intervals, weighted_ece


def gaps(q, c, row):
    """Sum the gaps of eleven bins in a loop over completions."""
    gap_b = [0.0] * 11
    for n in row:
        gap_b[int(q[n] * 10 + 1e-9)] += (float(c[n]) - float(q[n])) / len(row)
    return np.array(gap_b)


def slow(runs, seed, resamples=25):
    """The bounds by their definition: of the first run, or of the first minus the second."""
    ids = runs[0][2]
    prompts = sorted(set(ids.tolist()))
    count = len(prompts)
    drawn = torch.randint(count, (resamples, count), generator=torch.Generator().manual_seed(seed)).tolist()
    stretch = math.sqrt(count / (count - 1)) * t.ppf(0.975, count - 1) / NormalDist().inv_cdf(0.975)
    fresh = torch.empty(resamples, 2, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(seed + 1))
    value, above, below, zero = 0.0, *np.zeros((3, 2 * resamples))
    for side, (q, c, id_n) in zip((1, -1), runs, strict=False):
        gap = gaps(q, c, range(len(q)))
        noise = [gaps(q, c, [n for p in row for n in range(len(q)) if int(id_n[n]) == prompts[p]]) - gap for row in drawn]
        contradict, agree = (gaps(q, answers, range(len(q))) / count for answers in (q < 0.5, q >= 0.5))
        ways = [(contradict, agree), (agree, contradict)][::side]  # who contradicts in run a agrees in run b
        noise = [
            z + (float(u) - 1) * first + (float(v) - 1) * second
            for first, second in ways for z, (u, v) in zip(noise, fresh, strict=True)
        ]  # fmt: skip
        sd = np.std(noise, axis=0, ddof=1)
        clear = [abs(gap[b]) > math.sqrt(2 * math.log(count)) * sd[b] for b in range(11)]
        signed = [[np.sign(gap[b]) * z[b] if abs(gap[b]) > 1e-12 else 0.0 for b in range(11)] for z in noise]
        pairs = zip(signed, noise, strict=True)
        most = np.array([sum(s[b] if clear[b] else abs(z[b]) for b in range(11)) for s, z in pairs])
        least = np.array([sum(s) for s in signed])
        if len(runs) == 2:
            least = np.array([sum(abs(gap[b] + z[b]) - abs(gap[b]) for b in range(11)) for z in noise])
        else:
            zero = np.array([sum(abs(z[b]) for b in range(11) if abs(gap[b]) <= 1e-12) for z in noise])
        value += side * np.abs(gap).sum()
        above += most if side > 0 else -least
        below += least if side > 0 else -most
    down = np.quantile(above, 0.975), -np.quantile(above, 0.025)
    up = np.quantile(below + zero, 0.975), -np.quantile(below - zero, 0.025)
    return value, value - stretch * max(down), value + stretch * max(up)


def test_the_bounds_against_loops():
    seed = 3
    first, second = reports(seed=seed), reports(seed=seed + 9)
    interval = ece_interval(Reports(*first), resamples=25, seed=seed)
    value, low, high = slow([first], seed)
    assert (interval.value, interval.low, interval.high) == pytest.approx((value, max(low, 0.0), high))
    assert interval.value == pytest.approx(ece(first[0], first[1]))
    difference = ece_difference(Reports(*first), Reports(*second), resamples=25, seed=seed)
    assert (difference.value, difference.low, difference.high) == pytest.approx(slow([first, second], seed))
    backward = ece_difference(Reports(*second), Reports(*first), resamples=25, seed=seed)
    assert (backward.low, backward.high) == pytest.approx((-difference.high, -difference.low))


def test_an_evaluation_has_this_interval_of_its_ece_and_leaves_out_what_was_not_judged():
    q, c, ids = reports(seed=5)
    formed = torch.ones(len(q), dtype=torch.bool)
    plain = figure_intervals(q, c, prompts=ids, well_formed_n=formed, resamples=80)
    assert plain["ece"] == ece_interval(Reports(q, c, ids), resamples=80)
    assert list(plain).index("ece") == list(plain).index("brier") - 1
    mute = torch.full((3,), torch.nan, dtype=q.dtype)
    more = figure_intervals(
        torch.cat([q, mute]), torch.cat([c, torch.zeros(3, dtype=c.dtype)]), prompts=[*ids.tolist(), *ids[:3].tolist()],
        well_formed_n=torch.cat([formed, formed[:3]]), resamples=80,
    )  # fmt: skip
    assert vars(more["ece"]) == pytest.approx(vars(plain["ece"]))


def calibrated(generator, prompts=100, samples=4, shift=0.0):
    """Confidences .1, .2, ..., .9, right as often as they say, or less often by `shift`."""
    q = torch.randint(1, 10, (prompts * samples,), generator=generator).double() / 10
    c = (torch.rand(len(q), generator=generator, dtype=torch.float64) < q - shift).double()
    return q, c, torch.arange(prompts).repeat_interleave(samples)


def test_coverage_where_the_bootstrap_of_the_ece_has_none():
    """Of 20 intervals at .95 about 19 cover the truth, for 400 completions that are calibrated or off by .05 everywhere."""
    generator, covered = torch.Generator().manual_seed(0), dict.fromkeys(("ours", "percentile", "basic", "difference"), 0)
    for trial in range(20):
        shift = 0.05 * (trial % 2)
        q, c, ids = calibrated(generator, shift=shift)
        worse = calibrated(generator, shift=0.1)
        options = {"resamples": 100, "seed": trial}
        plain = bootstrap(partial(weighted_ece, q, c), ids, **options)
        basic = replace(plain, low=2 * plain.value - plain.high, high=2 * plain.value - plain.low)
        difference = ece_difference(Reports(q, c, ids), Reports(*worse), **options)
        for name, interval, truth in (
            ("ours", ece_interval(Reports(q, c, ids), **options), shift), ("difference", difference, shift - 0.1),
            ("percentile", plain, shift), ("basic", basic, shift),
        ):  # fmt: skip
            covered[name] += not interval.excludes(truth)
    assert min(covered["ours"], covered["difference"]) >= 18
    assert covered["percentile"] <= 5
    assert covered["basic"] <= 17


@pytest.mark.parametrize(("q", "prompts"), [(1.0, 100), (0.0, 100), (0.9, 100), (1.0, 30)])
def test_coverage_of_a_nearly_certain_policy(q, prompts):
    """With one completion per prompt and one confidence the number of wrong ones is binomial, so the coverage needs no trials."""
    count_k, q_n = np.arange(prompts + 1), torch.full((prompts,), q, dtype=torch.float64)
    bounds = {}
    for share in (0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0):
        right = 1 - share if q == 0 else share
        mass_k, coverage = binom.pmf(count_k, prompts, right), 0.0
        for k in count_k[mass_k > 1e-4].tolist():
            if k not in bounds:
                bound = ece_interval(Reports(q_n, (torch.arange(prompts) < k).double(), list(range(prompts))), resamples=400)
                bounds[k] = bound.low, bound.high
            low, high = bounds[k]
            assert high > low
            coverage += mass_k[k] * (low - 1e-9 <= abs(right - q) <= high + 1e-9)
        assert coverage > 0.93, right


def test_a_difference_of_certain_runs_has_width():
    """100 prompts, all right at 1 in both runs: either may err on a prompt that nobody saw, in 3.7 % at most (.025 = .963^100)."""
    sure = Reports(torch.ones(100), torch.ones(100), list(range(100)))
    difference = ece_difference(sure, sure)
    assert difference.value == 0
    assert difference.low == pytest.approx(-difference.high)
    assert 0.02 < difference.high < 0.05


def test_bins_without_completions_change_nothing():
    run = Reports(torch.tensor([0.9, 0.9, 0.6, 0.6] * 10), torch.tensor([1.0, 1.0, 1.0, 0.0] * 10), [*range(20)] * 2)
    assert ece_interval(run, bins=20) == ece_interval(run, bins=5) == ece_interval(run)


def test_what_has_no_bounds():
    q, c = torch.tensor([0.9, 0.4]), torch.tensor([1.0, 0.0])
    interval = ece_interval(Reports(q, c, [7, 7]))
    assert (interval.value, math.isnan(interval.low)) == (pytest.approx(0.25), True)
    assert math.isnan(ece_interval(Reports(q[:0], c[:0], [])).value)
    with pytest.raises(AlignmentError, match="Prompt 2 is missing in the second run"):
        ece_difference(Reports(q, c, [1, 2]), Reports(q, c, [1, 1]))
