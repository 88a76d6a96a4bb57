"""REINFORCE++ with a baseline: worked numbers, and groups without differences."""

import math

import torch

from credit_batches import LENGTH, REWARD, TWO_PROMPTS
from helpers import assert_close
from spanwise.credit import reinforce_plus_plus_baseline


def test_reinforce_plus_plus_baseline():
    adv_n = reinforce_plus_plus_baseline(REWARD, TWO_PROMPTS, length_n=LENGTH)
    assert_close(adv_n, [1.271099, -0.988632, -0.988632, 1.271099, 1.836031, -0.4237, -0.4237, -0.4237])


def test_the_baseline_of_reinforce_plus_plus_credits_constant_groups_unless_told_not_to():
    reward_n, group_n = torch.tensor([1.0, 0, 1, 1, 0.7]), torch.tensor([0, 0, 1, 1, 2])
    length_n = torch.tensor([30, 10, 20, 20, 50])
    adv_n = reinforce_plus_plus_baseline(reward_n, group_n, length_n=length_n, ddof=0, eps=0.0)
    std = math.sqrt((30 * 0.375**2 + 10 * 0.625**2 + 40 * 0.125**2) / 80)
    assert_close(adv_n, [0.375 / std, -0.625 / std, -0.125 / std, -0.125 / std, 0.0], 1e-12)
    only = reinforce_plus_plus_baseline(reward_n, group_n, length_n=length_n, ddof=0, eps=0.0, zero_constant_groups=True)
    alone = reinforce_plus_plus_baseline(reward_n[:2], group_n[:2], length_n=length_n[:2], ddof=0, eps=0.0)
    assert_close(only, [*alone.tolist(), 0.0, 0.0, 0.0], 1e-12)
