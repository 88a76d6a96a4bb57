"""What holds for every critic-free method: its relations to the others, a slow oracle, order, absence, constants, strata."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import completion_batches
from helpers import NAN, assert_close
from oracles import slow_maxrl, slow_opo, slow_reinforce_plus_plus_baseline
from spanwise.credit import (
    HistoryWeight,
    dcpo,
    dr_grpo,
    gdpo,
    grpo,
    ha_dw,
    maxrl,
    moments,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)
from spanwise.credit.strata import standardised
from spanwise.errors import AlignmentError, RecipeError, RewardError


@given(batch=completion_batches(low=-4))
@settings(max_examples=40, deadline=None)
def test_relations(batch):
    reward_n, group_n, length_n = batch
    plain, scaled = dr_grpo(reward_n, group_n), grpo(reward_n, group_n)
    assert_close(rloo(reward_n, group_n), dr_grpo(reward_n, group_n, leave_one_out=True), 0)
    assert_close(opo(reward_n, group_n, length_n=torch.full_like(length_n, 7)), plain, 1e-9)
    assert_close(ha_dw(reward_n, group_n, lambda_scale=0.0), torch.zeros(len(reward_n)).double(), 0)
    # An anchor at the group's mean weighs nothing.
    one = torch.zeros_like(group_n)
    rate = reward_n.nanmean()
    if not rate.isnan():
        assert_close(ha_dw(reward_n, one, anchor=float(rate), lambda_scale=1.0), grpo(reward_n, one), 1e-9)
    # One block and weight 1 are GRPO; the mechanism with a group baseline and a scale gives both block methods.
    assert_close(dcpo(reward_n[:, None], group_n)[:, 0], scaled, 0)
    assert_close(
        gdpo(reward_n[:, None], group_n),
        standardised(torch.where(reward_n.isnan(), NAN, scaled), shift=False, eps=1e-6)[0],
        1e-9,
    )
    # Whitening by completions instead of tokens is what equal lengths do.
    by_length = reinforce_plus_plus_baseline(reward_n, group_n, length_n=torch.ones_like(length_n), eps=0.0)
    alone = moments(reward_n, group_n).count_n() < 2
    assert_close(by_length, standardised(torch.where(alone | reward_n.isnan(), NAN, plain))[0], 1e-9)


@given(batch=completion_batches(), ddof=st.integers(0, 1), alpha=st.sampled_from([0.0, 0.3, 1.0]), flag=st.booleans())
@settings(max_examples=80, deadline=None)
def test_equal_the_slow_oracles(batch, ddof, alpha, flag):
    reward_n, group_n, length_n = batch
    assert_close(maxrl(reward_n, group_n, eps=alpha), slow_maxrl(batch, alpha), 1e-9)
    assert_close(opo(reward_n, group_n, length_n=length_n), slow_opo(batch), 1e-9)
    whitened_n = reinforce_plus_plus_baseline(reward_n, group_n, length_n=length_n, ddof=ddof, zero_constant_groups=flag)
    assert_close(whitened_n, slow_reinforce_plus_plus_baseline(batch, ddof, flag), 1e-9)


def completion_methods(length_n):
    """Every method of this page as a function of rewards and groups alone."""
    return {
        "rloo": rloo,
        "maxrl": maxrl,
        "opo": functools.partial(opo, length_n=length_n),
        "ha_dw": ha_dw,
        "gdpo": lambda reward_n, group_n: gdpo(torch.stack([reward_n, reward_n**2], dim=1), group_n),
        "baseline": functools.partial(reinforce_plus_plus_baseline, length_n=length_n),
    }


@pytest.mark.parametrize("name", ["rloo", "maxrl", "opo", "ha_dw", "gdpo", "baseline"])
def test_groups_below_min_stratum_get_zero_and_join_nothing(name):
    reward_n = torch.tensor([1.0, 0.25, 0, 0.5, 1.0], dtype=torch.float64)
    group_n, length_n = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([3, 1, 2, 2, 5])

    def run(reward_n, group_n, length_n, min_stratum):
        if name == "gdpo":
            return gdpo(torch.stack([reward_n, reward_n**2], dim=1), group_n, min_stratum=min_stratum)
        return completion_methods(length_n)[name](reward_n, group_n, min_stratum=min_stratum)

    assert run(reward_n, group_n, length_n, 2)[:2].abs().min() > 0
    strict = run(reward_n, group_n, length_n, 3)
    assert strict[:2].tolist() == [0.0, 0.0]
    if name != "gdpo":  # there a group without differences still counts in the deviation of the batch
        assert_close(strict[2:], run(reward_n[2:], group_n[2:], length_n[2:], 3), 1e-9)
    assert run(reward_n, group_n, length_n, 4).tolist() == [0.0] * 5


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
    for method in completion_methods(nobody).values():
        assert method(nothing, nobody).shape == (0,)
    assert reinforce_plus_plus(torch.zeros(0, 3), torch.zeros(0, 3).bool()).shape == (0, 3)


def test_sentences(unchecked_shapes):
    reward_n, group_n = torch.tensor([0.5, -0.25]), torch.tensor([0, 0])
    with pytest.raises(RewardError, match=r"reward of completion 1 is -0\.25; maxrl divides by the group's mean"):
        maxrl(reward_n, group_n)
    with pytest.raises(AlignmentError, match="3 weights for 1 rewards"):
        gdpo(reward_n[:, None], group_n, weight_m=torch.ones(3))
    with pytest.raises(AlignmentError, match="2 rewards for 3 group ids"):
        rloo(reward_n, torch.zeros(3, dtype=torch.long))
    with pytest.raises(RecipeError, match="window is 1"):
        HistoryWeight()(reward_n, group_n, window=1)
