"""SAE: worked numbers, its closed form, a slow oracle, and GAE as a special case."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import SAE_REWARD, SAE_VALUE, all_of, fast, token_batches
from helpers import assert_close, double
from oracles import slow_recursion
from spanwise.credit.methods._batch_relative import reinforce_plus_plus
from spanwise.credit.methods._gae import gae, sae, value_target
from spanwise.errors import RecipeError, RewardError

SAE_LOGP = double([[0.9, 0.95, 0.1, 0.9, 0.15, 0.99]]).log()
START = [[0.512, 0.412, 0.68, 0.38, 0.2, 0.3]]


def test_sae_worked_numbers():
    inputs = (SAE_REWARD, SAE_VALUE, SAE_LOGP, all_of(1, 6))
    assert_close(sae(*inputs, lam=0.9), START, 1e-12)
    assert_close(sae(*inputs, lam=0.9, boundary="end"), [[0.533, 0.433, 0.633, 0.37, 0.17, 0.3]], 1e-12)
    assert_close(gae(*inputs[:2], inputs[3], lam=0.9), [[0.420337, 0.355930, 0.617700, 0.353, 0.17, 0.3]])
    assert_close(sae(*inputs, lam=1.0), [[0.6, 0.5, 0.7, 0.4, 0.2, 0.3]], 1e-12)


def test_a_token_of_exactly_the_threshold_is_no_boundary():
    logp = torch.tensor([[0.5, 0.2, 0.5]], dtype=torch.float64).log()
    inputs = double([[0, 0, 1]]), double([[0.5, 0.25, 0.5]]), logp, all_of(1, 3)
    assert_close(sae(*inputs, lam=0.0), [[0.5, 0.75, 0.5]], 1e-12)
    assert_close(sae(*inputs, lam=0.0, threshold=0.201), [[-0.25, 0.75, 0.5]], 1e-12)


@pytest.mark.parametrize("boundary", ["start", "end"])
@given(batch=token_batches(), gamma=st.sampled_from([1.0, 0.9]), threshold=st.sampled_from([0.2, 0.7]))
@fast
def test_sae_equals_the_slow_oracle(blocks, boundary, batch, gamma, threshold):
    reward, value, logp, mask, end = batch
    adv = sae(reward, value, logp, mask, threshold=threshold, lam=0.6, gamma=gamma, boundary=boundary, bootstrap_n=end)
    expected = slow_recursion(
        reward, value, mask, gamma=gamma, bootstrap=end,
        lam_after=lambda i, k, n: 0.6 if math.exp(logp[i, n if boundary == "start" else k]) < threshold else 1.0,
    )  # fmt: skip
    torch.testing.assert_close(adv, expected, atol=1e-10, rtol=0)


@given(batch=token_batches(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_relations_between_the_recursions(batch, data):
    reward, value, logp, mask, end = batch
    logp = torch.where(mask, logp, 0.0)
    lam = data.draw(st.sampled_from([0.3, 0.95]))
    every, none = (sae(reward, value, logp, mask, lam=lam, threshold=p, bootstrap_n=end) for p in (2.0, 0.0))
    torch.testing.assert_close(every, gae(reward, value, mask, lam=lam, bootstrap_n=end), atol=1e-12, rtol=0)
    torch.testing.assert_close(none, gae(reward, value, mask, lam=1.0, bootstrap_n=end), atol=1e-12, rtol=0)
    known = ~(reward.isnan() & mask).any(dim=1, keepdim=True)
    returns = reinforce_plus_plus(reward, mask, whiten=False)
    monte_carlo = torch.where(mask & known, returns - torch.where(mask, value, 0.0), 0.0)
    torch.testing.assert_close(sae(reward, value, logp, mask, lam=1.0), monte_carlo, atol=1e-10, rtol=0)
    torch.testing.assert_close(
        value_target(reward, value, mask), torch.where(known, returns, torch.where(mask, value, 0.0)), atol=1e-10, rtol=0
    )
    order = torch.tensor(data.draw(st.permutations(range(len(reward)))))
    shuffled = gae(reward[order], value[order], mask[order], lam=lam, bootstrap_n=None if end is None else end[order])
    torch.testing.assert_close(shuffled, gae(reward, value, mask, lam=lam, bootstrap_n=end)[order], atol=0, rtol=0)


def test_sae_with_a_weight_of_each_length():
    # Values 1/4, 1/2, 1/2, 0; one boundary, before the third token. Four tokens and alpha 1/2 make lam 1/2.
    # Surprises 1/4, 0, -1/2, 1: A = 1;  -1/2 + 1 = 1/2;  0 + 1/2 x 1/2;  1/4 + 1/4
    value, logp = double([[0.25, 0.5, 0.5, 0.0]]), double([[0.9, 0.9, 0.1, 0.9]]).log()
    adv = sae(double([[0, 0, 0, 1]]), value, logp, all_of(1, 4), length_adaptive_alpha=0.5)
    assert_close(adv, [[1 / 2, 1 / 4, 1 / 2, 1]], 1e-12)


def test_what_is_no_probability_is_refused():
    inputs = double([[0, 1]]), double([[0.5, 0.5]]), double([[-1, math.nan]])
    with pytest.raises(RewardError, match="completion 0 is nan at trainable token 1"):
        sae(*inputs, all_of(1, 2))
    masked = sae(*inputs, torch.tensor([[True, False]]))
    assert masked.tolist() == [[0.5, 0.0]]
    for threshold in (-0.1, math.nan):
        with pytest.raises(RecipeError, match=str(threshold)):
            sae(*inputs, all_of(1, 2), threshold=threshold)
