"""DCPO: worked numbers of the credit; the scores are its smoothed calibration."""

import torch

from credit_batches import ONE_PROMPT
from helpers import assert_close
from spanwise.credit import dcpo


def test_dcpo():
    c = torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1], dtype=torch.float64)
    score_n = torch.tensor(
        [-0.01125, -0.15125, -0.01125, -0.01125, -0.00125, -0.03125, -0.21125, -0.00125], dtype=torch.float64
    )
    adv_nk = dcpo(torch.stack([c, score_n], dim=1), ONE_PROMPT)
    assert_close(adv_nk[:, 0], [value * 0.935413 for value in (1, -1, 1, 1, -1, -1, -1, 1)], 2e-6)
    assert_close(
        adv_nk[:, 1],
        [0.525699, -1.206015, 0.525699, 0.525699, 0.649393, 0.278311, -1.948178, 0.649393],
        1e-5,
    )
