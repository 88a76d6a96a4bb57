"""An outcome that stands at a turn without the block it pays: the rollout has the block, so it has the reward."""

import pytest

from spanwise import Layout, Objective, Scheme, credit_batch, read
from spanwise.credit import Trajectory, Turn
from spanwise.segment import Vocabulary
from spanwise.trajectories import turn_batch
from spanwise.types import Status

VOCABULARY = Vocabulary((b"<answer>", b"4", b"</answer>", b"<confidence>4</confidence>", b"x"))
LAYOUT = Layout({"solution": ["answer"], "confidence": ["confidence"]})
SAYS, BYE = [0, 1, 2, 3], [4, 4]  # both blocks, one of a single token; no tag at all


def paid(**columns):
    raise AssertionError("it is recorded")


def talk(name, reward, *, turns=(SAYS, BYE)):
    spoken, context = [], [4]
    for ids in turns:
        spoken.append(Turn(context, ids, [1] * len(ids), anchor="start"))
        context = [*context, *ids, 4]
    return Trajectory(name, 0, tuple(spoken), rewards={"paid": reward})


def block_credit(rollouts, *, scope=None, method="bae"):
    scheme = Scheme(method, LAYOUT, (Objective(paid, pays="confidence", scope=scope),), "completion")
    batch, recorded = turn_batch(rollouts)
    reading = read(batch, scheme, VOCABULARY, recorded=recorded)
    return reading.scores, credit_batch(reading, batch, scheme).block_nk


@pytest.mark.parametrize("method", ["bae", "dr_grpo"])
@pytest.mark.parametrize("scope", [None, "rollout"])
def test_an_outcome_pays_the_block_of_an_earlier_turn(scope, method):
    scores, block_sk = block_credit([talk("a", 1.0), talk("b", 0.0)], scope=scope, method=method)
    assert scores.status_nm.flatten().tolist() == [Status.UNSCORED, Status.OK, Status.UNSCORED, Status.OK]
    assert scores.unused_nm.isnan().all()
    assert block_sk[:, 1].tolist() == [0.5, 0.0, -0.5, 0.0]


def test_a_rollout_without_the_block_has_no_reward():
    scores, block_sk = block_credit([talk("a", 1.0), talk("b", 0.0), talk("c", 1.0, turns=(BYE, BYE))])
    assert scores.status_nm.flatten().tolist()[4:] == [Status.ABSENT, Status.ABSENT]
    assert scores.unused_nm.flatten().tolist()[5] == 1.0
    assert block_sk[:, 1].tolist() == [0.5, 0.0, -0.5, 0.0, 0.0, 0.0]  # it joins no baseline


@pytest.mark.parametrize(("method", "scope"), [("bae", "turn"), ("gigpo", None)])
def test_a_reward_of_turns_keeps_to_its_turn(method, scope):
    scores, block_sk = block_credit([talk("a", 1.0), talk("b", 0.0)], scope=scope, method=method)
    assert scores.status_nm.flatten().tolist() == [Status.UNSCORED, Status.ABSENT] * 2
    assert block_sk.abs().sum() == 0
