"""The blended baseline: two cases by hand, a slow oracle, and what it never reads."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import SAME, scored_batches
from helpers import NAN, assert_close
from spanwise.credit import advantage, assign, bae, blended_baseline
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
