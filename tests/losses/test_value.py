"""The losses of a critic and how far it is off: verl's own numbers, SciPy, scikit-learn and loops; masked tokens are never read."""

import math
from itertools import pairwise

import pytest
import torch
from scipy.stats import norm, truncnorm
from sklearn.metrics import explained_variance_score

from helpers import NAN, assert_close, double
from spanwise.errors import AlignmentError, RecipeError, RewardError
from spanwise.losses import categorical_value, categorical_value_loss, critic_error, hl_gauss, value_loss

VALUE = [[0.2, 0.9, -0.4, 2.0, 7.0], [1.5, 0.1, 0.6, 9.0, 9.0]]
TARGET = [[1.0, 0.5, 0.0, 1.0, 7.0], [1.0, 0.3, -1.0, 9.0, 9.0]]
OLD = [[0.1, 0.5, 0.5, 1.9, 7.0], [1.0, 0.05, 0.9, 9.0, 9.0]]
MASK = torch.tensor([[True, True, True, True, False], [True, True, True, False, False]])
WIDTH = 1 / 51


# verl 0.9.1, core_algos.compute_value_loss(VALUE, TARGET, OLD, MASK, cliprange), token-mean: the loss and the gradient of VALUE.
VERL = {
    0.2: (
        0.3671428859233856,
        [[-0.11428572237491608, 0.05714285746216774, -0.05714286118745804, 0.1428571492433548, 0.0],
         [0.0714285746216774, -0.02857143245637417, 0.0, 0.0, 0.0]],
    ),
    100.0: (
        0.3435714542865753,
        [[-0.11428572237491608, 0.05714285746216774, -0.05714286118745804, 0.1428571492433548, 0.0],
         [0.0714285746216774, -0.02857143245637417, 0.22857144474983215, 0.0, 0.0]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("clip", VERL)
def test_twice_what_verl_says_and_a_gradient_of_the_value_alone(clip):
    loss, gradient = VERL[clip]
    value, target, old = (torch.tensor(rows, requires_grad=True) for rows in (VALUE, TARGET, OLD))
    ours = value_loss(value, target, MASK, old_value_nt=old, clip=clip)
    (ours.sum() / MASK.sum()).backward()
    assert float(ours.detach().sum() / MASK.sum()) == pytest.approx(2 * loss, rel=1e-6)
    assert_close(value.grad, 2 * torch.tensor(gradient))
    assert target.grad is old.grad is None


def losses(value, target, old, logits):
    return {
        "plain": (value, value_loss(value, target, MASK)),
        "clipped": (value, value_loss(value, target, MASK, old_value_nt=old, clip=0.2)),
        "categorical": (logits, categorical_value_loss(logits, target, MASK, value_range=(-3.0, 3.0))),
    }


@pytest.mark.parametrize("poison", [NAN, 1e9, math.inf, -math.inf])
@pytest.mark.parametrize("loss", ["plain", "clipped", "categorical"])
def test_nothing_is_read_at_masked_tokens(loss, poison):
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    clean = [double(rows) for rows in (VALUE, TARGET, OLD)] + [logits]
    dirty = [torch.where(MASK if x.ndim == 2 else MASK[..., None], x, poison) for x in clean]
    results = []
    for value, target, old, scores in (clean, dirty):
        parameter, loss_nt = losses(value.requires_grad_(), target, old, scores.requires_grad_())[loss]
        loss_nt.sum().backward()
        assert (loss_nt[~MASK] == 0).all()
        assert (parameter.grad[~MASK] == 0).all()
        results.append((loss_nt.detach(), parameter.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert (results[0][1][MASK] != 0).any()


@pytest.mark.parametrize(("clip", "old"), [(0.2, None), (None, OLD), (0.0, OLD), (NAN, OLD)])
def test_an_option_is_used_or_refused(clip, old):
    with pytest.raises(RecipeError, match="clip"):
        value_loss(double(VALUE), double(TARGET), MASK, clip=clip, old_value_nt=old and double(old))


@pytest.mark.usefixtures("unchecked_shapes")
def test_other_shapes_are_refused():
    value, target = double(VALUE), double(TARGET)
    for names, call in (
        ("target_nt", lambda: value_loss(value, target[:, :4], MASK)),
        ("old_value_nt", lambda: value_loss(value, target, MASK, old_value_nt=double(OLD)[:1], clip=0.2)),
        ("logits_ntb", lambda: categorical_value_loss(torch.zeros(2, 4, 7), target, MASK, value_range=(-3.0, 3.0))),
        ("boolean", lambda: value_loss(value, target, MASK.int())),
        ("target_nt", lambda: critic_error(value, target[:, :4], MASK)),
    ):
        with pytest.raises(AlignmentError, match=names):
            call()


@pytest.mark.parametrize(("low", "high", "bins"), [(0.0, 1.0, 5), (-2.0, 3.0, 51)])
def test_probabilities_are_those_of_a_truncated_normal(low, high, bins):
    target = torch.linspace(low, high, 11, dtype=torch.float64)[None]
    spread = 0.75 * (high - low) / bins
    edges = [low + (high - low) * b / bins for b in range(bins + 1)]
    probabilities = hl_gauss(target, bins=bins, value_range=(low, high))
    for t, y in enumerate(target[0].tolist()):
        normal = truncnorm((low - y) / spread, (high - y) / spread, loc=y, scale=spread)
        assert_close(probabilities[0, t], [normal.cdf(b) - normal.cdf(a) for a, b in pairwise(edges)], 1e-12)
    assert_close(probabilities.sum(dim=-1), torch.ones_like(target), 1e-12)


def bias(target, bins=51, value_range=(0.0, 1.0)):
    """Expectation minus target, in bin widths."""
    low, high = value_range
    share = hl_gauss(double([target]), bins=bins, value_range=value_range)
    return (categorical_value(share.log(), value_range=value_range)[0] - double(target)) * bins / (high - low)


def test_the_expectation_is_the_target_away_from_the_ends():
    assert bias(torch.linspace(3 * WIDTH, 1 - 3 * WIDTH, 999).tolist()).abs().max() < 2e-4
    assert bias(torch.linspace(0.2, 0.8, 99).tolist()).abs().max() < 1e-5


@pytest.mark.parametrize("bins", [11, 51, 255])
def test_at_an_end_the_expectation_is_pulled_inwards_as_the_docstring_says(bins):
    # Half a normal of .75 bin widths: bin b from the end holds 2 (Phi((b + 1) / .75) - Phi(b / .75)), its centre is b + .5 away.
    pull = sum(2 * (norm.cdf((b + 1) / 0.75) - norm.cdf(b / 0.75)) * (b + 0.5) for b in range(10))
    assert pull == pytest.approx(0.69, abs=0.005)
    assert_close(bias([0.0, 1.0], bins), [pull, -pull], 1e-9)
    assert bias([0.0, 1.0], 57, (-3 * WIDTH, 1 + 3 * WIDTH)).abs().max() < 2e-4  # 3 of 57 bins on either side of [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_types_are_computed_in_float32(dtype):
    target = torch.tensor([[0.0, 0.25, 1.0]])
    share = hl_gauss(target.to(dtype), bins=51, value_range=(0.0, 1.0))
    assert share.dtype == torch.float32
    assert_close(share.double(), hl_gauss(target.double(), bins=51, value_range=(0.0, 1.0)), 2e-6)
    assert_close(categorical_value(torch.zeros(1, 3, 51, dtype=dtype), value_range=(0.0, 1.0)), torch.full((1, 3), 0.5))


@pytest.mark.parametrize("target", [1.5, -0.2, NAN, math.inf])
def test_a_target_outside_the_range_is_named(target):
    rows, ones = torch.tensor([[0.5, 0.5], [0.5, target]]), torch.ones(2, 2).bool()
    with pytest.raises(RewardError, match=rf"completion 1 at token 1 is {target:g}"):
        hl_gauss(rows, bins=5, value_range=(0.0, 1.0))
    with pytest.raises(RewardError, match=rf"completion 1 at token 1 is {target:g}"):
        categorical_value_loss(torch.zeros(2, 2, 5), rows, ones, value_range=(0.0, 1.0))


def test_rounding_is_no_target_outside_the_range():
    # What float32 makes of V + (1 - V) may be above 1.
    over = hl_gauss(torch.tensor([[1 + 1e-6, -1e-6]]), bins=51, value_range=(0.0, 1.0))
    assert torch.equal(over, hl_gauss(torch.tensor([[1.0, 0.0]]), bins=51, value_range=(0.0, 1.0)))


@pytest.mark.parametrize(("bins", "value_range"), [(1, (0.0, 1.0)), (5, (1.0, 1.0)), (5, (0.0, math.inf)), (5, (NAN, 1.0))])
def test_bins_that_cannot_be(bins, value_range):
    with pytest.raises(RecipeError):
        hl_gauss(double([[0.5]]), bins=bins, value_range=value_range)


def test_the_cross_entropy_is_that_of_torch():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 4, 9, generator=generator, dtype=torch.float64)
    target = 2 * torch.rand(3, 4, generator=generator, dtype=torch.float64) - 1
    share = hl_gauss(target, bins=9, value_range=(-1.0, 1.0))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), share.flatten(0, 1), reduction="none").view(3, 4)
    assert_close(categorical_value_loss(logits, target, torch.ones(3, 4).bool(), value_range=(-1.0, 1.0)), expected, 1e-12)


def batch(seed, completions=6, tokens=9, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    value, target = torch.rand(2, completions, tokens, generator=generator, dtype=torch.float64)
    mask = torch.rand(completions, tokens, generator=generator) < 0.6
    mask[1] = False  # a completion without a token
    mask[0, 3] = True
    return value.to(dtype), target.to(dtype), mask


def slow_error(value, target, mask):
    """Every figure as loops over completions and tokens."""
    rows = [
        [(v, q) for v, q, flag in zip(*row, strict=True) if flag]
        for row in zip(value.tolist(), target.tolist(), mask.tolist(), strict=True)
    ]
    rows = [row for row in rows if row]
    points, means, withins = [], [], []
    for row in rows:
        v_mean, q_mean = (math.fsum(pair[side] for pair in row) / len(row) for side in (0, 1))
        points.append(sum((v - q) ** 2 for v, q in row) / len(row))
        means.append((v_mean - q_mean) ** 2)
        withins.append(sum((v - v_mean - q + q_mean) ** 2 for v, q in row) / len(row))
    values, targets = [v for row in rows for v, _ in row], [q for row in rows for _, q in row]
    return {
        "error_point": sum(points) / len(points),
        "error_mean": sum(means) / len(means),
        "error_within": sum(withins) / len(withins),
        "explained_variance": explained_variance_score(targets, values),
        "value_mean": sum(values) / len(values),
        "target_mean": sum(targets) / len(targets),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_the_error_is_that_of_scikit_learn_and_loops_over_unmasked_tokens(seed, dtype):
    value, target, mask = batch(seed, dtype=dtype)
    want = slow_error(value.double(), target.double(), mask)
    error = critic_error(value.requires_grad_(), target, mask)
    assert error == pytest.approx(want, abs=1e-12)
    for poison in (NAN, 1e9, math.inf):  # nothing is read at masked tokens
        assert critic_error(torch.where(mask, value, poison), torch.where(mask, target, poison), mask) == error


@pytest.mark.parametrize("constant", [0.1, 1 / 3, 1e-30, 0.0])
def test_a_target_that_does_not_vary_has_no_explained_variance(constant):
    """The test for it is exact: in floats 49 times .1 is not 4.9."""
    value, _, mask = batch(3, completions=7, tokens=7)
    error = critic_error(value, torch.full_like(value, constant), mask)
    assert math.isnan(error["explained_variance"])
    assert error["target_mean"] == constant
    assert not math.isnan(error["error_point"])


@pytest.mark.parametrize("size", [(2, 3), (0, 0)])
def test_the_error_of_nothing_is_nan(size):
    assert all(math.isnan(x) for x in critic_error(torch.zeros(size), torch.zeros(size), torch.zeros(size).bool()).values())


@pytest.mark.parametrize("wrong", [NAN, math.inf])
def test_a_diverged_critic_shows(wrong):
    value, target, mask = batch(0)
    value[0, 3] = wrong
    error = critic_error(value, target, mask)
    assert not any(math.isfinite(error[name]) for name in ("error_point", "explained_variance", "value_mean"))
