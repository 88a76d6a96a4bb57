"""Trajectories in rows, merged or with branches: the same tokens to train, the same gradient; batches of rows."""

import random

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import NAN
from spanwise.credit import Trajectory, Turn, merge_counts, prompt_mini_batches
from spanwise.credit.trajectories.turns import step_rewards
from spanwise.errors import AlignmentError, RecipeError
from spanwise.segment import Vocabulary
from spanwise.types import Status


def turn(prompt, response, mask=None, **fields):
    return Turn(prompt, response, [1] * len(response) if mask is None else mask, **fields)


def rows(*turns):
    return Trajectory("a", 0, turns)


def parents(trajectory):
    return [row.parent for row in trajectory.turns]


@pytest.mark.parametrize("kind", [list, pd.Series, np.array, torch.tensor])
def test_rows_in_any_order_in_columns_of_any_kind(kind, unchecked_shapes):
    """A column of pandas is asked for labels, not places, and ids in a tensor are no equal keys."""
    columns = [[5, 4, 5, 4], [7, 3, 2, 4], [8, 9, 8, 9]]
    labels = {"index": [2, 0, 1, 3]} if kind is pd.Series else {}
    trajectory, step, group = (kind(column, **labels) for column in columns)
    turns = [turn([1], [i]) for i in (10, 11, 12, 13)]
    rollouts = Trajectory.of_rows(turns, trajectory, step, group, rewards={5: {"won": 1.0}})
    assert [(t.id, t.group, t.rewards, [row.response_ids for row in t.turns]) for t in rollouts] == [
        (5, 8, {"won": 1.0}, [(12,), (10,)]),
        (4, 9, {}, [(11,), (13,)]),
    ]
    rewards = {5: {"won": 1.0}, 6: {"won": 0.0}}  # 6 may have its rows in another process
    assert [t.rewards for t in Trajectory.of_rows(turns[:1], [5], [0], [8], rewards=rewards)] == [{"won": 1.0}]
    assert Trajectory.of_rows([], [], [], [], rewards=rewards) == []


def test_numbers_that_a_turn_lacks_are_absent_and_not_zero():
    first = turn([1], [2, 3], [1, 0], per_token={"logp": [-1.0, -9.0]})
    merged = rows(first, turn([1, 2, 3, 5], [4], truncated=True, anchor="door")).merged()
    (branch,) = merged.branches()
    assert branch.per_token["logp"] == pytest.approx((-1.0, -9.0, 0.0, NAN), nan_ok=True)
    assert (merged.turns[1].truncated, merged.turns[1].anchor) == (True, "door")


def test_nothing_to_merge():
    assert merge_counts([]) == dict.fromkeys(merge_counts([]), 0)
    assert Trajectory("a", 0, ()).merged().branches() == []


@st.composite
def trajectories(draw):
    """Turns that mostly go on from the one before, sometimes from an earlier one, sometimes from nowhere."""
    turns, sequences = [], []
    for number in range(draw(st.integers(1, 7))):
        kind = draw(st.integers(0, 5)) if sequences else 0
        context = sequences[-1] if kind > 1 else draw(st.sampled_from(sequences)) if sequences and kind == 1 else ()
        context = [*context, *draw(st.lists(st.integers(0, 2), max_size=3))]
        response = draw(st.lists(st.integers(0, 2), max_size=3))
        mask = draw(st.lists(st.integers(0, 1), min_size=len(response), max_size=len(response)))
        advantage = [10.0 * number + i + 1 for i in range(len(response))]
        reward = draw(st.sampled_from([0.0, 1.0, 0.1, Status.TIMEOUT]))
        fields = {"rewards": {"ok": reward}, "per_token": {"advantage": advantage}, "extra": {"row": number}}
        turns.append({"prompt_ids": context, "response_ids": response, "mask": mask, **fields})
        sequences.append((*context, *response))
    return turns


@given(fields=trajectories())
@settings(max_examples=120, deadline=None)
def test_merging_loses_nothing(fields):
    given_rows = rows(*(Turn(**turn_fields) for turn_fields in fields))
    merged = given_rows.merged()
    assert merged.rows() == given_rows  # the exact inverse: rewards, numbers, extras, contexts
    assert merged.merged() == merged
    branches = merged.branches()
    assert sorted(t for branch in branches for t in branch.turns) == list(range(len(given_rows.turns)))  # each turn once
    for branch in branches:
        tokens = list(zip(branch.turn, branch.response_ids, branch.mask, branch.per_token["advantage"], strict=True))
        for t in branch.turns:
            row = given_rows.turns[t]
            expected = zip(row.response_ids, row.mask, row.per_token["advantage"], strict=True)
            assert [token[1:] for token in tokens if token[0] == t] == list(expected)
            if row.response_ids:  # each token still sees the context it was written in
                assert (*branch.prompt_ids, *branch.response_ids[: branch.turn.index(t)]) == row.prompt_ids
        assert {token[2:] for token in tokens if token[0] == -1} <= {(0, 0.0)}
    counts = merge_counts([merged])
    assert counts["rows"] == len(given_rows.turns) >= counts["branches"] == len(branches)
    for name, sequences in (("row_tokens", given_rows.turns), ("branch_tokens", branches)):
        assert counts[name] == sum(len(row.prompt_ids) + len(row.response_ids) for row in sequences)
        assert counts["trained_tokens"] == sum(sum(row.mask) for row in sequences)
    assert counts["branch_tokens"] <= counts["row_tokens"]
    whole = [row.prompt_ids + row.response_ids for row in given_rows.turns]
    for t, (row, after) in enumerate(zip(given_rows.turns, merged.turns, strict=True)):  # the longest context there is
        fits = [len(before) for before in whole[:t] if row.prompt_ids[: len(before)] == before]
        assert (max(fits) if fits else None) == (None if after.parent is None else len(whole[after.parent]))


PIECES = Vocabulary((b"a", b"b", b"ab", b"c", b"", b"\xff"))


def test_the_same_text_in_other_tokens_is_refused_with_the_first_token_that_differs():
    retokenised = turn([3], [0, 1]), turn([3, 2, 3], [0])  # "c" -> "a" "b"; then "c" "ab" "c"
    for turns, sentence in (
        (retokenised, r"Turns 0 and 1 of trajectory 'a' .* 1 was 0 \(b'a'\), .* 2 \(b'ab'\)"),
        # "c" "a", then "c" "ab": the text goes on inside a token
        ((turn([3], [0]), turn([3, 2], [0])), r"1 was 0 \(b'a'\), .* 2 \(b'ab'\)"),
        # The end-of-sequence token, which writes nothing, was dropped.
        ((turn([3], [0, 4]), turn([3, 0], [1])), r"2 was 4 \(b''\), .* not there"),
        ((turn([3], [0, 1]), turn([0], [0]), turn([3, 2], [0])), "turn 2 .* turn 0"),  # not of the turn before
    ):
        with pytest.raises(AlignmentError, match=sentence):
            rows(*turns).merged(PIECES)
    assert parents(rows(*retokenised).merged()) == [None, None]


def test_another_text_opens_a_new_sequence_with_a_vocabulary_too():
    edited = rows(turn([3], [0, 1]), turn([3, 0, 3], [0]), turn([], []), turn([5], [1]))
    assert parents(edited.merged(PIECES)) == [None, None, None, 2]
    kept = rows(turn([3], [0, 1]), turn([3, 0, 1, 3], [0]))
    assert kept.merged(PIECES) == kept.merged()


def chat(turns):
    """Many turns, each of four tokens of observation and four of answer; every other one ends with an observation token."""
    draw, context, talk = random.Random(3), [], []
    for number in range(turns):
        context, response = context + draw.choices(range(32), k=4), draw.choices(range(32), k=4)
        advantage = [draw.gauss(0, 1) for _ in response]
        talk.append(turn(context, response, [1, 1, 1, number % 2], per_token={"advantage": advantage}))
        context = context + response
    return talk


def gradient(model, sequences):
    """d/d theta of the sum over trainable tokens of advantage times log-prob, as one vector."""
    model.zero_grad()
    for sequence in sequences:
        ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
        start = len(sequence.prompt_ids)
        logp = model(input_ids=ids).logits[0, start - 1 : -1].log_softmax(dim=-1)
        token_logp = logp.gather(1, ids[0, start:, None]).squeeze(1)
        weight = torch.tensor(sequence.per_token["advantage"], dtype=torch.float64) * torch.tensor(sequence.mask)
        (weight * token_logp).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_thirty_two_turns_cost_a_tenth_and_give_the_same_gradient():
    turns = chat(32)
    merged = rows(*turns).merged()
    assert merge_counts([merged]) == {
        "trajectories": 1, "rows": 32, "branches": 1, "row_tokens": 8 * 32 * 33 // 2, "branch_tokens": 8 * 32,
        "trained_tokens": 32 * 3 + 16,
    }  # fmt: skip
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, max_position_embeddings=512)).double().eval()
    plain, once = gradient(model, turns), gradient(model, merged.branches())
    assert plain.abs().max() > 1e-2
    assert (once - plain).norm() < 1e-6 * plain.norm()


TWO = [turn([1], [2]), turn([1, 2], [2])]


@pytest.mark.parametrize(
    ("error", "sentence", "call"),
    [
        (AlignmentError, "2 .* 1 .*'mask'", lambda: rows(turn([1], [2]), turn([1], [2, 2], [1]))),
        (AlignmentError, "2 rows but 1 groups", lambda: Trajectory.of_rows(TWO, ["a", "a"], [3, 2], ["y"])),
        (AlignmentError, "row 0", lambda: Trajectory.of_rows([turn([1], [2], parent=0)], ["a"], [0], [0])),
        (AlignmentError, "has the shape", lambda: step_rewards(torch.zeros(3, 4), torch.ones(3, 2).bool())),
        (RecipeError, "is 0", lambda: prompt_mini_batches(torch.tensor([0]), prompts_per_batch=0)),
    ],
)
def test_what_does_not_fit_is_refused(unchecked_shapes, error, sentence, call):
    with pytest.raises(error, match=sentence):
        call()


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
