"""VinePPO (and SPO, where both are the same): worked numbers and a slow oracle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import SAE_REWARD, SAE_VALUE, all_of
from helpers import NAN, assert_close, double
from oracles import slow_vineppo
from spanwise.credit.contrib._vineppo import spo_chain, vineppo
from spanwise.credit.methods._gae import gae
from spanwise.errors import AlignmentError, RecipeError


def test_span_numbers_out_of_order_are_refused():
    values = torch.tensor([[0.5, 0.25], [0.5, 0.25]])
    with pytest.raises(AlignmentError, match="completion 1 are not in order: token 2 belongs to span 0 and stands behind"):
        vineppo(values, torch.tensor([1.0, 0.0]), torch.tensor([[0, 1, -1], [1, -1, 0]]))
    with pytest.raises(AlignmentError, match="Token 1 of completion 0 belongs to span 2, but there are 2 spans"):
        vineppo(values, torch.tensor([1.0, 0.0]), torch.tensor([[0, 2, -1], [0, -1, 1]]))


def test_vineppo_worked_numbers():
    value, block = double([[0.5, 0.25, 0.75]]), torch.tensor([[0, 1, 1, -1, 2, -1]])
    assert_close(vineppo(value, double([1]), block), [[-0.25, 0.5, 0.5, 0, 0.25, 0]], 1e-12)


@given(seed=st.integers(0, 10**6), n=st.integers(1, 5), k=st.integers(1, 4), t=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_vineppo_and_spo_equal_the_slow_oracle(seed, n, k, t):
    g = torch.Generator().manual_seed(seed)
    value = torch.rand(n, k, generator=g).double()
    value[torch.rand(n, k, generator=g) < 0.2] = NAN
    reward = torch.where(torch.rand(n, generator=g) < 0.2, NAN, torch.rand(n, generator=g).double())
    block = torch.randint(0, k, (n, t), generator=g).sort(dim=1).values
    block = torch.where(torch.rand(n, t, generator=g) < 0.2, -1, block)
    expected = slow_vineppo(value, reward, block)
    assert_close(vineppo(value, reward, block), expected, 1e-12)
    assert_close(spo_chain(value, reward, block), expected, 1e-12)
    logp = torch.where(block < 0, NAN, torch.rand(n, t, generator=g).double().log())
    uncertain = (logp.exp() < 0.4).double()
    assert_close(spo_chain(value, reward, block, logp_nt=logp, threshold=0.4), expected * uncertain, 1e-12)


def test_one_span_per_token_is_gae_without_memory():
    assert_close(
        vineppo(SAE_VALUE, double([1]), torch.arange(6)[None]), gae(SAE_REWARD, SAE_VALUE, all_of(1, 6), lam=0.0), 1e-12
    )


def test_spans_add_up_to_the_reward_minus_the_first_value():
    value, block = double([[0.3, NAN, 0.9, 0.1]]), torch.tensor([[0, 1, 3]])  # no span 2
    assert_close(vineppo(value, double([0.75]), block), [[0.1 - 0.3, 0, 0.65]], 1e-12)


def test_errors_of_the_spans(unchecked_shapes):
    with pytest.raises(AlignmentError, match="belongs to span 2, but there are 2 spans, 0 to 1"):
        vineppo(torch.zeros(1, 2), torch.zeros(1), torch.tensor([[0, 2]]))
    with pytest.raises(AlignmentError, match=r"value_nk is \(1, .\) but reward_n is \(2,\)"):
        vineppo(torch.zeros(1, 2), torch.zeros(2), torch.tensor([[0, 1]]))
    with pytest.raises(AlignmentError, match=r"logp_nt is \(1, 3\)"):
        spo_chain(torch.zeros(1, 2), torch.zeros(1), torch.tensor([[0, 1]]), logp_nt=torch.zeros(1, 3))
    with pytest.raises(RecipeError, match="threshold is 0"):
        spo_chain(torch.zeros(1, 2), torch.zeros(1), torch.tensor([[0, 1]]), logp_nt=torch.zeros(1, 2), threshold=0.0)
