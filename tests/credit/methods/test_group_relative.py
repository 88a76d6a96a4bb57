"""GRPO and its relatives: worked numbers of two prompts, one with two right of four, one with one."""

from functools import partial

import pytest
import torch

from credit_batches import LENGTH, REWARD, TWO_PROMPTS
from helpers import assert_close
from spanwise.credit import dr_grpo, grpo, maxrl, opo, rlcr, rloo


@pytest.mark.parametrize(
    ("method", "first", "second", "tolerance"),
    [  # what each of the first two gets, then each of the others; a wrong one first
        (grpo, (-0.866024, 0.866024), (-0.499999, 1.499997), 1e-6),
        (partial(grpo, ddof=0), (-0.999998, 0.999998), (-0.577349, 1.732047), 1e-6),
        (dr_grpo, (-1 / 2, 1 / 2), (-1 / 4, 3 / 4), 1e-12),
        (partial(dr_grpo, leave_one_out=True), (-2 / 3, 2 / 3), (-1 / 3, 1), 1e-12),
        (rloo, (-2 / 3, 2 / 3), (-1 / 3, 1), 1e-12),
        (maxrl, (-0.999998, 0.999998), (-0.999996, 2.999988), 1e-6),
        (partial(maxrl, eps=0.0), (-1, 1), (-1, 3), 1e-12),
        # group 1: 4 of 8 tokens right; group 2: 1 of 8
        (partial(opo, length_n=LENGTH), (-1 / 2, 1 / 2), (-1 / 8, 7 / 8), 1e-12),
    ],
)
def test_right_and_wrong_ones(method, first, second, tolerance):
    expected = [(first if n < 4 else second)[int(right)] for n, right in enumerate(REWARD.tolist())]
    assert_close(method(REWARD, TWO_PROMPTS), expected, tolerance)


def test_small_differences_survive_standardising():
    # Rewards 1e-5 apart: sample standard deviation is exactly scale-free apart from eps = 0.
    reward_n = torch.tensor([0.5, 0.50001, 0.50002], dtype=torch.float64)
    assert_close(grpo(reward_n, torch.zeros(3, dtype=torch.long), eps=0.0), [-1.0, 0.0, 1.0])


def test_rlcr_weighs_its_rewards():
    reward_nm = torch.tensor([[1.0, -0.5], [0.0, -0.25]], dtype=torch.float64)  # 1 - .1 and 0 - .05: mean .425
    adv_n = rlcr(reward_nm, torch.tensor([0, 0]), weight_m=torch.tensor([1.0, 0.2]))
    assert_close(adv_n, [0.475, -0.475], 1e-7)
    alone_n = rlcr(reward_nm, torch.tensor([0, 0]), weight_m=torch.tensor([1.0, 0.2]), leave_one_out=True)
    assert_close(alone_n, [0.95, -0.95], 1e-7)
    assert_close(rlcr(reward_nm, torch.tensor([0, 0])), [0.375, -0.375], 1e-12)
