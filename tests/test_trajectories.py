"""Trajectories through the pipeline: one vote each, credit on the turns, the same in rows, merged and with branches."""

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import NAN
from spanwise import AlignmentError, Layout, Objective, Scheme, Status, Vocabulary, advantages, credit_batch, read
from spanwise.credit import Trajectory, Turn
from spanwise.trajectories import onto_turns, turn_batch

VOCABULARY = Vocabulary((b"<answer>", b"4", b"</answer>", b"<confidence>4</confidence>", b"x", b"y", b"z", b"."))
LAYOUT = Layout({"all": ["answer"]})
TWO = Layout({"solution": ["answer"], "confidence": ["confidence"]})
SAYS, BYE = [0, 1, 2, 3], [4, 4]  # both blocks of two, one of a single token; no tag at all


def chain(name, group, responses, rewards, **fields):
    """A trajectory in rows; the environment says one token after each turn."""
    context, turns = [7], []
    for ids in responses:
        turns.append(Turn(context, ids, [1] * len(ids), **fields))
        context = [*context, *ids, 7]
    return Trajectory(name, group, tuple(turns), rewards=rewards)


def trajectory(name, group, sizes, reward, **fields):
    return chain(name, group, [[4] * size for size in sizes], {"correct": reward}, **fields)


def credited(rollouts, scheme):
    batch, recorded = turn_batch(rollouts)
    reading = read(batch, scheme, VOCABULARY, recorded=recorded)
    adv_st = advantages(credit_batch(reading, batch, scheme), reading.spans, scheme, dtype=torch.float64)
    return onto_turns(rollouts, "credit", adv_st)


def test_statuses_anchors_truncation_and_columns_reach_the_rows(unchecked_shapes):
    other = trajectory("b", "y", [1], 1.0)
    rollouts = [trajectory("a", "x", [1, 2], Status.TIMEOUT, anchor="door", truncated=True), other]
    batch, recorded = turn_batch(rollouts, columns={"answer": ["4", "5"]})
    assert recorded["correct"].status_n.tolist() == [Status.UNSCORED, Status.TIMEOUT, Status.OK]
    assert (batch.columns["truncated"], batch.columns["answer"]) == ([True, True, False], ["4", "4", "5"])
    shuffled = pd.Series(["4", "5"], index=[1, 0])  # pandas looks a row up by its label, but a column goes by places
    assert turn_batch(rollouts, columns={"answer": shuffled})[0].columns == batch.columns
    assert (batch.steps.anchor_s, batch.group_n.tolist()) == (["door", "door", None], [0, 0, 1])
    assert turn_batch([other])[0].steps.anchor_s is None


SIZES = st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), min_size=1, max_size=4))


@given(sizes=st.lists(SIZES, min_size=1, max_size=6), per=st.sampled_from(["block", "completion", "batch"]))
@settings(max_examples=60, deadline=None)
def test_the_credit_of_a_trajectory_does_not_depend_on_its_rows(sizes, per):
    """Splitting trajectories into turns changes no sum of credit: it is that of whole completions of as many tokens."""
    many = [trajectory(n, group, turns, float(n % 3)) for n, (group, turns) in enumerate(sizes)]
    whole = [trajectory(n, group, [sum(turns)], float(n % 3)) for n, (group, turns) in enumerate(sizes)]
    scheme = Scheme.preset("rloo", LAYOUT, per=per)
    for split, other in zip(credited(many, scheme), credited(whole, scheme), strict=True):
        credit = [value for turn in split.turns for value in turn.per_token["credit"]]
        assert credit == pytest.approx(other.turns[0].per_token["credit"])


def test_sentences():
    rollout = trajectory("a", 0, [1, 2], 1.0)
    with pytest.raises(AlignmentError, match="Column 'answer' has 2 values for 1 trajectories"):
        turn_batch([rollout], columns={"answer": ["4", "4"]})
    with pytest.raises(AlignmentError, match="Trajectory 'b' has no turn"):
        turn_batch([rollout, Trajectory("b", 0, ())])
    with pytest.raises(AlignmentError, match=r"'credit' has the shape \(2, 1\) for 2 turns of up to 2 tokens"):
        onto_turns([rollout], "credit", torch.zeros(2, 1))
    with pytest.raises(AlignmentError, match=r"'credit' has the shape \(1, 2\) for 2 turns"):
        onto_turns([rollout], "credit", torch.zeros(1, 2))


def paid(**columns):
    raise AssertionError("it is recorded")


def talk(name, reward, *, turns=(SAYS, BYE)):
    return chain(name, 0, turns, {"paid": reward}, anchor="start")


def block_credit(rollouts, scope, method):
    scheme = Scheme(method, TWO, (Objective(paid, pays="confidence", scope=scope),), "completion")
    batch, recorded = turn_batch(rollouts)
    reading = read(batch, scheme, VOCABULARY, recorded=recorded)
    return reading.scores, credit_batch(reading, batch, scheme).block_nk


@pytest.mark.parametrize("method", ["bae", "dr_grpo"])
@pytest.mark.parametrize("scope", [None, "rollout"])
def test_an_outcome_pays_the_block_of_an_earlier_turn_and_a_rollout_without_it_has_no_reward(scope, method):
    rollouts = [talk("a", 1.0), talk("b", 0.0), talk("c", 1.0, turns=(BYE, BYE))]  # the last one has no block: no reward
    scores, block_sk = block_credit(rollouts, scope, method)
    assert scores.status_nm.flatten().tolist() == [Status.UNSCORED, Status.OK] * 2 + [Status.ABSENT] * 2
    assert scores.unused_nm.flatten().tolist() == pytest.approx([NAN] * 5 + [1.0], nan_ok=True)
    assert block_sk[:, 1].tolist() == [0.5, 0.0, -0.5, 0.0, 0.0, 0.0]  # it joins no baseline


@pytest.mark.parametrize(("method", "scope"), [("bae", "turn"), ("gigpo", None)])
def test_a_reward_of_turns_keeps_to_its_turn(method, scope):
    scores, block_sk = block_credit([talk("a", 1.0), talk("b", 0.0)], scope, method)
    assert scores.status_nm.flatten().tolist() == [Status.UNSCORED, Status.ABSENT] * 2
    assert block_sk.abs().sum() == 0
