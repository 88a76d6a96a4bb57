"""GDPO, REINFORCE++ and its baseline: worked numbers, slow oracles, rewards that cancel, where epsilon stands."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import completion_batches, token_batches
from helpers import NAN, assert_close, double
from oracles import slow_gdpo, slow_reinforce_plus_plus
from spanwise.credit import gdpo, reinforce_plus_plus, reinforce_plus_plus_baseline


@pytest.mark.parametrize("conflict", [None, 1.0])
def test_gdpo_is_that_of_the_paid_rewards_where_another_one_is_only_logged(conflict):
    """Two completions lack the paid reward, so they join no moment, whatever is logged of them."""
    group_n = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    paid_n1 = torch.tensor([1.0, 0.0, NAN, 1.0, NAN, 0.0, 1.0, 0.0])[:, None]
    both_nm = torch.cat([paid_n1, torch.tensor([[0.0], [1.0]] * 4)], dim=1)
    assert_close(gdpo(both_nm, group_n, weight_m=torch.tensor([1.0, 0.0]), conflict=conflict), gdpo(paid_n1, group_n))


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_gdpo_rewards_that_contradict_each_other_cancel_exactly(eps):
    rewards = torch.tensor([[1.0, 0], [1, 0], [0, 1]], dtype=torch.float64)
    assert gdpo(rewards, torch.zeros(3, dtype=torch.long), eps=eps).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("conflict", [None, 1.0, 0.45, 0.2])
@given(batch=completion_batches(), data=st.data(), ddof=st.integers(0, 1), by_tokens=st.booleans())
@settings(max_examples=50, deadline=None)
def test_gdpo_equals_the_slow_oracle(conflict, batch, data, ddof, by_tokens):
    reward_n, group_n, length_n = batch
    other = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, NAN]), min_size=len(reward_n), max_size=len(reward_n)))
    reward_nm, length_n = torch.stack([reward_n, double(other)], dim=1), length_n if by_tokens else None
    options = {"ddof": ddof, "conflict": conflict, "weight_m": torch.tensor([1.0, 0.25]), "length_n": length_n}
    expected = slow_gdpo((reward_nm, group_n), [1.0, 0.25], length_n.tolist() if by_tokens else None, ddof, conflict)
    assert_close(gdpo(reward_nm, group_n, **options), expected, 1e-6)


def test_gd2po_leaves_out_who_cancels_to_exactly_its_bound():
    # z is 1.5, -.5, -.5 in three rows: exactly .2 of their sizes, which the authors' code leaves out.
    rewards = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]], dtype=torch.float64)
    assert gdpo(rewards, torch.zeros(4, dtype=torch.long), conflict=0.2).tolist() == [0, 0, 0, 0]


@given(batch=token_batches(), gamma=st.sampled_from([1.0, 0.5, 0.9]), ddof=st.integers(0, 1))
@settings(max_examples=80, deadline=None)
def test_reinforce_plus_plus_equals_the_slow_oracle(batch, gamma, ddof):
    reward_nt, _, _, mask_nt, _ = batch
    before, expected = reward_nt.clone(), slow_reinforce_plus_plus(reward_nt, mask_nt, gamma, ddof)
    assert_close(reinforce_plus_plus(reward_nt, mask_nt, gamma=gamma, ddof=ddof), expected, 1e-9)
    torch.testing.assert_close(reward_nt, before, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reinforce_plus_plus_of_equal_returns_is_exactly_zero(dtype):
    reward_nt, mask_nt = 0.7 * torch.eye(40, dtype=dtype), torch.ones(40, 40).tril().bool()  # 1 to 40 tokens
    assert reinforce_plus_plus(reward_nt, mask_nt).abs().max() == 0.0
    assert reinforce_plus_plus(reward_nt[:1, :1], mask_nt[:1, :1]).tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("eps_at", "eps", "size"),
    [("std", 0.21, 1 / 1.21), ("variance", 0.21, 1 / 1.1), ("floor", 0.21, 1), ("floor", 4.0, 1 / 2)],
)
def test_where_epsilon_stands(eps_at, eps, size):
    # rewards 2 and 0 on one token each: deviations +-1, population variance 1
    reward_n, group_n, ones = torch.tensor([2.0, 0.0]), torch.tensor([0, 0]), torch.tensor([1, 1])
    options = {"ddof": 0, "eps": eps, "eps_at": eps_at}
    assert_close(reinforce_plus_plus_baseline(reward_n, group_n, length_n=ones, **options), [size, -size], 1e-12)
    assert_close(reinforce_plus_plus(reward_n[:, None], ones[:, None].bool(), **options)[:, 0].double(), [size, -size])
    scores = torch.tensor([[1.0], [-1.0]])  # standardised in the group they are +-1 / (1 + eps)
    within = 1 / (1 + eps)
    divisor = {"std": within + eps, "variance": (within**2 + eps) ** 0.5, "floor": max(within, eps**0.5)}[eps_at]
    assert_close(gdpo(scores, group_n, **options), [within / divisor, -within / divisor], 1e-6)
