"""Step returns and outcomes of trajectories: worked numbers, a slow oracle, absent rewards."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import STEP, STEP_REWARD, TRAJECTORY, WORKED, step_batches, trajectory_outcomes
from helpers import NAN, assert_close
from oracles import slow_returns
from spanwise.credit.contrib._unconfirmed import gagpo
from spanwise.credit.methods._gigpo import gigpo
from spanwise.credit.strata import group_index
from spanwise.credit.trajectories.rollouts import step_returns


def test_step_returns():
    assert_close(step_returns(STEP_REWARD, TRAJECTORY, STEP), [9.025, 9.5, 10, 0, 0, 0], 1e-12)
    assert_close(step_returns(STEP_REWARD, TRAJECTORY, STEP, gamma=1.0), [10, 10, 10, 0, 0, 0], 1e-12)
    mixed = torch.tensor([4, 0, 3, 2, 5, 1])
    assert_close(step_returns(STEP_REWARD[mixed], TRAJECTORY[mixed], STEP[mixed]), [0, 9.025, 0, 10, 0, 9.5], 1e-12)


def test_absent_reward_reaches_back_to_the_start_and_no_further():
    reward = torch.tensor([0.0, NAN, 10, 0, 0, 0])
    assert step_returns(reward, TRAJECTORY, STEP).isnan().tolist() == [True, True, False, False, False, False]
    # s0 and s1 are left to b, whose returns are all 0; a's episode is absent, so nobody is left to compare b with but itself
    assert gigpo(reward, *WORKED[1:]).tolist() == [0.0] * 6
    assert gagpo(reward, *WORKED[1:]).tolist() == [0.0] * 6
    with_last = gigpo(reward, *WORKED[1:], reward="last")
    assert_close(with_last, [5, 5, 5, -5, -5, -5], 1e-12)


@given(batch=step_batches(), gamma=st.sampled_from([0.0, 0.5, 0.95, 1.0]))
@settings(max_examples=60, deadline=None)
def test_step_returns_equal_the_slow_oracle(batch, gamma):
    expected = torch.tensor(slow_returns(batch, gamma), dtype=torch.float64)
    actual = step_returns(batch[0], *batch[2:4], gamma=gamma)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0, equal_nan=True)


def test_ids_of_any_kind_through_group_index():
    pairs = [("x", 0), ("x", 0), ("y", 0), ("y", 0)]
    trajectory = group_index(pairs)
    assert trajectory_outcomes(
        torch.arange(4.0), group_index([p for p, _ in pairs]), trajectory, torch.tensor([0, 1, 0, 1])
    )[0].tolist() == [1.0, 3.0]
