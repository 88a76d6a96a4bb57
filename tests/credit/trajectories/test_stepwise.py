"""Turns as rows: rewards of steps at masked tokens, batches of whole prompts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import NAN
from spanwise.credit import prompt_mini_batches
from spanwise.credit.registry import outcome_methods
from spanwise.credit.trajectories.turns import step_rewards
from spanwise.errors import AlignmentError, RecipeError


def test_methods_that_are_no_outcome_methods():
    assert {"grpo", "dr_grpo"} <= set(outcome_methods())
    assert {"bae", "rlcr", "gigpo"}.isdisjoint(outcome_methods())


def test_step_rewards_at_masked_tokens():
    mask_st = torch.tensor([[False, True, True, False], [False, False, True, False], [False] * 4])
    reward_st = torch.tensor([[1e9, 0.5, 0.25, 2.0], [NAN, 1e9, 1.0, NAN], [7.0, NAN, 1e9, 7.0]])
    assert step_rewards(reward_st, mask_st).tolist() == [2.75, 1.0, 0.0]
    assert step_rewards(torch.tensor([[NAN, 1.0]]), torch.tensor([[True, True]])).isnan().all()


@given(group=st.lists(st.integers(-3, 6), min_size=1, max_size=30), size=st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_mini_batches_are_a_partition(group, size):
    parts = [batch.tolist() for batch in prompt_mini_batches(torch.tensor(group), prompts_per_batch=size)]
    assert sorted(row for part in parts for row in part) == list(range(len(group)))
    order = list(dict.fromkeys(group))
    for number, part in enumerate(parts):
        assert part == sorted(part)
        assert {group[row] for row in part} == set(order[number * size : (number + 1) * size])
    if group == sorted(group):  # contiguous prompts give ranges of rows
        assert [row for part in parts for row in part] == list(range(len(group)))


def test_what_is_refused(unchecked_shapes):
    mask_st = torch.ones(3, 2).bool()
    with pytest.raises(AlignmentError):
        step_rewards(torch.zeros(3, 4), mask_st)
    with pytest.raises(RecipeError):
        prompt_mini_batches(torch.tensor([0]), prompts_per_batch=0)
