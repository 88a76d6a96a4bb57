"""GiGPO and the anchor states of steps."""

from difflib import SequenceMatcher

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import STEP, TASK, TRAJECTORY, WORKED, step_batches
from helpers import NAN
from oracles import slow_gigpo
from spanwise.credit.methods._gigpo import anchor_groups, gigpo


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
    for over in ("rows", "trajectories"):
        assert gigpo(reward, TASK, TRAJECTORY, STEP, list("abcdef"), scale="std", eps=0.0, over=over).tolist() == [0.0] * 6


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
