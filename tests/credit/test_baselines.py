"""Baselines: worked numbers, a slow oracle, properties, and what a missing block costs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import PAIR, SAME, scored_batches
from helpers import NAN, assert_close
from oracles import slow_advantage
from spanwise.credit import advantage, bae, dr_grpo, grpo, rlcr


def test_leave_one_out_outcome_with_eight():
    correct = torch.tensor([1.0, 1, 0, 0, 1, 0, 1, 1], dtype=torch.float64)
    report = torch.tensor([0.9, 0.7, 0.8, 0.1, 0.8, 0.3, 0.6, 0.95], dtype=torch.float64)
    result = advantage(
        -((report - correct) ** 2),
        torch.zeros(8, dtype=torch.long),
        baseline="outcome",
        outcome_no=correct,
        leave_one_out=True,
    )
    assert_close(result.advantage_n, [0.063125, -0.036875, -0.59, 0.355, 0.025625, 0.235, -0.124375, 0.0725])


def test_batch_baseline_crosses_prompts():
    result = advantage(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 1, 2]), baseline="batch")
    assert_close(result.advantage_n, [0.5, -0.5, 0.0], 1e-12)


def test_groups_of_one_get_exactly_zero_and_are_counted():
    result = advantage(torch.tensor([0.7, 1.0, 0.0]), torch.tensor([5, 9, 9]), baseline="group")
    assert result.advantage_n.tolist() == [0.0, 0.5, -0.5]
    assert result.alone_n.tolist() == [True, False, False]


def test_singleton_outcome_is_zero_unless_blended():
    reward_n = torch.tensor([-0.64, -0.09, -0.01, -0.25, -0.04, -0.16], dtype=torch.float64)
    outcome_n = torch.tensor([1.0, 0, 0, 0, 0, 0], dtype=torch.float64)
    result = advantage(reward_n, torch.zeros(6, dtype=torch.long), baseline="outcome", outcome_no=outcome_n)
    # the five wrong ones: mean -.11
    assert_close(result.advantage_n, [0.0, 0.02, 0.10, -0.14, 0.07, -0.05], 1e-12)
    assert result.alone_n.tolist() == [True] + [False] * 5


@pytest.mark.parametrize("value", [0.806, 0.7, 1 / 3, 0.1, -0.123456789])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_groups_give_exactly_zero(value, size, dtype):
    reward_n = torch.full((size,), value, dtype=dtype)
    group_n = torch.zeros(size, dtype=torch.long)
    assert grpo(reward_n, group_n, eps=0.0).tolist() == [0.0] * size
    assert dr_grpo(reward_n, group_n).tolist() == [0.0] * size
    outcome_n = torch.ones(size)
    assert advantage(reward_n, group_n, baseline="blended", outcome_no=outcome_n).advantage_n.abs().max() == 0.0


def test_unknown_outcome_joins_no_stratum():
    result = advantage(
        torch.tensor([1.0, 0.0, 5.0]), torch.zeros(3, dtype=torch.long), baseline="outcome",
        outcome_no=torch.tensor([1.0, 1.0, NAN]),
    )  # fmt: skip
    assert result.advantage_n.tolist() == [0.5, -0.5, 0.0]
    assert result.alone_n.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("baseline", "outcome", "expected"),
    [
        ("none", [1.0, 1.0, 0.0, 0.0], -1.0),
        ("group", [1.0, 1.0, 0.0, 0.0], -1.0 + 0.25),  # mean of -.1, -.2, -.45
        ("outcome", [1.0, 1.0, 0.0, 0.0], -1.0 + 0.45),  # the only other wrong one
        ("outcome", [1.0, 1.0, 1.0, 0.0], -1.0 + 0.25),  # nobody else is wrong: the group
    ],
)
def test_missing_block_pays_at_the_decision_to_stop(baseline, outcome, expected):
    reward_n = torch.tensor([-0.1, -0.2, -0.45, NAN], dtype=torch.float64)
    result = advantage(
        reward_n, torch.zeros(4, dtype=torch.long), baseline=baseline, outcome_no=torch.tensor(outcome), if_missing=-1.0
    )
    assert_close(result.missing_n, [0.0, 0.0, 0.0, expected], 1e-12)
    assert result.advantage_n[3] == 0.0


BASELINES = ["none", "batch", "group", "outcome", "blended"]


def run(batch, baseline, **options):
    reward, group, outcome, by_outcome = batch
    return advantage(reward, group, baseline=baseline, outcome_no=outcome, by_outcome_n2=by_outcome, **options).advantage_n


@pytest.mark.parametrize("baseline", ["none", "batch", "group", "outcome"])
@pytest.mark.parametrize("leave_one_out", [False, True])
@given(batch=scored_batches())
@settings(max_examples=60, deadline=None)
def test_equals_the_slow_oracle(batch, baseline, leave_one_out):
    torch.testing.assert_close(
        run(batch, baseline, leave_one_out=leave_one_out), slow_advantage(batch, baseline, leave_one_out), atol=1e-12, rtol=0
    )


@pytest.mark.parametrize("baseline", BASELINES)
@given(batch=scored_batches(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_permuting_completions_permutes_advantages(batch, baseline, data):
    order = torch.tensor(data.draw(st.permutations(range(len(batch[0])))))
    expected = run(batch, baseline)[order]
    torch.testing.assert_close(run(tuple(x[order] for x in batch), baseline), expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("baseline", BASELINES)
@given(batch=scored_batches())
@settings(max_examples=40, deadline=None)
def test_absent_equals_deleted(batch, baseline):
    kept = ~batch[0].isnan()
    torch.testing.assert_close(run(batch, baseline)[kept], run(tuple(x[kept] for x in batch), baseline), atol=1e-9, rtol=0)
    assert run(batch, baseline)[~kept].abs().sum() == 0


@pytest.mark.parametrize("baseline", ["batch", "group", "outcome", "blended"])
@given(batch=scored_batches(), shift=st.floats(-50, 50))
@settings(max_examples=40, deadline=None)
def test_shifting_all_rewards_changes_nothing(batch, baseline, shift):
    reward, group, outcome, by_outcome = batch
    moved = (reward + shift, group, outcome, by_outcome + shift)
    torch.testing.assert_close(run(moved, baseline), run(batch, baseline), atol=1e-6, rtol=0)


@pytest.mark.parametrize("baseline", ["group", "outcome"])
@given(batch=scored_batches())
@settings(max_examples=40, deadline=None)
def test_strata_sum_to_zero_and_groups_do_not_mix(batch, baseline):
    result = run(batch, baseline)
    for g in batch[1].unique():
        inside = batch[1] == g
        assert abs(result[inside].sum().item()) < 1e-12
        alone = run(tuple(x[inside] for x in batch), baseline)
        torch.testing.assert_close(result[inside], alone, atol=1e-12, rtol=0)


def test_one_outcome_makes_outcome_the_group():
    reward_n, group_n = torch.tensor([-0.1, -0.5, -0.2, -0.9]), torch.tensor([0, 1, 0, 1])
    by_outcome = advantage(reward_n, group_n, baseline="outcome", outcome_no=torch.ones(4)).advantage_n
    torch.testing.assert_close(by_outcome, dr_grpo(reward_n, group_n))


ESTIMATORS = {
    "grpo": lambda r, g, **o: grpo(r, g, **o),
    "dr_grpo": lambda r, g, **o: dr_grpo(r, g, **o),
    "rlcr": lambda r, g, **o: rlcr(torch.stack([r, torch.zeros_like(r)], dim=1), g, **o),
    "bae": lambda r, g, **o: bae(r[:, None], g, **o)[:, 0],
    "advantage": lambda r, g, **o: advantage(r, g, **o).advantage_n,
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_min_stratum_is_two_and_can_be_three(name):
    assert ESTIMATORS[name](PAIR, SAME).abs().min() > 0
    assert ESTIMATORS[name](PAIR, SAME, min_stratum=3).tolist() == [0.0, 0.0]


def test_defaults_of_advantage():
    assert_close(advantage(PAIR, torch.tensor([0, 1])).advantage_n, [0.0, 0.0], 1e-12)  # the group, not the batch
    assert_close(advantage(PAIR, SAME, scale="std").advantage_n, [-(2**-0.5), 2**-0.5], 1e-12)


@pytest.mark.parametrize("baseline", ["batch", "group", "outcome", "blended"])
def test_a_batch_without_any_reward_costs_nothing(baseline):
    nothing = torch.tensor([NAN, NAN])
    result = advantage(nothing, SAME, baseline=baseline, outcome_no=torch.tensor([1.0, 1.0]), if_missing=-1.0)
    assert result.missing_n.tolist() == [0.0, 0.0]
    assert result.advantage_n.tolist() == [0.0, 0.0]
    assert result.missing_n.dtype == result.advantage_n.dtype == torch.float64


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([0.0, 2.0, NAN], -2 / (2**0.5 + 0.5)), ([0.0, 0.5, NAN], -1.25 / (0.125**0.5 + 0.5)), ([1.0, 1.0, NAN], -2.0)],
)
def test_what_is_missing_is_scaled_like_the_rest(rewards, expected):  # a constant stratum has no scale
    reward_n, group_n = torch.tensor(rewards, dtype=torch.float64), torch.zeros(3).long()
    result = advantage(reward_n, group_n, scale="std", eps=0.5, if_missing=-1.0)
    assert_close(result.missing_n, [0.0, 0.0, expected], 1e-12)


def test_without_a_baseline_nobody_is_alone():
    result = advantage(torch.tensor([NAN, 0.5]), SAME, baseline="none")
    assert result.alone_n.tolist() == [False, False]
    assert [value.dtype for value in result] == [torch.float64, torch.float64, torch.bool]
