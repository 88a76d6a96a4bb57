"""What credit should say of dependent parts, against distributions and groups worked out by hand."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from parts import own_advantage, to_go_advantage, weighted_correlation

from spanwise.measure import bootstrap

#: Two parts of three tokens each; the first is right as 0, the second as 1.
FIRST = (0.5, 0.3, 0.2)
#: The second part's probabilities behind each first one.
SECOND = ((0.1, 0.8, 0.1), (0.6, 0.25, 0.15), (0.4, 0.0, 0.6))
GOLD = (0, 1)


def test_own_advantages_are_those_of_a_distribution_worked_out_by_hand() -> None:
    pairs = list(product(range(3), range(3)))
    logp = torch.tensor([[FIRST, SECOND[a]] for a, _ in pairs], dtype=torch.float64).log()
    advantages = own_advantage(logp, torch.tensor(pairs), torch.tensor([GOLD] * 9)).tolist()
    right = {(a, b): [0.5 if a == 0 else -0.5, (b == 1) - (0.8, 0.25, 0.0)[a]] for a, b in pairs}
    assert advantages == [pytest.approx(right[pair]) for pair in pairs]
    # Behind each first part they cancel on average, whatever went wrong before: that is what makes them advantages.
    for a in range(3):
        assert sum(p * advantages[3 * a + b][1] for b, p in enumerate(SECOND[a])) == pytest.approx(0.0, abs=1e-12)


def test_advantages_to_go_add_what_a_part_does_to_later_ones() -> None:
    # At the start .5 + (.5 x .8 + .3 x .25 + .2 x 0) = .975 are to come.
    reward = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]).double()
    to_go = torch.tensor([[0.975, 0.8], [0.975, 0.8], [0.975, 0.25], [0.975, 0.0]]).double()
    expected = [[0.825, 0.2], [0.825, -0.8], [-0.725, 0.75], [-0.975, 0.0]]
    assert to_go_advantage(reward, to_go).tolist() == [pytest.approx(row) for row in expected]


def test_correlation_under_weights_is_that_of_repeated_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 7, generator=generator).double().unbind()
    weight = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 2, 1, 0, 3, 1, 1]])
    rows = [torch.arange(7).repeat_interleave(row) for row in weight]
    expected = [float(torch.corrcoef(torch.stack([left[row], right[row]]))[0, 1]) for row in rows]
    assert weighted_correlation(left, right, weight.double()).tolist() == pytest.approx(expected)
    constant = bootstrap(lambda weight_rn: weighted_correlation(left, torch.ones(7), weight_rn), list(range(7)), resamples=3)
    assert str(constant) == "-"
