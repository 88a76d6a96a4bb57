"""KTAE and OAR: slow oracles, and when they change nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import all_of
from helpers import NAN, assert_close, double
from oracles import slow_ktae, slow_oar
from spanwise.credit.methods._refinements import ktae, oar


@pytest.mark.parametrize("form", ["paper", "code"])
@given(seed=st.integers(0, 10**6), n=st.integers(1, 24))
@settings(max_examples=40, deadline=None)
def test_ktae_equals_the_slow_oracle(form, seed, n):
    g = torch.Generator().manual_seed(seed)
    adv = torch.randn(n, 6, generator=g).double()
    ids = torch.randint(0, 5, (n, 6), generator=g) * 1000
    mask = torch.rand(n, 6, generator=g) < 0.7
    correct = torch.randint(-1, 2, (n,), generator=g).double()
    correct[torch.rand(n, generator=g) < 0.15] = NAN
    group = torch.randint(3, 5, (n,), generator=g)
    expected = slow_ktae(adv, ids, mask, correct, group, form, 0.7, 1.2, 0.4)
    adv[~mask] = NAN
    assert_close(ktae(adv, ids, mask, correct, group, form=form, h1=0.7, h2=1.2, h3=0.4), expected, 1e-9)
    assert ktae(adv.float(), ids, mask, correct, group, form=form).dtype == torch.float32


def test_ktae_adds_nothing_where_nothing_can_be_learnt():
    ids, mask, half = torch.tensor([[1, 2], [3, 1], [4, 0], [1, 1]]), all_of(4, 2), double([1, 1, 0, 0])
    mask[2, 1] = False
    base, group = torch.where(mask, 0.3, 0.0).double(), torch.zeros(4).long()
    for correct in (torch.ones_like(half), torch.zeros_like(half)):
        assert torch.equal(ktae(base, ids, mask, correct, group), base)
    assert torch.equal(ktae(base, ids, mask, half, torch.arange(4)), base)  # nobody to compare with
    same = torch.where(mask, 5, ids)  # one token in all completions
    assert torch.equal(ktae(base, same, mask, half, group, form="code"), base)


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
    assert oar(adv[:, :2], double([[0, 0.2]]), torch.tensor([[True, False]])).tolist() == [[1.0, 0]]
