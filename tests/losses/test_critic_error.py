"""How far a critic is off: the worked numbers, scikit-learn and loops as oracles."""

import math

import pytest
import torch
from sklearn.metrics import explained_variance_score

from helpers import NAN
from spanwise.errors import AlignmentError
from spanwise.losses import critic_error


def batch(seed, completions=6, tokens=9, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    value, target = torch.rand(2, completions, tokens, generator=generator, dtype=torch.float64)
    mask = torch.rand(completions, tokens, generator=generator) < 0.6
    mask[1] = False  # a completion without a token
    mask[0, 3] = True
    return value.to(dtype), target.to(dtype), mask


def slow(value, target, mask):
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
def test_the_same_as_scikit_learn_and_loops(seed, dtype):
    value, target, mask = batch(seed, dtype=dtype)
    want = slow(value.double(), target.double(), mask)
    assert critic_error(value.requires_grad_(), target, mask) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("poison", [NAN, 1e9, math.inf])
def test_nothing_is_read_at_masked_tokens(poison):
    value, target, mask = batch(0)
    dirty = critic_error(torch.where(mask, value, poison), torch.where(mask, target, poison), mask)
    assert dirty == critic_error(value, target, mask)


@pytest.mark.parametrize("constant", [0.1, 1 / 3, 1e-30, 0.0])
def test_a_target_that_does_not_vary_has_no_explained_variance(constant):
    """The test for it is exact: in floats 49 times .1 is not 4.9."""
    value, _, mask = batch(3, completions=7, tokens=7)
    error = critic_error(value, torch.full_like(value, constant), mask)
    assert math.isnan(error["explained_variance"])
    assert error["target_mean"] == constant
    assert not math.isnan(error["error_point"])


@pytest.mark.parametrize("size", [(2, 3), (0, 0)])
def test_nothing_gives_nan(size):
    assert all(math.isnan(x) for x in critic_error(torch.zeros(size), torch.zeros(size), torch.zeros(size).bool()).values())


@pytest.mark.parametrize("wrong", [NAN, math.inf])
def test_a_diverged_critic_shows(wrong):
    value, target, mask = batch(0)
    value[0, 3] = wrong
    error = critic_error(value, target, mask)
    assert all(
        math.isnan(x) or math.isinf(x) for x in (error["error_point"], error["explained_variance"], error["value_mean"])
    )


@pytest.mark.usefixtures("unchecked_shapes")
def test_other_shapes_are_refused():
    value, target, mask = batch(0)
    with pytest.raises(AlignmentError):
        critic_error(value, target[:, :8], mask)
