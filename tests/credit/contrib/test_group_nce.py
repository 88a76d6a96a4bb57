"""Group NCE: worked numbers, the gradient of its loss, what it is at equal scores, and who takes no part."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import NAN, assert_close, double
from spanwise.credit import dr_grpo, group_nce
from spanwise.errors import AlignmentError, RewardError

ONE = torch.zeros(4, dtype=torch.long)
RIGHT = torch.tensor([1.0, 1.0, 0.0, 0.0])


def brute_force_loss(correct, groups, scores):
    """The loss as it is written, one right completion after the other."""
    total = torch.zeros((), dtype=torch.float64)
    for i, group in enumerate(groups):
        wrong = [j for j, other in enumerate(groups) if other == group and correct[j] == 0]
        if correct[i] == 1 and wrong:  # without a wrong one the fraction is 1 and its logarithm 0
            total = total - (scores[i].exp() / (scores[i].exp() + sum(scores[j].exp() for j in wrong))).log()
    return total


@st.composite
def judged(draw):
    n = draw(st.integers(1, 12))
    column = lambda values: draw(st.lists(values, min_size=n, max_size=n))  # noqa: E731
    correct_n, group_n = torch.tensor(column(st.sampled_from([0.0, 1.0]))), torch.tensor(column(st.integers(-2, 1)))
    return correct_n, group_n, double(column(st.floats(-3, 3, allow_subnormal=False)))


def test_worked_numbers():
    # (2, 2) at equal scores: Z = 3 for each right one, so 1 - 1/3 and -(1/3 + 1/3); L = 2 ln 3.
    assert_close(group_nce(RIGHT, ONE, double([7, 7, 7, 7])), [2 / 3, 2 / 3, -2 / 3, -2 / 3], 1e-12)
    assert float(brute_force_loss(RIGHT.tolist(), ONE.tolist(), torch.zeros(4).double())) == pytest.approx(2 * math.log(3))
    score_n = double([0.3, -0.1, 0.2, -0.4])
    assert_close(group_nce(RIGHT, ONE, score_n), [0.583580, 0.676446, -0.813544, -0.446482], 1e-6)
    assert float(brute_force_loss(RIGHT.tolist(), ONE.tolist(), score_n)) == pytest.approx(2.004452, abs=1e-6)


@given(batch=judged())
@settings(max_examples=60, deadline=None)
def test_it_is_the_gradient_of_the_loss(batch):
    correct_n, group_n, score_n = batch
    leaf_n = score_n.clone().requires_grad_()
    loss = brute_force_loss(correct_n.tolist(), group_n.tolist(), list(leaf_n))
    expected_n = torch.zeros_like(score_n)
    if loss.requires_grad:
        expected_n = -torch.autograd.grad(loss, leaf_n)[0]
    found_n = group_nce(correct_n, group_n, score_n)
    assert_close(found_n, expected_n, 1e-12)
    for group in group_n.unique():
        assert float(found_n[group_n == group].sum()) == pytest.approx(0.0, abs=1e-12)


@given(batch=judged(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_order_names_of_groups_and_a_constant_change_nothing(batch, data):
    correct_n, group_n, score_n = batch
    whole_n = group_nce(correct_n, group_n, score_n)
    order = torch.tensor(data.draw(st.permutations(range(len(group_n)))))
    other_n = torch.tensor([-(2**62), -1, 5, 2**62])[group_n + 2]  # the ids -2 to 1 under other names
    shifted_n = score_n + double([40.0, -7.5, 0.25, 1000.0])[group_n + 2]
    assert_close(group_nce(correct_n[order], other_n[order], shifted_n[order]), whole_n[order], 1e-12)


@given(batch=judged(), score=st.sampled_from([0.0, -250.0, 3.5]))
@settings(max_examples=40, deadline=None)
def test_equal_scores_are_centred_grpo_times_a_number(batch, score):
    correct_n, group_n, _ = batch
    expected_n = dr_grpo(correct_n, group_n)
    for group in group_n.unique():
        here = group_n == group
        expected_n[here] *= int(here.sum()) / (1 + int((correct_n[here] == 0).sum()))
    assert_close(group_nce(correct_n, group_n, torch.full((len(group_n),), score)), expected_n, 1e-12)


@pytest.mark.parametrize("correct", [0.0, 1.0])
def test_an_empty_side_gives_exactly_nothing(correct):
    score_n = double([800, -800, 0.5, -0.5, 3])
    group_n = torch.tensor([4, 4, 4, 9, 9])
    found_n = group_nce(torch.tensor([correct, correct, correct, 1 - correct, correct]), group_n, score_n)
    assert found_n[:3].tolist() == [0.0] * 3
    assert float(found_n[3:].abs().min()) > 0
    assert group_nce(torch.zeros(0), torch.zeros(0).long(), torch.zeros(0)).shape == (0,)


def test_scores_of_any_size():
    # Right far below wrong: each right one is pushed with all its weight, by the wrong one at the top. And the other way round: 0.
    assert group_nce(RIGHT, ONE, double([-800, -800, 800, -800])).tolist() == [1.0, 1.0, -2.0, 0.0]
    assert group_nce(RIGHT, ONE, double([800, 800, -800, -800])).tolist() == [0.0] * 4
    # The right one that the wrong ones beat, and the one that beats them.
    assert group_nce(RIGHT, ONE, double([800, -800, 0, -800])).tolist() == [0.0, 1.0, -1.0, 0.0]


def test_what_is_not_known_takes_no_part():
    correct_n, score_n = torch.tensor([1.0, NAN, 1.0, 0.0, 0.0, 1.0]), double([0.3, 9, -0.1, 0.2, -0.4, NAN])
    found_n = group_nce(correct_n, torch.full((6,), -1), score_n)
    known = torch.tensor([0, 2, 3, 4])
    assert found_n[[1, 5]].tolist() == [0.0, 0.0]
    assert_close(found_n[known], group_nce(RIGHT, ONE, score_n[known]), 0)


def test_sentences(unchecked_shapes):
    scores = torch.zeros(4)
    with pytest.raises(RewardError, match=r"reward of completion 1 is 0\.5; group_nce tells right \(1\) from wrong \(0\)"):
        group_nce(torch.tensor([1.0, 0.5, 0.0, NAN]), ONE, scores)
    with pytest.raises(RewardError, match=r"score of completion 2 is -inf; a score must be finite, or NaN"):
        group_nce(RIGHT, ONE, torch.tensor([0.0, 0.0, -math.inf, 0.0]))
    with pytest.raises(AlignmentError, match=r"There are 4 rewards, 4 group ids and 3 scores"):
        group_nce(RIGHT, ONE, scores[:3])
