"""The per-token methods: worked numbers, slow oracles that delete masked tokens, relations between methods."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import fisher_exact, hypergeom

from spanwise.credit import recursion
from spanwise.credit.methods._gae import gae, length_adaptive_lambda, value_target
from spanwise.credit.methods._ktae import _direction, _evidence, _tables, _Words, ktae
from spanwise.credit.methods._oar import oar
from spanwise.credit.methods._sae import sae
from spanwise.credit.methods._spo_chain import spo_chain
from spanwise.credit.methods._vineppo import vineppo
from spanwise.credit.recursion import bootstrap_values, discounted_returns
from spanwise.errors import AlignmentError, RecipeError, RewardError

NAN = float("nan")


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


def assert_close(actual, expected, tolerance=1e-6):
    expected = expected if isinstance(expected, torch.Tensor) else double(expected)
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=0)


def all_of(n, t):
    return torch.ones(n, t, dtype=torch.bool)


# GAE -----------------------------------------------------------------------------------------------------------------

REWARD = double([[0, 0, 0, 0, 1, 0]])
VALUE = double([[0.5, 0.6, 9, 0.4, 0.7, 7]])  # 9 and 7 stand where nobody may read
MASK = torch.tensor([[True, True, False, True, True, False]])


@pytest.mark.parametrize("poison", [9.0, 1e9, NAN, math.inf, -1e30])
def test_gae_skips_masked_tokens(poison):
    value = torch.where(MASK, VALUE, poison)
    adv = gae(REWARD, value, MASK, lam=0.95)
    assert_close(adv, [[0.437962, 0.355750, 0, 0.585, 0.3, 0]], 1e-6)
    assert adv[~MASK].tolist() == [0.0, 0.0]
    assert_close(value_target(REWARD, value, MASK, lam=0.95), [[0.937963, 0.955750, 0, 0.985, 1.0, 0]], 1e-6)
    assert_close(gae(REWARD, value, MASK, whiten=True), [[0.147539, -0.515844, 0, 1.334003, -0.965698, 0]], 1e-6)


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"), [(1.0, 1.0, [6, 5, 3]), (0.5, 1.0, [2.75, 3.5, 3]), (1.0, 0.5, [3.625, 4.25, 3])]
)
def test_value_targets_of_three_tokens(gamma, lam, expected):
    assert_close(
        value_target(double([[1, 2, 3]]), double([[0.5, 1, 1.5]]), all_of(1, 3), gamma=gamma, lam=lam), [expected], 1e-12
    )


def test_whitening_says_ddof_and_eps():
    value = double([[0.5, 0.25]])  # advantages .5 and .75 with lam = 1: mean 5/8, squares 2/64
    assert_close(gae(double([[0, 1]]), value, all_of(1, 2), lam=1.0, whiten=True, eps=0.0), [[-(0.5**0.5), 0.5**0.5]], 1e-12)
    assert_close(gae(double([[0, 1]]), value, all_of(1, 2), lam=1.0, whiten=True, ddof=0, eps=0.0), [[-1, 1]], 1e-12)
    assert_close(gae(double([[0, 1]]), value, all_of(1, 2), lam=1.0, whiten=True, ddof=0, eps=3 / 64), [[-0.5, 0.5]], 1e-12)


def test_whitening_of_constant_advantages_is_zero_and_absent_ones_take_no_part():
    assert gae(double([[0, 0.7]]), double([[0, 0]]), all_of(1, 2), lam=1.0, whiten=True).tolist() == [[0.0, 0.0]]
    reward, value = double([[0, 1], [0, NAN], [0, 1]]), double([[0.5, 0.25], [3, 4], [9, 9]])
    for unknown in ({}, {"bootstrap_n": double([0, 0, NAN])}):
        rows = [0] if unknown else [0, 2]
        alone = gae(reward[rows], value[rows], all_of(len(rows), 2), whiten=True)
        adv = gae(reward, value, all_of(3, 2), whiten=True, **unknown)
        assert_close(adv[rows], alone, 1e-12)
        assert adv[1].tolist() == [0.0, 0.0]


def test_length_adaptive_lambda():
    assert_close(length_adaptive_lambda(torch.tensor([0, 10, 20, 100, 1000])), [0, 0, 0, 0.8, 0.98], 1e-12)
    assert_close(length_adaptive_lambda(torch.tensor([1000]), alpha=0.4), [0.9975], 1e-12)


# SAE -----------------------------------------------------------------------------------------------------------------

SAE_REWARD, SAE_VALUE = double([[0, 0, 0, 0, 0, 1]]), double([[0.4, 0.5, 0.3, 0.6, 0.8, 0.7]])
SAE_LOGP = double([[0.9, 0.95, 0.1, 0.9, 0.15, 0.99]]).log()
START = [[0.512, 0.412, 0.68, 0.38, 0.2, 0.3]]


def test_sae_worked_numbers():
    inputs = (SAE_REWARD, SAE_VALUE, SAE_LOGP, all_of(1, 6))
    assert_close(sae(*inputs, lam=0.9), START, 1e-12)
    assert_close(sae(*inputs, lam=0.9, boundary="end"), [[0.533, 0.433, 0.633, 0.37, 0.17, 0.3]], 1e-12)
    assert_close(gae(*inputs[:2], inputs[3], lam=0.9), [[0.420337, 0.355930, 0.617700, 0.353, 0.17, 0.3]])
    assert_close(sae(*inputs, lam=1.0), [[0.6, 0.5, 0.7, 0.4, 0.2, 0.3]], 1e-12)


def test_sae_closed_form():
    # Segments {1,2} {3,4} {5,6} start at V = .3 and .8; what follows t is V(b1) - V(t), then lam, then lam^2.
    for t, (first, later) in enumerate([((0.3, 0.8), 2), ((0.3, 0.8), 2), ((0.8,), 1), ((0.8,), 1), ((), 0), ((), 0)]):
        ends = [*first, 1.0]
        adv = ends[0] - SAE_VALUE[0, t].item() + sum(0.9 ** (j + 1) * (ends[j + 1] - ends[j]) for j in range(later))
        assert adv == pytest.approx(START[0][t])


def test_a_token_of_exactly_the_threshold_is_no_boundary():
    logp = torch.tensor([[0.5, 0.2, 0.5]], dtype=torch.float64).log()
    inputs = double([[0, 0, 1]]), double([[0.5, 0.25, 0.5]]), logp, all_of(1, 3)
    assert_close(sae(*inputs, lam=0.0), [[0.5, 0.75, 0.5]], 1e-12)
    assert_close(sae(*inputs, lam=0.0, threshold=0.201), [[-0.25, 0.75, 0.5]], 1e-12)


# The oracle of all recursions --------------------------------------------------------------------------------------------


def slow(reward, value, mask, *, gamma, lam_after, bootstrap=None):
    """Delete masked tokens, then the textbook loop; lam_after(i, k, next) is the weight of A[next] in A[k]."""
    result = torch.zeros(reward.shape, dtype=torch.float64)
    for i in range(len(reward)):
        kept = [t for t in range(reward.shape[1]) if mask[i, t]]
        rewards = dict.fromkeys(kept, 0.0)
        end = 0.0 if bootstrap is None else float(bootstrap[i])
        if any(math.isnan(reward[i, t]) for t in kept) or math.isnan(end):
            continue
        for t in range(reward.shape[1]):
            before = [k for k in kept if k <= t]
            if before and not math.isnan(reward[i, t]):
                rewards[before[-1]] += float(reward[i, t])
        for place in reversed(range(len(kept))):
            k = kept[place]
            if place == len(kept) - 1:
                result[i, k] = rewards[k] + gamma * end - float(value[i, k])
            else:
                n = kept[place + 1]
                delta = rewards[k] + gamma * float(value[i, n]) - float(value[i, k])
                result[i, k] = delta + gamma * lam_after(i, k, n) * float(result[i, n])
    return result


@st.composite
def token_batches(draw):
    n, t = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 7, 40, 75]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    share = draw(st.sampled_from([0.2, 0.6, 1.0]))
    mask = torch.rand(n, t, generator=generator) < share
    reward = torch.randn(n, t, generator=generator).double() * (torch.rand(n, t, generator=generator) < 0.3)
    value = torch.randn(n, t, generator=generator).double()
    value[~mask] = draw(st.sampled_from([NAN, 1e9, math.inf]))
    if draw(st.booleans()):
        reward[~mask & (torch.rand(n, t, generator=generator) < 0.2)] = NAN  # no reward at all
    if draw(st.booleans()) and bool(mask.any()):
        i, at = mask.nonzero()[0].tolist()
        reward[i, at] = NAN  # an absent one
    logp = torch.rand(n, t, generator=generator).double().log()
    logp[~mask] = draw(st.sampled_from([NAN, -1e9, 1e9]))
    end = torch.randn(n, generator=generator).double() if draw(st.booleans()) else None
    if end is not None and draw(st.booleans()):
        end[0] = NAN
    return reward, value, logp, mask, end


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request, monkeypatch):
    if request.param == "many blocks":
        monkeypatch.setattr(recursion, "_ROWS", 2)
        monkeypatch.setattr(recursion, "_BLOCK", 1)  # 32 tokens, the least


fast = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(
    batch=token_batches(), gamma=st.sampled_from([1.0, 0.9, 0.0]), lam=st.sampled_from([0.95, 1.0, 0.0, "per completion"])
)
@fast
def test_gae_equals_the_slow_oracle(blocks, batch, gamma, lam):
    reward, value, _, mask, end = batch
    lam = torch.linspace(0, 1, len(reward)).double() if lam == "per completion" else lam
    expected = slow(
        reward, value, mask, gamma=gamma, bootstrap=end,
        lam_after=lambda i, *_: float(lam[i]) if isinstance(lam, torch.Tensor) else lam,
    )  # fmt: skip
    adv = gae(reward, value, mask, gamma=gamma, lam=lam, bootstrap_n=end)
    torch.testing.assert_close(adv, expected, atol=1e-10, rtol=0)
    assert not bool(adv[~mask].any())


@pytest.mark.parametrize("boundary", ["start", "end"])
@given(batch=token_batches(), gamma=st.sampled_from([1.0, 0.9]), threshold=st.sampled_from([0.2, 0.7]))
@fast
def test_sae_equals_the_slow_oracle(blocks, boundary, batch, gamma, threshold):
    reward, value, logp, mask, end = batch
    adv = sae(reward, value, logp, mask, threshold=threshold, lam=0.6, gamma=gamma, boundary=boundary, bootstrap_n=end)
    expected = slow(
        reward, value, mask, gamma=gamma, bootstrap=end,
        lam_after=lambda i, k, n: 0.6 if math.exp(logp[i, n if boundary == "start" else k]) < threshold else 1.0,
    )  # fmt: skip
    torch.testing.assert_close(adv, expected, atol=1e-10, rtol=0)


@given(batch=token_batches(), gamma=st.sampled_from([1.0, 0.5]))
@fast
def test_discounted_returns_equal_the_slow_oracle(blocks, batch, gamma):
    reward, value, _, mask, _ = batch
    expected = slow(reward, torch.zeros_like(value), mask, gamma=gamma, lam_after=lambda *_: 1.0)
    torch.testing.assert_close(discounted_returns(reward, mask, gamma=gamma), expected, atol=1e-10, rtol=0)


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
    returns = discounted_returns(reward, mask)
    monte_carlo = torch.where(mask & known, returns - torch.where(mask, value, 0.0), 0.0)
    torch.testing.assert_close(sae(reward, value, logp, mask, lam=1.0), monte_carlo, atol=1e-10, rtol=0)
    torch.testing.assert_close(
        value_target(reward, value, mask), torch.where(known, returns, torch.where(mask, value, 0.0)), atol=1e-10, rtol=0
    )
    order = torch.tensor(data.draw(st.permutations(range(len(reward)))))
    shuffled = gae(reward[order], value[order], mask[order], lam=lam, bootstrap_n=None if end is None else end[order])
    torch.testing.assert_close(shuffled, gae(reward, value, mask, lam=lam, bootstrap_n=end)[order], atol=0, rtol=0)


def test_the_first_token_may_be_unlikely():
    inputs = SAE_REWARD, SAE_VALUE, SAE_LOGP.clone(), all_of(1, 6)
    inputs[2][0, 0] = -9.0
    assert_close(sae(*inputs, lam=0.9), START, 1e-12)


def test_a_bootstrap_is_a_last_token_without_surprise():
    reward, value = double([[0, 0.5, 0.8]]), double([[0.3, 0.4, 0.8]])
    whole = gae(reward, value, all_of(1, 3), lam=0.7)
    cut = gae(reward[:, :2], value[:, :2], all_of(1, 2), lam=0.7, bootstrap_n=double([0.8]))
    assert_close(cut, whole[:, :2], 1e-12)


def test_three_ways_to_take_truncation():
    truncated, end = torch.tensor([True, False]), double([0.8, NAN])
    inputs = double([[0, 0], [0, 1]]), double([[0.3, 0.4], [0.3, 0.4]]), all_of(2, 2)
    expected = {"terminal": [-0.3, -0.4], "bootstrap": [0.5, 0.4], "mask": [0.0, 0.0]}
    for truncation, row in expected.items():
        bootstrap = bootstrap_values(truncated, truncated=truncation, value_end_n=end)
        assert_close(gae(*inputs, lam=1.0, bootstrap_n=bootstrap), [row, [0.7, 0.6]], 1e-12)
    assert bootstrap_values(truncated).tolist() == [0.0, 0.0]


def test_a_reward_on_a_masked_token_moves_back_and_is_dropped_before_the_first():
    mask = torch.tensor([[False, True, False, False, True, False]])
    reward = double([[5, 0, 1, 2, 0, 4]])
    assert_close(discounted_returns(reward, mask, gamma=0.5), [[0, 3 + 0.5 * 4, 0, 0, 4, 0]], 1e-12)
    assert_close(gae(reward, torch.full_like(reward, 0.0), mask, gamma=0.0), [[0, 3, 0, 0, 4, 0]], 1e-12)
    nothing = discounted_returns(reward, torch.zeros(1, 6, dtype=torch.bool))
    assert nothing.tolist() == [[0.0] * 6]


def test_absent_completions_get_zero_and_their_own_values_as_targets():
    reward, value = double([[0, NAN], [0, 1]]), double([[0.2, 0.3], [0.5, 0.5]])
    assert_close(gae(reward, value, all_of(2, 2), lam=1.0), [[0, 0], [0.5, 0.5]], 1e-12)
    assert_close(value_target(reward, value, all_of(2, 2)), [[0.2, 0.3], [1, 1]], 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_token_results_keep_the_dtype(dtype):
    adv = gae(REWARD.to(dtype), VALUE.to(dtype), MASK, lam=0.95)
    assert adv.dtype == dtype
    assert_close(adv, [[0.437962, 0.355750, 0, 0.585, 0.3, 0]], 0.01 if dtype.itemsize == 2 else 1e-6)
    assert gae(REWARD.float(), VALUE, MASK).dtype == torch.float64


def test_masked_zeros_are_not_negative():
    assert not bool(gae(-REWARD, VALUE, MASK)[~MASK].signbit().any())


def test_half_precision_is_only_the_wrapping():
    reward, mask = torch.full((1, 600), 0.125, dtype=torch.bfloat16), all_of(1, 600)
    assert discounted_returns(reward, mask)[0, 0].item() == 75.0  # sums in bfloat16 stop growing at 32


def test_gradients_do_not_enter_and_inputs_stay():
    value = VALUE.clone().requires_grad_()
    adv = gae(REWARD, value, MASK)
    assert not adv.requires_grad
    assert torch.equal(value.detach(), VALUE)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_nothing_in_nothing_out(shape):
    empty, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    assert gae(empty, empty, mask, whiten=True).shape == shape
    assert sae(empty, empty, empty, mask, boundary="end").shape == shape
    assert oar(empty, empty, mask).shape == shape
    assert ktae(empty, empty.long(), mask, torch.zeros(shape[0]), torch.zeros(shape[0]).long()).shape == shape


def test_errors_of_the_recursion(unchecked_shapes):
    with pytest.raises(AlignmentError, match=r"reward_nt is \(1, 6\) but value_nt is \(1, 5\)"):
        gae(REWARD, VALUE[:, :5], MASK)
    with pytest.raises(AlignmentError, match=r"mask_nt holds torch.float64"):
        gae(REWARD, VALUE, MASK.double())
    with pytest.raises(RewardError, match="value of completion 1 is nan at trainable token 3"):
        gae(REWARD.repeat(2, 1), torch.cat([VALUE, torch.where(torch.arange(6) == 3, NAN, VALUE)]), MASK.repeat(2, 1))
    with pytest.raises(RewardError, match="reward of completion 0 is inf at token 4"):
        gae(torch.where(REWARD > 0, math.inf, REWARD), VALUE, MASK)
    with pytest.raises(RecipeError, match=r"lam is 1.5; it must lie between 0 and 1"):
        gae(REWARD, VALUE, MASK, lam=torch.tensor([1.5]))
    with pytest.raises(RecipeError, match=r"gamma is -0.1"):
        gae(REWARD, VALUE, MASK, gamma=-0.1)
    with pytest.raises(RecipeError, match="no boundary 'begin'"):
        sae(REWARD, VALUE, VALUE, MASK, boundary="begin")
    with pytest.raises(AlignmentError, match="logp_nt is"):
        sae(REWARD, VALUE, VALUE[:, :2], MASK)
    with pytest.raises(RecipeError, match="needs value_end_n"):
        bootstrap_values(torch.tensor([True]), truncated="bootstrap")
    with pytest.raises(RecipeError, match="no way to take truncation 'drop'"):
        bootstrap_values(torch.tensor([True]), truncated="drop")


def test_the_scratch_does_not_grow_with_the_batch():
    sizes = {recursion._Room(n, t, like=torch.zeros(0)).flat.numel() for n, t in ((1 << 13, 1 << 12), (1 << 15, 1 << 14))}
    assert len(sizes) == 1
    assert sizes.pop() < 1 << 22


# VinePPO and SPO --------------------------------------------------------------------------------------------------------


def test_vineppo_worked_numbers():
    value, block = double([[0.5, 0.25, 0.75]]), torch.tensor([[0, 1, 1, -1, 2, -1]])
    assert_close(vineppo(value, double([1]), block), [[-0.25, 0.5, 0.5, 0, 0.25, 0]], 1e-12)


def slow_vineppo(value, reward, block):
    result = torch.zeros(block.shape, dtype=torch.float64)
    for i in range(len(block)):
        spans = [k for k in range(value.shape[1]) if k in block[i].tolist()]
        if math.isnan(reward[i]):
            continue
        after = float(reward[i])
        for k in reversed(spans):
            here = float(value[i, k])
            here = after if math.isnan(here) else here
            result[i, block[i] == k] = after - here
            after = here
    return result


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


def test_a_completion_without_cut_points_gets_nothing():
    assert spo_chain(double([[NAN]]), double([1]), torch.zeros(1, 3).long()).tolist() == [[0.0] * 3]


def test_errors_of_the_spans(unchecked_shapes):
    with pytest.raises(AlignmentError, match="belongs to span 2, but there are 2 spans, 0 to 1"):
        vineppo(torch.zeros(1, 2), torch.zeros(1), torch.tensor([[0, 2]]))
    with pytest.raises(AlignmentError, match="1 rows of values, 2 rewards and 1 rows of tokens"):
        vineppo(torch.zeros(1, 2), torch.zeros(2), torch.tensor([[0, 1]]))
    with pytest.raises(AlignmentError, match=r"logp_nt is \(1, 3\)"):
        spo_chain(torch.zeros(1, 2), torch.zeros(1), torch.tensor([[0, 1]]), logp_nt=torch.zeros(1, 3))
    with pytest.raises(RecipeError, match="threshold is 0"):
        spo_chain(torch.zeros(1, 2), torch.zeros(1), torch.tensor([[0, 1]]), logp_nt=torch.zeros(1, 2), threshold=0.0)


# KTAE ---------------------------------------------------------------------------------------------------------------------

# Four correct completions hold token 1 (4 times in 8 tokens), of four wrong ones only the first does (4 times in 8 tokens).
IDS = torch.tensor([[1, 2], [1, 3], [1, 4], [1, 5], [1, 1], [1, 1], [6, 7], [8, 9]])


def ktae_example():
    # rows 4 and 5 become one completion of four tokens, so that b = 1; two wrong ones have no token to spare
    ids = torch.zeros(8, 4, dtype=torch.long)
    ids[:4, :2], ids[4] = IDS[:4], 1
    ids[5, :2], ids[6, 0], ids[7, 0] = torch.tensor([6, 7]), 8, 9
    length = torch.tensor([2, 2, 2, 2, 4, 2, 1, 1])
    mask = torch.arange(4) < length[:, None]
    correct = double([1, 1, 1, 1, 0, 0, 0, 0])
    return torch.zeros(8, 4, dtype=torch.float64), torch.where(mask, ids, 151643), mask, correct, torch.zeros(8).long()


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_ktae_worked_numbers():
    fisher, gain = _tables(4, 4, True)
    assert fisher[4, 1].item() == pytest.approx(0.751477, abs=1e-6)  # exp(-2 * .142857)
    assert gain[4, 1].item() == pytest.approx(0.548795, abs=1e-6)
    inputs = ktae_example()
    held = inputs[1] == 1
    code = ktae(*inputs, form="code")
    assert_close(code[held], [0.327844] * 8)
    assert_close(ktae(*inputs, form="code", top=0.5)[held], [0.163922] * 8)
    # the paper's: p of the table itself is 4/56, and no division by h1 + h2; D is 60 degrees
    expected = sigmoid((math.exp(-2 * 4 / 56) + 0.548795) * math.pi / 3) - 0.5
    assert_close(ktae(*inputs)[held], [expected] * 8)
    assert not bool(code[~inputs[2]].any())


def test_ktae_with_unequal_term_frequencies():
    one = torch.ones(1, dtype=torch.long)
    words = _Words(torch.zeros(0).long(), 4, 4, 4 * one, one, double([0.035573]), double([0.012802]))
    direction = _direction(words, 1.0, 1e-5).item()
    key = _evidence(words, "code", 1.0, 1.0).item() * direction
    assert direction == pytest.approx(3.463900, abs=2e-4)
    assert key == pytest.approx(2.252006, abs=2e-4)
    assert 2 * (sigmoid(key) - 0.5) == pytest.approx(0.809647, abs=1e-4)


@pytest.mark.parametrize(("right", "wrong"), [(4, 4), (1, 7), (5, 3), (8, 8), (3, 1), (3, 7), (2, 12)])
def test_fisher_and_information_gain(right, wrong):
    two_sided, gain = _tables(right, wrong, True)
    point, _ = _tables(right, wrong, False)

    def entropy(*counts):
        return -sum(c / sum(counts) * math.log2(c / sum(counts)) for c in counts if c)

    for a in range(right + 1):
        for b in range(wrong + 1):
            p = fisher_exact([[a, b], [right - a, wrong - b]]).pvalue
            assert two_sided[a, b].item() == pytest.approx(0.0 if p > 1 - 1e-9 else math.exp(-2 * p), abs=1e-9)
            p = hypergeom.pmf(a, right + wrong, right, a + b)
            assert point[a, b].item() == pytest.approx(0.0 if p > 1 - 1e-9 else math.exp(-2 * p), abs=1e-9)
            held, total = a + b, right + wrong
            rest = held / total * entropy(a, b) if held else 0.0
            rest += (total - held) / total * entropy(right - a, wrong - b) if total > held else 0.0
            assert gain[a, b].item() == pytest.approx(entropy(right, wrong) - rest, abs=1e-9)


def slow_ktae(adv, ids, mask, correct, group, form, h1, h2, h3, k1=2.0, b=0.5):
    result = torch.where(mask, adv, 0.0)
    n, width = ids.shape
    text = [[int(ids[i, t]) for t in range(width) if mask[i, t]] for i in range(n)]
    for i in range(n):
        mates = [j for j in range(n) if group[j] == group[i] and not math.isnan(correct[j])]
        sides = [[j for j in mates if correct[j] > 0], [j for j in mates if correct[j] <= 0]]
        if math.isnan(correct[i]) or not all(sides):
            continue
        tokens = [[w for j in side for w in text[j]] for side in sides]
        average = (len(tokens[0]) + len(tokens[1])) / 2
        for t in range(width):
            if not mask[i, t]:
                continue
            w = int(ids[i, t])
            held = [sum(w in text[j] for j in side) for side in sides]
            table = [held, [len(sides[0]) - held[0], len(sides[1]) - held[1]]]
            p = fisher_exact(table).pvalue
            if form == "paper":
                p = hypergeom.pmf(held[0], len(mates), len(sides[0]), sum(held))
            tf = []
            for side in tokens:
                f = Counter(side)[w] / len(side) if side else 0.0
                tf.append(f * (k1 + 1) / (f + k1 * (1 - b + b * len(side) / average)) if f else 0.0)

            def entropy(*counts):
                return -sum(c / sum(counts) * math.log2(c / sum(counts)) for c in counts if c)

            total = len(mates)
            gain = entropy(len(sides[0]), len(sides[1])) - sum(sum(row) / total * entropy(*row) for row in table if sum(row))
            direction = math.asin((held[0] / len(sides[0])) ** 0.5) - math.asin((held[1] / len(sides[1])) ** 0.5)
            direction += h3 * (tf[0] / (tf[1] + 1e-5) - tf[1] / (tf[0] + 1e-5))
            key = (h1 * (0.0 if p > 1 - 1e-9 else math.exp(-2 * p)) + h2 * gain) * direction
            key = max(-500.0, min(500.0, key))
            result[i, t] += sigmoid(key) - 0.5 if form == "paper" else 2 * (sigmoid(key / (h1 + h2)) - 0.5)
    return result


@pytest.mark.parametrize("form", ["paper", "code"])
@given(seed=st.integers(0, 10**6), n=st.integers(1, 9))
@settings(max_examples=25, deadline=None)
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


def test_ktae_adds_nothing_where_nothing_can_be_learnt():
    adv, ids, mask, _, group = ktae_example()
    base = torch.where(mask, 0.3, adv)
    for correct in (double([1] * 8), double([0] * 8)):
        assert torch.equal(ktae(base, ids, mask, correct, group), base)
    alone = ktae(base, ids, mask, double([1, 1, 1, 1, 0, 0, 0, 0]), torch.arange(8))
    assert torch.equal(alone, base)
    everywhere = torch.where(mask, 5, ids)  # one token in all completions
    assert torch.equal(ktae(base, everywhere, mask, double([1, 1, 1, 1, 0, 0, 0, 0]), group, form="code"), base)


def test_ktae_composes_with_any_method():
    inputs = ktae_example()
    base = torch.where(inputs[2], torch.arange(8.0).double()[:, None], 0.0)
    assert_close(ktae(base, *inputs[1:]), base + ktae(*inputs), 1e-12)
    assert ktae(base.float(), *inputs[1:]).dtype == torch.float32


# OAR ----------------------------------------------------------------------------------------------------------------------

IMPORTANCE = double([[0, 0.2, 0.5, 1, 3]])


def test_oar_worked_numbers():
    assert_close(oar(torch.ones(1, 5).double(), IMPORTANCE, all_of(1, 5)), [[0.1, 1, 1.185339, 1.424283, 2]])
    expected = [[0.087571, 0.875715, 1.038019, 1.247266, 1.751429]]
    assert_close(oar(torch.ones(1, 5).double(), IMPORTANCE, all_of(1, 5), sum_to_length=True), expected)


def slow_oar(adv, importance, mask, q, beta, floor, to_length):
    result = torch.zeros_like(adv)
    for i in range(len(adv)):
        kept = [t for t in range(adv.shape[1]) if mask[i, t]]
        if not kept:
            continue
        level = [math.log(1 + float(importance[i, t])) for t in kept]
        width = max(level) - min(level) or 1.0
        level = [(x - min(level)) / width for x in level]
        cut = float(torch.quantile(double(level), q))
        weight = [
            max(x / (cut + 1e-8), floor) if x < cut else 1 + beta * (x - cut) / (1 - cut + 1e-8) for x in level
        ]  # fmt: skip
        scale = len(weight) / sum(weight) if to_length else 1.0
        for t, w in zip(kept, weight, strict=True):
            result[i, t] = adv[i, t] * w * scale
    return result


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
    assert_close(oar(adv, IMPORTANCE, all_of(1, 5), beta=0.0, floor=1.0), adv, 1e-12)
    one = torch.tensor([[True, False, False, False, False]])
    assert oar(adv, IMPORTANCE, one).tolist() == [[1.0, 0, 0, 0, 0]]


def test_errors_of_the_reshapers(unchecked_shapes):
    adv, mask = torch.ones(1, 2), all_of(1, 2)
    with pytest.raises(RewardError, match="importance of completion 0 is -1"):
        oar(adv, -adv, mask)
    with pytest.raises(RecipeError, match="quantile is 25"):
        oar(adv, adv, mask, quantile=25)
    with pytest.raises(AlignmentError, match="importance_nt"):
        oar(adv, torch.ones(1, 3), mask)
    with pytest.raises(AlignmentError, match="2 outcomes"):
        ktae(adv, adv.long(), mask, torch.ones(2), torch.zeros(1).long())
    with pytest.raises(RecipeError, match="no form of KTAE 'papr'"):
        ktae(adv, adv.long(), mask, torch.ones(1), torch.zeros(1).long(), form="papr")
