"""OAR: worked numbers, a slow oracle, and when it changes nothing."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import all_of
from helpers import NAN, assert_close, double
from oracles import slow_oar
from spanwise.credit.methods._refinements import oar

IMPORTANCE = double([[0, 0.2, 0.5, 1, 3]])


def test_oar_worked_numbers():
    assert_close(oar(torch.ones(1, 5).double(), IMPORTANCE, all_of(1, 5)), [[0.1, 1, 1.185339, 1.424283, 2]])
    expected = [[0.087571, 0.875715, 1.038019, 1.247266, 1.751429]]
    assert_close(oar(torch.ones(1, 5).double(), IMPORTANCE, all_of(1, 5), sum_to_length=True), expected)


@given(seed=st.integers(0, 10**6), q=st.sampled_from([0.0, 0.25, 0.5, 1.0]), to_length=st.booleans())
@settings(max_examples=60, deadline=None)
def test_oar_equals_the_slow_oracle(seed, q, to_length):
    g = torch.Generator().manual_seed(seed)
    adv, importance = torch.randn(3, 7, generator=g).double(), torch.randn(3, 7, generator=g).exp().double()
    mask = torch.rand(3, 7, generator=g) < 0.7
    expected = slow_oar(adv, importance, mask, q, 0.8, 0.2, to_length)
    adv[~mask], importance[~mask] = NAN, NAN
    options = {"quantile": q, "beta": 0.8, "floor": 0.2, "sum_to_length": to_length}
    assert_close(oar(adv, importance, mask, **options), expected, 1e-9)


def test_oar_leaves_advantages_alone():
    adv = double([[1, -2, 0.5, 3, 1]])
    assert torch.equal(oar(adv, torch.full_like(adv, 0.7), all_of(1, 5)), adv)  # nothing matters more than the rest
    one = torch.tensor([[True, False, False, False, False]])
    assert oar(adv, IMPORTANCE, one).tolist() == [[1.0, 0, 0, 0, 0]]
