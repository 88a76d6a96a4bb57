"""Token fidelity: figures against plain loops, by hand, masked, unknown, and critics that are exact."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from helpers import NAN
from oracles import slow_token_fidelity
from spanwise.errors import AlignmentError, DataError, RecipeError
from spanwise.fidelity import SaeSegments, Trajectories, token_fidelity
from spanwise.fidelity.tokens import TOKEN_ESTIMATORS, TOKEN_FIGURES, VALUES


def drawn(n, t, *, seed=0, prompts=5):
    """Random trajectories with holes in the mask, and values of a critic."""
    g = torch.Generator().manual_seed(seed)
    chance, value_nt, noise_nt, p_nt, critic_nt = torch.rand(5, n, t, generator=g).double()
    prompt_n, reward_n = torch.randint(prompts, (n,), generator=g), torch.randint(2, (n,), generator=g).double()
    return Trajectories(prompt_n, reward_n, value_nt, 0.02 * noise_nt, (0.4 + 0.6 * p_nt).log(), chance < 0.8), critic_nt


def pick_tokens(trajectories, *, seed=0):
    """The same, of which a sample of tokens was picked; half of the others have values all the same."""
    g = torch.Generator().manual_seed(seed)
    weight_nt = torch.randint(3, trajectories.mask_nt.shape, generator=g) * 1.5
    gone_nt = (weight_nt == 0) & (torch.rand(weight_nt.shape, generator=g) < 0.5)
    return replace(trajectories, value_nt=trajectories.value_nt.masked_fill(gone_nt, NAN), weight_nt=weight_nt)


@pytest.mark.long
@pytest.mark.parametrize("picked", [False, True], ids=["all", "picked"])
@pytest.mark.parametrize("cut", [None, *product((0.0, 0.5, 2.0), ("start", "end"))])
@pytest.mark.parametrize("seed", range(2))
def test_against_plain_loops(seed, cut, picked, request):
    if seed:  # the checks of the shapes take most of the time
        request.getfixturevalue("unchecked_shapes")
    trajectories, value_nt = drawn(12, 7, seed=seed)
    if picked:
        trajectories = pick_tokens(trajectories, seed=seed)
    poison = {"value_nt": NAN, "noise_nt": 1e9, "logp_nt": -50.0}  # at tokens that do not count
    masked_nt = ~trajectories.mask_nt
    trajectories = replace(trajectories, **{x: vars(trajectories)[x].masked_fill(masked_nt, poison[x]) for x in poison})
    value_nt = value_nt.masked_fill(masked_nt, NAN)
    segments = None if cut is None else SaeSegments(*cut)
    measured = token_fidelity(trajectories, {"critic": value_nt}, segments=segments, draws=2)
    sae = {f"SAE {side} {p}, {lam}" for side in ("start", "end") for p in (0.2, 0.5, 0.9) for lam in (0, 0.5, 0.95)}
    gae = {f"GAE {lam}" for lam in (0, 0.5, 0.8, 0.95, 1, "adaptive 0.05", "adaptive 0.4")}
    assert set(TOKEN_ESTIMATORS) == sae | gae | {"GRPO c - group mean", "GRPO c - V(prompt)"}
    for name in TOKEN_ESTIMATORS:
        expected = slow_token_fidelity(trajectories, value_nt, name, cut=cut)
        for kind in ("all", "decision"):
            figures = {figure: measured.interval("critic", name, figure, kind=kind).value for figure in TOKEN_FIGURES}
            assert {**figures, "count": measured.count(kind)} == pytest.approx(expected[kind], abs=1e-9), (name, kind)


def test_what_is_unknown_is_left_out():
    trajectories, value_nt = drawn(9, 5, seed=4)
    gone, unvalued, dumb = trajectories.reward_n.clone(), trajectories.value_nt.clone(), value_nt.clone()
    gone[0], dumb[1] = NAN, NAN
    unvalued[2, 2] = NAN
    mask_nt = torch.ones(9, 5, dtype=torch.bool)
    holes = replace(trajectories, reward_n=gone, value_nt=unvalued, mask_nt=mask_nt)
    measured = token_fidelity(holes, {"c": value_nt, "d": dumb}, draws=2)
    count_n = measured.sum_cesnk[0, 0, 0, :, 0]
    assert count_n.tolist() == [0, 0, 3, 5, 5, 5, 5, 5, 5]  # V unknown before token 2: neither token 2 nor token 1 has A_MC
    assert torch.equal(count_n, measured.sum_cesnk[1, -1, 0, :, 0])
    assert bool(measured.sum_cesnk.isfinite().all())


def exact_and_noisy(rerolls, *, n=3000, t=6, seed=0):
    """Martingale values of a chain that is hit with probability .3 at each step, and their Monte Carlo estimates."""
    g = torch.Generator().manual_seed(seed)
    step_nt = torch.where(torch.rand(n, t, generator=g) < 0.3, -0.1, 0.3 * 0.1 / 0.7)
    value_nt = (0.5 + torch.cat([torch.zeros(n, 1), step_nt[:, 1:]], dim=1).cumsum(dim=1)).double()
    reward_n = (torch.rand(n, generator=g) < value_nt[:, -1]).double()

    def roll():
        return torch.distributions.Binomial(rerolls, value_nt).sample() / rerolls

    torch.manual_seed(seed)
    first_nt, second_nt = roll(), roll()
    noise_nt = first_nt * (1 - first_nt) / (rerolls - 1)
    logp_nt, mask_nt = torch.zeros(n, t).double(), torch.ones(n, t, dtype=torch.bool)
    return Trajectories(torch.arange(n), reward_n, first_nt, noise_nt, logp_nt, mask_nt), value_nt, second_nt


@pytest.mark.parametrize("rerolls", [4, 64])
def test_the_exact_critic_reaches_the_ceiling(rerolls):
    trajectories, exact_nt, again_nt = exact_and_noisy(rerolls)
    measured = token_fidelity(trajectories, {"exact": exact_nt, "again": again_nt, "same": trajectories.value_nt}, draws=10)
    ceiling = measured.interval("exact", "GAE 0", "ceiling").value
    assert measured.interval("exact", "GAE 0", "correlation").value == pytest.approx(ceiling, abs=0.01)
    assert measured.interval("exact", "GAE 0", "rmse").value < 0.06  # without taking the noise off: .35 and .09
    assert measured.interval("exact", VALUES, "rmse").value < 0.05
    # An independent set of re-rolls is as noisy as the reference itself; its own re-rolls would look perfect.
    assert measured.interval("again", "GAE 0", "correlation").value == pytest.approx(ceiling**2, abs=0.02)
    assert measured.interval("same", "GAE 0", "correlation").value == pytest.approx(1.0)
    assert measured.best("exact", "GAE") == "GAE 0"
    assert measured.lead("exact", "SAE start 0.5, 0", "GAE").value < 0  # no token is unlikely, so that SAE is c - V


def test_leads_choose_anew_in_every_draw():
    trajectories, value_nt = drawn(60, 6, seed=5, prompts=20)
    measured = token_fidelity(trajectories, {"c": value_nt}, draws=300)
    names = [name for name in TOKEN_ESTIMATORS if name.startswith("GAE")]
    by_name = {name: measured.interval("c", name, "correlation").value for name in names}
    assert measured.best("c", "GAE") == max(by_name, key=by_name.get)
    lead = measured.lead("c", "SAE start 0.9, 0", "GAE")
    assert lead.low < lead.value < lead.high
    sae = measured.interval("c", "SAE start 0.9, 0", "correlation").value
    assert lead.value == pytest.approx(sae - max(by_name.values()))
    # Against many chosen anew, the lead is never better than against any one of them.
    for name in names:
        assert lead.high <= measured.lead("c", "SAE start 0.9, 0", name).high + 1e-12
    assert measured.lead("c", "GAE", "GAE").low == measured.lead("c", "GAE", "GAE").high == 0
    assert measured.lead("c", "GAE 0", "GAE 1").value == -measured.lead("c", "GAE 1", "GAE 0").value


def test_an_estimator_that_never_varies_leads_nobody():
    # A critic that always says 0, and last tokens that are no decisions: GAE 0 is 0 at every decision, the others are not.
    trajectories, value_nt = drawn(60, 6, seed=5, prompts=20)
    last_nt = torch.arange(6) == 5
    logp_nt, mask_nt = trajectories.logp_nt.masked_fill(last_nt, 0.0), trajectories.mask_nt | last_nt
    sure = replace(trajectories, logp_nt=logp_nt, mask_nt=mask_nt)
    measured = token_fidelity(sure, {"zero": torch.zeros_like(value_nt)}, draws=50)
    assert math.isnan(measured.interval("zero", "GAE 0", "correlation", kind="decision").value)
    best = measured.best("zero", "GAE", kind="decision")
    lead = measured.lead("zero", "SAE start 0.5, 0", "GAE", kind="decision")
    pair = [measured.interval("zero", name, "correlation", kind="decision").value for name in ("SAE start 0.5, 0", best)]
    assert lead.value == pytest.approx(pair[0] - pair[1])


def test_intervals_are_by_prompt():
    trajectories, value_nt = drawn(6, 5, seed=6, prompts=6)
    copies = 20  # the same six completions of six prompts, again and again: no new facts, the same interval
    tables = {name: table for name, table in vars(trajectories).items() if table is not None}
    many = replace(trajectories, **{name: torch.cat([table] * copies) for name, table in tables.items()})
    single = token_fidelity(trajectories, {"c": value_nt}).interval("c", "GAE 1", "correlation")
    repeated = token_fidelity(many, {"c": value_nt.repeat(copies, 1)}).interval("c", "GAE 1", "correlation")
    assert (repeated.low, repeated.high) == pytest.approx((single.low, single.high))
    assert single.low < single.value < single.high


@pytest.mark.usefixtures("unchecked_shapes")
def test_sentences():
    trajectories, value_nt = drawn(4, 5)
    with pytest.raises(AlignmentError, match="'c'"):
        token_fidelity(trajectories, {"c": value_nt[:, :4]})
    for critics in ({"c": value_nt * NAN}, {}):
        with pytest.raises(DataError):
            token_fidelity(trajectories, critics)
    for short in ({"mask_nt": trajectories.mask_nt[:, :4]}, {"prompt_n": trajectories.prompt_n[:3]}):
        with pytest.raises(AlignmentError):
            replace(trajectories, **short)
    measured = token_fidelity(trajectories, {"c": value_nt}, draws=2)
    for arguments in (("d", "GAE 0", "rmse"), ("c", "GAE", "rmse"), ("c", "GAE 0", "rms")):
        with pytest.raises(RecipeError, match="There is no"):
            measured.interval(*arguments)
    with pytest.raises(RecipeError, match="no estimator 'VAPO'"):
        measured.best("c", "VAPO")
