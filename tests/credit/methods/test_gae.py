"""GAE and SAE: slow oracles that delete masked tokens, whitening, and one as a case of the other."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import all_of, fast, token_batches
from helpers import NAN, assert_close, double
from oracles import slow_recursion, slow_vineppo
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


@given(seed=st.integers(0, 10**6), n=st.integers(1, 5), k=st.integers(1, 4), t=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_gae_over_spans_is_vineppo(seed, n, k, t):
    g = torch.Generator().manual_seed(seed)
    value_nk = torch.rand(n, k, generator=g).double()
    value_nk[torch.rand(n, k, generator=g) < 0.2] = NAN
    reward_n = torch.where(torch.rand(n, generator=g) < 0.2, NAN, torch.rand(n, generator=g).double())
    block_nt = torch.randint(0, k, (n, t), generator=g).sort(dim=1).values
    block_nt = torch.where(torch.rand(n, t, generator=g) < 0.2, -1, block_nt)
    mask_nk = (block_nt[:, None] == torch.arange(k)[:, None]).any(dim=2) & ~value_nk.isnan()
    reward_nk = torch.cat([torch.zeros(n, k - 1).double(), reward_n[:, None]], dim=1)
    reward_nk = torch.where(reward_n.isnan()[:, None], NAN, reward_nk)
    adv_nk = gae(reward_nk, value_nk, mask_nk, lam=0.0)
    adv_nt = torch.where(block_nt >= 0, adv_nk.gather(1, block_nt.clamp(min=0)), 0.0)
    assert_close(adv_nt, slow_vineppo(value_nk, reward_n, block_nt), 1e-12)


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


@given(batch=token_batches(), lam=st.sampled_from([0.3, 0.95]))
@settings(max_examples=40, deadline=None)
def test_relations_between_the_recursions(batch, lam):
    reward, value, logp, mask, end = batch
    logp = torch.where(mask, logp, 0.0)
    every, none = (sae(reward, value, logp, mask, lam=lam, threshold=p, bootstrap_n=end) for p in (2.0, 0.0))
    assert_close(every, gae(reward, value, mask, lam=lam, bootstrap_n=end), 1e-12)
    assert_close(none, gae(reward, value, mask, lam=1.0, bootstrap_n=end), 1e-12)
    rewarded = ~(reward.isnan() & mask).any(dim=1, keepdim=True)
    returns = reinforce_plus_plus(reward, mask, whiten=False)
    monte_carlo = torch.where(mask & rewarded, returns - torch.where(mask, value, 0.0), 0.0)
    assert_close(sae(reward, value, logp, mask, lam=1.0), monte_carlo, 1e-10)
    assert_close(value_target(reward, value, mask), torch.where(rewarded, returns, torch.where(mask, value, 0.0)), 1e-10)


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
    assert sae(*inputs, torch.tensor([[True, False]])).tolist() == [[0.5, 0.0]]
    for threshold in (-0.1, math.nan):
        with pytest.raises(RecipeError, match=str(threshold)):
            sae(*inputs, all_of(1, 2), threshold=threshold)


@pytest.mark.usefixtures("unchecked_shapes")  # they cost four fifths of the time
@pytest.mark.parametrize("method", ["gae", "sae"])
def test_what_the_suite_asks_of_every_method_with_a_critic(method):
    check_estimator(method, options={"length_adaptive_alpha": 0.4}, optional=["bootstrap_n"], examples=8)


def test_sae_worked_numbers():
    logp = double([[0.9, 0.95, 0.1, 0.9, 0.15, 0.99]]).log()
    inputs = double([[0, 0, 0, 0, 0, 1]]), double([[0.4, 0.5, 0.3, 0.6, 0.8, 0.7]]), logp, all_of(1, 6)
    assert_close(sae(*inputs, lam=0.9), [[0.512, 0.412, 0.68, 0.38, 0.2, 0.3]], 1e-12)
    assert_close(sae(*inputs, lam=0.9, boundary="end"), [[0.533, 0.433, 0.633, 0.37, 0.17, 0.3]], 1e-12)
