"""MaxRL: worked numbers."""

from credit_batches import REWARD, TWO_PROMPTS
from helpers import assert_close
from spanwise.credit import maxrl


def test_maxrl():
    expected = [0.999998, -0.999998, -0.999998, 0.999998, 2.999988, -0.999996, -0.999996, -0.999996]
    assert_close(maxrl(REWARD, TWO_PROMPTS), expected)
    assert_close(
        maxrl(REWARD, TWO_PROMPTS, eps=0.0) / 4, [1 / 4, -1 / 4, -1 / 4, 1 / 4, 3 / 4, -1 / 4, -1 / 4, -1 / 4], 1e-12
    )
