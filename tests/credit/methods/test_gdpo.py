"""GDPO: worked numbers, a slow oracle, and rewards that cancel."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import completion_batches
from helpers import NAN, assert_close
from oracles import slow_gdpo
from spanwise.credit import gdpo, grpo

GDPO = torch.tensor([[0.0, 0], [1, 0], [0, 0], [1, 1]], dtype=torch.float64)
PAIRS = torch.tensor([0, 0, 1, 1])


def test_gdpo():
    assert_close(gdpo(GDPO, PAIRS, eps=1e-4), [-0.547680, 0.547680, -1.095360, 1.095360])
    by_tokens = gdpo(GDPO, PAIRS, length_n=torch.tensor([1, 3, 1, 1]), eps=1e-6)
    assert_close(by_tokens, [-0.885615, 0.442807, -1.549826, 1.107019], 2e-6)
    assert_close(grpo(GDPO.sum(dim=1), PAIRS), [-0.707106, 0.707106, -0.707106, 0.707106], 1e-6)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_gdpo_rewards_that_contradict_each_other_cancel_exactly(eps):
    rewards = torch.tensor([[1.0, 0], [1, 0], [0, 1]], dtype=torch.float64)
    assert gdpo(rewards, torch.zeros(3, dtype=torch.long), eps=eps).tolist() == [0.0, 0.0, 0.0]


@given(batch=completion_batches(low=-4), data=st.data(), ddof=st.integers(0, 1), by_tokens=st.booleans())
@settings(max_examples=50, deadline=None)
def test_gdpo_equals_the_slow_oracle(batch, data, ddof, by_tokens):
    reward_n, group_n, length_n = batch
    others = [data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, NAN]), min_size=len(reward_n), max_size=len(reward_n)))]
    reward_nm = torch.stack([reward_n, *(torch.tensor(other).double() for other in others)], dim=1)
    adv_n = gdpo(reward_nm, group_n, weight_m=torch.tensor([1.0, 0.25]), length_n=length_n if by_tokens else None, ddof=ddof)
    assert_close(adv_n, slow_gdpo((reward_nm, group_n), [1.0, 0.25], length_n.tolist() if by_tokens else None, ddof), 1e-6)
