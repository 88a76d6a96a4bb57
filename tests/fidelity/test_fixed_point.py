"""The q* test: closed forms against enumeration and against the simulation that goes through `advantage` itself."""

from math import comb

import pytest
import torch

from helpers import double
from spanwise.errors import RecipeError
from spanwise.fidelity import fixed_point, proper_score, simulated_fixed_point
from spanwise.objective import Objective
from spanwise.score import score_all

#: The checks of the shapes cost ten times what a long simulation does; the shortest ones have them.
long_simulation = pytest.mark.usefixtures("unchecked_shapes")

GRID = double([0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.95])


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4, 9, 64])
def test_the_closed_form_is_the_sum_over_how_many_are_right(size, leave_one_out):
    # of the gradient of n completions of one outcome
    comes_through = [(n > 1) * n if leave_one_out else max(n - 1, 0) for n in range(size + 1)]
    for p in (0.0, 0.01, 0.3, 0.5, 0.98, 1.0):
        chance = [comb(size, n) * p**n * (1 - p) ** (size - n) for n in range(size + 1)]
        right = sum(c * n for c, n in zip(chance, comes_through, strict=True))
        wrong = sum(c * n for c, n in zip(chance, reversed(comes_through), strict=True))
        options = {"group_size": size, "leave_one_out": leave_one_out}
        assert float(fixed_point(double([p]), baseline="outcome", **options)) == pytest.approx(right / (right + wrong))
        for baseline in ("none", "batch", "group"):
            assert float(fixed_point(double([p]), baseline=baseline, **options)) == pytest.approx(p)


@pytest.mark.long
@long_simulation
@pytest.mark.parametrize("baseline", ["none", "batch", "group", "outcome", "group alone", "outcome alone"])
@pytest.mark.parametrize("rule", ["brier", "log_score"])
def test_the_simulation_finds_the_closed_form(baseline, rule):
    baseline, _, alone = baseline.partition(" ")
    options = {"group_size": 5, "baseline": baseline, "leave_one_out": bool(alone)}
    p_b = double([0.2, 0.5, 0.9])
    point_b, error_b = simulated_fixed_point(p_b, rule=rule, copies=30, batches=120, seed=1, **options)
    off_b = (point_b - fixed_point(p_b, **options)).abs()
    assert bool((off_b <= 4 * error_b + 1e-9).all()), (off_b, error_b)
    assert float(error_b.max()) < 0.012


@pytest.mark.long
@long_simulation
def test_the_standard_error_is_honest():
    exact = float(fixed_point(double([0.3]), group_size=4, baseline="outcome"))
    options = {"group_size": 4, "baseline": "outcome", "copies": 4, "batches": 60}
    runs = [simulated_fixed_point(double([0.3]), seed=seed, **options) for seed in range(30)]
    z = torch.tensor([(float(point_b) - exact) / float(error_b) for point_b, error_b in runs])
    assert 0.7 < float(z.square().mean().sqrt()) < 1.4


@pytest.mark.long
@long_simulation
@pytest.mark.parametrize("size", [4, 8, 16, 32])
def test_blended_keeps_the_honest_probability(size):
    copies = max(1, 512 // (size * len(GRID)))
    point_b, error_b = simulated_fixed_point(GRID, group_size=size, baseline="blended", copies=copies, batches=80, seed=3)
    assert float((point_b - GRID).abs().max()) < 0.01
    assert float(error_b.max()) < 0.0025


@pytest.mark.parametrize("rule", ["brier", "log_score"])
def test_the_proper_scores_are_the_rewards(rule):
    reports, right = (0.0, 0.003, 0.4, 0.995, 1.0), (1.0, 0.0, 1.0, 1.0, 0.0)
    text = [{"solution": {"": "", "answer": "1"}, "confidence": {"": "", "confidence": f"{q}"}} for q in reports]
    objectives = [Objective("correct", pays="solution"), Objective(rule, pays="confidence", given="correct")]
    scores = score_all(objectives, text, columns={"answer": ["1" if c else "2" for c in right]})
    q, c = torch.tensor(reports).double(), torch.tensor(right).double()
    by_outcome = ((torch.full_like(q, o), scores.by_outcome_nmo[:, 1, o]) for o in (0, 1))
    for outcome, reward in ((c, scores.reward_nm[:, 1]), *by_outcome):
        assert torch.allclose(proper_score(q, outcome, rule=rule), reward, atol=1e-7)


def test_sentences(unchecked_shapes):
    half, alone = torch.tensor([0.5]), {"group_size": 1, "baseline": "outcome"}
    for call, sentence in (
        (lambda: fixed_point(half, group_size=4, baseline="blended"), "simulated_fixed_point"),
        (lambda: fixed_point(half, **alone), "group of 1 "),
        (lambda: simulated_fixed_point(half, group_size=4, baseline="blended", batches=10), "10 batches .* 20 completions"),
        (lambda: proper_score(half, torch.tensor([1.0]), rule="briar"), "'briar'"),
    ):
        with pytest.raises(RecipeError, match=sentence):
            call()
