"""Anchor states: equality, similarity in row order, unknown states."""

from difflib import SequenceMatcher

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import STEP, STEP_METHODS, STEP_REWARD, TASK, TRAJECTORY, WORKED
from helpers import assert_close
from spanwise.credit.contrib._unconfirmed import gagpo
from spanwise.credit.methods._gigpo import anchor_groups, gigpo


def test_unknown_states_join_nothing():
    states = ["s0", None, "s2", "s0", None, None]
    assert_close(gigpo(STEP_REWARD, TASK, TRAJECTORY, STEP, states), [9.5125, 5, 5, -9.5125, -5, -5], 1e-12)
    distinct = ["s0", "x", "s2", "s0", "y", "z"]
    by_none, by_distinct = (gagpo(STEP_REWARD, TASK, TRAJECTORY, STEP, value) for value in (states, distinct))
    assert by_none.tolist() == by_distinct.tolist()
    assert by_none.abs().max() > 1


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
