"""Step-wise training: a trajectory's credit reaches every trainable token of each of its steps, through each row's own mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import NAN
from spanwise.credit.methods._dr_grpo import dr_grpo
from spanwise.credit.methods._gigpo import gigpo
from spanwise.credit.methods._grpo import grpo
from spanwise.credit.registry import METHODS
from spanwise.credit.spread import to_tokens
from spanwise.credit.trajectories.step_returns import trajectory_outcomes
from spanwise.credit.trajectories.stepwise import (
    broadcast_to_steps,
    check_stepwise,
    outcome_methods,
    prompt_mini_batches,
    step_rewards,
    stepwise,
)
from spanwise.errors import AlignmentError, RecipeError
from spanwise.registry import register

SKYRL = {"grpo": True, "rloo": True, "maxrl": True, "gae": False, "reinforce++": False}
TEMPORAL = ["gae", "sae", "reinforce++"]
SIDES = ["left", "right"]


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


def copied_by_column(adv_j, trajectory_s, step_s, mask_st):
    """The fault of SkyRL issue 1492: the last step's advantages, already masked, are copied to the other rows column by column."""
    result = torch.zeros(mask_st.shape)
    for row in range(len(mask_st)):
        mates = torch.nonzero(trajectory_s == trajectory_s[row]).squeeze(1)
        last = mates[step_s[mates].argmax()]
        result[row] = adv_j[trajectory_s[row]] * mask_st[last]
    return result


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
    broadcast_st = broadcast_to_steps(adv_j, batch["trajectory_s"], batch["mask_st"])
    assert torch.equal(broadcast_st, adv_st)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("seed", range(4))
def test_the_copied_mask_of_the_last_step_is_caught(side, seed):
    batch = realistic(seed, side)
    adv_j = torch.linspace(-1, 1, 12)
    faulty_st = copied_by_column(adv_j, batch["trajectory_s"], batch["step_s"], batch["mask_st"])
    with pytest.raises(AssertionError):
        check_every_step_is_paid(faulty_st, adv_j, batch["trajectory_s"], batch["mask_st"])
    right_st = broadcast_to_steps(adv_j, batch["trajectory_s"], batch["mask_st"])
    check_every_step_is_paid(right_st, adv_j, batch["trajectory_s"], batch["mask_st"])


def test_the_fault_starves_right_aligned_turns_that_end_with_observations():
    # two steps, right-aligned: step 0 wrote the first two of four tokens, step 1 the last two
    mask_st = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]]).bool()
    trajectory_s, step_s = torch.tensor([0, 0]), torch.tensor([0, 1])
    faulty_st = copied_by_column(torch.tensor([3.0]), trajectory_s, step_s, mask_st)
    assert faulty_st[0][mask_st[0]].tolist() == [0.0, 0.0]
    assert broadcast_to_steps(torch.tensor([3.0]), trajectory_s, mask_st).tolist() == [[3, 3, 0, 0], [0, 0, 3, 3]]


@pytest.mark.parametrize("name", SKYRL)
def test_skyrls_five_estimators_are_accepted_or_refused(name):
    if SKYRL[name]:
        assert check_stepwise(name).name == name
        adv_st = stepwise(name, **realistic(0, "right"))
        assert adv_st.isfinite().all()
        assert adv_st.abs().sum() > 0
        return
    with pytest.raises(RecipeError) as caught:
        stepwise(name, **realistic(0, "right"))
    sentence = str(caught.value)
    assert sentence.startswith(f"Method '{name}' gives every token of one completion its own credit")
    assert {"dr_grpo", "grpo", "maxrl", "rloo"} <= set(outcome_methods())
    for other in (*outcome_methods(), "gigpo", "gagpo"):
        assert other in sentence


def _token_stand_in(reward_nt, mask_nt):
    """A token method."""
    return reward_nt


@pytest.mark.parametrize("name", TEMPORAL)
def test_temporal_methods_are_refused(name):
    with pytest.raises(RecipeError, match=r"does not go with step-wise trajectories\. Use an outcome method"):
        check_stepwise(name)


def test_a_temporal_method_of_ones_own_is_refused_by_its_kind_not_by_its_name(monkeypatch):
    register("my_own", kind="token", paper="none")(_token_stand_in)
    monkeypatch.setitem(METHODS, "my_own", METHODS.pop("my_own"))
    with pytest.raises(RecipeError, match=r"'my_own' gives every token.*dr_grpo, grpo.*gagpo, gigpo"):
        check_stepwise("my_own")


def test_methods_that_are_no_outcome_methods():
    assert {"grpo", "dr_grpo"} <= set(outcome_methods())
    assert {"bae", "rlcr", "gigpo"}.isdisjoint(outcome_methods())
    assert check_stepwise("gigpo").kind == "step"
    with pytest.raises(RecipeError, match="'bae' gives every block of one completion its own credit"):
        check_stepwise("bae")
    with pytest.raises(RecipeError, match="'rlcr' needs reward_nm, not one reward per trajectory"):
        check_stepwise("rlcr")
    with pytest.raises(RecipeError, match=r"There is no method 'grop'\. Did you mean 'grpo'"):
        check_stepwise("grop")
    with pytest.raises(RecipeError, match=r"call gigpo\(...\) and pass the result to to_tokens"):
        stepwise("gigpo", **realistic(0, "right"))


def test_every_accepted_outcome_method_takes_a_reward_and_a_group():
    for name in outcome_methods():
        adv_j = METHODS[name].estimator(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 0]))
        assert adv_j.shape == (3,)


# --- the reward of a trajectory


def test_last_and_sum():
    reward_s, step_s = torch.tensor([1.0, 5.0, 2.0, 4.0]), torch.tensor([0, 1, 1, 0])
    group_s, trajectory_s = torch.tensor([3, 3, 3, 3]), torch.tensor([9, 9, 4, 4])
    last = trajectory_outcomes(reward_s, group_s, trajectory_s, step_s)
    assert last.reward_j.tolist() == [2.0, 5.0]
    assert last.group_j.tolist() == [3, 3]
    assert last.index_s.tolist() == [1, 1, 0, 0]
    assert trajectory_outcomes(reward_s, group_s, trajectory_s, step_s, reward="sum").reward_j.tolist() == [6.0, 6.0]


def test_an_absent_step_leaves_the_last_reward_alone_and_makes_the_sum_absent():
    steps = torch.tensor([NAN, 5.0, 1.0]), torch.tensor([0, 0, 0]), torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0])
    mask_st = torch.ones(3, 2).bool()
    assert stepwise("dr_grpo", *steps, mask_st)[:, 0].tolist() == [2.0, 2.0, -2.0]
    assert stepwise("dr_grpo", *steps, mask_st, reward="sum")[:, 0].tolist() == [0.0, 0.0, 0.0]


def test_a_trajectory_counts_once_however_many_steps_it_has():
    # rewards 1 with three steps, 0 with one: the mean is 1/2 and not 3/4
    reward_s, trajectory_s = torch.tensor([0.0, 0, 1, 0]), torch.tensor([0, 0, 0, 1])
    adv_st = stepwise(
        "dr_grpo", reward_s, torch.zeros(4).long(), trajectory_s, torch.tensor([0, 1, 2, 0]), torch.ones(4, 1).bool()
    )
    assert adv_st.squeeze(1).tolist() == [0.5, 0.5, 0.5, -0.5]


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


@pytest.mark.parametrize("seed", range(3))
def test_outcome_credit_is_gigpo_without_its_step_part(seed):
    batch = realistic(seed, "right")
    states = list(range(len(batch["reward_s"])))
    keys = ("reward_s", "group_s", "trajectory_s", "step_s")
    adv_s = gigpo(*(batch[key] for key in keys), states, over="trajectories", scale="std")
    expected = to_tokens(adv_s, batch["mask_st"])
    torch.testing.assert_close(stepwise("grpo", **batch, reward="sum"), expected)


@given(data=st.data(), seed=st.integers(0, 50), side=st.sampled_from(SIDES))
@settings(max_examples=40, deadline=None)
def test_permuting_rows_permutes_advantages(data, seed, side):
    batch = realistic(seed, side)
    order = torch.tensor(data.draw(st.permutations(range(len(batch["reward_s"])))))
    moved = stepwise("grpo", **{key: value[order] for key, value in batch.items()})
    torch.testing.assert_close(moved, stepwise("grpo", **batch)[order])


@pytest.mark.parametrize("seed", range(5))
def test_the_side_of_the_padding_does_not_matter(seed):
    left, right = realistic(seed, "left"), realistic(seed, "right")
    adv_left, adv_right = stepwise("grpo", **left), stepwise("grpo", **right)
    for row in range(len(adv_left)):
        assert torch.equal(adv_left[row][left["mask_st"][row]], adv_right[row][right["mask_st"][row]])
    wider = {**left, "mask_st": torch.nn.functional.pad(left["mask_st"], (3, 2))}
    assert torch.equal(stepwise("grpo", **wider), torch.nn.functional.pad(adv_left, (3, 2)))


@pytest.mark.parametrize("seed", range(3))
def test_a_mask_of_any_kind(seed):
    batch = realistic(seed, "right")
    expected = stepwise("grpo", **batch)
    for dtype in (torch.long, torch.float32):  # SkyRL's two kinds of response mask
        assert torch.equal(stepwise("grpo", **{**batch, "mask_st": batch["mask_st"].to(dtype)}), expected)
    reward_st = torch.ones(batch["mask_st"].shape)
    assert torch.equal(step_rewards(reward_st, batch["mask_st"]), step_rewards(reward_st, batch["mask_st"].long()))


@pytest.mark.parametrize("seed", range(3))
def test_conservation_step_by_step(seed):
    # what a step is paid is its trajectory's credit times its own tokens, so the whole batch adds up as well
    batch = realistic(seed, "right")
    keys = ("reward_s", "group_s", "trajectory_s", "step_s")
    outcome = trajectory_outcomes(*(batch[key] for key in keys))
    adv_j = dr_grpo(outcome.reward_j, outcome.group_j)
    paid_s = stepwise("dr_grpo", **batch, dtype=torch.float64).sum(dim=1)
    torch.testing.assert_close(paid_s, adv_j[outcome.index_s] * batch["mask_st"].sum(dim=1))


def test_a_step_without_trainable_tokens():
    mask_st = torch.tensor([[False, False], [True, False]])
    assert broadcast_to_steps(torch.tensor([2.0]), torch.tensor([5, 5]), mask_st).tolist() == [[0, 0], [2, 0]]


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


def test_mini_batches_hold_whole_prompts():
    group_s = torch.tensor([7, 7, 7, 2, 9, 9, 2, 4])
    rows = [batch.tolist() for batch in prompt_mini_batches(group_s, prompts_per_batch=2)]
    assert rows == [[0, 1, 2, 3, 6], [4, 5, 7]]
    assert [batch.tolist() for batch in prompt_mini_batches(group_s, prompts_per_batch=9)] == [list(range(8))]
    assert prompt_mini_batches(group_s[:0], prompts_per_batch=2) == []


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
    with pytest.raises(AlignmentError, match="3 advantages for 2 trajectories"):
        broadcast_to_steps(torch.zeros(3), torch.tensor([0, 2, 2]), mask_st)
    with pytest.raises(AlignmentError, match="2 trajectory ids for 3 rows of the mask"):
        broadcast_to_steps(torch.zeros(2), torch.tensor([0, 2]), mask_st)
    with pytest.raises(AlignmentError, match="3 trajectory ids for 2 rows of the mask"):
        stepwise("grpo", torch.zeros(3), *(torch.zeros(3).long(),) * 2, torch.arange(3), mask_st[:2])
    with pytest.raises(AlignmentError, match=r"Token rewards are \(3, 4\), the mask is \(3, 2\)"):
        step_rewards(torch.zeros(3, 4), mask_st)
    with pytest.raises(RecipeError, match="prompts_per_batch=0 must be at least 1"):
        prompt_mini_batches(torch.tensor([0]), prompts_per_batch=0)
