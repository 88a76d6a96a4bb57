"""BAE: the confidence block under each baseline, outcomes handed on, and one block alone."""

import pytest
import torch

from helpers import NAN, assert_close
from spanwise.credit import bae, dr_grpo

CORRECT = torch.tensor([1.0, 1, 0, 0, 1, 0], dtype=torch.float64)
REPORT = torch.tensor([0.9, 0.7, 0.8, 0.1, 0.8, 0.3], dtype=torch.float64)
BRIER = -((REPORT - CORRECT) ** 2)
ONE_PROMPT = torch.zeros(6, dtype=torch.long)


@pytest.mark.parametrize(
    ("baseline", "leave_one_out", "expected"),
    [
        ("outcome", False, [0.036667, -0.043333, -0.393333, 0.236667, 0.006667, 0.156667]),
        ("group", False, [0.136667, 0.056667, -0.493333, 0.136667, 0.106667, 0.056667]),
        ("outcome", True, [0.055, -0.065, -0.59, 0.355, 0.01, 0.235]),
        ("none", False, [-0.01, -0.09, -0.64, -0.01, -0.04, -0.09]),
    ],
)
def test_bae_confidence_block(baseline, leave_one_out, expected):
    adv_nk = bae(torch.stack([CORRECT, BRIER], dim=1), ONE_PROMPT, baseline=baseline, leave_one_out=leave_one_out)
    assert_close(adv_nk[:, 1], expected)
    factor = 6 / 5 if leave_one_out else 1
    assert_close(adv_nk[:, 0], [factor * (value - 0.5) for value in CORRECT.tolist()], 1e-12)


def test_one_block_is_the_sequence_method():
    reward_n, group_n = torch.tensor([1.0, 0.0, 0.5, 0.2]), torch.tensor([0, 1, 0, 1])
    torch.testing.assert_close(bae(reward_n[:, None], group_n)[:, 0], dr_grpo(reward_n, group_n))


def test_bae_hands_outcomes_on():
    reward_nk = torch.tensor([[1.0, -0.1], [1.0, -0.3], [0.0, -0.5], [0.0, -0.7]], dtype=torch.float64)
    group_n = torch.tensor([0, 0, 0, 0])
    assert_close(bae(reward_nk, group_n)[:, 1], [0.1, -0.1, 0.1, -0.1], 1e-12)
    other = torch.tensor([[NAN, 1.0], [NAN, 0.0], [NAN, 1.0], [NAN, 0.0]])
    assert_close(bae(reward_nk, group_n, outcome_no=other, given_k=[(), (1,)])[:, 1], [0.2, 0.2, -0.2, -0.2], 1e-12)
