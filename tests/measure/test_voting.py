"""Voting against enumeration of every subset in fractions, closed forms, and each way against the others."""

import math
import random as stdlib_random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers import NAN, quickly
from oracles import slow_voting
from spanwise.errors import AlignmentError, RecipeError
from spanwise.measure import curve_difference, voting

#: answer, right, confidence in tenths; None is absent.
SAMPLE = st.tuples(
    st.sampled_from(["1", " 1", "2", "3\n", None, "  "]), st.sampled_from([0, 1]), st.sampled_from([None, 0, 3, 6, 9, 10])
)


def run(rows, prompts=None, **options):
    answers, correct, confidence = zip(*rows, strict=True)
    return voting(
        answers,
        torch.tensor([NAN if q is None else q / 10 for q in confidence], dtype=torch.float64),
        torch.tensor([NAN if c is None else c for c in correct], dtype=torch.float64),
        **{"prompts": [0] * len(rows) if prompts is None else prompts, "resamples": 10, **options},
    )


def curve_values(curves, prompt=0):
    return {name: curve.value_pb[prompt].tolist() for name, curve in curves.items()}


@given(st.lists(SAMPLE, min_size=1, max_size=7))
@example([("1", 1, 9), ("2", 0, 3), ("2", 0, 6)])  # .9 against .3 + .6 is a tie of two answers, not of three samples
@settings(max_examples=120, deadline=None)
def test_against_every_subset(rows):
    curves = run(rows)
    for b in range(len(rows)):
        expected = slow_voting(rows, b + 1)
        assert set(curves) == {"pass@1", *expected}
        for name, value in expected.items():
            assert float(curves[name].value_pb[0, b]) == pytest.approx(value, abs=1e-12), (name, b + 1)
        assert float(curves["pass@1"].value_pb[0, b]) == pytest.approx(sum(c for _, c, _ in rows) / len(rows))


def test_a_sample_without_a_verdict_votes_as_its_answer_was_judged_elsewhere_and_answers_may_be_numbers(unchecked_shapes):
    rows = [("0", 1, 9), ("2", 0, 5), ("2", 0, 6)]
    judged, unjudged = run([*rows, ("0", 1, 10)]), run([*rows, ("0", None, 10)])
    assert unjudged["majority"].budgets == (1, 2, 3, 4)
    assert curve_values(unjudged) == curve_values(judged)  # "0" is right, says the first sample
    assert curve_values(run([(int(answer), right, q) for answer, right, q in rows])) == curve_values(run(rows))


def test_an_answer_that_nobody_judged_is_not_right():
    """The popular answer of a hard prompt timed out; leaving its samples out would make the prompt look solved."""
    rows = [("1", 1, 9), ("3", None, 9), ("3", None, 9)]
    values = curve_values(run(rows))
    assert values["pass@1"][0] == pytest.approx(1 / 3)
    assert values["majority"] == pytest.approx([1 / 3, 1 / 3, 0.0])  # two of three pairs are {1, 3}: a tie
    assert values["pass@k"] == pytest.approx([1 / 3, 2 / 3, 1.0])
    curve = run([("1", 1, 9), ("2", None, 9)], prompts=["x", "y"])["weighted"]  # a prompt without any verdict has no value
    assert curve.value_pb.nan_to_num(nan=-1.0).tolist() == [[1.0], [-1.0]]
    assert (curve.intervals[0].value, curve.intervals[0].count) == (1.0, 1)


def test_random_subsets_come_near_and_are_seeded():
    source = stdlib_random.Random(0)
    rows = [(str(source.randrange(4)), source.randrange(2), source.randrange(11)) for _ in range(14)]

    def values(rows, **options):
        return curve_values(run(rows, budgets=[5, 7], **options))

    exact, near = values(rows), values(rows, subsets=1900)  # C(14, 5) = 2002
    assert near["majority"] != exact["majority"]
    for way in ("majority", "weighted"):
        assert near[way] == pytest.approx(exact[way], abs=0.04)
    assert near == values(source.sample(rows, len(rows)), subsets=1900)
    assert near["majority"] != values(rows, subsets=1900, seed=1)["majority"]


def test_prompts_count_equally_and_short_ones_drop_out():
    rows = [("1", 1, 9)] * 4 + [("2", 0, 9)] * 2
    curves = run(rows, prompts=["x"] * 4 + ["y"] * 2)
    curve = curves["majority"]
    assert curve.prompts == ("x", "y")
    assert curve.value_pb.nan_to_num(nan=-1.0).tolist() == [[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, -1.0, -1.0]]
    assert [i.value for i in curve.intervals] == [0.5, 0.5, 1.0, 1.0]
    assert [i.count for i in curve.intervals] == [2, 2, 1, 1]
    assert (curve.intervals[0].low, curve.intervals[0].high) == (0.0, 1.0)
    assert math.isnan(curve.intervals[3].low)


@given(st.lists(st.tuples(st.integers(0, 2), SAMPLE), min_size=1, max_size=12), st.randoms())
@settings(max_examples=15, deadline=None)
def test_order_and_other_prompts_do_not_matter(rows, random):
    curves = run([row for _, row in rows], prompts=[p for p, _ in rows])
    mixed = random.sample(rows, len(rows))
    shuffled = run([row for _, row in mixed], prompts=torch.tensor([p for p, _ in mixed]))
    for name, curve in curves.items():
        assert curve.prompts == shuffled[name].prompts
        torch.testing.assert_close(curve.value_pb, shuffled[name].value_pb, equal_nan=True)
        for i, p in enumerate(curve.prompts):
            lone = run([row for q, row in rows if q == p])
            if name in lone:  # a prompt by itself may hold no confidence
                value_b = lone[name].value_pb[0]
                torch.testing.assert_close(curve.value_pb[i, : len(value_b)], value_b)


def test_sixteen_samples_are_exact():
    rows = [("1", 1, 9)] * 9 + [("2", 0, 3)] * 7
    values = curve_values(run(rows))
    for n in range(1, 17):  # hypergeometric: the right answer wins with more than half, a tie counts half
        wins = sum(math.comb(9, k) * math.comb(7, n - k) * ((2 * k > n) + (2 * k == n) / 2) for k in range(n + 1))
        assert values["majority"][n - 1] == pytest.approx(wins / math.comb(16, n))
    assert len(values["majority"]) == 16
    assert len(curve_values(run(rows * 2))["pass@k"]) == 16


def test_exactly_so_many_subsets_are_drawn():
    rows = [("1", 1, 9)] * 13 + [("2", 0, 3)] * 7
    accuracy = curve_values(run(rows, budgets=[5], subsets=5000))["majority"][0]
    right_votes = accuracy * 5000  # five votes for two answers have one winner
    assert right_votes == pytest.approx(round(right_votes), abs=1e-6)


def test_paired_difference_of_curves():
    rows = [("4", 0, 2), ("4", 0, 2), ("7", 1, 9)] * 5
    curves = run(rows, prompts=[i // 3 for i in range(15)], resamples=200)
    gap = curve_difference(curves["weighted"], curves["majority"])
    assert [i.value for i in gap.intervals] == pytest.approx([0.0, 1 / 3, 1.0])
    # All prompts are alike: the difference has no noise at all.
    assert (gap.intervals[2].low, gap.intervals[2].high) == pytest.approx((1.0, 1.0))
    assert not gap.intervals[0].excludes()
    other = run(rows, prompts=[i // 3 + 1 for i in range(15)])
    with pytest.raises(AlignmentError, match=r"5 and 5 prompts \(different ids\)"):
        curve_difference(curves["weighted"], other["majority"])


def test_bad_input_is_a_sentence(unchecked_shapes):
    one = torch.ones(1)
    with pytest.raises(RecipeError, match=r"budget of 3 .* at most 2"):
        voting(["1", "1"], torch.ones(2), torch.ones(2), prompts=[0, 0], budgets=[3])
    for confidence_n, correct_n, prompts, names in (
        (one, torch.ones(2), [0], "2 verdicts for 1 answers"), (one, one, [0, 0], "2 prompt ids for 1 completions"),
        (one, one / 2, [0], "Correctness 0.5 of completion 0"), (95 * one, one, [0], "Confidence 95.0 of completion 0"),
    ):  # fmt: skip
        with pytest.raises(AlignmentError, match=names):
            voting(["1"], confidence_n, correct_n, prompts=prompts)
    assert voting([], torch.zeros(0), torch.zeros(0), prompts=[])["majority"].budgets == ()


def test_long_answers_are_compared_once():
    answers = ["x" * 100_000 + f"{n:03}" for n in range(500)]
    curves = quickly(voting, answers, torch.zeros(500), torch.ones(500), prompts=[0] * 500, budgets=[1], resamples=1)
    assert float(curves["majority"].value_pb) == 1.0
