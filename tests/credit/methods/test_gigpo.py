"""GiGPO, the anchor states of steps, and what every step method refuses."""

from difflib import SequenceMatcher

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import STATE, STEP, STEP_METHODS, STEP_REWARD, TASK, TRAJECTORY, WORKED, step_batches
from helpers import NAN, assert_close
from oracles import slow_gigpo
from spanwise.credit.contrib._unconfirmed import gagpo
from spanwise.credit.methods._gigpo import anchor_groups, gigpo
from spanwise.credit.trajectories.rollouts import build_timeline, step_returns
from spanwise.errors import AlignmentError, RecipeError


def test_gigpo_mean():
    # returns by state: s0 {9.025, 0}, s1 {9.5, 0, 0}, s2 {10}; episodes: row mean 5
    within = [9.025 / 2, 9.5 * 2 / 3, 0, -9.025 / 2, -9.5 / 3, -9.5 / 3]
    assert_close(gigpo(*WORKED, episode_weight=0.0), within, 1e-12)
    assert_close(gigpo(*WORKED, step_weight=0.0), [5, 5, 5, -5, -5, -5], 1e-12)
    assert_close(gigpo(*WORKED), [9.5125, 11.333333, 5, -9.5125, -8.166667, -8.166667])


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


@pytest.mark.parametrize("scale", ["none", "std"])
@pytest.mark.parametrize("over", ["rows", "trajectories"])
@pytest.mark.parametrize("reward", ["sum", "last"])
@given(
    batch=step_batches(), ddof=st.integers(0, 1), eps=st.sampled_from([1e-6, 0.5]), step_weight=st.sampled_from([1.0, 0.3])
)
@settings(max_examples=40, deadline=None)
def test_gigpo_equals_the_slow_oracle(batch, scale, over, reward, ddof, eps, step_weight):
    options = {"scale": scale, "over": over, "reward": reward, "ddof": ddof, "eps": eps}
    options |= {"step_weight": step_weight, "gamma": 0.9}
    torch.testing.assert_close(gigpo(*batch, **options), slow_gigpo(batch, **options), atol=1e-9, rtol=0)


def test_equal_totals_stay_equal_whatever_the_order_of_their_parts():
    # .1 + .2 + .3 and .3 + .2 + .1 differ in floating point; with eps = 0 the difference would be blown up to +-.7
    reward = torch.tensor([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], dtype=torch.float64)
    states = list("abcdef")
    for over in ("rows", "trajectories"):
        assert gigpo(reward, TASK, TRAJECTORY, STEP, states, scale="std", eps=0.0, over=over).tolist() == [0.0] * 6


def test_states_are_compared_by_equality_inside_a_prompt():
    prompt = torch.tensor([0, 0, 0, 1, 1])
    hashes = torch.tensor([-1, -(2**63), -1, -1, -1])
    for states in ([(1, "a"), (2, "a"), (1, "a"), (1, "a"), (1, "a")], torch.tensor([4, 5, 4, 4, 4]), hashes):
        assert anchor_groups(prompt, states).tolist() == [0, 1, 0, 2, 2]


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


def test_an_empty_batch():
    none = torch.zeros(0), *(torch.zeros(0, dtype=torch.long),) * 3, []
    for method in STEP_METHODS:
        assert method(*none).shape == (0,)


CROSSED = STEP_REWARD, torch.tensor([0, 0, 0, 0, 0, 3]), TRAJECTORY, STEP, STATE


@pytest.mark.parametrize(
    ("error", "sentence", "call"),
    [
        (AlignmentError, "6 .* for 5", lambda: build_timeline(TRAJECTORY, STEP[:5])),
        (AlignmentError, "reward_s", lambda: step_returns(STEP_REWARD[:5], TRAJECTORY, STEP)),
        (AlignmentError, "group_s", lambda: gigpo(STEP_REWARD, TASK[:5], TRAJECTORY, STEP, STATE)),
        (AlignmentError, "5 anchor states", lambda: gigpo(*WORKED[:4], STATE[:5])),
        (AlignmentError, "Trajectory 1", lambda: gagpo(*CROSSED)),
        (RecipeError, "row 1 is of type list", lambda: anchor_groups(TASK, ["a", ["b"], "c", "d", "e", "f"])),
        (RecipeError, "row 1 is of type tuple", lambda: anchor_groups(TASK, ["a", ("b", ["key"]), "c", "d", "e", "f"])),
        (RecipeError, "is 0.0", lambda: anchor_groups(TASK, STATE, similarity=0.0)),
        (RecipeError, "is 1.0", lambda: anchor_groups(TASK, STATE, similarity=1.0)),
        (RecipeError, "'mean'", lambda: gigpo(*WORKED, reward="mean")),
        (RecipeError, "'mean_norm'", lambda: gigpo(*WORKED, scale="mean_norm")),
        (RecipeError, "'mean_norm'", lambda: gagpo(*WORKED, scale="mean_norm")),
        (RecipeError, "'steps'", lambda: gigpo(*WORKED, over="steps")),
        (RecipeError, "'error'", lambda: gigpo(*WORKED, singleton="error")),
    ],
)
def test_rows_that_do_not_fit_and_options_without_a_meaning_are_refused(unchecked_shapes, error, sentence, call):
    with pytest.raises(error, match=sentence):
        call()
