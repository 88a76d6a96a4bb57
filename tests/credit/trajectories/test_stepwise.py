"""Turns as rows: a rollout's credit reaches every trainable token of each of its turns, through each row's own mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import trajectory_outcomes
from helpers import NAN, assert_close
from spanwise import Objective
from spanwise.credit import assign_turns, prompt_mini_batches
from spanwise.credit.registry import METHODS, outcome_methods
from spanwise.credit.spread import to_tokens
from spanwise.credit.trajectories.turns import step_rewards
from spanwise.errors import AlignmentError, RecipeError
from spanwise.types import Scores, Status


def stepwise(name, reward_s, group_s, trajectory_s, step_s, mask_st, dtype=torch.float32, **options):
    """The credit of whole rollouts on the tokens of their turns."""
    status = torch.where(reward_s.isnan(), int(Status.UNSCORED), int(Status.OK)).to(torch.int8)[:, None]
    blank = torch.full((len(reward_s), 1, 2), NAN, dtype=torch.float64)
    credit = assign_turns(
        Scores(("correct",), reward_s.double()[:, None], status, blank), group_s, mask_st.sum(dim=1)[:, None],
        trajectory_s=trajectory_s, step_s=step_s, objectives=[Objective("correct", pays="all")], block_names=["all"],
        method=name, **options,
    )  # fmt: skip
    return to_tokens(credit.block_nk[:, 0], mask_st, dtype=dtype)


def realistic(seed, side, observations=True):
    """Trajectories of one to six steps with prompts and responses of different lengths, padded to one batch; responses hold
    observation tokens at their end. Every prompt has four trajectories, two of which succeed at their last step."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    rows = []
    for j in range(12):
        steps = draw(1, 6)
        for step in range(steps):
            written, observed = draw(1, 9), draw(0, 4) if observations else 0
            reward = float(j % 2) if step == steps - 1 else 0.0
            rows.append((j // 4, j, step, reward, [True] * written + [False] * observed))
    width = max(len(row[-1]) for row in rows)

    def pad(mask):
        blank = [False] * (width - len(mask))
        return mask + blank if side == "left" else blank + mask

    group, trajectory, step, reward, masks = zip(*rows, strict=True)
    return {
        "reward_s": torch.tensor(reward),
        "group_s": torch.tensor(group),
        "trajectory_s": torch.tensor(trajectory),
        "step_s": torch.tensor(step),
        "mask_st": torch.tensor([pad(mask) for mask in masks]),
    }


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_every_trainable_token_of_every_step_gets_its_trajectorys_credit(side, seed, name):
    batch = realistic(seed, side)
    outcome = trajectory_outcomes(*(batch[key] for key in ("reward_s", "group_s", "trajectory_s", "step_s")))
    adv_j = METHODS[name].estimator(outcome.reward_j, outcome.group_j)
    assert bool((adv_j != 0).all())
    expected_st = adv_j[batch["trajectory_s"], None] * batch["mask_st"]
    assert_close(stepwise(name, **batch, dtype=torch.float64), expected_st, 1e-12)
    wider = {**batch, "mask_st": torch.nn.functional.pad(batch["mask_st"], (3, 2))}
    assert torch.equal(stepwise(name, **wider), torch.nn.functional.pad(stepwise(name, **batch), (3, 2)))


def test_methods_that_are_no_outcome_methods():
    assert {"grpo", "dr_grpo"} <= set(outcome_methods())
    assert {"bae", "rlcr", "gigpo"}.isdisjoint(outcome_methods())


def test_last_and_sum():
    reward_s, step_s = torch.tensor([1.0, 5.0, 2.0, 4.0]), torch.tensor([0, 1, 1, 0])
    group_s, trajectory_s = torch.tensor([3, 3, 3, 3]), torch.tensor([9, 9, 4, 4])
    last = trajectory_outcomes(reward_s, group_s, trajectory_s, step_s)
    assert last.reward_j.tolist() == [2.0, 5.0]
    assert last.group_j.tolist() == [0, 0]
    assert last.line.index_s.tolist() == [1, 1, 0, 0]
    assert trajectory_outcomes(reward_s, group_s, trajectory_s, step_s, reward="sum").reward_j.tolist() == [6.0, 6.0]


def test_every_trainable_token_gets_the_advantage_of_its_row():
    adv_nt = to_tokens(torch.tensor([0.5, -1.0]), torch.tensor([[1, 1, 0], [0, 1, 0]]))
    assert adv_nt.tolist() == [[0.5, 0.5, 0], [0, -1, 0]]


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
