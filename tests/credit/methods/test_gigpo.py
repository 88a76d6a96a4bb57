"""GiGPO: worked numbers, a slow oracle, and what it is without steps or without episodes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import STEP, TASK, TRAJECTORY, WORKED, step_batches
from helpers import NAN, assert_close
from oracles import slow_gigpo
from spanwise.credit.methods._gigpo import gigpo


def test_gigpo_mean():
    # returns by state: s0 {9.025, 0}, s1 {9.5, 0, 0}, s2 {10}; episodes: row mean 5
    within = [9.025 / 2, 9.5 * 2 / 3, 0, -9.025 / 2, -9.5 / 3, -9.5 / 3]
    assert_close(gigpo(*WORKED, episode_weight=0.0), within, 1e-12)
    assert_close(gigpo(*WORKED, step_weight=0.0), [5, 5, 5, -5, -5, -5], 1e-12)
    assert_close(gigpo(*WORKED), [9.5125, 11.333333, 5, -9.5125, -8.166667, -8.166667])


def test_gigpo_mean_and_standard_deviation():
    assert_close(gigpo(*WORKED, scale="std"), [1.619977, 2.067571, 0.912871, -1.619977, -1.490221, -1.490221])
    assert_close(
        gigpo(*WORKED, scale="std", over="trajectories", step_weight=0.0),
        [0.707107, 0.707107, 0.707107, -0.707107, -0.707107, -0.707107],
    )
    half = 1 / math.sqrt(2)
    third = 1 / math.sqrt(3)
    assert_close(gigpo(*WORKED, scale="std", episode_weight=0.0), [half, 2 * third, 0, -half, -third, -third])
    # population deviation of the rows: 5, of s0: 4.5125
    assert_close(gigpo(*WORKED, scale="std", ddof=0, eps=0.0)[[0, 3]], [2, -2], 1e-12)
    assert_close(gigpo(*WORKED, scale="std", ddof=0, eps=5.0, step_weight=0.0)[[0, 3]], [0.5, -0.5], 1e-12)


def test_a_lone_episode_is_zero_unless_raw():
    alone = torch.tensor([3.0]), torch.tensor([0]), torch.tensor([0]), torch.tensor([0]), ["s"]
    assert gigpo(*alone).tolist() == [0.0]
    assert gigpo(*alone, singleton="raw").tolist() == [3.0]
    assert gigpo(*alone, singleton="raw", scale="std", eps=0.5).tolist() == [2.0]
    # as many rows as the trajectory has steps: constant over rows, alone over trajectories
    two = torch.tensor([1.0, 2]), torch.zeros(2).long(), torch.zeros(2).long(), torch.arange(2), ["s", "t"]
    assert gigpo(*two, singleton="raw").tolist() == [0.0, 0.0]
    assert gigpo(*two, singleton="raw", over="trajectories").tolist() == [3.0, 3.0]
    absent = torch.tensor([NAN, 3.0]), torch.zeros(2).long(), torch.arange(2), torch.zeros(2).long(), ["s", "t"]
    assert gigpo(*absent, singleton="raw").tolist() == [0.0, 3.0]


def test_min_stratum():
    assert gigpo(*WORKED, min_stratum=3).tolist() == pytest.approx([5, 5 + 19 / 3, 5, -5, -5 - 9.5 / 3, -5 - 9.5 / 3])
    assert gigpo(*WORKED, min_stratum=3, over="trajectories")[:1].tolist() == [0.0]


@pytest.mark.parametrize("scale", ["none", "std"])
@pytest.mark.parametrize("over", ["rows", "trajectories"])
@pytest.mark.parametrize("reward", ["sum", "last"])
@given(batch=step_batches(), ddof=st.integers(0, 1), step_weight=st.sampled_from([1.0, 0.3]))
@settings(max_examples=40, deadline=None)
def test_gigpo_equals_the_slow_oracle(batch, scale, over, reward, ddof, step_weight):
    options = {"scale": scale, "over": over, "reward": reward, "ddof": ddof, "step_weight": step_weight, "gamma": 0.9}
    expected = slow_gigpo(batch, eps=1e-6, **options)
    torch.testing.assert_close(gigpo(*batch, **options), expected, atol=1e-9, rtol=0)


def test_equal_totals_stay_equal_whatever_the_order_of_their_parts():
    # .1 + .2 + .3 and .3 + .2 + .1 differ in floating point; with eps = 0 the difference would be blown up to +-.7
    reward = torch.tensor([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], dtype=torch.float64)
    states = list("abcdef")
    for over in ("rows", "trajectories"):
        assert gigpo(reward, TASK, TRAJECTORY, STEP, states, scale="std", eps=0.0, over=over).tolist() == [0.0] * 6
