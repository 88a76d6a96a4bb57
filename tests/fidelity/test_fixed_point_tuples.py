"""q* of several outcomes (benchmarks/fixed_points.py): fractions by hand, every group there can be, the simulation."""

from fractions import Fraction as F
from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from fixed_points import fixed_point, gradient_shares, simulated_fixed_point

from spanwise.errors import RecipeError

#: The checks of the shapes cost ten times what a long simulation does; the short ones have them.
long_simulation = pytest.mark.usefixtures("unchecked_shapes")

# Right or wrong (judged), and complete or not: [right][complete].
PAIRS = [[F(3, 10), F(1, 2)], [F(0), F(1, 5)]]
TRIPLES = [[[F(1, 4), F(1, 8)], [F(1, 8), F(1, 16)]], [[F(1, 8), F(1, 8)], [F(1, 16), F(1, 8)]]]


def tensor(chances):
    return torch.from_numpy(np.array([chances], dtype=np.float64))


def flat(chances):
    return dict(np.ndenumerate(np.array(chances, dtype=object)))  # {tuple: probability}


def slow_shares(chances, size, *, back_off, leave_one_out=False, min_stratum=2):
    """E[1 - 1/n | own tuple] over every possible group, in fractions; 1 - 1/n is 1 without the completion itself."""
    chance = flat(chances)
    columns = len(next(iter(chance)))
    shares = {}
    for key in chance:
        share = F(0)
        for others in product(chance, repeat=size - 1):
            for dropped in range(columns + 1 if back_off else 1):
                kept = key[: columns - dropped]
                n = 1 + sum(other[: columns - dropped] == kept for other in others)
                if n >= min_stratum:
                    share += prod(chance[other] for other in others) * (1 if leave_one_out else 1 - F(1, n))
                    break
        shares[key] = share
    return shares


def slow_point(chances, shares, *, judged=0, seen=()):
    """{what is seen: q*}: the share of right answers among what comes through."""
    points = {}
    for values in {tuple(key[axis] for axis in seen) for key in shares}:
        fitting = {key: p * shares[key] for key, p in flat(chances).items() if tuple(key[axis] for axis in seen) == values}
        points[values] = sum(w for key, w in fitting.items() if key[judged] == 1) / sum(fitting.values())
    return points


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("back_off", [False, True])
@pytest.mark.parametrize(("chances", "sizes"), [(PAIRS, (2, 3, 5)), (TRIPLES, (2, 4)), ([F(7, 10), F(3, 10)], (2, 3, 6))])
def test_shares_are_those_of_every_group_there_can_be(chances, sizes, back_off, leave_one_out):
    for size in sizes:
        options = {"back_off": back_off, "leave_one_out": leave_one_out}
        expected = slow_shares(chances, size, **options)
        shares = gradient_shares(tensor(chances), group_size=size, baseline="outcome", **options)[0]
        for key, p in flat(chances).items():
            if p > 0:
                assert float(shares[key]) == pytest.approx(float(expected[key])), (size, key)
        point = fixed_point(tensor(chances), group_size=size, baseline="outcome", **options)
        assert float(point) == pytest.approx(float(slow_point(chances, expected)[()]))
        if len(flat(chances)) == 2:  # one binary outcome, written as a table or as its probability
            short = gradient_shares(torch.tensor([0.3]).double(), group_size=size, baseline="outcome", **options)[0]
            assert short.tolist() == pytest.approx(shares.tolist())


@pytest.mark.parametrize(
    ("judged", "seen"), [(0, ()), (1, ()), (2, ()), (1, (0,)), (2, (0,)), (0, (2,)), (1, (2,)), (0, (1, 2)), (2, (0, 1))]
)
def test_points_by_what_judges_and_what_is_seen(judged, seen):
    expected = slow_point(TRIPLES, slow_shares(TRIPLES, 3, back_off=True), judged=judged, seen=seen)
    points = fixed_point(tensor(TRIPLES), group_size=3, baseline="outcome", judged=judged, seen=seen)[0]
    assert points.shape == (2,) * len(seen)
    plain = fixed_point(tensor(TRIPLES), group_size=3, baseline="group", judged=judged, seen=seen)[0]
    honest = slow_point(TRIPLES, dict.fromkeys(flat(TRIPLES), 1), judged=judged, seen=seen)
    for values, point in expected.items():
        assert float(points[values]) == pytest.approx(float(point))
        assert float(plain[values]) == pytest.approx(float(honest[values]))  # the group mean pulls nothing: P(right | seen)


@pytest.mark.long
@long_simulation
@pytest.mark.parametrize("rule", ["brier", "log_score"])
@pytest.mark.parametrize("options", [
    *({"back_off": back_off, "leave_one_out": alone} for back_off, alone in product((True, False), repeat=2)),
    {"judged": 1}, {"baseline": "group"},
])  # fmt: skip
def test_the_simulation_finds_the_closed_form(options, rule):
    chance = torch.cat([tensor(PAIRS), tensor([[F(3, 10), F(1, 10)], [F(2, 10), F(4, 10)]])])
    options = {"group_size": 4, "baseline": "outcome", **options}
    simulated = simulated_fixed_point(chance[:, None], rule=rule, copies=60, batches=120, rounds=1, seed=1, **options)
    off = (simulated.point_bz[:, 0] - fixed_point(chance, **options)).abs()
    assert bool((off <= 4 * simulated.error_bz[:, 0] + 1e-9).all()), (off, simulated.error_bz)
    assert float(simulated.error_bz.max()) < 0.015


def test_contexts_share_the_strata_of_their_prompt():
    # A policy that sees half of its answers as likely (.9) and half as unlikely (.5) right; P(right) of the group is .7.
    p_bk, options = torch.tensor([[0.5, 0.9]]), {"group_size": 4, "copies": 30, "batches": 200}
    simulated = simulated_fixed_point(p_bk, baseline="outcome", rounds=1, **options)
    wrong, right = gradient_shares(torch.tensor([0.7]).double(), group_size=4, baseline="outcome")[0].tolist()
    expected = [p * right / (p * right + (1 - p) * wrong) for p in (0.5, 0.9)]
    assert simulated.point_bz[0].tolist() == pytest.approx(expected, abs=4 * float(simulated.error_bz.max()))
    assert simulated.share_bz2[0, 1].tolist() == pytest.approx([wrong, right], abs=0.05)
    group = simulated_fixed_point(p_bk, baseline="group", **options)
    assert group.point_bz[0].tolist() == pytest.approx([0.5, 0.9], abs=4 * float(group.error_bz.max()))


def test_contexts_that_see_an_outcome():
    # Two contexts, each seeing its own value of the second outcome: q* by what is seen.
    chance = torch.tensor([[[0.5, 0.0], [0.5, 0.0]], [[0.0, 0.1], [0.0, 0.9]]], dtype=torch.float64)
    joint = chance.mean(dim=0)[None]
    simulated = simulated_fixed_point(chance[None], group_size=4, baseline="outcome", copies=60, batches=150, rounds=1)
    expected = fixed_point(joint, group_size=4, baseline="outcome", seen=(1,))
    assert simulated.point_bz[0].tolist() == pytest.approx(expected[0].tolist(), abs=4 * float(simulated.error_bz.max()))


@pytest.mark.long
@long_simulation
@pytest.mark.parametrize(("chances", "judged"), [(PAIRS, 0), (TRIPLES, 0), (TRIPLES, 2)])
def test_blended_keeps_the_honest_probability(chances, judged):
    honest = float(slow_point(chances, dict.fromkeys(flat(chances), 1), judged=judged)[()])
    options = {"baseline": "blended", "copies": 48, "batches": 120, "seed": 3, "judged": judged}
    simulated = simulated_fixed_point(tensor(chances)[:, None], group_size=4, **options)
    assert float(simulated.error_bz) < 0.007
    assert abs(float(simulated.point_bz) - honest) < 0.005 + 3 * float(simulated.error_bz)


@pytest.mark.parametrize("find", [fixed_point, simulated_fixed_point])
def test_sentences(find):
    even, thirds = [[0.4, 0.3], [0.2, 0.1]], [[0.3, 0.2, 0.1], [0.1, 0.1, 0.2]]
    seen = ((even, {"seen": (0,)}, "outcome 0 judges"), (even, {"seen": (2,)}, "no outcome 2 "))
    for chances, options, sentence in (
        ([[0.4, 0.3], [0.1, 0.1]], {}, r"off by 0\.1"), (thirds, {"judged": 1}, r"1 of \(2, 3\)"),
        (even, {"judged": 2}, r"2 of \(2, 2\)"), (even, {"judged": -1}, "-1 of"), *(seen if find is fixed_point else ()),
    ):  # fmt: skip
        chance = torch.tensor([chances], dtype=torch.float64)
        with pytest.raises(RecipeError, match=sentence):
            find(chance if find is fixed_point else chance[:, None], group_size=4, **{"baseline": "outcome", **options})
