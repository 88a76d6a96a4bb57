"""GRPO: worked numbers for both deviations, and what is left of tiny differences."""

import torch

from credit_batches import REWARD, TWO_PROMPTS
from helpers import assert_close
from spanwise.credit import grpo


def test_grpo_sample_standard_deviation():
    assert_close(
        grpo(REWARD, TWO_PROMPTS), [0.866024, -0.866024, -0.866024, 0.866024, 1.499997, -0.499999, -0.499999, -0.499999]
    )


def test_grpo_population_standard_deviation():
    assert_close(
        grpo(REWARD, TWO_PROMPTS, ddof=0),
        [0.999998, -0.999998, -0.999998, 0.999998, 1.732047, -0.577349, -0.577349, -0.577349],
    )


def test_small_differences_survive_standardising():
    # Rewards 1e-5 apart: sample standard deviation is exactly scale-free apart from eps = 0.
    reward_n = torch.tensor([0.5, 0.50001, 0.50002], dtype=torch.float64)
    assert_close(grpo(reward_n, torch.zeros(3, dtype=torch.long), eps=0.0), [-1.0, 0.0, 1.0])
