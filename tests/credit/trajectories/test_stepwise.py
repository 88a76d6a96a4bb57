"""Turns as rows: a rollout's credit reaches every trainable token of each of its turns, through each row's own mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import trajectory_outcomes
from helpers import NAN
from spanwise import Objective
from spanwise.credit import assign_turns, grpo, outcome_methods, prompt_mini_batches, step_rewards, to_tokens
from spanwise.credit.registry import METHODS
from spanwise.errors import AlignmentError, RecipeError
from spanwise.types import Scores, Status

SIDES = ["left", "right"]


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


def check_every_step_is_paid(adv_st, adv_j, trajectory_s, mask_st):
    """Each trainable token holds its trajectory's credit, every other token exactly 0, and each step's sum follows."""
    for row in range(len(mask_st)):
        credit = float(adv_j[trajectory_s[row]])
        assert credit != 0.0
        paid = adv_st[row][mask_st[row]]
        assert len(paid) > 0
        assert (paid != 0.0).all(), f"row {row} has trainable tokens without credit"
        assert adv_st[row].sum().item() == pytest.approx(credit * int(mask_st[row].sum()), abs=1e-5)
        assert (adv_st[row][~mask_st[row]] == 0.0).all()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_every_trainable_token_of_every_step_gets_its_trajectorys_credit(side, seed, name):
    batch = realistic(seed, side)
    outcome = trajectory_outcomes(*(batch[key] for key in ("reward_s", "group_s", "trajectory_s", "step_s")))
    adv_j = METHODS[name].estimator(outcome.reward_j, outcome.group_j)
    adv_st = stepwise(name, **batch)
    check_every_step_is_paid(adv_st, adv_j, batch["trajectory_s"], batch["mask_st"])


def test_methods_that_are_no_outcome_methods():
    assert {"grpo", "dr_grpo"} <= set(outcome_methods())
    assert {"bae", "rlcr", "gigpo"}.isdisjoint(outcome_methods())


# --- the reward of a trajectory


def test_last_and_sum():
    reward_s, step_s = torch.tensor([1.0, 5.0, 2.0, 4.0]), torch.tensor([0, 1, 1, 0])
    group_s, trajectory_s = torch.tensor([3, 3, 3, 3]), torch.tensor([9, 9, 4, 4])
    last = trajectory_outcomes(reward_s, group_s, trajectory_s, step_s)
    assert last.reward_j.tolist() == [2.0, 5.0]
    assert last.group_j.tolist() == [0, 0]
    assert last.line.index_s.tolist() == [1, 1, 0, 0]
    assert trajectory_outcomes(reward_s, group_s, trajectory_s, step_s, reward="sum").reward_j.tolist() == [6.0, 6.0]


def test_options_reach_the_method():
    batch = realistic(1, "left")
    plain, without_self = stepwise("dr_grpo", **batch), stepwise("dr_grpo", **batch, leave_one_out=True)
    torch.testing.assert_close(without_self, plain * 4 / 3)
    assert stepwise("grpo", **batch, dtype=torch.float64).dtype == torch.float64
    assert plain.dtype == torch.float32


# --- relations and properties


@pytest.mark.parametrize("side", SIDES)
def test_one_step_each_is_the_method_itself(side):
    reward_s, group_s = torch.tensor([1.0, 0, 0, 1, 1]), torch.tensor([0, 1, 0, 1, 0])
    mask_st = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0]]).bool()
    mask_st = mask_st if side == "left" else mask_st.flip(1)
    adv_st = stepwise(
        "grpo", reward_s, group_s, torch.tensor([4, 3, 8, 1, 0]), torch.zeros(5).long(), mask_st, dtype=torch.float64
    )
    torch.testing.assert_close(adv_st, grpo(reward_s, group_s)[:, None] * mask_st, atol=1e-12, rtol=0)


@pytest.mark.parametrize("seed", range(5))
def test_the_side_of_the_padding_does_not_matter(seed):
    left, right = realistic(seed, "left"), realistic(seed, "right")
    adv_left, adv_right = stepwise("grpo", **left), stepwise("grpo", **right)
    for row in range(len(adv_left)):
        assert torch.equal(adv_left[row][left["mask_st"][row]], adv_right[row][right["mask_st"][row]])
    wider = {**left, "mask_st": torch.nn.functional.pad(left["mask_st"], (3, 2))}
    assert torch.equal(stepwise("grpo", **wider), torch.nn.functional.pad(adv_left, (3, 2)))


# --- token rewards


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("seed", range(3))
def test_step_rewards_equal_a_slow_scan(side, seed):
    mask_st = realistic(seed, side)["mask_st"]
    reward_st = torch.randn(mask_st.shape, generator=torch.Generator().manual_seed(seed))
    expected = []
    for mask, rewards in zip(mask_st.tolist(), reward_st.tolist(), strict=True):
        first = mask.index(True)
        expected.append(sum(rewards[first:]))
    torch.testing.assert_close(
        step_rewards(reward_st, mask_st), torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=0
    )


def test_step_rewards_at_masked_tokens():
    mask_st = torch.tensor([[False, True, True, False], [False, False, True, False], [False] * 4])
    reward_st = torch.tensor([[1e9, 0.5, 0.25, 2.0], [NAN, 1e9, 1.0, NAN], [7.0, NAN, 1e9, 7.0]])
    assert step_rewards(reward_st, mask_st).tolist() == [2.75, 1.0, 0.0]
    assert step_rewards(torch.tensor([[NAN, 1.0]]), torch.tensor([[True, True]])).isnan().all()


# --- mini-batches


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


def test_sentences(unchecked_shapes):
    mask_st = torch.ones(3, 2).bool()
    with pytest.raises(AlignmentError, match=r"reward_st is \(3, 4\) but mask_st is \(3, 2\)"):
        step_rewards(torch.zeros(3, 4), mask_st)
    with pytest.raises(RecipeError, match="prompts_per_batch=0 must be at least 1"):
        prompt_mini_batches(torch.tensor([0]), prompts_per_batch=0)
