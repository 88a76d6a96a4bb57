"""GRPO-Verif (and DCPO, its unweighted case): worked numbers, and the same by the mechanism of blocks."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import completion_batches
from helpers import assert_close
from spanwise.credit import bae, dcpo, grpo_verif, moments

VERIF = torch.tensor([[1.0, 1], [-1, 1], [1, -1], [-1.5, -1]], dtype=torch.float64)


def test_grpo_verif():
    group_n = torch.zeros(4, dtype=torch.long)
    adv_nk = grpo_verif(VERIF, group_n, ddof=0, eps=0.0)
    assert_close(adv_nk[:, 0], [0.987878, -0.768350, 0.987878, -1.207407])
    assert_close(adv_nk[:, 1], [0.2, 0.2, -0.2, -0.2])
    adv_nk = grpo_verif(VERIF, group_n, weight=1.0, eps=0.0)
    assert_close(adv_nk[:, 0], [0.855528, -0.665410, 0.855528, -1.045645])
    assert_close(adv_nk[:, 1], [0.866025, 0.866025, -0.866025, -0.866025])


@given(
    batch=completion_batches(low=-4), other=st.lists(st.integers(0, 4), min_size=20, max_size=20), weight=st.floats(0.1, 2)
)
@settings(max_examples=30, deadline=None)
def test_block_methods_are_the_mechanism(batch, other, weight):
    reward_n, group_n, *_ = batch
    reward_nk = torch.stack([reward_n, torch.tensor(other[: len(reward_n)]).double() / 4], dim=1)
    expected = bae(reward_nk, group_n, baseline="group")
    for k in range(2):
        std_n = moments(reward_nk[:, k], group_n).std_n(ddof=1)
        expected[:, k] *= (weight if k else 1.0) / (std_n + 1e-6)
    assert_close(grpo_verif(reward_nk, group_n, weight=weight), expected, 1e-9)
    assert_close(dcpo(reward_nk, group_n), grpo_verif(reward_nk, group_n, weight=1.0), 0)
