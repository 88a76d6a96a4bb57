"""RLCR: the summed reward of four reports, by hand."""

import torch

from helpers import assert_close
from spanwise.credit import rlcr


def test_rlcr_rewards():
    # (q, c) -> R: (.9,1) .99, (.9,0) -.81, (.2,1) .36, (.2,0) -.04; mean .125
    report, correct = torch.tensor([[0.9, 0.9, 0.2, 0.2], [1, 0, 1, 0]], dtype=torch.float64)
    adv_n = rlcr(correct, -((report - correct) ** 2), torch.zeros(4, dtype=torch.long))
    assert_close(adv_n, [0.99 - 0.125, -0.81 - 0.125, 0.36 - 0.125, -0.04 - 0.125], 1e-12)
