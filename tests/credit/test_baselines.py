"""Baselines: worked numbers, a slow oracle, properties, and what a missing block costs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import PAIR, SAME, scored_batches
from helpers import NAN, assert_close
from spanwise.credit import advantage, bae, dr_grpo, grpo, rlcr


@pytest.mark.parametrize("value", [0.806, 0.7, 1 / 3, 0.1, -0.123456789])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_groups_give_exactly_zero(value, size, dtype):
    reward_n = torch.full((size,), value, dtype=dtype)
    group_n = torch.zeros(size, dtype=torch.long)
    assert grpo(reward_n, group_n, eps=0.0).tolist() == [0.0] * size
    assert dr_grpo(reward_n, group_n).tolist() == [0.0] * size
    outcome_n = torch.ones(size)
    assert advantage(reward_n, group_n, baseline="blended", outcome_no=outcome_n).advantage_n.abs().max() == 0.0


@pytest.mark.parametrize(
    "method",
    [
        grpo,
        dr_grpo,
        lambda r, g, **o: rlcr(torch.stack([r, torch.zeros_like(r)], dim=1), g, **o),
        lambda r, g, **o: bae(r[:, None], g, **o)[:, 0],
        lambda r, g, **o: advantage(r, g, **o).advantage_n,
    ],
)
def test_min_stratum_is_two_and_can_be_three(method):
    assert method(PAIR, SAME).abs().min() > 0
    assert method(PAIR, SAME, min_stratum=3).tolist() == [0.0, 0.0]


def test_defaults_of_advantage():
    assert_close(advantage(PAIR, torch.tensor([0, 1])).advantage_n, [0.0, 0.0], 1e-12)  # the group, not the batch
    assert_close(advantage(PAIR, SAME, scale="std").advantage_n, [-(2**-0.5), 2**-0.5], 1e-12)


@pytest.mark.parametrize("baseline", ["batch", "group", "outcome", "blended"])
def test_a_batch_without_any_reward_costs_nothing(baseline):
    nothing = torch.tensor([NAN, NAN])
    result = advantage(nothing, SAME, baseline=baseline, outcome_no=torch.tensor([1.0, 1.0]), if_missing=-1.0)
    assert result.missing_n.tolist() == [0.0, 0.0]
    assert result.advantage_n.tolist() == [0.0, 0.0]
    assert result.missing_n.dtype == result.advantage_n.dtype == torch.float64


@st.composite
def gapped(draw):
    """Rewards of which some are missing, and what these stand for, on a fine grid."""
    batch = draw(scored_batches())
    return (*batch, draw(st.integers(-300, 100)) / 100)


def credited(batch, baseline, ddof=1, factor=1.0, shift=0.0):
    reward_n, group_n, outcome_n, _, if_missing = batch
    result = advantage(
        factor * reward_n + shift, group_n, baseline=baseline, outcome_no=outcome_n, scale="std", ddof=ddof,
        if_missing=factor * if_missing + shift,
    )  # fmt: skip
    return result.advantage_n + result.missing_n


@pytest.mark.parametrize("baseline", ["batch", "group", "outcome"])
@given(batch=gapped(), factor=st.sampled_from([0.001, 3.0, 1000.0]), shift=st.integers(-9, 9))
@settings(max_examples=60, deadline=None)
def test_units_and_origin_of_rewards_do_not_matter_to_what_is_scaled(batch, baseline, factor, shift):
    moved = credited((_apart(batch[0]), *batch[1:]), baseline, factor=factor, shift=shift)
    torch.testing.assert_close(moved, credited((_apart(batch[0]), *batch[1:]), baseline), atol=1e-6, rtol=1e-6)


def _apart(reward_n):
    """Rewards that are either equal or well apart, so that what is constant stays so in other units."""
    return (reward_n * 4).round() / 4


@pytest.mark.parametrize("baseline", ["batch", "group"])
@given(batch=gapped(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_small_step_of_one_reward_is_a_small_step_of_what_is_missing(batch, baseline, data):
    reward_n, *others, if_missing = batch
    present = (~reward_n.isnan()).nonzero().flatten().tolist()
    if not present or bool(((reward_n - if_missing).abs() < 0.05).any()):  # all equal, the stand-in too: nothing to scale by
        return
    moved_n = reward_n.clone()
    moved_n[data.draw(st.sampled_from(present))] += 1e-7
    step = credited((moved_n, *others, if_missing), baseline) - credited(batch, baseline)
    assert float(step[reward_n.isnan()].abs().sum()) < 1e-3
