"""GAE and SAE: slow oracles that delete masked tokens, whitening, and one as a case of the other."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import all_of, fast, token_batches
from helpers import NAN, assert_close, double
from oracles import slow_recursion
from spanwise.credit import recursion
from spanwise.credit.methods._batch_relative import reinforce_plus_plus
from spanwise.credit.methods._gae import gae, sae, value_target
from spanwise.errors import RecipeError, RewardError
from spanwise.testing import check_estimator


def test_whitening_says_ddof_and_eps():
    inputs = double([[0, 1]]), double([[0.5, 0.25]]), all_of(1, 2)  # advantages .5 and .75: mean 5/8, squares 2/64
    for ddof, eps, size in ((1, 0.0, 0.5**0.5), (0, 0.0, 1.0), (0, 3 / 64, 0.5)):
        assert_close(gae(*inputs, lam=1.0, whiten=True, ddof=ddof, eps=eps), [[-size, size]], 1e-12)


def test_whitening_of_constant_advantages_is_zero_and_absent_ones_take_no_part():
    assert gae(double([[0, 0.7]]), double([[0, 0]]), all_of(1, 2), lam=1.0, whiten=True).tolist() == [[0.0, 0.0]]
    reward, value = double([[0, 1], [0, NAN], [0, 1]]), double([[0.5, 0.25], [3, 4], [9, 9]])
    for unknown in ({}, {"bootstrap_n": double([0, 0, NAN])}):
        rows = [0] if unknown else [0, 2]
        alone = gae(reward[rows], value[rows], all_of(len(rows), 2), whiten=True)
        adv = gae(reward, value, all_of(3, 2), whiten=True, **unknown)
        assert_close(adv[rows], alone, 1e-12)
        assert adv[1].tolist() == [0.0, 0.0]


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request, monkeypatch):
    if request.param == "many blocks":
        monkeypatch.setattr(recursion, "_ROWS", 2)
        monkeypatch.setattr(recursion, "_BLOCK", 1)  # 32 tokens, the least


@given(
    batch=token_batches(), gamma=st.sampled_from([1.0, 0.9, 0.0]), lam=st.sampled_from([0.95, 1.0, 0.0, "per completion"])
)
@fast
def test_gae_equals_the_slow_oracle(blocks, batch, gamma, lam):
    reward, value, _, mask, end = batch
    lam = torch.linspace(0, 1, len(reward)).double() if lam == "per completion" else lam
    expected = slow_recursion(
        reward, value, mask, gamma=gamma, bootstrap=end,
        lam_after=lambda i, *_: float(lam[i]) if isinstance(lam, torch.Tensor) else lam,
    )  # fmt: skip
    adv = gae(reward, value, mask, gamma=gamma, lam=lam, bootstrap_n=end)
    assert_close(adv, expected, 1e-10)
    target = value_target(reward, value, mask, gamma=gamma, lam=lam, bootstrap_n=end)
    assert_close(target, torch.where(mask, value + expected, 0.0), 1e-10)
    assert not bool(adv[~mask].any() | target[~mask].signbit().any())


def test_sae_worked_numbers():
    logp = double([[0.9, 0.95, 0.1, 0.9, 0.15, 0.99]]).log()
    inputs = double([[0, 0, 0, 0, 0, 1]]), double([[0.4, 0.5, 0.3, 0.6, 0.8, 0.7]]), logp, all_of(1, 6)
    assert_close(sae(*inputs, lam=0.9), [[0.512, 0.412, 0.68, 0.38, 0.2, 0.3]], 1e-12)
    assert_close(sae(*inputs, lam=0.9, boundary="end"), [[0.533, 0.433, 0.633, 0.37, 0.17, 0.3]], 1e-12)


def test_a_token_of_exactly_the_threshold_is_no_boundary():
    logp = double([[0.5, 0.2, 0.5]]).log()
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
    assert_close(adv, expected, 1e-10)


@given(batch=token_batches(), weight=st.sampled_from([{"lam": 0.3}, {"lam": 0.95}, {"length_adaptive_alpha": 0.5}]))
@settings(max_examples=40, deadline=None)
def test_relations_between_the_recursions(batch, weight):
    reward, value, logp, mask, end = batch
    logp = torch.where(mask, logp, 0.0)
    every, none = (sae(reward, value, logp, mask, **weight, threshold=p, bootstrap_n=end) for p in (2.0, 0.0))
    assert_close(every, gae(reward, value, mask, **weight, bootstrap_n=end), 1e-12)
    assert_close(none, gae(reward, value, mask, lam=1.0, bootstrap_n=end), 1e-12)
    rewarded = ~(reward.isnan() & mask).any(dim=1, keepdim=True)
    returns = reinforce_plus_plus(reward, mask, whiten=False)
    monte_carlo = torch.where(mask & rewarded, returns - torch.where(mask, value, 0.0), 0.0)
    assert_close(sae(reward, value, logp, mask, lam=1.0), monte_carlo, 1e-10)
    assert_close(value_target(reward, value, mask), torch.where(rewarded, returns, torch.where(mask, value, 0.0)), 1e-10)


def test_what_is_no_probability_is_refused():
    inputs = double([[0, 1]]), double([[0.5, 0.5]]), double([[-1, math.nan]])
    with pytest.raises(RewardError, match="completion 0 is nan at trainable token 1"):
        sae(*inputs, all_of(1, 2))
    assert sae(*inputs, torch.tensor([[True, False]])).tolist() == [[0.5, 0.0]]
    for threshold in (-0.1, math.nan):
        with pytest.raises(RecipeError, match=str(threshold)):
            sae(*inputs, all_of(1, 2), threshold=threshold)


@pytest.mark.usefixtures("unchecked_shapes")  # they cost four fifths of the time
@pytest.mark.parametrize("method", ["gae", "sae"])
def test_what_the_suite_asks_of_every_method_with_a_critic(method):
    check_estimator(method, options={"length_adaptive_alpha": 0.4}, optional=["bootstrap_n"], examples=8)
