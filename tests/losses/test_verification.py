"""The loss of a self-rewarding score: the worked numbers of the paper's code, and completions that take no part."""

import pytest
import torch

from helpers import NAN, assert_close, double
from spanwise.errors import AlignmentError, RewardError
from spanwise.modes.laser.score import class_weights, verification_loss

SCORE, VERDICT = [0.9, 0.7, 0.3, 0.1], [1, 0, 0, 0]


def slow_loss(score, verdict):
    """The definition in loops, over the completions that have a score and a verdict."""
    rows = [(s, v) for s, v in zip(score, verdict, strict=True) if s == s and v == v]
    right, wrong = sum(v == 1 for _, v in rows), sum(v == 0 for _, v in rows)
    total = 0.0
    for s, v in rows:
        total += (right + wrong) / (2 * (right if v == 1 else wrong)) * (s - v) ** 2
    return total / (right + wrong) if rows else 0.0


def test_random_batches_against_loops_whatever_is_absent():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        score_n = torch.rand(9, generator=generator).double() * 3 - 1
        verdict_n = torch.randint(0, 2, (9,), generator=generator).double()
        score_n[torch.rand(9, generator=generator) < 0.3] = NAN
        verdict_n[torch.rand(9, generator=generator) < 0.3] = NAN
        loss = float(verification_loss(score_n, verdict_n))
        assert loss == pytest.approx(slow_loss(score_n.tolist(), verdict_n.tolist()), abs=1e-12)
    assert float(verification_loss(double([NAN, 0.3]), double([1, NAN]))) == 0.0  # nobody takes part
    assert class_weights(double([1, 1, 1])).tolist() == [0.5, 0.5, 0.5]  # a class of nobody has no weight
    assert class_weights(double([1, 0, 0, NAN]), balanced=False).tolist() == [1, 1, 1, 0]


def test_who_takes_no_part_is_not_counted_and_has_no_gradient():
    score_n = double([*SCORE, 7.0, NAN]).requires_grad_()
    loss = verification_loss(score_n, double([*VERDICT, NAN, 1]))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.1033333, abs=1e-7)  # a mean over all six would be .0688889
    gradient = score_n.grad
    assert gradient[4:].tolist() == [0.0, 0.0]
    # 2 w (r_s - r_v) / 4
    assert_close(gradient[:4], [-0.1, 2 * 2 / 3 * 0.7 / 4, 2 * 2 / 3 * 0.3 / 4, 2 * 2 / 3 * 0.1 / 4], 1e-12)


def test_parts_of_a_batch_with_its_weights_add_up():
    score_n, verdict_n = double([0.9, 0.7, 0.3, 0.1, NAN, 0.4]), double([1, 0, 0, 0, 1, 1])
    weight_n = class_weights(torch.where(score_n.isnan(), torch.nan, verdict_n))
    parts = (slice(0, 2), slice(2, 5), slice(5, 6))
    losses = [verification_loss(score_n[rows], verdict_n[rows], weight_n=weight_n[rows], count=5.0) for rows in parts]
    assert float(sum(losses)) == pytest.approx(float(verification_loss(score_n, verdict_n)), abs=1e-12)


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_verdict_is_right_or_wrong_and_sizes_fit():
    with pytest.raises(RewardError, match=r"completion 1 of 2 is 0\.5"):
        class_weights(double([1, 0.5]))
    with pytest.raises(AlignmentError, match="3 verdicts"):
        verification_loss(double([1, 0]), double([1, 0, 1]))
