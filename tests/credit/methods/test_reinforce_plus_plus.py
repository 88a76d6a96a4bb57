"""REINFORCE++: worked numbers, a slow oracle, and what whitening over tokens means for completions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import LENGTH, REWARD, outcome_tokens
from helpers import NAN, assert_close
from oracles import slow_reinforce_plus_plus
from spanwise.credit import reinforce_plus_plus


def test_reinforce_plus_plus():
    reward_nt, mask_nt = outcome_tokens(REWARD, LENGTH)
    adv_nt = reinforce_plus_plus(reward_nt, mask_nt)
    expected = torch.where(REWARD == 1, 1.436141, -0.652791)[:, None].expand(mask_nt.shape)
    torch.testing.assert_close(adv_nt, torch.where(mask_nt, expected.double(), 0.0), atol=1e-6, rtol=0)


@st.composite
def dense_batches(draw):
    n, t = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    values = st.sampled_from([0.0, 0.0, 0.0, 0.25, 1.0, -0.5, NAN])
    reward_nt = torch.tensor(draw(st.lists(st.lists(values, min_size=t, max_size=t), min_size=n, max_size=n)))
    mask_nt = torch.tensor(draw(st.lists(st.lists(st.booleans(), min_size=t, max_size=t), min_size=n, max_size=n)))
    return reward_nt.double(), mask_nt


@given(batch=dense_batches(), gamma=st.sampled_from([1.0, 0.5, 0.9]), ddof=st.integers(0, 1))
@settings(max_examples=80, deadline=None)
def test_reinforce_plus_plus_equals_the_slow_oracle(batch, gamma, ddof):
    reward_nt, mask_nt = batch
    before = reward_nt.clone()
    assert_close(
        reinforce_plus_plus(reward_nt, mask_nt, gamma=gamma, ddof=ddof), slow_reinforce_plus_plus(*batch, gamma, ddof), 1e-9
    )
    torch.testing.assert_close(reward_nt, before, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reinforce_plus_plus_of_equal_returns_is_exactly_zero(dtype):
    reward_nt, mask_nt = outcome_tokens(torch.full((40,), 0.7), torch.arange(1, 41), dtype)
    assert reinforce_plus_plus(reward_nt, mask_nt).abs().max() == 0.0
    assert reinforce_plus_plus(reward_nt[:1, :1], mask_nt[:1, :1]).tolist() == [[0.0]]
