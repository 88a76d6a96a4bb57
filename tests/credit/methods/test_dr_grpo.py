"""Dr. GRPO: worked numbers with and without the completion itself, and a reward that is absent."""

import torch

from credit_batches import REWARD, TWO_PROMPTS
from helpers import NAN, assert_close
from spanwise.credit import dr_grpo


def test_dr_grpo_and_its_leave_one_out():
    assert_close(dr_grpo(REWARD, TWO_PROMPTS), [1 / 2, -1 / 2, -1 / 2, 1 / 2, 3 / 4, -1 / 4, -1 / 4, -1 / 4], 1e-12)
    assert_close(
        dr_grpo(REWARD, TWO_PROMPTS, leave_one_out=True), [2 / 3, -2 / 3, -2 / 3, 2 / 3, 1, -1 / 3, -1 / 3, -1 / 3], 1e-12
    )


def test_absent_reward_is_deletion_not_zero():
    with_hole = dr_grpo(torch.tensor([1.0, NAN, 0.0, 0.0]), torch.zeros(4, dtype=torch.long))
    assert_close(with_hole, [2 / 3, 0.0, -1 / 3, -1 / 3], 1e-12)
