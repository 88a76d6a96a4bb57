"""The q* test: closed forms against enumeration and against the simulation that goes through `advantage` itself."""

from itertools import product
from math import comb

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.credit import advantage
from spanwise.errors import RecipeError
from spanwise.fidelity import fixed_point, proper_score, simulated_fixed_point
from spanwise.objective import Objective
from spanwise.score import score_all

#: The checks of the shapes cost ten times what a long simulation does; the short ones have them.
long_simulation = pytest.mark.usefixtures("unchecked_shapes")

GRID = torch.tensor([0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.95], dtype=torch.float64)
TABLE = {
    4: [0.005, 0.021, 0.087, 0.196, 0.5, 0.804, 0.979, 0.995],
    8: [0.010, 0.036, 0.124, 0.241, 0.5, 0.759, 0.964, 0.990],
    16: [0.017, 0.055, 0.159, 0.272, 0.5, 0.728, 0.945, 0.983],
    32: [0.026, 0.074, 0.180, 0.287, 0.5, 0.713, 0.926, 0.974],
}
MEAN_ERROR = {4: (0.075, 0.115, 0.058), 8: (0.049, 0.076, 0.023), 16: (0.028, 0.046, 0.007), 32: (0.015, 0.026, 0.002)}


def exactly(*p):
    return torch.tensor(p, dtype=torch.float64)


@pytest.mark.parametrize("size", TABLE)
def test_the_published_table(size):
    point_b = fixed_point(GRID, group_size=size, baseline="outcome")
    assert point_b.tolist() == pytest.approx(TABLE[size], abs=6e-4)
    p_b = torch.linspace(0.0005, 0.9995, 1000, dtype=torch.float64)
    off_b = (fixed_point(p_b, group_size=size, baseline="outcome") - p_b).abs()
    without_b = (fixed_point(p_b, group_size=size, baseline="outcome", leave_one_out=True) - p_b).abs()
    found = float(off_b.mean()), float(off_b.max()), float(without_b.mean())
    assert found == pytest.approx(MEAN_ERROR[size], abs=1e-3)


@pytest.mark.parametrize("size", [2, 3, 4, 9, 64])
def test_the_closed_form_is_the_sum_over_how_many_are_right(size):
    for p in (0.0, 0.01, 0.3, 0.5, 0.98, 1.0):
        chance = [comb(size, n) * p**n * (1 - p) ** (size - n) for n in range(size + 1)]
        right = sum(c * max(n - 1, 0) for n, c in enumerate(chance))
        wrong = sum(c * max(size - n - 1, 0) for n, c in enumerate(chance))
        q = fixed_point(exactly(p), group_size=size, baseline="outcome")
        assert float(q) == pytest.approx(right / (right + wrong))
        for baseline in ("none", "batch", "group"):
            assert float(fixed_point(exactly(p), group_size=size, baseline=baseline)) == pytest.approx(p)


def enumerated_shares(p, m, width, size, **options):
    """Every group there can be, a policy that reports m - width or m + width: gradient that comes through / that there is."""
    reports, world = (m - width, m + width), list(product(product((0.0, 1.0), (0, 1)), repeat=size))
    outcome = torch.tensor([[c for c, _ in group] for group in world], dtype=torch.float64)
    report = torch.tensor([[reports[k] for _, k in group] for group in world], dtype=torch.float64)
    chance = (outcome * p + (1 - outcome) * (1 - p)).prod(dim=1) / 2**size
    ids = torch.arange(len(world)).repeat_interleave(size)
    got = advantage(-(report - outcome).square().flatten(), ids, outcome_no=outcome.flatten(), **options).advantage_n
    shares = []
    for o in (0.0, 1.0):
        through = float((chance[:, None] * got.reshape(-1, size) * (report - m) * (outcome == o)).sum()) / size
        there = sum(-((q - o) ** 2) * (q - m) / 2 for q in reports) * (p if o else 1 - p)
        shares.append(through / there)
    return shares


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("p", [0.15, 0.6])
def test_the_point_is_that_of_every_group_there_can_be(p, size, leave_one_out):
    options = {"baseline": "outcome", "leave_one_out": leave_one_out}
    wrong, right = enumerated_shares(p, 0.4, 0.1, size, **options)
    expected = p * right / (p * right + (1 - p) * wrong)
    assert float(fixed_point(exactly(p), group_size=size, **options)) == pytest.approx(expected)
    # The group mean shrinks both outcomes alike, or not at all without the sample itself.
    alike = 1.0 if leave_one_out else (size - 1) / size
    assert enumerated_shares(p, 0.4, 0.1, size, baseline="group", leave_one_out=leave_one_out) == pytest.approx([alike] * 2)
    assert enumerated_shares(p, 0.4, 0.1, size, baseline="none") == pytest.approx([1.0, 1.0])


@given(st.floats(0.001, 0.999), st.integers(2, 64))
@settings(max_examples=80, deadline=None)
def test_relations(p, size):
    def point(probability, **options):
        return float(fixed_point(exactly(probability), group_size=size, **options))

    for leave_one_out in (False, True):
        options = {"baseline": "outcome", "leave_one_out": leave_one_out}
        assert point(p, **options) == pytest.approx(1 - point(1 - p, **options), abs=1e-9)
        assert abs(point(p, **options) - 0.5) >= abs(p - 0.5) - 1e-12  # always extremised
    with_it, without = point(p, baseline="outcome"), point(p, baseline="outcome", leave_one_out=True)
    assert abs(with_it - p) >= abs(without - p) - 1e-9
    if size == 2:  # two of one kind or nothing: both see the same half
        assert with_it == pytest.approx(without, abs=1e-9) == pytest.approx(p * p / (p * p + (1 - p) ** 2), abs=1e-9)


@pytest.mark.parametrize(("baseline", "leave_one_out"), [
    ("none", False), ("batch", False), ("group", False), ("group", True), ("outcome", False), ("outcome", True),
])  # fmt: skip
@pytest.mark.parametrize("rule", ["brier", "log_score"])
def test_the_simulation_finds_the_closed_form(baseline, leave_one_out, rule):
    options = {"group_size": 5, "baseline": baseline, "leave_one_out": leave_one_out}
    p_b = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    point_b, error_b = simulated_fixed_point(p_b, rule=rule, copies=30, batches=120, seed=1, **options)
    off_b = (point_b - fixed_point(p_b, **options)).abs()
    assert bool((off_b <= 4 * error_b + 1e-9).all()), (off_b, error_b)
    assert float(error_b.max()) < 0.012


@long_simulation
def test_the_standard_error_is_honest():
    exact = float(fixed_point(torch.tensor([0.3]).double(), group_size=4, baseline="outcome"))
    runs = [
        simulated_fixed_point(exactly(0.3), group_size=4, baseline="outcome", copies=4, batches=60, seed=s)
        for s in range(30)
    ]
    z = torch.tensor([(float(point_b) - exact) / float(error_b) for point_b, error_b in runs])
    assert 0.7 < float(z.square().mean().sqrt()) < 1.4


@long_simulation
@pytest.mark.parametrize("size", [4, 8, 16, 32])
def test_blended_keeps_the_honest_probability(size):
    copies = max(1, 512 // (size * len(GRID)))
    point_b, error_b = simulated_fixed_point(GRID, group_size=size, baseline="blended", copies=copies, batches=80, seed=3)
    assert float((point_b - GRID).abs().max()) < 0.01
    assert float(error_b.max()) < 0.0025


@long_simulation
def test_alone_in_the_batch_blended_is_outcome_without_itself():
    options = {"group_size": 4, "batches": 150}
    blended_b, _ = simulated_fixed_point(exactly(0.3), baseline="blended", **options)
    outcome_b, _ = simulated_fixed_point(exactly(0.3), baseline="outcome", leave_one_out=True, **options)
    assert float(blended_b) == pytest.approx(float(outcome_b), abs=1e-12)


def trained(baseline, p, *, group_size=4, copies=16, steps=400, rate=2.0):
    """REINFORCE on a softmax over the confidences 0, .1, ..., 1 of every prompt; mean confidence at the end."""
    generator = torch.Generator().manual_seed(0)
    chance_b, report_v = torch.tensor(p).repeat(copies).double(), torch.arange(11).double() / 10
    logit_bv, ids = torch.zeros(len(chance_b), 11).double(), torch.arange(len(chance_b)).repeat_interleave(group_size)
    for step in range(steps):
        policy_bv = logit_bv.softmax(dim=1)
        chosen_bg = torch.multinomial(policy_bv, group_size, replacement=True, generator=generator)
        q = report_v[chosen_bg]
        c = (torch.rand(q.shape, generator=generator) < chance_b[:, None]).double()
        by_outcome = torch.stack([-q.square(), -(q - 1).square()], dim=2).reshape(-1, 2)
        a = advantage(
            -(q - c).square().flatten(), ids, baseline=baseline, outcome_no=c.flatten(), by_outcome_n2=by_outcome
        ).advantage_n.reshape(q.shape)
        gradient_bv = torch.zeros_like(logit_bv).scatter_add_(1, chosen_bg, a) - a.sum(dim=1, keepdim=True) * policy_bv
        logit_bv += rate * (1 - step / steps) * gradient_bv / group_size
    return (logit_bv.softmax(dim=1) @ report_v).reshape(copies, -1).mean(dim=0).tolist()


@long_simulation
def test_a_tabular_policy_goes_where_the_fixed_point_says():
    low, middle, high = trained("outcome", [0.2, 0.5, 0.8], steps=600)
    assert low < 0.15
    assert middle == pytest.approx(0.5, abs=0.04)
    assert high > 0.85
    assert trained("blended", [0.2, 0.5, 0.8]) == pytest.approx([0.2, 0.5, 0.8], abs=0.045)


@pytest.mark.parametrize("rule", ["brier", "log_score"])
def test_the_proper_scores_are_the_rewards(rule):
    reports, right = (0.0, 0.003, 0.4, 0.995, 1.0), (1.0, 0.0, 1.0, 1.0, 0.0)
    text = [
        {"solution": {"": "", "answer": "1"}, "confidence": {"": "", "confidence": f"{q}"}} for q in reports
    ]  # fmt: skip
    objectives = [Objective("correct", pays=("solution",)), Objective(rule, pays=("confidence",), given="correct")]
    scores = score_all(objectives, text, columns={"answer": ["1" if c else "2" for c in right]})
    q, c = torch.tensor(reports).double(), torch.tensor(right).double()
    assert torch.allclose(proper_score(q, c, rule=rule), scores.reward_nm[:, 1], atol=1e-7)
    for o in (0, 1):
        assert torch.allclose(proper_score(q, torch.full_like(q, o), rule=rule), scores.by_outcome_nmo[:, 1, o], atol=1e-7)


def test_sentences():
    p = torch.tensor([0.5])
    with pytest.raises(RecipeError, match="no closed form; use simulated_fixed_point"):
        fixed_point(p, group_size=4, baseline="blended")
    with pytest.raises(RecipeError, match="group of 1 has nobody"):
        fixed_point(p, group_size=1, baseline="outcome")
    with pytest.raises(RecipeError, match=r"In 10 batches the rarest outcome comes only 20 times"):
        simulated_fixed_point(p, group_size=4, baseline="blended", batches=10)


def test_an_unknown_rule_is_named(unchecked_shapes):
    with pytest.raises(RecipeError, match=r"no score of a confidence 'briar'. Did you mean 'brier'"):
        proper_score(torch.tensor([0.5]), torch.tensor([1.0]), rule="briar")
