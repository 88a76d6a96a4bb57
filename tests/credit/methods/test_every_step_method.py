"""What holds for every step method: order of rows, tasks apart, exact zeros, dtypes, sentences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import STATE, STEP, STEP_METHODS, STEP_REWARD, TASK, TRAJECTORY, WORKED, step_batches
from helpers import assert_close
from spanwise.credit.contrib._unconfirmed import gagpo
from spanwise.credit.methods._gigpo import anchor_groups, gigpo
from spanwise.credit.trajectories.rollouts import step_returns, timeline
from spanwise.errors import AlignmentError, RecipeError


@pytest.mark.parametrize("method", STEP_METHODS)
@given(batch=step_batches(absent=False), value=st.sampled_from([0.0, 0.1, 1 / 3, 0.7, -2.3]))
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


HASHES = torch.tensor([-1, -(2**63), -(2**62), -(2**62) - 1, 2**63 - 1])


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((method, {"scale": scale}) for method in STEP_METHODS for scale in ("none", "std")),
        (gigpo, {"over": "trajectories"}),
        (gigpo, {"singleton": "raw"}),
    ],
)
def test_no_id_is_special(method, options):
    state = torch.tensor([0, 1, 2, 0, 1, 1])
    expected = method(STEP_REWARD, TASK, TRAJECTORY, STEP, state, **options)
    for task, trajectory, step, anchor in [
        (HASHES[TASK], TRAJECTORY, STEP, state),
        (HASHES[TASK + 1], HASHES[TRAJECTORY + 2], STEP, state),
        (TASK, TRAJECTORY, HASHES.sort().values[STEP], state),
        (TASK, TRAJECTORY, STEP, HASHES[state]),
        (TASK, TRAJECTORY, STEP, HASHES[state + 2]),
    ]:
        assert_close(method(STEP_REWARD, task, trajectory, step, anchor, **options), expected, 0)


def test_an_empty_batch():
    none = torch.zeros(0), *(torch.zeros(0, dtype=torch.long),) * 3, []
    assert gigpo(*none).shape == gagpo(*none).shape == (0,)


def test_sentences(unchecked_shapes):
    repeated = torch.tensor([0, 0, 2, 0, 1, 2])
    with pytest.raises(AlignmentError, match="Rows 0 and 1 are both step 0 of trajectory 0"):
        step_returns(STEP_REWARD, TRAJECTORY, repeated)
    with pytest.raises(AlignmentError, match="6 trajectory ids for 5 step numbers"):
        timeline(TRAJECTORY, STEP[:5])
    with pytest.raises(AlignmentError, match=r"reward_s is \(5,\) but trajectory_s is \(6,\)"):
        step_returns(STEP_REWARD[:5], TRAJECTORY, STEP)
    with pytest.raises(AlignmentError, match=r"reward_s is \(6,\) but group_s is \(5,\)"):
        gigpo(STEP_REWARD, TASK[:5], TRAJECTORY, STEP, STATE)
    with pytest.raises(AlignmentError, match="5 anchor states for 6 prompt ids"):
        gigpo(STEP_REWARD, TASK, TRAJECTORY, STEP, STATE[:5])
    for method in STEP_METHODS:
        with pytest.raises(AlignmentError, match=r"Trajectory 1 has rows of prompt [03] and of prompt [03]"):
            method(STEP_REWARD, torch.tensor([0, 0, 0, 0, 0, 3]), TRAJECTORY, STEP, STATE)
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
