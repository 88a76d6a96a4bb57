"""SAN: worked numbers."""

import functools

import pytest
import torch

from credit_batches import ONE_PROMPT
from helpers import assert_close
from spanwise.credit import moments, san

SAN_REWARD = torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1], dtype=torch.float64)
SAN_STRATUM = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2])


def test_san():
    run = functools.partial(san, SAN_REWARD, ONE_PROMPT, stratum_n=SAN_STRATUM, ddof=0)
    assert_close(run(), [1, -1, 0.707107, 0.707107, -1.414214, -0.707107, -0.707107, 1.414214])
    assert_close(run(alpha=0.0), [1, -1, 1, 1, -1, -1, -1, 1])
    assert_close(run(alpha=0.8), [1, -1, 0.765685, 0.765685, -1.331371, -0.765685, -0.765685, 1.331371])
    # Var A_G - Var A_S is the variance between strata: .25 - .229167
    inside = moments(SAN_REWARD, SAN_STRATUM).deviation_n
    assert inside.square().mean().item() == pytest.approx(0.229167, abs=1e-6)
    assert 0.25 - inside.square().mean().item() == pytest.approx(0.020833, abs=1e-6)
