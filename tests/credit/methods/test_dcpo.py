"""DCPO: worked numbers of the credit and of its smoothed calibration reward."""

import torch

from credit_batches import ONE_PROMPT
from helpers import NAN, assert_close
from spanwise.credit import dcpo, smoothed_calibration


def test_dcpo():
    c = torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1], dtype=torch.float64)
    q = torch.tensor([0.9, 0.8, 0.6, 0.9, 0.3, 0.5, 0.9, 0.7], dtype=torch.float64)
    score_n = smoothed_calibration(q, c, ONE_PROMPT)
    assert_close(score_n, [-0.01125, -0.15125, -0.01125, -0.01125, -0.00125, -0.03125, -0.21125, -0.00125], 1e-12)
    adv_nk = dcpo(torch.stack([c, score_n], dim=1), ONE_PROMPT)
    assert_close(adv_nk[:, 0], [value * 0.935413 for value in (1, -1, 1, 1, -1, -1, -1, 1)], 2e-6)
    assert_close(
        adv_nk[:, 1],
        [0.525699, -1.206015, 0.525699, 0.525699, 0.649393, 0.278311, -1.948178, 0.649393],
        1e-5,
    )
    assert_close(smoothed_calibration(q, c, ONE_PROMPT, form="absolute")[:2], [-0.15, -0.55], 1e-12)
    # share 0: half a Brier score; share 1: everyone has the group's rate for a target
    assert_close(smoothed_calibration(q, c, ONE_PROMPT, share=0.0), (-((q - c) ** 2) / 2).tolist(), 1e-12)
    assert_close(smoothed_calibration(q, c, ONE_PROMPT, share=1.0), (-((q - 0.5) ** 2) / 2).tolist(), 1e-12)


def test_smoothed_calibration_takes_the_rate_of_the_own_group():
    # rates 3/4 and 0: targets .5 c + .375 and .5 c
    c, q = torch.tensor([1.0, 1, 0, 1, 0, 0], dtype=torch.float64), torch.full((6,), 0.5, dtype=torch.float64)
    score_n = smoothed_calibration(q, c, torch.tensor([0, 0, 0, 0, 1, 1]), form="absolute")
    assert_close(score_n, [-0.375, -0.375, -0.125, -0.375, -0.5, -0.5], 1e-12)


def test_smoothed_calibration_without_a_confidence_or_an_outcome():
    q, c = torch.tensor([NAN, 0.5, 0.5]), torch.tensor([1.0, 0.0, NAN])
    group_n = torch.zeros(3, dtype=torch.long)
    assert smoothed_calibration(q, c, group_n).isnan().tolist() == [True, False, True]
    assert_close(smoothed_calibration(q, c, group_n, missing=-1.0)[:1], [-(1.75**2) / 2], 1e-12)  # target .75, confidence -1
