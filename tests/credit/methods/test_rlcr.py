"""RLCR: the summed reward of four reports, by hand."""

import pytest
import torch

from helpers import assert_close
from spanwise.credit import rlcr
from spanwise.errors import AlignmentError


def test_rlcr_rewards():
    # (q, c) -> R: (.9,1) .99, (.9,0) -.81, (.2,1) .36, (.2,0) -.04; mean .125
    report, correct = torch.tensor([[0.9, 0.9, 0.2, 0.2], [1, 0, 1, 0]], dtype=torch.float64)
    adv_n = rlcr(torch.stack([correct, -((report - correct) ** 2)], dim=1), torch.zeros(4, dtype=torch.long))
    assert_close(adv_n, [0.99 - 0.125, -0.81 - 0.125, 0.36 - 0.125, -0.04 - 0.125], 1e-12)


def test_weights_of_the_rewards(unchecked_shapes):
    reward_nm = torch.tensor([[1.0, -0.5], [0.0, -0.25]], dtype=torch.float64)  # 1 - .1 and 0 - .05: mean .425
    adv_n = rlcr(reward_nm, torch.tensor([0, 0]), weight_m=torch.tensor([1.0, 0.2]))
    assert_close(adv_n, [0.475, -0.475], 1e-7)
    alone_n = rlcr(reward_nm, torch.tensor([0, 0]), weight_m=torch.tensor([1.0, 0.2]), leave_one_out=True)
    assert_close(alone_n, [0.95, -0.95], 1e-7)
    with pytest.raises(AlignmentError, match="There are 3 weights for 2 rewards"):
        rlcr(reward_nm, torch.tensor([0, 0]), weight_m=torch.ones(3))
