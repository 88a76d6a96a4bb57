"""Policy losses and their aggregation: worked numbers, slow oracles, masking as deletion, relations."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import NAN, assert_close, double
from oracles import slow_aggregate, slow_loss
from spanwise.errors import AlignmentError, RecipeError
from spanwise.losses import aggregate, aspo, cispo, dppo, gspo, ppo_clip

LOSSES = {
    "ppo_clip": ppo_clip,
    "dual_clip": lambda *a: ppo_clip(*a, clip_high=0.28, dual_clip=3.0),
    "gspo": lambda *a: gspo(*a, clip_low=0.1, clip_high=0.2),
    "cispo": lambda *a: cispo(*a, clip_low=0.5, clip_high=0.5),
    "dppo_tv": lambda *a: dppo(*a, delta_low=0.1, delta_high=0.15),
    "dppo_kl": lambda *a: dppo(*a, divergence="kl", delta_low=0.05, delta_high=0.03, cap=2.0),
    "aspo": lambda *a: aspo(*a, cap=1.6),
}
MODES = [
    "token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "sequence-mean-token-sum-norm", "token-sum",
    "prompt-mean",
]  # fmt: skip


def of_ratio(loss, ratio, adv, **options):
    ratio = double([ratio])
    return loss(ratio.log(), torch.zeros_like(ratio), double([adv]), torch.ones_like(ratio).bool(), **options)


def test_ppo_clip():
    ratio, adv = [1.5, 0.5, 1.5, 0.5, 4], [1, 1, -1, -1, -1]
    assert_close(of_ratio(ppo_clip, ratio, adv), [[-1.2, -0.5, 1.5, 0.8, 4.0]], 1e-12)
    assert_close(of_ratio(ppo_clip, ratio, adv, dual_clip=3.0), [[-1.2, -0.5, 1.5, 0.8, 3.0]], 1e-12)
    assert_close(of_ratio(ppo_clip, ratio, adv, clip_high=0.28, dual_clip=3.0), [[-1.28, -0.5, 1.5, 0.8, 3.0]], 1e-12)


def test_aspo_weights():
    assert_close(-of_ratio(aspo, [0.5, 1.1, 1.5, 0.1], [1, 1, 1, 1]), [[2, 0.909091, 0, 3]])
    assert_close(of_ratio(aspo, [0.5, 0.9, 1.5, 4], [-1, -1, -1, -1]), [[0, 0.9, 1.5, 3]])


@pytest.mark.parametrize("loss", [ppo_clip, gspo, cispo, aspo, dppo])
def test_one_signature(loss):
    parameters = list(inspect.signature(loss).parameters.values())
    assert [p.name for p in parameters[:4]] == ["logp_nt", "logp_old_nt", "adv_nt", "mask_nt"]
    assert {p.kind for p in parameters[4:]} == {inspect.Parameter.KEYWORD_ONLY}
    bounds = ["delta_low", "delta_high"] if loss is dppo else ["clip_low", "clip_high"]  # a divergence is no ratio
    assert [p.name for p in parameters[4:6]] == bounds
    assert [p.name for p in parameters if p.name.endswith(("_low", "_high"))] == bounds


def test_a_clip_range_is_counted_from_1_in_every_loss():
    bounds = {"clip_low": 0.25, "clip_high": 0.5}
    for loss in (ppo_clip, cispo):
        assert_close(of_ratio(loss, [1.75, 1.25], [1, 1], **bounds), [[-1.5, -1.25]], 1e-12)
        assert_close(of_ratio(loss, [0.5, 0.8], [-1, -1], **bounds), [[0.75, 0.8]], 1e-12)
    for ratio, adv, expected in ((1.75, 1, -1.5), (1.25, 1, -1.25), (0.5, -1, 0.75), (0.8, -1, 0.8)):
        assert_close(of_ratio(gspo, [ratio], [adv], **bounds), [[expected]], 1e-12)
    # ASPO drops what the others clip; good tokens weigh 1 / rho.
    assert_close(of_ratio(aspo, [1.51, 1.49, 0.74, 0.76], [1, 1, -1, -1], **bounds), [[0, -1 / 1.49, 0, 0.76]], 1e-12)


P_OLD, P, DPPO_ADV = [0.01, 0.01, 0.9, 0.5], [0.05, 0.2, 0.6, 0.36], [1, 1, -1, -1]


def dppo_of(p_old, p, adv, **options):
    return dppo(double([p]).log(), double([p_old]).log(), double([adv]), torch.ones(1, len(p)).bool(), **options)


def test_dppo_masks():
    tv = dppo_of(P_OLD, P, DPPO_ADV, delta_low=0.15, delta_high=0.15)
    assert_close(tv, [[-5, 0, 0, 0.72]])
    assert_close(dppo_of(P_OLD, P, DPPO_ADV, delta_low=0.05, delta_high=0.05, divergence="kl"), [[-5, 0, 0, 0.72]])
    # every token kept: ratios 5, 20, 2/3, .72
    assert_close(dppo_of(P_OLD, P, DPPO_ADV, delta_low=1.0, delta_high=1.0), [[-5, -20, 2 / 3, 0.72]])
    assert_close(dppo_of(P_OLD, P, DPPO_ADV, delta_low=1.0, delta_high=1.0, cap=4.0), [[-4, -4, 2 / 3, 0.72]])
    kl = [0.024736, 0.181005, 0.226289, 0.040822]
    for delta in (0.0247, 0.0248, 0.0408, 0.0409, 0.1810, 0.1811, 0.2262, 0.2263):
        kept = dppo_of(P_OLD, P, DPPO_ADV, divergence="kl", delta_low=delta, delta_high=delta)[0] != 0
        assert kept.tolist() == [d <= delta for d in kl]


def test_dppo_lets_tokens_come_back():
    # Far from the old policy, but each step leads towards it.
    for divergence in ("tv", "kl"):
        loss = dppo_of([0.9, 0.1], [0.2, 0.8], [1, -1], divergence=divergence, delta_low=0.01, delta_high=0.01)
        assert_close(loss, [[-2 / 9, 8]])


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    logp = double([[1.5, 8.0, 0.1]]).log().requires_grad_()
    loss = cispo(logp, torch.zeros(1, 3).double(), double([[1, 1, -2]]), torch.ones(1, 3).bool())
    assert_close(loss.detach(), [[-1.5, -5, 0.2]])
    assert_close(torch.autograd.grad(loss.sum(), logp)[0], [[-1.5, -5, 0.2]])


@st.composite
def token_batches(draw):
    n, t = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))

    def rand():
        return torch.rand(n, t, generator=generator).double()

    mask = rand() < draw(st.sampled_from([0.3, 0.7, 1.0]))
    old = (0.02 + 0.96 * rand()).log()
    logp = ((old.exp() * (0.4 + 1.6 * rand())).clamp(max=0.99)).log()
    return logp, old, rand() - 0.5, mask, torch.randint(0, 3, (n,), generator=generator)


@pytest.mark.parametrize("name", LOSSES)
@given(batch=token_batches())
@settings(max_examples=40, deadline=None)
def test_equals_the_slow_oracle_and_never_reads_masked_tokens(name, batch):
    logp, old, adv, mask, _ = batch
    expected = torch.zeros_like(logp)
    for i, t in mask.nonzero().tolist():
        drift = float((logp - old)[i, mask[i]].mean())
        expected[i, t] = slow_loss(name, float(logp[i, t]), float(old[i, t]), float(adv[i, t]), drift)
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
    _, old, adv, mask, _ = batch
    logp = old.clone().requires_grad_()
    loss = LOSSES[name](logp, old, adv, mask)
    assert_close(loss.detach(), torch.where(mask, -adv, 0.0), 1e-12)
    assert_close(torch.autograd.grad(loss.sum(), logp)[0], torch.where(mask, -adv, 0.0), 1e-12)


def gradient_of(loss, batch, **options):
    logp = batch[0].clone().requires_grad_()
    return torch.autograd.grad(loss(logp, *batch[1:4], **options).sum(), logp)[0]


@given(batch=token_batches())
@settings(max_examples=40, deadline=None)
def test_without_bounds_they_are_one_method(batch):
    plain = gradient_of(ppo_clip, batch, clip_low=1.0, clip_high=math.inf)
    assert_close(gradient_of(cispo, batch, clip_high=math.inf), plain, 1e-9)
    for divergence in ("tv", "kl"):
        free = gradient_of(dppo, batch, divergence=divergence, delta_low=9.0, delta_high=9.0, cap=math.inf)
        assert_close(free, plain, 1e-9)


@given(batch=token_batches())
@settings(max_examples=40, deadline=None)
def test_aspo_on_bad_tokens_is_ppo_with_dual_clip(batch):
    bad = (batch[0], batch[1], -batch[2].abs(), batch[3])
    assert_close(gradient_of(aspo, bad, cap=1.5), gradient_of(ppo_clip, bad, dual_clip=1.5), 1e-9)


@given(batch=token_batches())
@settings(max_examples=40, deadline=None)
def test_gspo_with_one_advantage_per_completion_is_the_sequence_surrogate(batch):
    logp, old, adv, mask, _ = batch
    adv, mask = adv[:, :1].expand_as(adv), mask.clone()
    mask[:, 0] = True
    token, sequence = logp.clone().requires_grad_(), logp.clone().requires_grad_()
    by_token = aggregate(gspo(token, old, adv, mask, clip_low=0.1, clip_high=0.2), mask, mode="sequence-mean-token-mean")
    ratio = (torch.where(mask, sequence - old, 0.0).sum(dim=1) / mask.sum(dim=1)).exp()
    by_sequence = torch.maximum(-adv[:, 0] * ratio, -adv[:, 0] * ratio.clamp(0.9, 1.2)).mean()
    assert_close(by_token.detach(), by_sequence.detach(), 1e-12)
    assert_close(torch.autograd.grad(by_token, token)[0], torch.autograd.grad(by_sequence, sequence)[0], 1e-12)


def test_gspo_of_completions_of_one_token_is_ppo():
    logp, old, adv = double([[-1.0], [-2.0]]), double([[-1.3], [-1.9]]), double([[1.0], [-1.0]])
    mask = torch.ones(2, 1).bool()
    assert_close(gspo(logp, old, adv, mask, clip_low=0.2, clip_high=0.2), ppo_clip(logp, old, adv, mask), 1e-12)


def test_a_huge_ratio_stays_finite():
    for loss in LOSSES.values():
        logp = torch.tensor([[0.0, -200.0, 0.0, -200.0]]).requires_grad_()
        old, adv = torch.tensor([[-200.0, 0.0, -200.0, 0.0]]), torch.tensor([[1.0, 1.0, -1.0, -1.0]])
        value = loss(logp, old, adv, torch.ones(1, 4).bool())
        assert bool(value.isfinite().all())
        assert bool(torch.autograd.grad(value.sum(), logp)[0].isfinite().all())


LOSS = double([[1, 1, 0, 0, 0], [2, 2, 2, 2, 0]])
LOSS_MASK = torch.tensor([[True, True, False, False, False], [True, True, True, True, False]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 10 / 6),
        ("sequence-mean-token-mean", 3 / 2),
        ("sequence-mean-token-sum", 10 / 2),
        ("sequence-mean-token-sum-norm", 10 / 2 / 5),
        ("token-sum", 10),
        ("prompt-mean", 3 / 2),
    ],
)
def test_aggregate(mode, expected):
    options = {"mode": mode, "group_n": torch.tensor([4, 2]), "length": 5}
    assert aggregate(LOSS, LOSS_MASK, **options).item() == pytest.approx(expected, abs=1e-12)
    # Poison, padding and a completion without any token change nothing.
    poisoned = torch.where(LOSS_MASK, LOSS, NAN)
    wide = torch.cat([poisoned, torch.full((2, 3), NAN).double()], dim=1)
    wide = torch.cat([wide, torch.full((1, 8), NAN).double()]).requires_grad_()
    mask = torch.zeros(3, 8, dtype=torch.bool)
    mask[:2, :5] = LOSS_MASK
    for group in ([4, 2, 7], [4, 2, 2]):
        total = aggregate(wide, mask, mode=mode, group_n=torch.tensor(group), length=5)
        assert total.item() == pytest.approx(expected, abs=1e-12)
        gradient = torch.autograd.grad(total, wide)[0]
        assert bool(gradient.isfinite().all())
        assert not bool(gradient[~mask].any())


def test_a_prompt_counts_once():
    # Both completions of one prompt: its six tokens have the mean 10/6.
    assert aggregate(LOSS, LOSS_MASK, mode="prompt-mean", group_n=torch.tensor([3, 3])).item() == pytest.approx(10 / 6)


@pytest.mark.parametrize("mode", MODES)
@given(batch=token_batches(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_aggregate_equals_deletion_and_its_parts(mode, batch, data):
    loss, _, _, mask, group = batch
    expected = slow_aggregate(loss, mask, mode, group)
    poisoned = torch.where(mask, loss, NAN)
    assert aggregate(poisoned, mask, mode=mode, group_n=group, length=11).item() == pytest.approx(expected, abs=1e-9)
    # Split by prompt into two micro-batches, each divided by the whole.
    first = group <= data.draw(st.integers(0, 2))
    kept = mask.any(dim=1)
    whole = {"token-mean": mask.sum(), "prompt-mean": len(group[kept].unique()), "token-sum": 1}.get(mode, kept.sum())
    parts = [
        aggregate(poisoned[part], mask[part], mode=mode, group_n=group[part], length=11, whole=max(float(whole), 1.0))
        for part in (first, ~first)
    ]
    assert sum(part.item() for part in parts) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_left_is_zero_with_a_gradient(mode):
    loss = torch.full((2, 3), NAN).requires_grad_()
    total = aggregate(loss, torch.zeros(2, 3).bool(), mode=mode, group_n=torch.tensor([0, 0]), length=3)
    assert total.item() == 0.0
    assert not bool(torch.autograd.grad(total, loss)[0].any())


def test_sequence_mean_token_mean_is_token_mean_of_equal_lengths():
    loss, mask = LOSS[:, :2], torch.ones(2, 2).bool()
    means = {aggregate(loss, mask, mode=mode, group_n=torch.tensor([0, 1])).item() for mode in MODES[:2] + MODES[5:]}
    assert means == {1.5}


def test_sentences(unchecked_shapes):
    one, mask = torch.zeros(1, 2), torch.ones(1, 2).bool()
    with pytest.raises(AlignmentError, match=r"mask_nt is \(1, 2\) but adv_nt is \(1, 3\)"):
        ppo_clip(one, one, torch.zeros(1, 3), mask)
    with pytest.raises(AlignmentError, match=r"mask_nt holds torch.float32"):
        cispo(one, one, one, mask.float())
    with pytest.raises(RecipeError, match=r"dual_clip is 0\.5"):
        ppo_clip(one, one, one, mask, dual_clip=0.5)
    with pytest.raises(RecipeError, match="no divergence 'js'"):
        dppo(one, one, one, mask, divergence="js")
    with pytest.raises(AlignmentError, match=r"loss_nt is \(1, 2\) but mask_nt is \(1, 3\)"):
        aggregate(one, torch.ones(1, 3).bool())
    with pytest.raises(RecipeError, match="Did you mean 'token-mean'"):
        aggregate(one, mask, mode="token_mean")
    with pytest.raises(RecipeError, match="needs group_n"):
        aggregate(one, mask, mode="prompt-mean")
    with pytest.raises(AlignmentError, match="1 completions for 2 group ids"):
        aggregate(one, mask, mode="prompt-mean", group_n=torch.tensor([0, 1]))
    with pytest.raises(RecipeError, match="divides by a constant"):
        aggregate(one, mask, mode="sequence-mean-token-sum-norm")
