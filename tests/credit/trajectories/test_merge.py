"""Prefix merging: fewer tokens to read, the same tokens to train, the same gradient, nothing lost."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.credit.trajectories.merge import MergedSequence, Step, merge_steps
from spanwise.credit.trajectories.step_returns import trajectory_outcomes
from spanwise.errors import AlignmentError


def turn(step, prompt, response, mask=None, **fields):
    return Step("a", step, prompt, response, [1] * len(response) if mask is None else mask, **fields)


# O1 = 1, A1 = 2, O2 = 3, A2 = 4, O2.5 = 5 in the three cases of SkyRL's table.
@pytest.mark.parametrize(
    ("first", "second", "response", "mask", "turns"),
    [
        (turn(0, [1], [2]), turn(1, [1, 2, 3], [4]), (2, 3, 4), (1, 0, 1), (0, -1, 1)),
        (turn(0, [1], [2, 3], [1, 0]), turn(1, [1, 2, 3], [4]), (2, 3, 4), (1, 0, 1), (0, 0, 1)),
        (turn(0, [1], [2, 3], [1, 0]), turn(1, [1, 2, 3, 5], [4]), (2, 3, 5, 4), (1, 0, 0, 1), (0, 0, -1, 1)),
        (turn(0, [1], []), turn(1, [1], [2]), (2,), (1,), (1,)),  # an empty response, an equal prompt
        (turn(0, [], [2]), turn(1, [2], [4]), (2, 4), (1, 1), (0, 1)),  # an empty prompt; two turns without a gap stay apart
    ],
)
def test_a_prompt_that_starts_with_all_that_came_before_merges(first, second, response, mask, turns):
    merge = merge_steps([first, second])
    assert merge.sequences == (
        MergedSequence(
            "a", (0, 1), (0, 1), merge.sequences[0].rewards, tuple(first.prompt_ids), response, mask, turns, {}, {}
        ),
    )
    assert all(math.isnan(reward) for reward in merge.sequences[0].rewards)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (turn(0, [1, 2], [3, 4]), turn(1, [1, 2, 3, 9, 9], [5])),  # the history was edited
        (turn(0, [1, 2], [3, 4]), turn(1, [1, 2, 3], [4, 5])),  # the prompt ends inside the response before it
        (turn(0, [1, 2], [3, 4]), turn(1, [1, 2], [3, 4])),  # the same once more
        (turn(0, [1, 2], [3, 4]), turn(1, [1, 2], [])),
        (turn(0, [1, 2], [3, 4]), turn(1, [], [1, 2, 3, 4])),
        (turn(0, [1, 2], [3, 4]), turn(1, [2, 3, 4, 5], [6])),  # cut at the front
    ],
)
def test_other_prompts_open_a_new_sequence(first, second):
    merge = merge_steps([first, second])
    assert [merged.rows for merged in merge.sequences] == [(0,), (1,)]
    assert (merge.rows_before, merge.rows_after) == (2, 2)
    assert merge.tokens_before == merge.tokens_after
    for step, merged in zip((first, second), merge.sequences, strict=True):
        assert merged.prompt_ids == tuple(step.prompt_ids)
        assert merged.response_ids == tuple(step.response_ids)


def test_partial_merge_with_counts():
    steps = [
        turn(0, [1], [2]),
        turn(1, [1, 2, 3], [4, 4]),
        turn(2, [9], [5]),  # the history was summarised
        turn(3, [9, 5, 6], [7]),
        turn(4, [1, 2, 3, 4, 4], [8]),  # a prefix of an earlier sequence, not of the one before it
    ]
    merge = merge_steps(steps)
    assert [merged.rows for merged in merge.sequences] == [(0, 1), (2, 3), (4,)]
    assert [merged.response_ids for merged in merge.sequences] == [(2, 3, 4, 4), (5, 6, 7), (8,)]
    assert (merge.rows_before, merge.rows_after) == (5, 3)
    assert merge.tokens_before == 2 + 5 + 2 + 4 + 6
    assert merge.tokens_after == 5 + 4 + 6
    assert merge.trained_tokens == 6


def test_rows_in_any_order_and_trajectories_apart():
    steps = [
        Step("b", 7, [1, 2], [3], [1], reward=0.5),
        Step("a", 3, [1], [2], [1], reward=2.0),
        Step("b", 2, [1], [2], [1], reward=1.5),
        Step("a", 4, [1, 2, 3], [4], [1], reward=3.0),
    ]
    first, second = merge_steps(steps).sequences
    assert (first.trajectory, first.rows, first.steps, first.rewards) == ("b", (2, 0), (2, 7), (1.5, 0.5))
    assert (second.trajectory, second.rows, second.steps, second.rewards) == ("a", (1, 3), (3, 4), (2.0, 3.0))
    assert second.turn == (3, -1, 4)


def test_per_token_numbers_and_extra_fields_are_kept_by_turn():
    steps = [
        turn(0, [1], [2, 3], [1, 0], per_token={"advantage": [0.5, 0.0], "logp": [-1.0, -9.0]}, extra={"tool": "search"}),
        turn(1, [1, 2, 3, 5], [4], per_token={"advantage": [-0.5]}, extra={"agent": {"id": 3}}),
    ]
    (merged,) = merge_steps(steps).sequences
    assert merged.per_token["advantage"] == (0.5, 0.0, 0.0, -0.5)
    assert merged.per_token["logp"][:3] == (-1.0, -9.0, 0.0)
    assert math.isnan(merged.per_token["logp"][3])  # absent is not zero
    assert merged.extra == {"tool": ("search", None), "agent": (None, {"id": 3})}


def test_nothing_to_merge():
    merge = merge_steps([])
    assert (merge.sequences, merge.rows_before, merge.rows_after, merge.tokens_after) == ((), 0, 0, 0)
    one = merge_steps([turn(0, [1], [2], [1], reward=1.0)])
    assert one.sequences[0].rewards == (1.0,)
    assert (one.rows_before, one.rows_after) == (1, 1)


# --- random trajectories


@st.composite
def trajectories(draw):

    steps = []
    for name in range(draw(st.integers(1, 3))):
        context = draw(st.lists(st.integers(0, 2), max_size=3))
        for number in range(draw(st.integers(1, 6))):
            response = draw(st.lists(st.integers(0, 2), max_size=3))
            mask = draw(st.lists(st.integers(0, 1), min_size=len(response), max_size=len(response)))
            advantage = [1000.0 * name + 10 * number + i + 1 for i in range(len(response))]
            reward = draw(st.sampled_from([0.0, 1.0, 0.1]))
            fields = {"advantage": advantage}, {"row": (name, number)}
            steps.append((name, number, list(context), response, mask, reward, *fields))
            context = [*context, *response, *draw(st.lists(st.integers(0, 2), max_size=2))]
            if draw(st.integers(0, 4)) == 0:
                context = draw(st.lists(st.integers(0, 2), max_size=4))
    return draw(st.permutations(steps))


@given(steps=trajectories())
@settings(max_examples=150, deadline=None)
def test_merging_loses_nothing(steps):
    steps = [Step(*fields) for fields in steps]
    merge = merge_steps(steps)
    assert sorted(row for merged in merge.sequences for row in merged.rows) == list(range(len(steps)))
    assert merge.rows_after == len(merge.sequences) <= merge.rows_before == len(steps)
    assert merge.tokens_after <= merge.tokens_before
    for merged in merge.sequences:
        size = len(merged.response_ids)
        assert len(merged.mask) == len(merged.turn) == len(merged.per_token["advantage"]) == size
        assert merged.extra["row"] == tuple((merged.trajectory, number) for number in merged.steps)
        assert list(merged.steps) == list(range(merged.steps[0], merged.steps[0] + len(merged.steps)))  # consecutive
        for row, number, reward in zip(merged.rows, merged.steps, merged.rewards, strict=True):
            step = steps[row]
            assert (step.trajectory, step.step, step.reward) == (merged.trajectory, number, reward)
            places = [place for place in range(size) if merged.turn[place] == number]
            assert [merged.response_ids[place] for place in places] == list(step.response_ids)
            assert [merged.mask[place] for place in places] == list(step.mask)
            assert [merged.per_token["advantage"][place] for place in places] == step.per_token["advantage"]
            if places:  # each token still sees the context it was written in
                before = [*merged.prompt_ids, *merged.response_ids[: places[0]]]
                assert before == list(step.prompt_ids)
        for place in range(size):
            if merged.turn[place] == -1:
                assert merged.mask[place] == 0
                assert merged.per_token["advantage"][place] == 0.0
    assert merge.trained_tokens == sum(sum(step.mask) for step in steps)


@given(steps=trajectories())
@settings(max_examples=100, deadline=None)
def test_sequences_are_as_long_as_they_can_be(steps):
    steps = [Step(*fields) for fields in steps]
    merge = merge_steps(steps)
    for one, other in zip(merge.sequences, merge.sequences[1:], strict=False):
        if one.trajectory == other.trajectory:
            whole = one.prompt_ids + one.response_ids
            assert other.prompt_ids[: len(whole)] != whole


@given(steps=trajectories(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_order_of_rows_does_not_matter(steps, data):
    steps = [Step(*fields) for fields in steps]

    def told(steps):
        merged = merge_steps(steps).sequences
        return sorted((m.trajectory, m.steps, m.rewards, m.prompt_ids, m.response_ids, m.mask, m.turn) for m in merged)

    assert told(data.draw(st.permutations(steps))) == told(steps)


@given(steps=trajectories())
@settings(max_examples=60, deadline=None)
def test_the_reward_of_a_trajectory_is_the_same_merged_or_not(steps):
    steps = [Step(*fields) for fields in steps]

    def outcome(rows, reward):
        trajectory, number, value = (torch.tensor(column) for column in zip(*rows, strict=True))
        return trajectory_outcomes(value, torch.zeros_like(trajectory), trajectory, number, reward=reward).reward_j.tolist()

    plain = [(step.trajectory, step.step, step.reward) for step in steps]
    merged = [
        (one.trajectory, number, reward)
        for one in merge_steps(steps).sequences
        for number, reward in zip(one.steps, one.rewards, strict=True)
    ]
    for reward in ("last", "sum"):
        assert outcome(plain, reward) == outcome(merged, reward)


# --- a real model


def chat(turns):
    """One trajectory of many turns: four tokens of observation, four of answer, an advantage for each answered token."""
    generator = torch.Generator().manual_seed(3)
    context, steps = [], []
    for number in range(turns):
        context = context + torch.randint(0, 32, (4,), generator=generator).tolist()
        response = torch.randint(0, 32, (4,), generator=generator).tolist()
        advantage = torch.randn(4, generator=generator, dtype=torch.float64).tolist()
        mask = [1, 1, 1, number % 2]  # every other turn ends with an observation token
        steps.append(turn(number, context, response, mask, per_token={"advantage": advantage}))
        context = context + response
    return steps


def gradient(model, rows):
    """d/d theta of the sum over trainable tokens of advantage times log-prob, as one vector."""
    model.zero_grad()
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        start = len(row.prompt_ids)
        logp = model(input_ids=ids).logits[0, start - 1 : -1].log_softmax(dim=-1)
        token_logp = logp.gather(1, ids[0, start:, None]).squeeze(1)
        weight = torch.tensor(row.per_token["advantage"], dtype=torch.float64) * torch.tensor(row.mask)
        (weight * token_logp).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def tiny_model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().eval()


def test_thirty_two_turns_cost_a_tenth_and_give_the_same_gradient():
    steps = chat(32)
    merge = merge_steps(steps)
    assert (merge.rows_before, merge.rows_after) == (32, 1)
    assert merge.tokens_before == 8 * 32 * 33 // 2
    assert merge.tokens_after == 8 * 32
    assert merge.tokens_before >= 10 * merge.tokens_after
    assert merge.trained_tokens == 32 * 3 + 16
    model = tiny_model()
    plain, merged = gradient(model, steps), gradient(model, merge.sequences)
    assert plain.abs().max() > 1e-2
    torch.testing.assert_close(merged, plain, atol=1e-5, rtol=1e-5)
    assert (merged - plain).norm() < 1e-6 * plain.norm()


def test_a_broken_history_gives_the_same_gradient_too():
    steps = chat(8)
    broken = steps[4]
    steps[4] = Step("a", 4, [5, *broken.prompt_ids[1:]], broken.response_ids, broken.mask, per_token=broken.per_token)
    merge = merge_steps(steps)
    assert [merged.rows for merged in merge.sequences] == [(0, 1, 2, 3), (4,), (5, 6, 7)]
    model = tiny_model()
    plain, merged = gradient(model, steps), gradient(model, merge.sequences)
    assert (merged - plain).norm() < 1e-6 * plain.norm()


def test_sentences():
    with pytest.raises(AlignmentError, match="Step 3 of trajectory 'a' has 2 response tokens and 1 entries of 'mask'"):
        turn(3, [1], [2, 2], [1])
    with pytest.raises(AlignmentError, match="has 1 response tokens and 2 entries of 'logp'"):
        turn(3, [1], [2], per_token={"logp": [0.0, 0.0]})
    with pytest.raises(AlignmentError, match="Rows 0 and 2 are both step 3 of trajectory 'a'"):
        merge_steps([turn(3, [1], [2]), turn(4, [1, 2], [2]), turn(3, [1], [2])])
