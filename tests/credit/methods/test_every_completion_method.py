"""What holds for every critic-free method: its relations to the others, a slow oracle, order, absence, constants, strata."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import completion_batches
from helpers import assert_close
from oracles import slow_maxrl, slow_opo, slow_reinforce_plus_plus_baseline
from spanwise.credit import (
    HistoryWeight,
    gdpo,
    ha_dw,
    maxrl,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)
from spanwise.errors import AlignmentError, RecipeError, RewardError


@given(batch=completion_batches(), ddof=st.integers(0, 1), alpha=st.sampled_from([0.0, 0.3, 1.0]), flag=st.booleans())
@settings(max_examples=80, deadline=None)
def test_equal_the_slow_oracles(batch, ddof, alpha, flag):
    reward_n, group_n, length_n = batch
    assert_close(maxrl(reward_n, group_n, eps=alpha), slow_maxrl(batch, alpha), 1e-9)
    assert_close(opo(reward_n, group_n, length_n=length_n), slow_opo(batch), 1e-9)
    whitened_n = reinforce_plus_plus_baseline(reward_n, group_n, length_n=length_n, ddof=ddof, zero_constant_groups=flag)
    assert_close(whitened_n, slow_reinforce_plus_plus_baseline(batch, ddof, flag), 1e-9)


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


def test_empty_batches():
    nothing, nobody = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    for method in (rloo, maxrl, ha_dw):
        assert method(nothing, nobody).shape == (0,)
    for method in (opo, reinforce_plus_plus_baseline):
        assert method(nothing, nobody, length_n=nobody).shape == (0,)
    assert gdpo(torch.zeros(0, 2), nobody).shape == (0,)
    assert reinforce_plus_plus(torch.zeros(0, 3), torch.zeros(0, 3).bool()).shape == (0, 3)


def test_sentences(unchecked_shapes):
    reward_n, group_n = torch.tensor([0.5, -0.25]), torch.tensor([0, 0])
    with pytest.raises(RewardError, match=r"completion 1 is -0\.25"):
        maxrl(reward_n, group_n)
    with pytest.raises(AlignmentError, match="3 weights for 1 rewards"):
        gdpo(reward_n[:, None], group_n, weight_m=torch.ones(3))
    with pytest.raises(AlignmentError, match="2 rewards for 3 group ids"):
        rloo(reward_n, torch.zeros(3, dtype=torch.long))
    with pytest.raises(RecipeError, match="window is 1"):
        HistoryWeight()(reward_n, group_n, window=1)
