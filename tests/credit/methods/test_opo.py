"""OPO: worked numbers, weighted by lengths."""

from credit_batches import LENGTH, REWARD, TWO_PROMPTS
from helpers import assert_close
from spanwise.credit import opo


def test_opo():
    # group 1: 4 of 8 tokens right; group 2: 1 of 8
    assert_close(
        opo(REWARD, TWO_PROMPTS, length_n=LENGTH), [1 / 2, -1 / 2, -1 / 2, 1 / 2, 7 / 8, -1 / 8, -1 / 8, -1 / 8], 1e-12
    )
