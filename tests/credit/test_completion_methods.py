"""The critic-free methods: worked numbers, relations between methods, and slow oracles written as plain loops."""

import functools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.credit import (
    METHODS,
    HistoryWeight,
    advantage,
    assign,
    bae,
    canon,
    dcpo,
    dr_grpo,
    gdpo,
    grpo,
    grpo_verif,
    ha_dw,
    history_weighted,
    maxrl,
    moments,
    opo,
    preset_objectives,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    san,
    smoothed_calibration,
)
from spanwise.credit.strata import standardised, standardised_tokens, unit_scale, weighted_mean
from spanwise.errors import AlignmentError, RecipeError, RewardError
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.types import Scores

NAN = float("nan")
# Two prompts of four completions, lengths and rewards of the worked example that most methods share.
TWO_PROMPTS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
REWARD = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 0], dtype=torch.float64)
LENGTH = torch.tensor([2, 1, 3, 2, 1, 1, 2, 4])


def assert_close(actual, expected, tolerance=1e-6):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), atol=tolerance, rtol=0)


def outcome_tokens(reward_n, length_n, dtype=torch.float64):
    """Every completion's reward on its last token, right-padded."""
    mask_nt = torch.arange(int(length_n.max()))[None] < length_n[:, None]
    reward_nt = torch.zeros(mask_nt.shape, dtype=dtype)
    reward_nt[torch.arange(len(reward_n)), length_n - 1] = reward_n.to(dtype)
    return reward_nt, mask_nt


# ---------------------------------------------------------------------------------------------------------- worked numbers


def test_rloo():
    assert_close(rloo(REWARD, TWO_PROMPTS), [2 / 3, -2 / 3, -2 / 3, 2 / 3, 1, -1 / 3, -1 / 3, -1 / 3], 1e-12)


def test_maxrl():
    expected = [0.999998, -0.999998, -0.999998, 0.999998, 2.999988, -0.999996, -0.999996, -0.999996]
    assert_close(maxrl(REWARD, TWO_PROMPTS), expected)
    assert_close(
        maxrl(REWARD, TWO_PROMPTS, eps=0.0) / 4, [1 / 4, -1 / 4, -1 / 4, 1 / 4, 3 / 4, -1 / 4, -1 / 4, -1 / 4], 1e-12
    )


def test_reinforce_plus_plus():
    reward_nt, mask_nt = outcome_tokens(REWARD, LENGTH)
    adv_nt = reinforce_plus_plus(reward_nt, mask_nt)
    expected = torch.where(REWARD == 1, 1.436141, -0.652791)[:, None].expand(mask_nt.shape)
    torch.testing.assert_close(adv_nt, torch.where(mask_nt, expected.double(), 0.0), atol=1e-6, rtol=0)
    # 5 of 16 tokens have return 1: mean .3125, sample standard deviation sqrt(16/15 * .3125 * .6875)
    assert_close(adv_nt[0, :1], [0.6875 / math.sqrt(16 / 15 * 0.3125 * 0.6875 + 1e-8)], 1e-12)


def test_reinforce_plus_plus_baseline():
    adv_n = reinforce_plus_plus_baseline(REWARD, TWO_PROMPTS, length_n=LENGTH)
    assert_close(adv_n, [1.271099, -0.988632, -0.988632, 1.271099, 1.836031, -0.4237, -0.4237, -0.4237])
    adv_n = reinforce_plus_plus_baseline(REWARD, TWO_PROMPTS, length_n=LENGTH, ddof=0, eps_at="floor")
    assert_close(adv_n, [1.312785, -1.021055, -1.021055, 1.312785, 1.896245, -0.437595, -0.437595, -0.437595])


GDPO = torch.tensor([[0.0, 0], [1, 0], [0, 0], [1, 1]], dtype=torch.float64)
PAIRS = torch.tensor([0, 0, 1, 1])


def test_gdpo():
    assert_close(gdpo(GDPO, PAIRS, eps=1e-4), [-0.547680, 0.547680, -1.095360, 1.095360])
    by_tokens = gdpo(GDPO, PAIRS, length_n=torch.tensor([1, 3, 1, 1]), eps=1e-6)
    assert_close(by_tokens, [-0.885615, 0.442807, -1.549826, 1.107019], 2e-6)
    assert_close(grpo(GDPO.sum(dim=1), PAIRS), [-0.707106, 0.707106, -0.707106, 0.707106], 1e-6)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_gdpo_rewards_that_contradict_each_other_cancel_exactly(eps):
    rewards = torch.tensor([[1.0, 0], [1, 0], [0, 1]], dtype=torch.float64)
    assert gdpo(rewards, torch.zeros(3, dtype=torch.long), eps=eps).tolist() == [0.0, 0.0, 0.0]


SAN_REWARD = torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1], dtype=torch.float64)
SAN_STRATUM = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2])
ONE_PROMPT = torch.zeros(8, dtype=torch.long)


def test_san():
    run = functools.partial(san, SAN_REWARD, ONE_PROMPT, stratum_n=SAN_STRATUM, ddof=0)
    assert_close(run(), [1, -1, 0.707107, 0.707107, -1.414214, -0.707107, -0.707107, 1.414214])
    assert_close(run(alpha=0.0), [1, -1, 1, 1, -1, -1, -1, 1])
    assert_close(run(alpha=0.8), [1, -1, 0.765685, 0.765685, -1.331371, -0.765685, -0.765685, 1.331371])
    # Var A_G - Var A_S is the variance between strata: .25 - .229167
    inside = moments(SAN_REWARD, SAN_STRATUM).deviation_n
    assert inside.square().mean().item() == pytest.approx(0.229167, abs=1e-6)
    assert 0.25 - inside.square().mean().item() == pytest.approx(0.020833, abs=1e-6)


CANON_REWARD = torch.tensor([1.0, 1, 0, 1, 0, 0, 0, 0], dtype=torch.float64)
METRIC = torch.tensor([8.0, 7, 6, 5, 4, 3, 2, 1])


def test_canon():
    run = functools.partial(canon, CANON_REWARD, ONE_PROMPT, metric_n=METRIC)
    assert_close(run(), [1, 1, 0, 1, -0.75, -0.75, -0.75, -0.75], 1e-12)
    assert_close(run(mu=0.0), [0.25, 0.25, -0.75, 0.25, 0, 0, 0, 0], 1e-12)
    assert_close(run(mu=0.5), [0.625, 0.625, -0.375, 0.625, -0.375, -0.375, -0.375, -0.375], 1e-12)
    assert_close(run(alpha=0.9), [0.9, 0.9, 0, 0.9, -0.675, -0.675, -0.675, -0.675], 1e-12)
    # entropies favour the low half: high r - .9 * 0, low .9 r - .75
    assert_close(run(alpha=0.9, favoured="low"), [1, 1, 0, 1, -0.75, -0.75, -0.75, -0.75], 1e-12)
    assert_close(run(divide_by=8192), [value / 8192 for value in (1, 1, 0, 1, -0.75, -0.75, -0.75, -0.75)], 1e-15)


def test_canon_favouring_the_low_half_with_rewards_in_both():
    # high half {0: r 1, 1: r 0}, low half {2: r 1, 3: r 1}: high r - .5 * 1, low .5 r - .5
    reward_n, metric_n = torch.tensor([1.0, 0, 1, 1]), torch.tensor([4.0, 3, 2, 1])
    adv_n = canon(reward_n, torch.zeros(4, dtype=torch.long), metric_n=metric_n, alpha=0.5, favoured="low")
    assert_close(adv_n, [0.5, -0.5, 0.0, 0.0], 1e-12)


def test_canon_of_odd_size_has_one_more_in_the_high_half():
    reward_n, metric_n = torch.tensor([1.0, 0, 1]), torch.tensor([1.0, 2, 3])
    group_n = torch.zeros(3, dtype=torch.long)
    assert_close(canon(reward_n, group_n, metric_n=metric_n, mu=0.5), [0.25, -0.75, 0.25], 1e-12)
    assert_close(dr_grpo(reward_n, group_n), [1 / 3, -2 / 3, 1 / 3], 1e-12)


VERIF = torch.tensor([[1.0, 1], [-1, 1], [1, -1], [-1.5, -1]], dtype=torch.float64)


def test_grpo_verif():
    group_n = torch.zeros(4, dtype=torch.long)
    adv_nk = grpo_verif(VERIF, group_n, ddof=0, eps=0.0)
    assert_close(adv_nk[:, 0], [0.987878, -0.768350, 0.987878, -1.207407])
    assert_close(adv_nk[:, 1], [0.2, 0.2, -0.2, -0.2])
    adv_nk = grpo_verif(VERIF, group_n, weight=1.0, eps=0.0)
    assert_close(adv_nk[:, 0], [0.855528, -0.665410, 0.855528, -1.045645])
    assert_close(adv_nk[:, 1], [0.866025, 0.866025, -0.866025, -0.866025])


def test_dcpo():
    c = torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1], dtype=torch.float64)
    q = torch.tensor([0.9, 0.8, 0.6, 0.9, 0.3, 0.5, 0.9, 0.7], dtype=torch.float64)
    score_n = smoothed_calibration(q, c, ONE_PROMPT)
    assert_close(score_n, [-0.01125, -0.15125, -0.01125, -0.01125, -0.00125, -0.03125, -0.21125, -0.00125], 1e-12)
    adv_nk = dcpo(torch.stack([c, score_n], dim=1), ONE_PROMPT)
    assert_close(adv_nk[:, 0], [value * 0.935413 for value in (1, -1, 1, 1, -1, -1, -1, 1)], 2e-6)
    assert_close(
        adv_nk[:, 1],
        [0.525699, -1.206015, 0.525699, 0.525699, 0.649393, 0.278311, -1.948178, 0.649393],
        1e-5,
    )
    assert_close(smoothed_calibration(q, c, ONE_PROMPT, form="absolute")[:2], [-0.15, -0.55], 1e-12)
    # share 0: half a Brier score; share 1: everyone has the group's rate for a target
    assert_close(smoothed_calibration(q, c, ONE_PROMPT, share=0.0), (-((q - c) ** 2) / 2).tolist(), 1e-12)
    assert_close(smoothed_calibration(q, c, ONE_PROMPT, share=1.0), (-((q - 0.5) ** 2) / 2).tolist(), 1e-12)


def test_smoothed_calibration_takes_the_rate_of_the_own_group():
    # rates 3/4 and 0: targets .5 c + .375 and .5 c
    c, q = torch.tensor([1.0, 1, 0, 1, 0, 0], dtype=torch.float64), torch.full((6,), 0.5, dtype=torch.float64)
    score_n = smoothed_calibration(q, c, torch.tensor([0, 0, 0, 0, 1, 1]), form="absolute")
    assert_close(score_n, [-0.375, -0.375, -0.125, -0.375, -0.5, -0.5], 1e-12)


def test_smoothed_calibration_without_a_confidence_or_an_outcome():
    q, c = torch.tensor([NAN, 0.5, 0.5]), torch.tensor([1.0, 0.0, NAN])
    group_n = torch.zeros(3, dtype=torch.long)
    assert smoothed_calibration(q, c, group_n).isnan().tolist() == [True, False, True]
    assert_close(smoothed_calibration(q, c, group_n, missing=-1.0)[:1], [-(1.75**2) / 2], 1e-12)  # target .75, confidence -1


def test_opo():
    # group 1: 4 of 8 tokens right; group 2: 1 of 8
    assert_close(
        opo(REWARD, TWO_PROMPTS, length_n=LENGTH), [1 / 2, -1 / 2, -1 / 2, 1 / 2, 7 / 8, -1 / 8, -1 / 8, -1 / 8], 1e-12
    )


def test_ha_dw_weights():
    reward_n = torch.tensor([1.0, 0, 0, 0])
    adv_n = history_weighted(dr_grpo(reward_n, torch.zeros(4).long()), reward_n, torch.zeros(4).long(), anchor=0.5)
    assert_close(adv_n, [1.251925, -0.253110, -0.253110, -0.253110])
    assert_close(adv_n[:2] / torch.tensor([0.75, -0.25]).double(), [1.669233, 1.012441])


@pytest.mark.parametrize(("p", "expected"), [(0.1, 0.175583), (0.01, 0.129441), (0.5, 0.5), (0.9, 0.824417)])
def test_ha_dw_mean_reward_of_mixed_groups_is_biased(p, expected):
    # All mixed groups of 8 with k right ones, weighted by their probability under p: what `mean_n` says on average.
    size = 8
    reward_n = torch.tensor([float(i < k) for k in range(1, size) for i in range(size)])
    mean_k = moments(reward_n, torch.arange(1, size).repeat_interleave(size)).mean_n()[::size]
    weight_k = torch.tensor([math.comb(size, k) * p**k * (1 - p) ** (size - k) for k in range(1, size)]).double()
    assert float((weight_k * mean_k).sum() / weight_k.sum()) == pytest.approx(expected, abs=1e-6)


def test_history_weight_moves_its_anchor():
    weigh = HistoryWeight(eta=0.02)
    weigh(torch.tensor([1.0, 0, 1, 0, 1]), torch.zeros(5, dtype=torch.long))  # .5 -> .502 for a rate of .6
    assert weigh.anchor == pytest.approx(0.502, abs=1e-12)
    weigh(torch.tensor([NAN, NAN]), torch.tensor([0, 0]))
    assert weigh.anchor == pytest.approx(0.502, abs=1e-12)


def test_history_weight_slows_down_as_its_anchor_settles():
    weigh = HistoryWeight(eta=0.5, window=3, start=0.0)
    ones, group_n = torch.ones(2), torch.zeros(2, dtype=torch.long)
    anchors = [0.0]
    for batch in range(4):
        weigh(ones, group_n)
        known = torch.tensor(anchors[-3:], dtype=torch.float64)
        eta = 0.5 * float(known.std()) if batch >= 2 else 0.5
        anchors.append((1 - eta) * anchors[-1] + eta)
        assert weigh.anchor == pytest.approx(anchors[-1], abs=1e-12)
    assert anchors[:3] == [0.0, 0.5, 0.75]


def test_history_weight_with_a_moving_average():
    weigh = HistoryWeight(history=2)
    group_n = torch.zeros(2, dtype=torch.long)
    seen = []
    for rewards in ([1.0, 0.0], [1.0, 1.0], [0.0, 1.0]):
        weigh(torch.tensor(rewards), group_n)
        seen.append(weigh.anchor)
    assert seen == [0.5, 0.75, 0.75]


@pytest.mark.parametrize("history", [None, 3])
def test_history_weight_continues_after_a_resume(history):
    torch.manual_seed(0)
    batches = [(torch.rand(6) < 0.4).float() for _ in range(8)]
    group_n = torch.tensor([0, 0, 0, 1, 1, 1])
    whole = HistoryWeight(window=3, history=history)
    expected = [whole(reward_n, group_n) for reward_n in batches]
    first = HistoryWeight(window=3, history=history)
    for reward_n in batches[:4]:
        first(reward_n, group_n)
    second = HistoryWeight(window=3, history=history)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for reward_n, adv_n in zip(batches[4:], expected[4:], strict=True):
        torch.testing.assert_close(second(reward_n, group_n), adv_n, atol=0, rtol=0)
    assert whole.state_dict() == second.state_dict()
    with pytest.raises(RecipeError, match="holds 'anchors' and 'rates'; got anchor"):
        second.load_state_dict({"anchor": [0.5]})


# -------------------------------------------------------------------------------------------------- relations between methods


@st.composite
def batches(draw, low=0):
    """Ragged groups in any order, some rewards absent, rewards and lengths on coarse grids so that ties happen."""
    n = draw(st.integers(1, 20))

    def column(values):
        return torch.tensor(draw(st.lists(values, min_size=n, max_size=n)))

    reward_n = column(st.integers(low, 6)).double() / 4
    reward_n[column(st.sampled_from([False, False, False, True]))] = NAN
    return reward_n, column(st.integers(0, 4)), column(st.integers(0, 5)), column(st.integers(0, 2))


def assert_same(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


@given(batch=batches(low=-4))
@settings(max_examples=40, deadline=None)
def test_relations(batch):
    reward_n, group_n, length_n, stratum_n = batch
    plain, scaled = dr_grpo(reward_n, group_n), grpo(reward_n, group_n)
    assert_same(rloo(reward_n, group_n), dr_grpo(reward_n, group_n, leave_one_out=True), 0)
    assert_same(opo(reward_n, group_n, length_n=torch.full_like(length_n, 7)), plain)
    assert_same(san(reward_n, group_n, stratum_n=stratum_n, alpha=0.0, eps=1e-6), scaled)
    assert_same(san(reward_n, group_n, stratum_n=torch.full_like(stratum_n, 3), eps=1e-6), scaled)
    assert_same(san(reward_n, group_n, stratum_n=torch.full_like(stratum_n, -1), alpha=0.25, eps=1e-6), 0.75 * scaled)
    inside = advantage(reward_n, group_n, baseline="outcome", outcome_n=stratum_n.double(), scale="std", eps=1e-6)
    assert_same(san(reward_n, group_n, stratum_n=stratum_n, eps=1e-6), inside.advantage_n)
    assert_same(canon(reward_n, group_n, metric_n=torch.zeros(len(reward_n)), mu=0.3), plain)  # nothing to cut by
    assert_same(ha_dw(reward_n, group_n, lambda_scale=0.0), torch.zeros(len(reward_n)).double(), 0)
    # An anchor at the group's mean weighs nothing.
    one = torch.zeros_like(group_n)
    rate = reward_n.nanmean()
    if not rate.isnan():
        assert_same(ha_dw(reward_n, one, anchor=float(rate), lambda_scale=1.0), grpo(reward_n, one))
    # One block and weight 1 are GRPO; the mechanism with a group baseline and a scale gives both block methods.
    assert_same(dcpo(reward_n[:, None], group_n)[:, 0], scaled, 0)
    assert_same(gdpo(reward_n[:, None], group_n), scaled * unit_scale(torch.where(reward_n.isnan(), NAN, scaled), eps=1e-6))
    # Whitening by completions instead of tokens is what equal lengths do.
    by_length = reinforce_plus_plus_baseline(reward_n, group_n, length_n=torch.ones_like(length_n), eps=0.0)
    alone = moments(reward_n, group_n).count_n() < 2
    assert_same(by_length, standardised(torch.where(alone | reward_n.isnan(), NAN, plain)))


@given(batch=batches(low=-4), other=st.lists(st.integers(0, 4), min_size=20, max_size=20), weight=st.floats(0.1, 2))
@settings(max_examples=30, deadline=None)
def test_block_methods_are_the_mechanism(batch, other, weight):
    reward_n, group_n, *_ = batch
    reward_nk = torch.stack([reward_n, torch.tensor(other[: len(reward_n)]).double() / 4], dim=1)
    expected = bae(reward_nk, group_n, baseline="group")
    for k in range(2):
        std_n = moments(reward_nk[:, k], group_n).std_n(ddof=1)
        expected[:, k] *= (weight if k else 1.0) / (std_n + 1e-6)
    assert_same(grpo_verif(reward_nk, group_n, weight=weight), expected)
    assert_same(dcpo(reward_nk, group_n), grpo_verif(reward_nk, group_n, weight=1.0), 0)


@given(batch=batches(low=-4), gamma=st.sampled_from([1.0, 0.5]))
@settings(max_examples=40, deadline=None)
def test_reinforce_plus_plus_of_outcomes_weighs_completions_by_their_tokens(batch, gamma):
    reward_n, _, length_n, _ = batch
    length_n = length_n + 1
    reward_nt, mask_nt = outcome_tokens(reward_n, length_n)
    if gamma == 1.0:
        expected_n = standardised(reward_n, weight_n=length_n.double(), eps=1e-8, eps_at="variance")
        assert_same(reinforce_plus_plus(reward_nt, mask_nt), torch.where(mask_nt, expected_n[:, None], 0.0))
    returns_nt = reinforce_plus_plus(reward_nt, mask_nt, gamma=gamma, whiten=False)
    away_nt = length_n[:, None] - 1 - torch.arange(mask_nt.shape[1])[None]
    assert_same(returns_nt, torch.where(mask_nt, reward_n.nan_to_num(nan=0.0)[:, None] * gamma ** away_nt.clamp(min=0), 0.0))


# ------------------------------------------------------------------------------------------------------- slow oracles (loops)


def members(batch):
    """Indices of the present completions, by group."""
    reward, group = batch[0].tolist(), batch[1].tolist()
    found = {}
    for i, r in enumerate(reward):
        if not math.isnan(r):
            found.setdefault(group[i], []).append(i)
    return reward, found


def average(values):
    return sum(values) / len(values)


def deviation(values, ddof):
    free = len(values) - ddof
    return math.sqrt(sum((v - average(values)) ** 2 for v in values) / free) if free > 0 else 0.0


def z_scores(values, ddof, eps):
    std = deviation(values, ddof)
    return [(v - average(values)) / (std + eps) if std > 1e-12 else 0.0 for v in values]


def slow_maxrl(batch, eps):
    reward, groups = members(batch)
    result = [0.0] * len(reward)
    for inside in groups.values():
        mean = average([reward[i] for i in inside])
        for i in inside if len(inside) > 1 and mean > 0 else []:
            result[i] = (reward[i] - mean) / (mean + eps)
    return result


def slow_opo(batch):
    reward, groups = members(batch)
    length, result = batch[2].tolist(), [0.0] * len(reward)
    for inside in groups.values():
        total = sum(length[i] for i in inside)
        for i in inside if len(inside) > 1 and total else []:
            result[i] = reward[i] - sum(length[j] * reward[j] for j in inside) / total
    return result


def slow_san(batch, alpha, ddof):
    reward, groups = members(batch)
    stratum, result = batch[3].tolist(), [0.0] * len(reward)
    for inside in groups.values():
        for value in set(stratum):
            same_value = [i for i in inside if stratum[i] == value]
            if len(same_value) > 1:
                for i, z in zip(same_value, z_scores([reward[i] for i in same_value], ddof, 1e-8), strict=True):
                    result[i] += alpha * z
        if len(inside) > 1:
            for i, z in zip(inside, z_scores([reward[i] for i in inside], ddof, 1e-8), strict=True):
                result[i] += (1 - alpha) * z
    return result


def slow_canon(batch, metric, mu, alpha, favoured):
    """Ties in the order of completions."""
    reward, groups = members(batch)
    result = [0.0] * len(reward)
    for inside in groups.values():
        if len(inside) < 2:
            continue
        ranked = sorted(inside, key=lambda i: metric[i])
        half = {"low": ranked[: len(ranked) // 2], "high": ranked[len(ranked) // 2 :]}
        for name, other in (("low", "high"), ("high", "low")):
            mine = alpha if favoured == name else 1.0
            theirs = alpha if favoured == other else 1.0
            for i in half[name]:
                between = mine * reward[i] - theirs * average([reward[j] for j in half[other]])
                within = reward[i] - average([reward[j] for j in half[name]])
                result[i] = mu * between + (1 - mu) * within
    return result


def slow_whitened(value, weight, ddof, eps, eps_at="variance", shift=True):
    used = [i for i, v in enumerate(value) if v is not None and weight[i] > 0]
    total = sum(weight[i] for i in used)
    if not used or total <= max(ddof, 1):
        return [0.0] * len(value)
    mean = sum(weight[i] * value[i] for i in used) / total
    variance = sum(weight[i] * (value[i] - mean) ** 2 for i in used) / (total - ddof)
    if variance < 1e-24:
        return [0.0] * len(value)
    divisor = {
        "std": math.sqrt(variance) + eps,
        "variance": math.sqrt(variance + eps),
        "floor": math.sqrt(max(variance, eps)),
    }[eps_at]
    return [(value[i] - (mean if shift else 0.0)) / divisor if i in used else 0.0 for i in range(len(value))]


def slow_baseline(batch, ddof, zero_constant_groups):
    reward, groups = members(batch)
    value = [None] * len(reward)
    for inside in groups.values():
        if len(inside) > 1 and not (zero_constant_groups and len({reward[i] for i in inside}) == 1):
            for i in inside:
                value[i] = reward[i] - average([reward[j] for j in inside])
    return slow_whitened(value, batch[2].tolist(), ddof, 1e-8)


def slow_gdpo(batch, weights, length, ddof):
    reward_nm, group = batch[0].tolist(), batch[1].tolist()
    n = len(reward_nm)
    value = [None if all(math.isnan(r) for r in row) else 0.0 for row in reward_nm]
    for m, weight in enumerate(weights):
        for g in set(group):
            inside = [i for i in range(n) if group[i] == g and not math.isnan(reward_nm[i][m])]
            if len(inside) > 1:
                for i, z in zip(inside, z_scores([reward_nm[i][m] for i in inside], ddof, 1e-6), strict=True):
                    value[i] += weight * z
    value = [v if v is None or abs(v) > 1e-12 else 0.0 for v in value]
    return slow_whitened(value, length or [1] * n, ddof, 1e-6, eps_at="std", shift=length is not None)


def slow_reinforce(reward_nt, mask_nt, gamma, ddof):
    n, t = reward_nt.shape
    reward, mask = reward_nt.tolist(), mask_nt.tolist()
    returns = [[None] * t for _ in range(n)]
    for i in range(n):
        trainable = [k for k in range(t) if mask[i][k]]
        if any(math.isnan(reward[i][k]) for k in trainable):
            continue
        value = {k: reward[i][k] for k in trainable}
        for k in range(t):
            before = [j for j in trainable if j < k]
            if not mask[i][k] and before and not math.isnan(reward[i][k]):
                value[before[-1]] += reward[i][k]
        for position, k in enumerate(trainable):
            returns[i][k] = sum(gamma**away * value[j] for away, j in enumerate(trainable[position:]))
    flat = slow_whitened([value for row in returns for value in row], [1] * (n * t), ddof, 1e-8)
    return torch.tensor(flat, dtype=torch.float64).reshape(n, t)


def check(actual, expected, tolerance=1e-9):
    expected = expected if isinstance(expected, torch.Tensor) else torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=1e-9)


@given(batch=batches(), ddof=st.integers(0, 1), alpha=st.sampled_from([0.0, 0.3, 1.0]), flag=st.booleans())
@settings(max_examples=80, deadline=None)
def test_equal_the_slow_oracles(batch, ddof, alpha, flag):
    reward_n, group_n, length_n, stratum_n = batch
    check(maxrl(reward_n, group_n, eps=alpha), slow_maxrl(batch, alpha))
    check(opo(reward_n, group_n, length_n=length_n), slow_opo(batch))
    check(san(reward_n, group_n, stratum_n=stratum_n, alpha=alpha, ddof=ddof), slow_san(batch, alpha, ddof), 1e-7)
    whitened_n = reinforce_plus_plus_baseline(reward_n, group_n, length_n=length_n, ddof=ddof, zero_constant_groups=flag)
    check(whitened_n, slow_baseline(batch, ddof, flag))
    favoured = "high" if flag else "low"
    adv_n = canon(reward_n, group_n, metric_n=length_n.double(), mu=alpha, alpha=0.7, favoured=favoured, ties="order")
    check(adv_n, slow_canon(batch, length_n.tolist(), alpha, 0.7, favoured))


@given(batch=batches(low=-4), data=st.data(), ddof=st.integers(0, 1), by_tokens=st.booleans())
@settings(max_examples=50, deadline=None)
def test_gdpo_equals_the_slow_oracle(batch, data, ddof, by_tokens):
    reward_n, group_n, length_n, _ = batch
    others = [data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, NAN]), min_size=len(reward_n), max_size=len(reward_n)))]
    reward_nm = torch.stack([reward_n, *(torch.tensor(other).double() for other in others)], dim=1)
    adv_n = gdpo(reward_nm, group_n, weight_m=torch.tensor([1.0, 0.25]), length_n=length_n if by_tokens else None, ddof=ddof)
    check(adv_n, slow_gdpo((reward_nm, group_n), [1.0, 0.25], length_n.tolist() if by_tokens else None, ddof), 1e-6)


@st.composite
def token_batches(draw):
    n, t = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    values = st.sampled_from([0.0, 0.0, 0.0, 0.25, 1.0, -0.5, NAN])
    reward_nt = torch.tensor(draw(st.lists(st.lists(values, min_size=t, max_size=t), min_size=n, max_size=n)))
    mask_nt = torch.tensor(draw(st.lists(st.lists(st.booleans(), min_size=t, max_size=t), min_size=n, max_size=n)))
    return reward_nt.double(), mask_nt


@given(batch=token_batches(), gamma=st.sampled_from([1.0, 0.5, 0.9]), ddof=st.integers(0, 1))
@settings(max_examples=80, deadline=None)
def test_reinforce_plus_plus_equals_the_slow_oracle(batch, gamma, ddof):
    reward_nt, mask_nt = batch
    before = reward_nt.clone()
    check(reinforce_plus_plus(reward_nt, mask_nt, gamma=gamma, ddof=ddof), slow_reinforce(*batch, gamma, ddof))
    torch.testing.assert_close(reward_nt, before, equal_nan=True)


# ---------------------------------------------------------------------------------------------------------------- properties


def completion_methods(length_n, stratum_n):
    """Every method of this page as a function of rewards and groups alone."""
    return {
        "rloo": rloo,
        "maxrl": maxrl,
        "opo": functools.partial(opo, length_n=length_n),
        "san": functools.partial(san, stratum_n=stratum_n, alpha=0.5),
        "canon": functools.partial(canon, metric_n=length_n.double(), mu=0.7),
        "ha_dw": ha_dw,
        "gdpo": lambda reward_n, group_n: gdpo(torch.stack([reward_n, reward_n**2], dim=1), group_n),
        "baseline": functools.partial(reinforce_plus_plus_baseline, length_n=length_n),
    }


@pytest.mark.parametrize("name", list(completion_methods(LENGTH, LENGTH)))
@given(batch=batches(), data=st.data())
@settings(max_examples=20, deadline=None)
def test_order_never_matters_and_absent_is_deleted(name, batch, data):
    reward_n, group_n, length_n, stratum_n = batch
    whole = completion_methods(length_n, stratum_n)[name](reward_n, group_n)
    order = torch.tensor(data.draw(st.permutations(range(len(reward_n)))))
    shuffled = completion_methods(length_n[order], stratum_n[order])[name](reward_n[order], group_n[order])
    assert_same(shuffled, whole[order])
    kept = ~reward_n.isnan()
    assert_same(completion_methods(length_n[kept], stratum_n[kept])[name](reward_n[kept], group_n[kept]), whole[kept])
    assert whole[~kept].abs().sum() == 0
    assert whole.dtype == torch.float64


@pytest.mark.parametrize("name", [name for name in completion_methods(LENGTH, LENGTH) if name != "baseline"])
@pytest.mark.parametrize("value", [0.7, 0.1, 1 / 3, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_groups_and_groups_of_one_give_exactly_zero(name, value, dtype):
    reward_n = torch.tensor([value] * 7 + [0.9, 0.0, 1.0, 0.25], dtype=dtype)
    group_n = torch.tensor([4] * 7 + [9, 5, 5, 5])
    length_n = torch.arange(1, 12)
    adv_n = completion_methods(length_n, length_n % 3)[name](reward_n, group_n)
    assert adv_n[:8].tolist() == [0.0] * 8
    assert adv_n[8:].abs().sum() > 0


@pytest.mark.parametrize("name", ["rloo", "maxrl", "opo", "san", "canon", "ha_dw", "gdpo", "baseline"])
def test_groups_below_min_stratum_get_zero_and_join_nothing(name):
    reward_n = torch.tensor([1.0, 0.25, 0, 0.5, 1.0], dtype=torch.float64)
    group_n, length_n = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([3, 1, 2, 2, 5])

    def run(reward_n, group_n, length_n, min_stratum):
        if name == "gdpo":
            return gdpo(torch.stack([reward_n, reward_n**2], dim=1), group_n, min_stratum=min_stratum)
        same_stratum = torch.zeros_like(group_n)
        return completion_methods(length_n, same_stratum)[name](reward_n, group_n, min_stratum=min_stratum)

    assert run(reward_n, group_n, length_n, 2)[:2].abs().min() > 0
    strict = run(reward_n, group_n, length_n, 3)
    assert strict[:2].tolist() == [0.0, 0.0]
    if name != "gdpo":  # there a group without differences still counts in the deviation of the batch
        assert_same(strict[2:], run(reward_n[2:], group_n[2:], length_n[2:], 3))
    assert run(reward_n, group_n, length_n, 4).tolist() == [0.0] * 5


def test_the_baseline_of_reinforce_plus_plus_credits_constant_groups_unless_told_not_to():
    reward_n, group_n = torch.tensor([1.0, 0, 1, 1, 0.7]), torch.tensor([0, 0, 1, 1, 2])
    length_n = torch.tensor([30, 10, 20, 20, 50])
    adv_n = reinforce_plus_plus_baseline(reward_n, group_n, length_n=length_n, ddof=0, eps=0.0)
    std = math.sqrt((30 * 0.375**2 + 10 * 0.625**2 + 40 * 0.125**2) / 80)
    assert_close(adv_n, [0.375 / std, -0.625 / std, -0.125 / std, -0.125 / std, 0.0], 1e-12)
    only = reinforce_plus_plus_baseline(reward_n, group_n, length_n=length_n, ddof=0, eps=0.0, zero_constant_groups=True)
    alone = reinforce_plus_plus_baseline(reward_n[:2], group_n[:2], length_n=length_n[:2], ddof=0, eps=0.0)
    assert_close(only, [*alone.tolist(), 0.0, 0.0, 0.0], 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reinforce_plus_plus_of_equal_returns_is_exactly_zero(dtype):
    reward_nt, mask_nt = outcome_tokens(torch.full((40,), 0.7), torch.arange(1, 41), dtype)
    assert reinforce_plus_plus(reward_nt, mask_nt).abs().max() == 0.0
    assert reinforce_plus_plus(reward_nt[:1, :1], mask_nt[:1, :1]).tolist() == [[0.0]]


def test_token_whitening_over_many_rows_survives_an_offset_and_poison():
    # More rows than one block holds, some without a token, values with a large common offset; float32 keeps what float64 found.
    torch.manual_seed(0)
    value_nt = torch.randn(100, 9, dtype=torch.float64) + 1e6
    mask_nt = torch.rand(100, 9) < 0.6
    mask_nt[:40:3] = False
    inside = value_nt[mask_nt]
    expected_nt = torch.where(mask_nt, (value_nt - inside.mean()) / inside.std(), 0.0)
    for poison in (NAN, 1e9):
        poisoned_nt = torch.where(mask_nt, value_nt, poison)
        before_nt = poisoned_nt.clone()
        whitened_nt = standardised_tokens(poisoned_nt, mask_nt, eps=0.0)
        torch.testing.assert_close(poisoned_nt, before_nt, atol=0, rtol=0, equal_nan=True)
        assert_same(whitened_nt, expected_nt, 1e-8)
        assert whitened_nt.masked_select(~mask_nt).abs().sum() == 0
    small_nt = (value_nt - 1e6).float()
    result_nt = standardised_tokens(small_nt, mask_nt, eps=0.0)
    assert result_nt.dtype == torch.float32
    torch.testing.assert_close(result_nt.double(), expected_nt, atol=1e-5, rtol=0)
    assert standardised_tokens(small_nt, torch.zeros_like(mask_nt)).abs().sum() == 0


@pytest.mark.parametrize(
    ("eps_at", "eps", "size"),
    [("std", 0.21, 1 / 1.21), ("variance", 0.21, 1 / 1.1), ("floor", 0.21, 1), ("floor", 4.0, 1 / 2)],
)
def test_where_epsilon_stands(eps_at, eps, size):
    # rewards 2 and 0 on one token each: deviations +-1, population variance 1
    reward_n, group_n, ones = torch.tensor([2.0, 0.0]), torch.tensor([0, 0]), torch.tensor([1, 1])
    options = {"ddof": 0, "eps": eps, "eps_at": eps_at}
    assert_close(reinforce_plus_plus_baseline(reward_n, group_n, length_n=ones, **options), [size, -size], 1e-12)
    assert_close(reinforce_plus_plus(reward_n[:, None], ones[:, None].bool(), **options)[:, 0], [size, -size])
    scores = torch.tensor([[1.0], [-1.0]])  # standardised in the group they are +-1 / (1 + eps)
    within = 1 / (1 + eps)
    divisor = {"std": within + eps, "variance": (within**2 + eps) ** 0.5, "floor": max(within, eps**0.5)}[eps_at]
    assert_close(gdpo(scores, group_n, **options), [within / divisor, -within / divisor], 1e-6)


def test_canon_shares_ties_whatever_their_order():
    # Metrics 1 2 2 2: one completion of the three ties belongs to the low half, so each belongs to it by a third.
    reward_n, metric_n = torch.tensor([1.0, 0, 0, 1]), torch.tensor([1.0, 2, 2, 2])
    group_n = torch.zeros(4, dtype=torch.long)
    high, low = (1 / 3), (1 + 1 / 3) / 2  # mean of the ties; of completion 0 and a third of each tie
    expected = [1 - high, *(r - (2 * low + high) / 3 for r in (0, 0, 1))]
    assert_close(canon(reward_n, group_n, metric_n=metric_n), expected, 1e-12)
    in_order = canon(reward_n, group_n, metric_n=metric_n, ties="order")  # low: 0 and 1
    assert_close(in_order, [1 - 0.5, 0 - 0.5, 0 - 0.5, 1 - 0.5], 1e-12)


def test_canon_leaves_out_who_has_no_metric():
    reward_n, group_n = torch.tensor([1.0, 0, 5.0]), torch.tensor([0, 0, 0])
    assert_close(canon(reward_n, group_n, metric_n=torch.tensor([2.0, 1, NAN])), [1.0, -1.0, 0.0], 1e-12)


def test_weighted_mean():
    mean_n = weighted_mean(torch.tensor([1.0, 4, NAN, 2]), torch.tensor([1.0, 2, 9, 0]), torch.tensor([0, 0, 0, -1]))
    assert_close(mean_n[:3], [3.0, 3.0, 3.0], 1e-12)
    assert mean_n[3].isnan()
    assert weighted_mean(torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor([0])).isnan().all()


def test_what_is_constant_has_no_scale():
    assert unit_scale(torch.full((5,), 0.7), eps=1e-6) == 0.0
    assert unit_scale(torch.tensor([0.7, NAN]), eps=1e-6) == 0.0
    assert standardised(torch.full((5,), 0.7), shift=False, eps=1e-6).tolist() == [0.0] * 5


def test_empty_batches():
    nothing, nobody = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    for method in completion_methods(nobody, nobody).values():
        assert method(nothing, nobody).shape == (0,)
    assert reinforce_plus_plus(torch.zeros(0, 3), torch.zeros(0, 3).bool()).shape == (0, 3)


def test_sentences(unchecked_shapes):
    reward_n, group_n = torch.tensor([0.5, -0.25]), torch.tensor([0, 0])
    with pytest.raises(RewardError, match=r"reward of completion 1 is -0\.25; maxrl divides by the group's mean"):
        maxrl(reward_n, group_n)
    with pytest.raises(AlignmentError, match="3 weights for 1 rewards"):
        gdpo(reward_n[:, None], group_n, weight_m=torch.ones(3))
    with pytest.raises(AlignmentError, match="1 metrics for 2 rewards"):
        canon(reward_n, group_n, metric_n=torch.ones(1))
    with pytest.raises(AlignmentError, match="2 rewards for 3 group ids"):
        rloo(reward_n, torch.zeros(3, dtype=torch.long))
    with pytest.raises(RecipeError, match="Did you mean 'absolute'"):
        smoothed_calibration(reward_n, reward_n, group_n, form="absolut")
    with pytest.raises(RecipeError, match="window is 1"):
        HistoryWeight(window=1)


# --------------------------------------------------------------------------------------------------------------- the mechanism

LAYOUT = Layout({"solution": ["reasoning", "answer"], "confidence": ["analysis", "confidence"]})


def scores_of(reward_nm):
    status = torch.where(reward_nm.isnan(), 1, 0).to(torch.int8)
    names = ("correct", "brier")
    return Scores(names, reward_nm, status, torch.full((*reward_nm.shape, 2), NAN, dtype=torch.float64))


def two_rewards(seed, n=24):
    generator = torch.Generator().manual_seed(seed)
    correct_n = (torch.rand(n, generator=generator) < 0.5).double()
    report_n = torch.rand(n, generator=generator, dtype=torch.float64)
    group_n = torch.randint(0, 5, (n,), generator=generator)
    return torch.stack([correct_n, -((report_n - correct_n) ** 2)], dim=1), group_n


def run_preset(name, reward_nm, group_n, layout, **options):
    preset = METHODS[name].preset
    return assign(
        scores_of(reward_nm),
        group_n,
        torch.ones(len(group_n), len(layout.names)).bool(),
        objectives=preset_objectives(preset, layout, baseline="group"),
        block_names=layout.names,
        sum_first=preset.sum_first,
        whiten=preset.whiten,
        **options,
    )


@pytest.mark.parametrize("seed", range(4))
def test_presets_of_objectives_equal_the_pure_functions(seed):
    reward_nm, group_n = two_rewards(seed)
    whole = Layout({"completion": LAYOUT.tags})
    assert_same(run_preset("gdpo", reward_nm, group_n, whole).block_nk[:, 0], gdpo(reward_nm, group_n))
    assert_same(run_preset("dcpo", reward_nm, group_n, LAYOUT).block_nk, dcpo(reward_nm, group_n))
    assert_same(run_preset("grpo_verif", reward_nm, group_n, LAYOUT).block_nk, grpo_verif(reward_nm, group_n))


@pytest.mark.parametrize("name", ["rloo", "opo", "reinforce++-baseline", "maxrl"])
def test_an_estimator_takes_the_sum_and_the_inputs_it_asks_for(name):
    reward_nm, group_n = two_rewards(7)
    group_n[0] = 99  # alone
    reward_nm[:, 1] += 1.0
    length_n = torch.arange(1, len(group_n) + 1)
    objectives = (Objective("correct", pays=LAYOUT.names), Objective("brier", pays=LAYOUT.names, weight=0.5))
    present = torch.ones(len(group_n), 2).bool()
    present[3, 1] = False
    estimator = METHODS[name].estimator
    credit = assign(
        scores_of(reward_nm),
        group_n,
        present,
        objectives=objectives,
        block_names=LAYOUT.names,
        sum_first=True,
        estimator=estimator,
        inputs={"length_n": length_n, "metric_n": None},
    )
    needs = {"length_n": length_n} if "length_n" in METHODS[name].needs else {}
    expected_n = estimator(reward_nm @ torch.tensor([1.0, 0.5]).double(), group_n, **needs)
    assert_same(credit.block_nk, torch.where(present, expected_n[:, None], 0.0))
    alone = moments(reward_nm[:, 0], group_n).count_n() < 2
    assert credit.singleton_m.tolist() == [int(alone.sum())] * 2


def test_an_estimator_is_bound_by_the_options_of_the_recipe():
    reward_nm, group_n = two_rewards(3)
    group_n[:3] = 99
    common = {
        "objectives": (Objective("correct", pays=("solution",)), Objective("brier", pays=("solution",), weight=0.0)),
        "block_names": ("solution",),
        "sum_first": True,
    }
    run = functools.partial(assign, scores_of(reward_nm), group_n, torch.ones(len(group_n), 1).bool(), **common)
    strict = run(estimator=rloo, min_stratum=5)
    assert_same(strict.block_nk[:, 0], rloo(reward_nm[:, 0], group_n, min_stratum=5))
    assert_same(strict.singleton_m, run(min_stratum=5).singleton_m)
    assert not torch.equal(strict.block_nk, run(estimator=rloo).block_nk)
    left = run(estimator=dr_grpo, leave_one_out=True)
    assert_same(left.block_nk[:, 0], rloo(reward_nm[:, 0], group_n))
    bound = run(estimator=functools.partial(rloo, min_stratum=5))
    assert_same(bound.block_nk, strict.block_nk)
    weigh = HistoryWeight(opo, start=0.1)
    lengths = {"length_n": torch.arange(1, len(group_n) + 1), "metric_n": None}
    weighted = run(estimator=weigh, inputs=lengths).block_nk[:, 0]
    plain = opo(reward_nm[:, 0], group_n, length_n=lengths["length_n"])
    assert_same(weighted, history_weighted(plain, reward_nm[:, 0], group_n, anchor=0.1))
    assert weigh.anchor != 0.1
    with pytest.raises(RecipeError, match="An estimator takes one reward per completion"):
        run(estimator=rloo, sum_first=False)


@pytest.mark.parametrize("sum_first", [False, True])
def test_whitening_scales_each_block_over_who_has_it(sum_first):
    reward_nm, group_n = two_rewards(11, n=9)
    reward_nm[4, 1] = NAN  # left its confidence out
    present = torch.ones(9, 2).bool()
    present[4, 1] = False
    objectives = (
        Objective("correct", pays=LAYOUT.names if sum_first else ("solution",)),
        Objective("brier", pays=LAYOUT.names if sum_first else ("confidence",), if_missing=-1.0),
    )
    run = functools.partial(
        assign, scores_of(reward_nm), group_n, present, objectives=objectives, block_names=LAYOUT.names, sum_first=sum_first
    )
    plain, whitened = run(), run(whiten=True, ddof=0, eps=0.1)
    for k in range(2):
        has = present[:, k]
        std = plain.block_nk[has, k].std(correction=0) + 0.1
        assert_same(whitened.block_nk[:, k], plain.block_nk[:, k] / std)
    if not sum_first:
        assert whitened.stop_n[4] != 0
        assert_same(whitened.stop_n, plain.stop_n / (plain.block_nk[present[:, 1], 1].std(correction=0) + 0.1))


def test_whitening_leaves_groups_without_differences_at_zero():
    reward_nm = torch.tensor([[1.0, -0.7], [1, -0.7], [1, -0.7], [0, -0.1], [1, -0.3]], dtype=torch.float64)
    group_n = torch.tensor([0, 0, 0, 1, 1])
    credit = run_preset("gdpo", reward_nm, group_n, Layout({"completion": LAYOUT.tags}), eps=0.0)
    assert credit.block_nk[:3, 0].tolist() == [0.0, 0.0, 0.0]
    assert gdpo(reward_nm, group_n, eps=0.0)[:3].tolist() == [0.0, 0.0, 0.0]
