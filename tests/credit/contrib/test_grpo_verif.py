"""GRPO-Verif (and DCPO, its unweighted case): worked numbers, and the same by the mechanism of blocks."""

import torch

from helpers import assert_close
from spanwise.credit import grpo_verif

VERIF = torch.tensor([[1.0, 1], [-1, 1], [1, -1], [-1.5, -1]], dtype=torch.float64)


def test_grpo_verif():
    group_n = torch.zeros(4, dtype=torch.long)
    adv_nk = grpo_verif(VERIF, group_n, ddof=0, eps=0.0)
    assert_close(adv_nk[:, 0], [0.987878, -0.768350, 0.987878, -1.207407])
    assert_close(adv_nk[:, 1], [0.2, 0.2, -0.2, -0.2])
    adv_nk = grpo_verif(VERIF, group_n, weight=1.0, eps=0.0)
    assert_close(adv_nk[:, 0], [0.855528, -0.665410, 0.855528, -1.045645])
    assert_close(adv_nk[:, 1], [0.866025, 0.866025, -0.866025, -0.866025])
