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
    [  # -1 minus the mean of two, over the root of half of: two squares of theirs and its own
        ([0.0, 2.0, NAN], -2 / (3**0.5 + 0.5)),
        ([0.0, 0.5, NAN], -1.25 / (0.84375**0.5 + 0.5)),
        ([1.0, 1.0, NAN], -2 / (2**0.5 + 0.5)),
        ([-1.0, -1.0, NAN], 0.0),
    ],
)
def test_what_is_missing_joins_the_deviation_and_all_are_scaled_alike(rewards, expected):
    reward_n, group_n = torch.tensor(rewards, dtype=torch.float64), torch.zeros(3).long()
    result = advantage(reward_n, group_n, scale="std", eps=0.5, if_missing=-1.0)
    assert_close(result.missing_n, [0.0, 0.0, expected], 1e-12)
    gap = -1.0 - (rewards[0] + rewards[1]) / 2
    half = (rewards[1] - rewards[0]) / 2
    scale = ((2 * half**2 + gap**2) / 2) ** 0.5 + 0.5
    assert_close(result.advantage_n, [-half / scale, half / scale, 0.0], 1e-12)


def test_a_missing_reward_in_a_group_of_nearly_equal_ones_is_bounded():
    # Eight of one prompt, one without a confidence. Seven rewards of -.09 give a mean of -.09 and a deviation of sqrt(.91^2 / 7).
    nearly = torch.tensor([-0.09, -0.0903, -0.0897, -0.09, -0.09, -0.09, -0.09, NAN], dtype=torch.float64)
    equal = nearly.clone().where(nearly.isnan(), -0.09)
    for reward_n, tolerance in ((nearly, 1e-6), (equal, 1e-12)):
        result = advantage(reward_n, torch.zeros(8).long(), scale="std", if_missing=-1.0)
        assert abs(float(result.missing_n[7]) + 7**0.5) < tolerance


def test_a_group_of_which_nothing_is_there_is_scaled_as_the_batch():
    # Group 9 has no reward at all: -1 against the batch's mean of 1, with squares 1 + 1 of the two that are there and 4 + 4 of
    # the two that are not, over 4 - 1.
    reward_n, group_n = torch.tensor([0.0, 2.0, NAN, NAN], dtype=torch.float64), torch.tensor([-3, -3, 9, 9])
    result = advantage(reward_n, group_n, scale="std", if_missing=-1.0)
    assert_close(result.missing_n, [0.0, 0.0, -2 / (10 / 3) ** 0.5, -2 / (10 / 3) ** 0.5], 1e-12)
    assert_close(result.advantage_n, [-(2**-0.5), 2**-0.5, 0.0, 0.0], 1e-12)


def test_only_what_a_number_stands_for_joins_the_deviation():
    reward_n = torch.tensor([0.0, 2.0, NAN, NAN], dtype=torch.float64)
    result = advantage(reward_n, torch.zeros(4).long(), scale="std", if_missing=torch.tensor([5.0, 5.0, NAN, -1.0]))
    assert_close(result.missing_n, [0.0, 0.0, 0.0, -2 / 3**0.5], 1e-12)
    assert_close(result.advantage_n, [-1 / 3**0.5, 1 / 3**0.5, 0.0, 0.0], 1e-12)


@st.composite
def gapped(draw):
    """Rewards of which some are missing, and what these stand for, on a fine grid."""
    batch = draw(scored_batches())
    return (*batch, draw(st.integers(-300, 100)) / 100)


def credited(batch, baseline, ddof=1, factor=1.0, shift=0.0):
    reward_n, group_n, outcome_n, _, if_missing = batch
    result = advantage(
        factor * reward_n + shift, group_n, baseline=baseline, outcome_no=outcome_n, scale="std", ddof=ddof,
        if_missing=factor * if_missing + shift,
    )  # fmt: skip
    return result.advantage_n + result.missing_n


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("baseline", ["batch", "group"])
@given(batch=gapped())
@settings(max_examples=60, deadline=None)
def test_k_missing_of_n_get_at_most_the_root_of_n_over_k(batch, baseline, ddof):
    reward_n, group_n = batch[:2]
    result = credited(batch, baseline, ddof)
    for i in range(len(reward_n)):
        mates = (group_n == group_n[i]) if baseline == "group" else torch.ones_like(group_n).bool()
        if bool(reward_n[mates].isnan().all()):  # compared with the batch
            mates = torch.ones_like(group_n).bool()
        if bool(reward_n[i].isnan()):
            missing = int(reward_n[mates].isnan().sum())
            assert abs(float(result[i])) <= ((int(mates.sum()) - ddof) / missing) ** 0.5 + 1e-9


@pytest.mark.parametrize("baseline", ["batch", "group", "outcome"])
@given(batch=gapped(), factor=st.sampled_from([0.001, 3.0, 1000.0]), shift=st.integers(-9, 9))
@settings(max_examples=60, deadline=None)
def test_units_and_origin_of_rewards_do_not_matter_to_what_is_scaled(batch, baseline, factor, shift):
    moved = credited((_apart(batch[0]), *batch[1:]), baseline, factor=factor, shift=shift)
    torch.testing.assert_close(moved, credited((_apart(batch[0]), *batch[1:]), baseline), atol=1e-6, rtol=1e-6)


def _apart(reward_n):
    """Rewards that are either equal or well apart, so that what is constant stays so in other units."""
    return (reward_n * 4).round() / 4


@pytest.mark.parametrize("baseline", ["batch", "group"])
@given(batch=gapped(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_small_step_of_one_reward_is_a_small_step_of_what_is_missing(batch, baseline, data):
    reward_n, *others, if_missing = batch
    present = (~reward_n.isnan()).nonzero().flatten().tolist()
    if not present or bool(((reward_n - if_missing).abs() < 0.05).any()):  # all equal, the stand-in too: nothing to scale by
        return
    moved_n = reward_n.clone()
    moved_n[data.draw(st.sampled_from(present))] += 1e-7
    step = credited((moved_n, *others, if_missing), baseline) - credited(batch, baseline)
    assert float(step[reward_n.isnan()].abs().sum()) < 1e-3


def test_without_a_baseline_nobody_is_alone():
    result = advantage(torch.tensor([NAN, 0.5]), SAME, baseline="none")
    assert result.alone_n.tolist() == [False, False]
    assert [value.dtype for value in result[:3]] == [torch.float64, torch.float64, torch.bool]
