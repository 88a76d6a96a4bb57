"""The blended baseline: two cases by hand, a slow oracle, and what it never reads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import SAME, scored_batches
from helpers import NAN, assert_close
from oracles import slow_blended
from spanwise.credit import advantage, assign, bae, blended_baseline, centred
from spanwise.credit.strata import refine
from spanwise.objective import Objective
from spanwise.types import Scores


def test_blended_by_hand_without_rescoring():
    # Three prompts with rewards 0 2, 4 8 and 3 3, one outcome. What prompt 0 learns from the other two: s2 = (8 + 0)/2 = 4; means 6
    # and 3, variance 4.5, noise 4/2: t2 = 2.5. So ml = 2 with v = 4/1, mu = 18/4 with v = 2.5 (1 + 1/2) + 4/4 = 4.75.
    reward_n = torch.tensor([0.0, 2.0, 4.0, 8.0, 3.0, 3.0], dtype=torch.float64)
    baseline_n = blended_baseline(reward_n, torch.tensor([0, 0, 1, 1, 2, 2]), torch.ones(6))

    def mix(ml, v_ml, mu, v_mu):
        return (ml / v_ml + mu / v_mu) / (1 / v_ml + 1 / v_mu)

    first = [mix(2, 4, 4.5, 4.75), mix(0, 4, 4.5, 4.75)]
    second = [mix(8, 1, 2, 2.5), mix(4, 1, 2, 2.5)]  # s2 = 2/2, t2 = 2 - 1/2
    third = [mix(3, 5, 3.5, 16.25)] * 2  # s2 = 10/2, t2 = 12.5 - 5/2
    assert_close(baseline_n, first + second + third, 1e-9)


def test_blended_with_one_other_prompt():
    # One other prompt cannot say how much prompts differ: mu stands in only for the completion that has nothing else.
    reward_n = torch.tensor([0.0, 4.0, 8.0], dtype=torch.float64)
    assert_close(blended_baseline(reward_n, torch.tensor([0, 1, 1]), torch.ones(3)), [6.0, 8.0, 4.0], 1e-9)


def test_blended_by_hand_with_rescoring():
    # Brier of reports q; prompts 0, 1 and 3 hold right and wrong answers, prompt 2 right ones only. Worked for outcome 1: own
    # rewards -(q-1)^2, the wrong ones re-scored as if they had been right.
    q = torch.tensor([0.5, 0.9, 0.6, 0.8, 0.4, 0.7, 0.3, 0.5, 0.2, 0.6, 0.9], dtype=torch.float64)
    c = torch.tensor([1.0, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0], dtype=torch.float64)
    group = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3])
    own = {0: [-0.25, -0.01], 1: [-0.04], 2: [-0.49, -0.25], 3: [-0.64]}
    other = {0: [-0.16], 1: [-0.36, -0.09], 3: [-0.16, -0.01]}

    def mean(values):
        return sum(values) / len(values)

    def variance(values):
        return sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1)

    def precision(pairs):
        return sum(e / v for e, v in pairs) / sum(1 / v for _, v in pairs)

    # Prompt 0 learns from 1, 2 and 3: only 2 has two right answers; 1 and 3 have both outcomes.
    s2, s2_x = 2 * 0.12**2, (2 * 0.135**2 + 2 * 0.075**2) / 2
    t2 = max(0, variance([-0.04, -0.37, -0.64]) - s2 * mean([1, 1 / 2, 1]))
    gaps = [-0.04 + 0.225, -0.64 + 0.085]
    d2 = max(0, variance(gaps) - (s2 + s2_x / 2))
    assert t2 > 0 < d2
    x = (-0.16 + mean(gaps), d2 * 1.5 + s2_x)
    mu = (mean(own[1] + own[2] + own[3]), t2 * 4 / 3 + s2 / 4)
    baseline_n = blended_baseline(reward := -((q - c) ** 2), group, c, torch.stack([-(q**2), -((q - 1) ** 2)], dim=1))
    assert baseline_n[0].item() == pytest.approx(precision([(-0.01, s2), x, mu]), rel=1e-9)

    # Prompt 1, whose only right answer stands alone, learns from 0, 2 and 3; 0 and 3 have both outcomes.
    s2, s2_x = (2 * 0.12**2 + 2 * 0.12**2) / 2, 2 * 0.075**2
    t2 = max(0, variance([-0.13, -0.37, -0.64]) - s2 * mean([1 / 2, 1 / 2, 1]))
    gaps = [-0.13 + 0.16, -0.64 + 0.085]
    d2 = max(0, variance(gaps) - mean([s2 / 2 + s2_x, s2 + s2_x / 2]))
    assert t2 > 0 < d2
    x = (-0.225 + mean(gaps), d2 * 1.5 + s2_x / 2)
    mu = (mean(own[0] + own[2] + own[3]), t2 * 4 / 3 + s2 / 5)
    assert baseline_n[3].item() == pytest.approx(precision([x, mu]), rel=1e-9)
    assert mean(other[1]) == pytest.approx(-0.225)
    assert reward[3].item() == pytest.approx(own[1][0])


def test_blended_alone_in_the_batch_is_counted():
    result = advantage(torch.tensor([-0.2]), torch.tensor([0]), baseline="blended", outcome_no=torch.tensor([1.0]))
    assert result.advantage_n.tolist() == [0.0]
    assert result.alone_n.tolist() == [True]


@given(batch=scored_batches())
@settings(max_examples=150, deadline=None)
def test_blended_equals_the_slow_oracle(batch):
    # precisions of nearly constant strata cancel, so two orders of summing differ by more than rounding
    torch.testing.assert_close(blended_baseline(*batch), slow_blended(batch), atol=1e-7, rtol=1e-7, equal_nan=True)


@given(batch=scored_batches())
@settings(max_examples=40, deadline=None)
def test_blended_alone_in_the_batch_is_the_mean_of_the_others(batch):
    # With one prompt and no re-scoring only the other members of the stratum remain.
    reward, _, outcome, _ = batch
    one = torch.zeros(len(reward), dtype=torch.long)
    expected = centred(reward, refine(one, outcome), leave_one_out=True)
    result = advantage(reward, one, baseline="blended", outcome_no=outcome).advantage_n
    torch.testing.assert_close(result, expected, atol=1e-9, rtol=0)


@given(batch=scored_batches(), data=st.data())
@settings(max_examples=80, deadline=None)
def test_blended_never_reads_the_own_reward(batch, data):
    # Neither in an estimate nor in a weight: whatever a completion earns, its baseline stays.
    reward = batch[0]
    i = data.draw(st.integers(0, len(reward) - 1))
    before = blended_baseline(*batch)[i]
    if not reward[i].isnan():
        reward[i] = data.draw(st.sampled_from([-1.0, -0.3, 0.0]))
        torch.testing.assert_close(blended_baseline(*batch)[i], before, atol=1e-7, rtol=1e-7, equal_nan=True)


def brier_batch():
    q = torch.tensor([0.5, 0.9, 0.6, 0.8, 0.4, 0.7, 0.3, 0.5, 0.2, 0.6], dtype=torch.float64)
    c = torch.tensor([1.0, 1, 0, 1, 0, 0, 1, 0, 1, 0], dtype=torch.float64)
    return c, -((q - c) ** 2), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 3]), torch.stack([-(q**2), -((q - 1) ** 2)], dim=1)


def test_rescored_rewards_reach_the_blended_baseline():
    c, brier, group_n, by_outcome = brier_batch()
    expected = brier - blended_baseline(brier, group_n, c, by_outcome)
    assert (expected - (brier - blended_baseline(brier, group_n, c))).abs().max() > 0.01
    result = advantage(brier, group_n, baseline="blended", outcome_no=c, by_outcome_n2=by_outcome)
    assert_close(result.advantage_n, expected.tolist(), 1e-12)
    both = torch.stack([torch.full_like(by_outcome, NAN), by_outcome], dim=1)
    assert_close(
        bae(torch.stack([c, brier], 1), group_n, baseline="blended", by_outcome_nk2=both)[:, 1], expected.tolist(), 1e-12
    )
    by_outcome_nmo = torch.stack([both[:, 0], by_outcome], dim=1)
    scores = Scores(
        ("correct", "brier"), torch.stack([c, brier], 1), torch.zeros(10, 2, dtype=torch.int8), by_outcome_nmo
    )  # fmt: skip
    objectives = (Objective("correct", pays=("a",)), Objective("brier", pays=("b",), given="correct", baseline="blended"))
    credit = assign(scores, group_n, torch.ones(10, 2).bool(), objectives=objectives, block_names=("a", "b"))
    assert_close(credit.block_nk[:, 1], expected.tolist(), 1e-12)


def test_blended_with_an_absent_reward():
    c, brier, group_n, by_outcome = brier_batch()
    brier[1] = NAN
    result = advantage(brier, group_n, baseline="blended", outcome_no=c, by_outcome_n2=by_outcome, if_missing=-1.0)
    baseline_n = blended_baseline(brier, group_n, c, by_outcome)
    assert_close(result.missing_n, [0.0, -1.0 - float(baseline_n[1]), 0, 0, 0, 0, 0, 0, 0, 0], 1e-12)
    assert result.alone_n.tolist() == [False] * 10
    nobody = advantage(torch.tensor([NAN, 1.0]), SAME, baseline="blended", outcome_no=torch.tensor([NAN, NAN]))
    assert nobody.alone_n.tolist() == [False, True]
