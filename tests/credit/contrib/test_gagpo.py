"""GAGPO: worked numbers, a slow oracle, and GiGPO as its limit."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import WORKED, step_batches
from helpers import assert_close
from oracles import slow_gagpo
from spanwise.credit.contrib._unconfirmed import gagpo


def test_gagpo():
    # V: s0 4.5125, s1 9.5/3, s2 10
    assert_close(gagpo(*WORKED), [4.211667, 6.333333, 0, -4.226332, -3.01625, -3.166667])
    delta = [0.95 * 9.5 / 3 - 4.5125, 9.5 - 9.5 / 3, 0, 0.95 * 9.5 / 3 - 4.5125, 0.95 * 9.5 / 3 - 9.5 / 3, -9.5 / 3]
    assert_close(gagpo(*WORKED, lam=0.0), delta, 1e-12)


def test_gagpo_standardised_in_the_prompt():
    plain = gagpo(*WORKED)
    assert_close(gagpo(*WORKED, scale="std", eps=0.0), ((plain - plain.mean()) / plain.std()).tolist(), 1e-12)


@given(batch=step_batches(), gamma=st.sampled_from([0.5, 0.95, 1.0]), lam=st.sampled_from([0.0, 0.95, 1.0]))
@settings(max_examples=80, deadline=None)
def test_gagpo_equals_the_slow_oracle(batch, gamma, lam):
    torch.testing.assert_close(gagpo(*batch, gamma=gamma, lam=lam), slow_gagpo(batch, gamma, lam), atol=1e-9, rtol=0)
