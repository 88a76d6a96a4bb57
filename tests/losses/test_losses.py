"""Policy losses: worked numbers, slow oracles, masking as deletion, relations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import NAN, assert_close, double
from oracles import slow_loss
from spanwise.errors import AlignmentError, RecipeError
from spanwise.losses import aspo, dppo

LOSSES = {
    "dppo_tv": lambda *a: dppo(*a, delta_low=0.1, delta_high=0.15),
    "dppo_kl": lambda *a: dppo(*a, divergence="kl", delta_low=0.05, delta_high=0.03, cap=2.0),
    "aspo": lambda *a: aspo(*a, cap=1.6),
}


def test_a_clip_range_is_counted_from_1():
    ratio, adv = double([[1.51, 1.49, 0.74, 0.76]]), double([[1, 1, -1, -1]])
    loss = aspo(ratio.log(), torch.zeros_like(ratio), adv, torch.ones_like(ratio).bool(), clip_low=0.25, clip_high=0.5)
    # Dropped outside 1 - .25 and 1 + .5; good tokens weigh 1 / rho.
    assert_close(loss, [[0, -1 / 1.49, 0, 0.76]], 1e-12)


def dppo_of(p_old, p, adv, **options):
    return dppo(double([p]).log(), double([p_old]).log(), double([adv]), torch.ones(1, len(p)).bool(), **options)


def test_the_bounds_of_dppo():
    # the defaults keep what moved by .2 at most, up or down
    adv = [1, 1, -1, -1]
    assert_close(dppo_of([0.1, 0.1, 0.9, 0.9], [0.29, 0.31, 0.71, 0.69], adv), [[-2.9, 0, 0.71 / 0.9, 0]])
    kl = [0.024736, 0.181005, 0.226289, 0.040822]
    for delta in (0.0247, 0.0248, 0.0408, 0.0409, 0.1810, 0.1811, 0.2262, 0.2263):
        bounds = {"divergence": "kl", "delta_low": delta, "delta_high": delta}
        loss = dppo_of([0.01, 0.01, 0.9, 0.5], [0.05, 0.2, 0.6, 0.36], adv, **bounds)
        assert (loss[0] != 0).tolist() == [d <= delta for d in kl]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_keeps_a_sure_token_in_small_types(dtype, divergence):
    """A probability of .9999 rounds to 1 in 16 bits, and 1 - p to 0; the token has hardly moved, and trains."""
    logp_old_nt, logp_nt = (torch.tensor([[-1e-4, number]], dtype=dtype) for number in (-2.0, -2.05))
    adv_nt, mask_nt = torch.tensor([[1.0, -1.0]], dtype=dtype), torch.ones(1, 2, dtype=torch.bool)
    loss_nt = dppo(logp_nt, logp_old_nt, adv_nt, mask_nt, divergence=divergence)
    assert loss_nt.dtype == dtype
    assert loss_nt.tolist() == [pytest.approx([-1.0, 0.951], rel=0.02)]  # the ratios 1 and exp(-.05)


@st.composite
def token_batches(draw):
    n, t = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))

    def rand():
        return torch.rand(n, t, generator=generator).double()

    mask = rand() < draw(st.sampled_from([0.3, 0.7, 1.0]))
    old = (0.02 + 0.96 * rand()).log()
    logp = ((old.exp() * (0.4 + 1.6 * rand())).clamp(max=0.99)).log()
    return logp, old, rand() - 0.5, mask


@pytest.mark.parametrize("name", LOSSES)
@given(batch=token_batches())
@settings(max_examples=40, deadline=None)
def test_equals_the_slow_oracle_and_never_reads_masked_tokens(name, batch):
    logp, old, adv, mask = batch
    expected = torch.zeros_like(logp)
    for i, t in mask.nonzero().tolist():
        expected[i, t] = slow_loss(name, float(logp[i, t]), float(old[i, t]), float(adv[i, t]))
    clean = logp.clone().requires_grad_()
    loss = LOSSES[name](clean, old, adv, mask)
    assert_close(loss.detach(), expected, 1e-9)
    gradient = torch.autograd.grad(loss.sum(), clean)[0]
    for poison in (NAN, 1e9, -math.inf):
        dirty = [torch.where(mask, value, poison) for value in (logp, old, adv)]
        dirty[0].requires_grad_()
        poisoned = LOSSES[name](*dirty, mask)
        assert torch.equal(poisoned, loss)
        assert torch.equal(torch.autograd.grad(poisoned.sum(), dirty[0])[0], gradient)
    assert not bool(gradient[~mask].any())


@pytest.mark.parametrize("name", LOSSES)
@given(batch=token_batches())
@settings(max_examples=25, deadline=None)
def test_at_the_old_policy_every_loss_has_the_policy_gradient(name, batch):
    _, old, adv, mask = batch
    logp = old.clone().requires_grad_()
    loss = LOSSES[name](logp, old, adv, mask)
    assert_close(loss.detach(), torch.where(mask, -adv, 0.0), 1e-12)
    assert_close(torch.autograd.grad(loss.sum(), logp)[0], torch.where(mask, -adv, 0.0), 1e-12)


def test_a_huge_ratio_stays_finite():
    for loss in LOSSES.values():
        logp = torch.tensor([[0.0, -200.0, 0.0, -200.0]]).requires_grad_()
        old, adv = torch.tensor([[-200.0, 0.0, -200.0, 0.0]]), torch.tensor([[1.0, 1.0, -1.0, -1.0]])
        value = loss(logp, old, adv, torch.ones(1, 4).bool())
        assert bool(value.isfinite().all())
        assert bool(torch.autograd.grad(value.sum(), logp)[0].isfinite().all())


def test_refusals(unchecked_shapes):
    one, mask = torch.zeros(1, 2), torch.ones(1, 2).bool()
    with pytest.raises(AlignmentError, match="adv_nt"):
        aspo(one, one, torch.zeros(1, 3), mask)
    with pytest.raises(AlignmentError, match="float32"):
        aspo(one, one, one, mask.float())
    with pytest.raises(RecipeError, match="'js'"):
        dppo(one, one, one, mask, divergence="js")
