"""BAE called as a function: outcomes handed on, and one block alone; test_comparison_exact has its numbers."""

import torch

from helpers import NAN, assert_close
from spanwise.credit import bae, dr_grpo


def test_one_block_is_the_sequence_method():
    reward_n, group_n = torch.tensor([1.0, 0.0, 0.5, 0.2]), torch.tensor([0, 1, 0, 1])
    torch.testing.assert_close(bae(reward_n[:, None], group_n)[:, 0], dr_grpo(reward_n, group_n))


def test_bae_hands_outcomes_on():
    reward_nk = torch.tensor([[1.0, -0.1], [1.0, -0.3], [0.0, -0.5], [0.0, -0.7]], dtype=torch.float64)
    group_n = torch.tensor([0, 0, 0, 0])
    assert_close(bae(reward_nk, group_n)[:, 1], [0.1, -0.1, 0.1, -0.1], 1e-12)
    other = torch.tensor([[NAN, 1.0], [NAN, 0.0], [NAN, 1.0], [NAN, 0.0]])
    assert_close(bae(reward_nk, group_n, outcome_no=other, given_k=[(), (1,)])[:, 1], [0.2, 0.2, -0.2, -0.2], 1e-12)
