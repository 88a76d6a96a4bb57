"""Baselines: properties, a batch of nothing, the blended one by hand and what it never reads; test_outcomes has its oracle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import SAME, report_batches
from helpers import NAN, assert_close
from spanwise.credit import advantage, blended_baseline

CONSTANTS = [(0.806,), (0.7,), (1 / 3,), (0.1,), (-0.123456789,), (0.1, 0.5, 0.7), (-0.123456789, 1 / 3, 0.806, 0.3)]


@pytest.mark.parametrize("values", CONSTANTS)
@pytest.mark.parametrize("size", [2, 3, 7, 8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blended_gives_constant_groups_exactly_zero(values, size, dtype):
    """Nothing varies inside a prompt, so the mean of the prompt's others is certain, and other prompts do not count."""
    reward_n = torch.tensor(values, dtype=dtype).repeat_interleave(size)
    group_n = torch.arange(len(values)).repeat_interleave(size)
    result = advantage(reward_n, group_n, baseline="blended", outcome_no=torch.ones(len(reward_n)))
    assert result.advantage_n.tolist() == [0.0] * len(reward_n)


@pytest.mark.parametrize("baseline", ["batch", "group", "outcome", "blended"])
@pytest.mark.parametrize("size", [0, 2])
def test_a_batch_without_any_completion_or_reward_costs_nothing(baseline, size):
    nothing, group_n = torch.full((size,), NAN), SAME[:size]
    result = advantage(nothing, group_n, baseline=baseline, outcome_no=torch.ones(size, 2).double(), if_missing=-1.0)
    assert result.missing_n.tolist() == result.advantage_n.tolist() == [0.0] * size
    assert result.missing_n.dtype == result.advantage_n.dtype == torch.float64
    assert result.comparison.baseline_nm.shape == (size, 1)


@st.composite
def gapped(draw):
    """Rewards of which some are missing, and what these stand for, on a fine grid."""
    return (*draw(report_batches()), draw(st.integers(-300, 100)) / 100)


def credited(batch, baseline, factor=1.0, shift=0.0):
    reward_n, group_n, outcome_no, *_, if_missing = batch
    options = {"baseline": baseline, "scale": "std", "if_missing": factor * if_missing + shift}
    result = advantage(factor * reward_n + shift, group_n, outcome_no=outcome_no, **options)
    return result.advantage_n + result.missing_n


@pytest.mark.parametrize("baseline", ["batch", "group", "outcome"])
@given(batch=gapped(), factor=st.sampled_from([0.001, 3.0, 1000.0]), shift=st.integers(-9, 9))
@settings(max_examples=60, deadline=None)
def test_units_and_origin_of_rewards_do_not_matter_to_what_is_scaled(batch, baseline, factor, shift):
    apart = ((batch[0] * 4).round() / 4, *batch[1:])  # equal or well apart, so that what is constant stays so in other units
    moved = credited(apart, baseline, factor=factor, shift=shift)
    torch.testing.assert_close(moved, credited(apart, baseline), atol=1e-6, rtol=1e-6)


@given(batch=report_batches(), data=st.data())
@settings(max_examples=50, deadline=None)
def test_blended_never_reads_the_own_reward(batch, data):
    # Neither in an estimate nor in a weight: whatever a completion earns, its baseline stays.
    reward, *_, judged = batch
    i = data.draw(st.integers(0, len(reward) - 1))
    before = blended_baseline(*batch[:4], judged=judged)[i]
    if not reward[i].isnan():
        reward[i] = data.draw(st.sampled_from([-1.0, -0.3, 0.0]))
        after = blended_baseline(*batch[:4], judged=judged)[i]
        torch.testing.assert_close(after, before, atol=1e-7, rtol=1e-7, equal_nan=True)


def test_blended_by_hand_without_rescoring():
    # Three prompts with rewards 0 2, 4 8 and 3 3, one outcome. What prompt 0 learns from the other two: s2 = (8 + 0)/2 = 4; means 6
    # and 3, variance 4.5, noise 4/2: t2 = 2.5. So ml = 2 with v = 4/1, mu = 18/4 with v = 2.5 (1 + 1/2) + 4/4 = 4.75.
    reward_n = torch.tensor([0.0, 2.0, 4.0, 8.0, 3.0, 3.0], dtype=torch.float64)
    baseline_n = blended_baseline(reward_n, torch.tensor([0, 0, 1, 1, 2, 2]), torch.ones(6))

    def mix(ml, v_ml, mu, v_mu):
        return (ml / v_ml + mu / v_mu) / (1 / v_ml + 1 / v_mu)

    first = [mix(2, 4, 4.5, 4.75), mix(0, 4, 4.5, 4.75)]
    second = [mix(8, 1, 2, 2.5), mix(4, 1, 2, 2.5)]  # s2 = 2/2, t2 = 2 - 1/2
    assert_close(baseline_n, first + second + [mix(3, 5, 3.5, 16.25)] * 2, 1e-9)  # s2 = 10/2, t2 = 12.5 - 5/2
