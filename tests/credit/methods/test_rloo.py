"""RLOO: worked numbers."""

from credit_batches import REWARD, TWO_PROMPTS
from helpers import assert_close
from spanwise.credit import rloo


def test_rloo():
    assert_close(rloo(REWARD, TWO_PROMPTS), [2 / 3, -2 / 3, -2 / 3, 2 / 3, 1, -1 / 3, -1 / 3, -1 / 3], 1e-12)
