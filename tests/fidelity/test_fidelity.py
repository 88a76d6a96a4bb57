"""Fidelity to Monte Carlo advantages: figures against plain loops, noise subtracted, exact baselines."""

import math
from dataclasses import replace

import pytest
import torch

from helpers import NAN
from measure_small import rolled
from oracles import slow_fidelity
from spanwise.errors import AlignmentError, DataError, RecipeError
from spanwise.fidelity import FIGURES, Fidelity, Rerolls, measure_fidelity
from spanwise.fidelity.baselines import BASELINES


def brier(q, c):
    return -((q - c) ** 2)


def log_score(q, c):
    q = min(max(q, 0.01), 0.99)
    return c * math.log(q) + (1 - c) * math.log(1 - q)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rule", [brier, log_score])
def test_against_plain_loops(seed, rule):
    g = torch.Generator().manual_seed(seed)
    confidence_xs, outcome_xs, prefix_xs, again_dm = vars(rolled(5, 6, 4, seed=seed)).values()
    again_dm[torch.rand(again_dm.shape, generator=g) < 0.3] = NAN  # also prefixes with one re-roll or none
    gone = torch.rand(confidence_xs.shape, generator=g)
    confidence_xs[gone < 0.2] = NAN
    prefix_xs[gone < 0.1] = -1
    outcome_xs[gone > 0.93] = NAN
    data = Rerolls(confidence_xs, outcome_xs, prefix_xs, again_dm)
    measured = measure_fidelity(data, group_sizes=[6], batch=30, resamples=2, draws=3, rule=rule.__name__, seed=seed)
    has_two_d = (~again_dm.isnan()).sum(dim=1) >= 2
    usable_xs = (prefix_xs >= 0) & has_two_d[prefix_xs] & ~confidence_xs.isnan() & ~outcome_xs.isnan()
    assert measured.share == pytest.approx(float(usable_xs.double().mean()))
    for name in BASELINES.keys() - {"blended"}:
        figures = {figure: measured.interval(name, 6, figure)[0] for figure in FIGURES}
        assert figures == pytest.approx(slow_fidelity(data, rule, name), abs=1e-9, nan_ok=True), name


@pytest.mark.parametrize("rerolls", [2, 64])
def test_the_noise_of_the_re_rolls_is_subtracted(rerolls):
    # Two thousand groups of 8 whose re-rolls vary like the reports: the error of a stratum mean is var / n, whatever M is.
    data, sizes = rolled(2000, 8, rerolls, seed=1), {"group_sizes": [8], "batch": 16000, "resamples": 1, "draws": 20}
    measured = measure_fidelity(data, baselines={"outcome": BASELINES["outcome"]}, **sizes)
    count_xs = (data.outcome_xs[:, :, None] == data.outcome_xs[:, None, :]).sum(dim=2)
    level_x = data.confidence_xs.mean(dim=1, keepdim=True)
    # var (q - c)^2 for q uniform in level +- h and d = level - c: 4 d^2 h^2/3 + 4 h^4/45
    h, d2_xs = 0.15, (level_x - data.outcome_xs).square()
    expected = float(((4 * d2_xs * h**2 / 3 + 4 * h**4 / 45) / count_xs).mean().sqrt())
    assert measured.interval("outcome", 8, "rmse")[0] == pytest.approx(expected, rel=0.04)


def test_the_order_of_the_paper():
    measured = measure_fidelity(rolled(64, 32, 16, spread=0.1), resamples=5, draws=200)
    for size in measured.group_sizes:
        rmse = [measured.interval(name, size, "rmse")[0] for name in ("none", "batch", "group", "outcome")]
        assert rmse == sorted(rmse, reverse=True)
        assert measured.interval("blended", size, "correlation")[0] > measured.interval("outcome", size, "correlation")[0]
        better, low, high = measured.interval("blended", size, "rmse_scaled", minus="outcome")
        assert low < better < high < 0


def test_intervals_come_from_the_same_prompts():
    twice = {"a": {"baseline": "outcome"}, "b": {"baseline": "outcome"}, "none": {"baseline": "none"}}
    measured = measure_fidelity(rolled(40, 8, 8), baselines=twice, group_sizes=[4], resamples=4, draws=400)
    assert measured.interval("a", 4, "rmse", minus="b") == (0.0, 0.0, 0.0)
    assert measured.interval("none", 4, "rmse", minus="a")[0] == -measured.interval("a", 4, "rmse", minus="none")[0]
    value, low, high = measured.interval("a", 4, "rmse")
    _, narrow_low, narrow_high = measured.interval("a", 4, "rmse", level=0.5)
    assert low < min(value, narrow_low) <= max(value, narrow_high) < high
    assert narrow_low < narrow_high
    wide = measure_fidelity(rolled(10, 8, 8), group_sizes=[4], resamples=4, draws=400).interval("outcome", 4, "rmse")
    assert wide[2] - wide[1] > high - low


def test_draws_without_a_figure_are_left_out_of_its_interval():
    draw_rbgf = torch.full((4, 1, 1, len(FIGURES)), NAN, dtype=torch.float64)
    draw_rbgf[:, 0, 0, FIGURES.index("rmse_wrong")] = torch.tensor([1.0, NAN, 3.0, 2.0]).double()
    measured = Fidelity(("none",), (4,), torch.zeros(1, 1, len(FIGURES)).double(), draw_rbgf, share=1.0)
    assert measured.interval("none", 4, "rmse_wrong", level=0.5) == pytest.approx((0.0, 1.5, 2.5))  # quartiles of 1, 2, 3
    assert all(math.isnan(bound) for bound in measured.interval("none", 4, "rmse_right")[1:])


def test_sentences():
    data = rolled(4, 6, 3)
    silent = replace(data, confidence_xs=data.confidence_xs * NAN)
    for table, options, sentence in (
        (data, {"group_sizes": [4, 8]}, "8 .* 6 "), (data, {"batch": 3}, " 3 .* 4 "), (silent, {}, "compare"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=sentence):
            measure_fidelity(table, **{"group_sizes": [4], **options})
    with pytest.raises(AlignmentError, match=r"23 of .* 5 rows"):
        replace(data, again_dm=data.again_dm[:5])
    with pytest.raises(RecipeError, match="'blend'"):
        measure_fidelity(data, group_sizes=[4], draws=2).interval("blend", 4, "rmse")
