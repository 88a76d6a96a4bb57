"""Trajectories through the pipeline: one vote each, credit on the turns, the same in rows, merged and with branches."""

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise import Layout, Scheme, advantages, credit_batch, read
from spanwise.credit import Trajectory, Turn
from spanwise.errors import AlignmentError
from spanwise.segment import Vocabulary
from spanwise.trajectories import onto_turns, turn_batch
from spanwise.types import Status

VOCABULARY = Vocabulary(tuple(b"<answer>|</answer>|<b>|</b>|x|y|z|.".split(b"|")))
LAYOUT = Layout({"all": ["answer"]})


def trajectory(name, group, sizes, reward, **fields):
    """A chain in rows: each turn says `size` tokens, the environment one."""
    context, turns = [7], []
    for size in sizes:
        turns.append(Turn(context, [4] * size, [1] * size, **fields))
        context = [*context, *[4] * size, 7]
    return Trajectory(name, group, tuple(turns), rewards={"correct": reward})


def credited(rollouts, scheme):
    batch, recorded = turn_batch(rollouts)
    reading = read(batch, scheme, VOCABULARY, recorded=recorded)
    adv_st = advantages(credit_batch(reading, batch, scheme), reading.spans, scheme, dtype=torch.float64)
    return onto_turns(rollouts, "credit", adv_st)


def test_statuses_anchors_truncation_and_columns_reach_the_rows(unchecked_shapes):
    rollout = trajectory("a", "x", [1, 2], Status.TIMEOUT, anchor="door", truncated=True)
    batch, recorded = turn_batch([rollout, trajectory("b", "y", [1], 1.0)], columns={"answer": ["4", "5"]})
    assert recorded["correct"].status_n.tolist() == [Status.UNSCORED, Status.TIMEOUT, Status.OK]
    assert batch.columns["truncated"] == [True, True, False]
    assert batch.columns["answer"] == ["4", "4", "5"]
    shuffled = pd.Series(["4", "5"], index=[1, 0])  # pandas looks a row up by its label, but a column goes by places
    assert turn_batch([rollout, trajectory("b", "y", [1], 1.0)], columns={"answer": shuffled})[0].columns == batch.columns
    assert batch.steps.anchor_s == ["door", "door", None]
    assert batch.group_n.tolist() == [0, 0, 1]
    assert turn_batch([trajectory("b", "y", [1], 1.0)])[0].steps.anchor_s is None


@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), min_size=1, max_size=4)), min_size=1, max_size=6
    ),
    per=st.sampled_from(["block", "completion", "batch"]),
)
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
