"""Step returns, anchor states, GiGPO and GAGPO: worked numbers, relations to other methods, slow oracles, properties."""

import math
from difflib import SequenceMatcher

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.credit.contrib._gagpo import gagpo
from spanwise.credit.methods._dr_grpo import dr_grpo
from spanwise.credit.methods._gigpo import gigpo
from spanwise.credit.methods._grpo import grpo
from spanwise.credit.registry import METHODS
from spanwise.credit.strata import group_index
from spanwise.credit.trajectories.anchors import anchor_groups
from spanwise.credit.trajectories.step_returns import step_returns, timeline, trajectory_outcomes
from spanwise.errors import AlignmentError, RecipeError

NAN = float("nan")
# Trajectory a: s0 s1 s2 with rewards 0 0 10, trajectory b: s0 s1 s1 with nothing; one task.
REWARD = torch.tensor([0.0, 0, 10, 0, 0, 0])
TASK = torch.zeros(6, dtype=torch.long)
TRAJECTORY = torch.tensor([0, 0, 0, 1, 1, 1])
STEP = torch.tensor([0, 1, 2, 0, 1, 2])
STATE = ["s0", "s1", "s2", "s0", "s1", "s1"]
WORKED = (REWARD, TASK, TRAJECTORY, STEP, STATE)
STEP_METHODS = [gigpo, gagpo]


def assert_close(actual, expected, tolerance=1e-6):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=tolerance, rtol=0)


def permuted(batch, order):
    *tensors, states = batch
    return (*(value[torch.tensor(order, dtype=torch.long)] for value in tensors), [states[i] for i in order])


# --- worked numbers


def test_step_returns():
    assert_close(step_returns(REWARD, TRAJECTORY, STEP), [9.025, 9.5, 10, 0, 0, 0], 1e-12)
    assert_close(step_returns(REWARD, TRAJECTORY, STEP, gamma=1.0), [10, 10, 10, 0, 0, 0], 1e-12)
    mixed = torch.tensor([4, 0, 3, 2, 5, 1])
    assert_close(step_returns(REWARD[mixed], TRAJECTORY[mixed], STEP[mixed]), [0, 9.025, 0, 10, 0, 9.5], 1e-12)


def test_gigpo_mean():
    # returns by state: s0 {9.025, 0}, s1 {9.5, 0, 0}, s2 {10}; episodes: row mean 5
    within = [9.025 / 2, 9.5 * 2 / 3, 0, -9.025 / 2, -9.5 / 3, -9.5 / 3]
    assert_close(gigpo(*WORKED, episode_weight=0.0), within, 1e-12)
    assert_close(gigpo(*WORKED, step_weight=0.0), [5, 5, 5, -5, -5, -5], 1e-12)
    assert_close(gigpo(*WORKED), [9.5125, 11.333333, 5, -9.5125, -8.166667, -8.166667])
    assert_close(
        gigpo(*WORKED, step_weight=0.5), [5 + 9.025 / 4, 5 + 9.5 / 3, 5, -5 - 9.025 / 4, -5 - 9.5 / 6, -5 - 9.5 / 6]
    )


def test_gigpo_mean_and_standard_deviation():
    assert_close(gigpo(*WORKED, scale="std"), [1.619977, 2.067571, 0.912871, -1.619977, -1.490221, -1.490221])
    assert_close(
        gigpo(*WORKED, scale="std", over="trajectories", step_weight=0.0),
        [0.707107, 0.707107, 0.707107, -0.707107, -0.707107, -0.707107],
    )
    half = 1 / math.sqrt(2)
    third = 1 / math.sqrt(3)
    assert_close(gigpo(*WORKED, scale="std", episode_weight=0.0), [half, 2 * third, 0, -half, -third, -third])
    # population deviation of the rows: 5, of s0: 4.5125
    assert_close(gigpo(*WORKED, scale="std", ddof=0, eps=0.0)[[0, 3]], [2, -2], 1e-12)
    assert_close(gigpo(*WORKED, scale="std", ddof=0, eps=5.0, step_weight=0.0)[[0, 3]], [0.5, -0.5], 1e-12)


def test_gigpo_episode_moments_count_rows_or_trajectories():
    # a has one step (reward 6), b has two (0): row mean 2, trajectory mean 3
    batch = (
        torch.tensor([6.0, 0, 0]),
        torch.zeros(3).long(),
        torch.tensor([0, 1, 1]),
        torch.tensor([0, 0, 1]),
        ["p", "q", "r"],
    )
    assert_close(gigpo(*batch), [4, -2, -2], 1e-12)
    assert_close(gigpo(*batch, over="trajectories"), [3, -3, -3], 1e-12)


def test_gigpo_episode_reward():
    batch = (
        torch.tensor([1.0, 5, 2]),
        torch.zeros(3).long(),
        torch.tensor([0, 0, 1]),
        torch.tensor([0, 1, 0]),
        ["p", "q", "r"],
    )
    assert_close(gigpo(*batch, over="trajectories"), [2, 2, -2], 1e-12)  # 6 and 2
    assert_close(gigpo(*batch, over="trajectories", reward="last"), [1.5, 1.5, -1.5], 1e-12)  # 5 and 2


def test_a_lone_episode_is_zero_unless_raw():
    alone = torch.tensor([3.0]), torch.tensor([0]), torch.tensor([0]), torch.tensor([0]), ["s"]
    assert gigpo(*alone).tolist() == [0.0]
    assert gigpo(*alone, singleton="raw").tolist() == [3.0]
    assert gigpo(*alone, singleton="raw", scale="std", eps=0.5).tolist() == [2.0]
    # as many rows as the trajectory has steps: constant over rows, alone over trajectories
    two = torch.tensor([1.0, 2]), torch.zeros(2).long(), torch.zeros(2).long(), torch.arange(2), ["s", "t"]
    assert gigpo(*two, singleton="raw").tolist() == [0.0, 0.0]
    assert gigpo(*two, singleton="raw", over="trajectories").tolist() == [3.0, 3.0]
    absent = torch.tensor([NAN, 3.0]), torch.zeros(2).long(), torch.arange(2), torch.zeros(2).long(), ["s", "t"]
    assert gigpo(*absent, singleton="raw").tolist() == [0.0, 3.0]


def test_min_stratum():
    assert gigpo(*WORKED, min_stratum=3).tolist() == pytest.approx([5, 5 + 19 / 3, 5, -5, -5 - 9.5 / 3, -5 - 9.5 / 3])
    assert gigpo(*WORKED, min_stratum=3, over="trajectories")[:1].tolist() == [0.0]


def test_gagpo():
    # V: s0 4.5125, s1 9.5/3, s2 10
    assert_close(gagpo(*WORKED), [4.211667, 6.333333, 0, -4.226332, -3.01625, -3.166667])
    delta = [0.95 * 9.5 / 3 - 4.5125, 9.5 - 9.5 / 3, 0, 0.95 * 9.5 / 3 - 4.5125, 0.95 * 9.5 / 3 - 9.5 / 3, -9.5 / 3]
    assert_close(gagpo(*WORKED, lam=0.0), delta, 1e-12)


def test_gagpo_standardised_in_the_prompt():
    plain = gagpo(*WORKED)
    assert_close(gagpo(*WORKED, scale="std", eps=0.0), ((plain - plain.mean()) / plain.std()).tolist(), 1e-12)


def test_absent_reward_reaches_back_to_the_start_and_no_further():
    reward = torch.tensor([0.0, NAN, 10, 0, 0, 0])
    assert step_returns(reward, TRAJECTORY, STEP).isnan().tolist() == [True, True, False, False, False, False]
    # s0 and s1 are left to b, whose returns are all 0; a's episode is absent, so nobody is left to compare b with but itself
    assert gigpo(reward, *WORKED[1:]).tolist() == [0.0] * 6
    assert gagpo(reward, *WORKED[1:]).tolist() == [0.0] * 6
    with_last = gigpo(reward, *WORKED[1:], reward="last")
    assert_close(with_last, [5, 5, 5, -5, -5, -5], 1e-12)


def test_unknown_states_join_nothing():
    states = ["s0", None, "s2", "s0", None, None]
    assert_close(gigpo(REWARD, TASK, TRAJECTORY, STEP, states), [9.5125, 5, 5, -9.5125, -5, -5], 1e-12)
    numbers = torch.tensor([0, -1, 2, 0, -1, -7])
    assert_close(gigpo(REWARD, TASK, TRAJECTORY, STEP, numbers), [9.5125, 5, 5, -9.5125, -5, -5], 1e-12)
    distinct = ["s0", "x", "s2", "s0", "y", "z"]
    by_none, by_distinct = (gagpo(REWARD, TASK, TRAJECTORY, STEP, value) for value in (states, distinct))
    assert by_none.tolist() == by_distinct.tolist()
    assert by_none.abs().max() > 1


# --- anchor states


def test_states_are_compared_by_equality_inside_a_prompt():
    prompt = torch.tensor([0, 0, 0, 1, 1])
    for states in ([(1, "a"), (2, "a"), (1, "a"), (1, "a"), (1, "a")], torch.tensor([4, 5, 4, 4, 4])):
        assert anchor_groups(prompt, states).tolist() == [0, 1, 0, 2, 2]


def test_similar_texts_join_the_first_alike_in_row_order():
    # b is like a and like c, c is not like a: the first member of the stratum decides
    a, b, c = "x" * 20, "x" * 18 + "yy", "x" * 16 + "yyyy"
    assert SequenceMatcher(None, b, a).ratio() == 0.9
    assert SequenceMatcher(None, c, b).ratio() == 0.9
    assert SequenceMatcher(None, c, a).ratio() == 0.8
    one = torch.zeros(3).long()
    assert anchor_groups(one, [a, b, c], similarity=0.9).tolist() == [0, 0, 1]
    assert anchor_groups(one, [b, a, c], similarity=0.9).tolist() == [0, 0, 0]
    assert anchor_groups(one, [a, c, b], similarity=0.9).tolist() == [0, 1, 0]
    assert anchor_groups(torch.tensor([0, 1, 1]), [a, b, c], similarity=0.9).tolist() == [0, 1, 1]
    assert anchor_groups(one, [a, b, a], similarity=0.91).tolist() == [0, 1, 0]
    assert anchor_groups(one, [a, None, a], similarity=0.91).tolist() == [0, -1, 0]


@given(
    texts=st.lists(st.text("ab", max_size=6), max_size=14), data=st.data(), similarity=st.sampled_from([0.4, 0.6, 0.8, 0.95])
)
@settings(max_examples=80, deadline=None)
def test_similarity_equals_the_slow_scan(texts, data, similarity):
    prompts = data.draw(st.lists(st.integers(0, 2), min_size=len(texts), max_size=len(texts)))
    firsts, expected = [], []
    for prompt, text in zip(prompts, texts, strict=True):
        alike = [
            number
            for number, (other, first) in enumerate(firsts)
            if other == prompt and SequenceMatcher(None, text, first).ratio() >= similarity
        ]
        expected.append(alike[0] if alike else len(firsts))
        if not alike:
            firsts.append((prompt, text))
    assert anchor_groups(torch.tensor(prompts, dtype=torch.long), texts, similarity=similarity).tolist() == expected


def test_similarity_reaches_the_estimators():
    texts = ["in the red hall", "at the door", "outside now", "in the red hall.", "at the door!", "at the door?"]
    for method in STEP_METHODS:
        assert_close(method(*WORKED[:4], texts, similarity=0.9), method(*WORKED).tolist(), 1e-12)
        assert not torch.allclose(method(*WORKED[:4], texts), method(*WORKED))


# --- random batches


@st.composite
def batches(draw, absent=True):
    """Tasks with trajectories of one to five steps on few states, rows shuffled, step numbers with gaps, some rewards absent."""
    rows = []
    for trajectory in draw(st.lists(st.integers(-5, 40), min_size=1, max_size=7, unique=True)):
        task = draw(st.integers(0, 2))
        for step in draw(st.lists(st.integers(-3, 9), min_size=1, max_size=5, unique=True)):
            reward = draw(st.sampled_from([0.0, 0.0, 1.0, 2.5, -1.0, NAN] if absent else [0.0, 0.1, 0.2, 0.3, 0.7, -1.0]))
            rows.append((reward, task, trajectory, step, draw(st.sampled_from(["p", "q", "r", None]))))
    reward, task, trajectory, step, state = zip(*draw(st.permutations(rows)), strict=True)
    return torch.tensor(reward), torch.tensor(task), torch.tensor(trajectory), torch.tensor(step), list(state)


def slow_returns(batch, gamma):
    reward, _, trajectory, step, _ = (value if isinstance(value, list) else value.tolist() for value in batch)
    result = []
    for i in range(len(reward)):
        later = sorted((step[k], k) for k in range(len(reward)) if trajectory[k] == trajectory[i] and step[k] >= step[i])
        total = 0.0
        for _, k in reversed(later):
            total = reward[k] + gamma * total
        result.append(total)
    return result


def slow_normal(value, members, scale, ddof, eps, least=2):
    """(value - mean) over (deviation + eps) of the members that are there."""
    there = [v for v in members if not math.isnan(v)]
    if math.isnan(value) or len(there) < least or len(set(there)) == 1:
        return 0.0
    mean = math.fsum(there) / len(there)
    if scale == "none":
        return value - mean
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in there) / (len(there) - ddof))
    return (value - mean) / (deviation + eps)


def slow_gigpo(batch, *, gamma, scale, over, reward, step_weight, ddof, eps):
    rewards, task, trajectory, step, state = (value if isinstance(value, list) else value.tolist() for value in batch)
    n, result = len(rewards), []
    returns = slow_returns(batch, gamma)

    def episode(name):
        rows = sorted((step[k], k) for k in range(n) if trajectory[k] == name)
        values = [rewards[k] for _, k in rows]
        return values[-1] if reward == "last" else math.fsum(values)

    for i in range(n):
        rows = [k for k in range(n) if task[k] == task[i]]
        names = [trajectory[k] for k in rows]
        episodes = [episode(name) for name in (names if over == "rows" else sorted(set(names)))]
        value = slow_normal(episode(trajectory[i]), episodes, scale, ddof, eps)
        if state[i] is not None:
            mates = [returns[k] for k in rows if state[k] == state[i]]
            value += step_weight * slow_normal(returns[i], mates, scale, ddof, eps)
        result.append(value)
    return torch.tensor(result, dtype=torch.float64)


def slow_gagpo(batch, gamma, lam):
    rewards, task, trajectory, step, state = (value if isinstance(value, list) else value.tolist() for value in batch)
    n, returns = len(rewards), slow_returns(batch, gamma)

    def value(i):
        mates = [k for k in range(n) if k == i or (task[k] == task[i] and state[k] == state[i] and state[i] is not None)]
        there = [returns[k] for k in mates if not math.isnan(returns[k])]
        return sum(there) / len(there) if there else NAN

    result = []
    for i in range(n):
        later = [
            k for _, k in sorted((step[k], k) for k in range(n) if trajectory[k] == trajectory[i] and step[k] >= step[i])
        ]
        total = 0.0
        for distance, k in enumerate(later):
            following = value(later[distance + 1]) if distance + 1 < len(later) else 0.0
            total += (gamma * lam) ** distance * (rewards[k] + gamma * following - value(k))
        result.append(0.0 if math.isnan(total) else total)
    return torch.tensor(result, dtype=torch.float64)


@given(batch=batches(), gamma=st.sampled_from([0.0, 0.5, 0.95, 1.0]))
@settings(max_examples=60, deadline=None)
def test_step_returns_equal_the_slow_oracle(batch, gamma):
    expected = torch.tensor(slow_returns(batch, gamma), dtype=torch.float64)
    actual = step_returns(batch[0], *batch[2:4], gamma=gamma)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0, equal_nan=True)


@pytest.mark.parametrize("scale", ["none", "std"])
@pytest.mark.parametrize("over", ["rows", "trajectories"])
@pytest.mark.parametrize("reward", ["sum", "last"])
@given(batch=batches(), ddof=st.integers(0, 1), step_weight=st.sampled_from([1.0, 0.3]))
@settings(max_examples=40, deadline=None)
def test_gigpo_equals_the_slow_oracle(batch, scale, over, reward, ddof, step_weight):
    options = {"scale": scale, "over": over, "reward": reward, "ddof": ddof, "step_weight": step_weight, "gamma": 0.9}
    expected = slow_gigpo(batch, eps=1e-6, **options)
    torch.testing.assert_close(gigpo(*batch, **options), expected, atol=1e-9, rtol=0)


@given(batch=batches(), gamma=st.sampled_from([0.5, 0.95, 1.0]), lam=st.sampled_from([0.0, 0.95, 1.0]))
@settings(max_examples=80, deadline=None)
def test_gagpo_equals_the_slow_oracle(batch, gamma, lam):
    torch.testing.assert_close(gagpo(*batch, gamma=gamma, lam=lam), slow_gagpo(batch, gamma, lam), atol=1e-9, rtol=0)


# --- relations


def known_states(batch):
    return batch[0], batch[1], batch[2], batch[3], [state or "none" for state in batch[4]]


@given(batch=batches())
@settings(max_examples=40, deadline=None)
def test_gagpo_with_lambda_one_is_the_step_part_of_gigpo(batch):
    batch = known_states(batch)
    expected = gigpo(*batch, episode_weight=0.0)
    torch.testing.assert_close(gagpo(*batch, lam=1.0), expected, atol=1e-9, rtol=0)


@given(batch=batches())
@settings(max_examples=40, deadline=None)
def test_gigpo_step_part_is_dr_grpo_of_returns_in_states(batch):
    batch = known_states(batch)
    returns = step_returns(batch[0], *batch[2:4])
    expected = dr_grpo(returns, anchor_groups(batch[1], batch[4]))
    torch.testing.assert_close(gigpo(*batch, episode_weight=0.0), expected, atol=1e-12, rtol=0)


@given(batch=batches())
@settings(max_examples=40, deadline=None)
def test_gigpo_without_steps_is_grpo_of_trajectories(batch):
    outcome = trajectory_outcomes(*batch[:4], reward="sum")
    expected = grpo(outcome.reward_j, outcome.group_j)[outcome.index_s]
    actual = gigpo(*batch, step_weight=0.0, scale="std", over="trajectories")
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    by_rows = grpo(outcome.reward_j[outcome.index_s], batch[1])
    torch.testing.assert_close(gigpo(*batch, step_weight=0.0, scale="std"), by_rows, atol=1e-12, rtol=0)


@given(batch=batches())
@settings(max_examples=40, deadline=None)
def test_one_step_trajectories_make_gigpo_twice_dr_grpo(batch):
    reward, task, *_ = batch
    n = len(reward)
    one_state = gigpo(reward, task, torch.arange(n), torch.zeros(n).long(), ["start"] * n)
    torch.testing.assert_close(one_state, 2 * dr_grpo(reward, task), atol=1e-12, rtol=0)


# --- properties


@pytest.mark.parametrize("method", STEP_METHODS)
@pytest.mark.parametrize("scale", ["none", "std"])
@given(batch=batches(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_permuting_rows_permutes_credit(method, scale, batch, data):
    order = data.draw(st.permutations(range(len(batch[0]))))
    expected = method(*batch, scale=scale)[torch.tensor(order)]
    torch.testing.assert_close(method(*permuted(batch, order), scale=scale), expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("method", STEP_METHODS)
@given(batch=batches())
@settings(max_examples=40, deadline=None)
def test_tasks_do_not_mix(method, batch):
    whole = method(*batch)
    for task in batch[1].unique():
        rows = torch.nonzero(batch[1] == task).squeeze(1).tolist()
        torch.testing.assert_close(whole[rows], method(*permuted(batch, rows)), atol=1e-12, rtol=0)


@pytest.mark.parametrize("method", STEP_METHODS)
@given(batch=batches(absent=False), value=st.sampled_from([0.0, 0.1, 1 / 3, 0.7, -2.3]))
@settings(max_examples=40, deadline=None)
def test_states_met_once_and_constant_episodes_give_exactly_zero(method, batch, value):
    # every trajectory has one step and the same reward; then every state is met once
    reward, task, trajectory, step, states = batch
    n = len(reward)
    constant = torch.full((n,), value), task, torch.arange(n), step, states
    assert method(*constant).abs().max() == 0.0
    assert method(*constant, scale="std", eps=0.0).abs().max() == 0.0
    once = reward, task, trajectory, step, list(range(n))
    assert (gagpo(*once) if method is gagpo else gigpo(*once, episode_weight=0.0)).abs().max() == 0.0


def test_equal_totals_stay_equal_whatever_the_order_of_their_parts():
    # .1 + .2 + .3 and .3 + .2 + .1 differ in floating point; with eps = 0 the difference would be blown up to +-.7
    reward = torch.tensor([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], dtype=torch.float64)
    states = list("abcdef")
    for over in ("rows", "trajectories"):
        assert gigpo(reward, TASK, TRAJECTORY, STEP, states, scale="std", eps=0.0, over=over).tolist() == [0.0] * 6


@given(batch=batches(absent=False), shift=st.floats(-5, 5))
@settings(max_examples=30, deadline=None)
def test_what_every_trajectory_gets_at_its_end_changes_no_episode(batch, shift):
    line = timeline(*batch[2:4])
    moved = batch[0] + torch.where(line.left_s == 0, shift, 0.0)
    for over in ("rows", "trajectories"):
        expected = gigpo(*batch, step_weight=0.0, over=over)
        torch.testing.assert_close(gigpo(moved, *batch[1:], step_weight=0.0, over=over), expected, atol=1e-5, rtol=0)


@given(batch=batches(absent=False))
@settings(max_examples=30, deadline=None)
def test_episode_and_step_credit_sum_to_zero_in_their_groups(batch):
    episode, within = gigpo(*batch, step_weight=0.0), gigpo(*batch, episode_weight=0.0)
    states = anchor_groups(batch[1], batch[4])
    for task in batch[1].unique():
        assert abs(episode[batch[1] == task].sum().item()) < 1e-9
    for state in states.unique():
        assert abs(within[states == state].sum().item()) < 1e-9
    assert within[states < 0].abs().sum() == 0


def test_results_are_float64_whatever_comes_in():
    for method in STEP_METHODS:
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            result = method(REWARD.to(dtype), *WORKED[1:])
            assert result.dtype == torch.float64
            torch.testing.assert_close(result, method(*WORKED), atol=1e-12, rtol=0)


def test_inputs_are_left_as_they_are():
    batch = (REWARD.double(), *WORKED[1:])
    for method in STEP_METHODS:
        method(*batch)
    step_returns(batch[0], TRAJECTORY, STEP)
    assert batch[0].tolist() == REWARD.tolist()


def test_an_empty_batch():
    none = torch.zeros(0), *(torch.zeros(0, dtype=torch.long),) * 3, []
    assert gigpo(*none).shape == gagpo(*none).shape == (0,)


def test_registered_as_step_methods():
    for name in ("gigpo", "gagpo"):
        assert METHODS[name].kind == "step"
        assert METHODS[name].needs == ("trajectory_s", "step_s", "anchor_s")


def test_sentences(unchecked_shapes):
    repeated = torch.tensor([0, 0, 2, 0, 1, 2])
    with pytest.raises(AlignmentError, match="Rows 0 and 1 are both step 0 of trajectory 0"):
        step_returns(REWARD, TRAJECTORY, repeated)
    with pytest.raises(AlignmentError, match="6 trajectory ids for 5 step numbers"):
        timeline(TRAJECTORY, STEP[:5])
    with pytest.raises(AlignmentError, match="5 rewards for 6 trajectory ids"):
        step_returns(REWARD[:5], TRAJECTORY, STEP)
    with pytest.raises(AlignmentError, match="6 rewards, 5 prompt ids and 6 trajectory ids"):
        gigpo(REWARD, TASK[:5], TRAJECTORY, STEP, STATE)
    with pytest.raises(AlignmentError, match="5 anchor states for 6 prompt ids"):
        gigpo(REWARD, TASK, TRAJECTORY, STEP, STATE[:5])
    for method in STEP_METHODS:
        with pytest.raises(AlignmentError, match=r"Trajectory 1 has rows of prompt [03] and of prompt [03]"):
            method(REWARD, torch.tensor([0, 0, 0, 0, 0, 3]), TRAJECTORY, STEP, STATE)
    with pytest.raises(RecipeError, match="row 1 is a list, which cannot be compared by equality"):
        anchor_groups(TASK, ["a", ["b"], "c", "d", "e", "f"])
    with pytest.raises(RecipeError, match="row 0 is a int, and only texts have a similarity"):
        anchor_groups(TASK, [1, 2, 3, 4, 5, 6], similarity=0.9)
    for similarity in (0.0, 1.0, 95):
        with pytest.raises(RecipeError, match="must lie between 0 and 1"):
            anchor_groups(TASK, STATE, similarity=similarity)
    with pytest.raises(RecipeError, match="no trajectory reward 'mean'"):
        gigpo(*WORKED, reward="mean")
    for method in STEP_METHODS:
        with pytest.raises(RecipeError, match="no scale 'mean_norm'"):
            method(*WORKED, scale="mean_norm")
    with pytest.raises(RecipeError, match="no unit for episode moments 'steps'"):
        gigpo(*WORKED, over="steps")
    with pytest.raises(RecipeError, match="no rule for singletons 'error'"):
        gigpo(*WORKED, singleton="error")


def test_ids_of_any_kind_through_group_index():
    pairs = [("x", 0), ("x", 0), ("y", 0), ("y", 0)]
    trajectory = group_index(pairs)
    assert trajectory_outcomes(
        torch.arange(4.0), group_index([p for p, _ in pairs]), trajectory, torch.tensor([0, 1, 0, 1])
    )[0].tolist() == [1.0, 3.0]
