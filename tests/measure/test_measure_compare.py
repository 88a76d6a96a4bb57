"""Comparison over seeds against scipy's paired t test, and which claims its sentences make."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from helpers import NAN
from spanwise.errors import RecipeError
from spanwise.measure import compare_arms, mean_interval
from spanwise.measure.compare import holm, seeds_needed


def runs(**values):
    return {method: {seed: {"ece": v} for seed, v in enumerate(row)} for method, row in values.items()}


def test_cells_and_differences_against_scipy():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.1, 0.02, 6), rng.normal(0.12, 0.02, 6)
    result = compare_arms(runs(a=a.tolist(), b=b.tolist()))
    assert result.cells["a", "ece"] == mean_interval(torch.tensor(a))
    (d,) = result.differences
    test = stats.ttest_rel(a, b)
    interval = test.confidence_interval(0.95)
    assert (d.interval.low, d.interval.high) == pytest.approx((interval.low, interval.high))
    assert d.p == d.p_adjusted == pytest.approx(test.pvalue)
    assert d.interval.sd == pytest.approx((a - b).std(ddof=1))


def test_pairing_by_seed_finds_what_two_intervals_do_not():
    base = [0.10, 0.20, 0.30, 0.40]
    result = compare_arms(runs(a=base, b=[x + y for x, y in zip(base, (0.010, 0.011, 0.009, 0.010), strict=True)]))
    assert result.cells["a", "ece"].high > result.cells["b", "ece"].low
    assert result.differences[0].verdict == "clear"
    # The same numbers under other seeds' names, in another order, give the same.
    named = {m: {9 - s: v for s, v in reversed(seeds.items())} for m, seeds in runs(a=base, b=base).items()}
    assert compare_arms(named).differences[0].verdict == "same"


def test_equal_differences_of_one_pair_are_not_blamed_on_several_and_noise_is_called_noise():
    """The sign test of 3 seeds has p = 2 / 2^3."""
    (sentence,) = compare_arms(runs(a=[0.5, 0.5, 0.5], b=[0.25, 0.25, 0.25])).sentences()
    assert sentence == (
        "ece of a minus b: +0.250 [+0.250, +0.250] over 3 seeds. Every seed has this difference. "
        "With so few seeds this may be luck (p = 0.25)."
    )
    noise = compare_arms(runs(a=[0.1, 0.2, 0.3], b=[0.2, 0.1, 0.31]))
    assert "inside the noise. A clear verdict on this difference needs" in noise.sentences()[0]
    assert noise.summary() == "None of 1 differences is beyond the noise: these runs do not show which method is better."
    assert noise.sentences("clear") == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_holm_against_its_definition(p_values):
    ordered = sorted(p_values)
    for p, adjusted in zip(p_values, holm(p_values), strict=True):
        rank = ordered.index(p)
        steps = [min(1.0, q * (len(p_values) - i)) for i, q in enumerate(ordered[: rank + 1])]
        assert adjusted == pytest.approx(max(steps))
    assert holm([*p_values, NAN]) == pytest.approx([*holm(p_values), NAN], nan_ok=True)  # a missing test counts for nothing


def test_many_pairs_make_a_difference_borderline():
    # a - b has p = .023 by itself; with the three pairs that a third method makes it is three times that.
    a, b, c = [0.10, 0.14, 0.12, 0.18], [0.13, 0.15, 0.14, 0.215], [0.11, 0.16, 0.09, 0.2]
    alone = compare_arms(runs(a=a, b=b)).differences[0]
    assert alone.p == pytest.approx(stats.ttest_rel(a, b).pvalue)
    assert 0.01 < alone.p < 0.05
    assert alone.verdict == "clear"
    among = compare_arms(runs(a=a, b=b, c=c))
    first = next(d for d in among.differences if (d.a, d.b) == ("a", "b"))
    assert first.interval == alone.interval
    assert first.verdict == "borderline"
    assert "Over all method pairs, the difference may be luck (p = 0.07 after Holm's correction)." in first.sentence()
    assert first.seeds_needed > alone.seeds_needed  # each of three pairs has a third of the 5 %
    assert "A clear verdict on this difference needs" in first.sentence()
    # With a reference there are two pairs instead of three.
    to_b = compare_arms(runs(a=a, b=b, c=c), reference="b")
    assert [(d.a, d.b) for d in to_b.differences] == [("a", "b"), ("c", "b")]
    assert to_b.differences[0].p_adjusted < first.p_adjusted


def test_missing_figures_leave_their_seed_out():
    result = compare_arms({
        "a": {0: {"auroc": 0.6, "ece": 0.1}, 1: {"auroc": None, "ece": 0.2}, 2: {"auroc": 0.8, "ece": 0.1}},
        "b": {0: {"auroc": NAN, "ece": 0.1}, 2: {"auroc": 0.7, "ece": 0.1}, 3: {"ece": 0.4}},
    })  # fmt: skip
    assert result.figures == ("auroc", "ece")
    a, b = (result.cells[arm, "auroc"] for arm in "ab")
    assert (a.count, a.value, b.count) == (2, pytest.approx(0.7), 1)
    auroc, ece = result.differences
    assert (auroc.verdict, auroc.interval.count, auroc.seeds_needed) == ("unknown", 1, None)
    assert auroc.sentence() == "auroc of a minus b is unknown, because it needs at least 2 common seeds and has 1."
    assert (ece.verdict, ece.interval.count) == ("same", 2)
    assert ece.sentence() == "ece of a minus b is 0 in each of 2 seeds."
    for cell in ("0.700 ± ", "0.700 (n=1)"):
        assert cell in result.markdown()


def test_the_table():
    a, b = {"ece": 0.1, "acc": 0.5}, {"ece": 0.3, "acc": None}
    result = compare_arms({"a": {0: a, 1: {**a, "ece": 0.2}}, "b": {0: b, 1: {"ece": 0.3}}}, figures=["acc", "ece"])
    half = 12.706204736 * 0.05  # t of one degree of freedom, standard error .1 / sqrt 2 / sqrt 2
    assert result.markdown().splitlines() == [
        "| method | acc | ece |",
        "|---|---|---|",
        f"| a | 0.500 ± 0.000 | 0.150 ± {half:.3f} |",
        "| b | - | 0.300 ± 0.000 |",
        "",
        "A figure is the mean over 2 seeds. The number after ± is half the width of the mean's 95 % interval (Student's t).",
    ]


@pytest.mark.parametrize(("seeds", "verdict"), [(2, "borderline"), (5, "borderline"), (8, "clear")])
def test_equal_differences_are_judged_by_their_signs(seeds, verdict):
    # Shares of few completions move in steps, so that two seeds agree exactly by chance: 2^(1 - S), times two or three pairs.
    result = compare_arms(runs(a=[0.5] * seeds, b=[0.25] * seeds, c=[0.5] * seeds))
    verdicts = [(d.a, d.b, d.verdict) for d in result.differences]
    assert verdicts == [("a", "b", verdict), ("a", "c", "same"), ("b", "c", verdict)]
    first = result.differences[0]
    assert (first.p, first.seeds_needed) == (pytest.approx(stats.binomtest(seeds, seeds).pvalue), None)
    summary = result.summary()
    named = "2 of 3 differences are beyond the noise: ece (a and b), ece (b and c). Differences that may be noise: 1."
    assert (named in summary) == (verdict == "clear")
    assert ("the number of figures (1). So up to 0.05 differences may be luck" in summary) == (verdict == "clear")


def test_rounding_is_no_difference_and_seeds_needed_are_those_of_the_observed_one():
    (same,) = compare_arms(runs(a=[0.1 + 0.2] * 6, b=[0.3] * 6)).differences
    assert same.verdict == "same"
    (d,) = compare_arms(runs(a=[0.1, 0.2, 0.3, 0.2], b=[0.15, 0.15, 0.3, 0.3])).differences
    assert d.seeds_needed == seeds_needed(d.interval.value, d.interval.sd, alpha=0.05)  # whose definition test_intervals has


def test_what_cannot_be_compared():
    arms = {"bae": {0: {"ece": 0.1}}}
    for runs_, options, names in (
        ({}, {}, "nothing to compare"), ({"a": {}}, {}, "nothing to compare"),
        (arms, {"reference": "bea"}, "method 'bea'"), (arms, {"figures": ["eec"]}, "figure 'eec'"),
    ):  # fmt: skip
        with pytest.raises(RecipeError, match=names):
            compare_arms(runs_, **options)


def test_a_difference_of_infinite_figures_is_unknown_and_not_noise():
    of_ab, of_ac, of_bc = compare_arms(runs(a=[math.inf, 0.1], b=[0.3, 0.4], c=[0.1, 0.4])).differences
    assert of_ab.sentence() == "ece of a minus b is unknown, because the figure is infinite in at least one seed."
    assert (of_ab.verdict, of_ac.verdict, of_ab.seeds_needed) == ("unknown", "unknown", None)
    assert of_bc.p_adjusted == of_bc.p  # the other two pairs are no tests
