"""What holds for every step method: order of rows, tasks apart, exact zeros, what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import STATE, STEP, STEP_METHODS, STEP_REWARD, TASK, TRAJECTORY, WORKED, step_batches
from helpers import assert_close
from spanwise.credit.contrib._unconfirmed import gagpo
from spanwise.credit.methods._gigpo import anchor_groups, gigpo
from spanwise.credit.registry import METHODS
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
        (HASHES[TASK + 1], HASHES[TRAJECTORY + 2], STEP, state),
        (HASHES[TASK], TRAJECTORY, HASHES.sort().values[STEP], HASHES[state]),
        (TASK, TRAJECTORY, STEP, HASHES[state + 2]),
    ]:
        assert_close(method(STEP_REWARD, task, trajectory, step, anchor, **options), expected, 0)


def test_registered_as_step_methods_and_an_empty_batch():
    none = torch.zeros(0), *(torch.zeros(0, dtype=torch.long),) * 3, []
    for name in ("gigpo", "gagpo"):
        assert METHODS[name].kind == "step"
        assert METHODS[name].needs == ("trajectory_s", "step_s", "anchor_s")
        assert METHODS[name].estimator(*none).shape == (0,)


CROSSED = STEP_REWARD, torch.tensor([0, 0, 0, 0, 0, 3]), TRAJECTORY, STEP, STATE


@pytest.mark.parametrize(
    ("error", "says", "call"),
    [
        (AlignmentError, "Rows 0 and 1", lambda: step_returns(STEP_REWARD, TRAJECTORY, torch.tensor([0, 0, 2, 0, 1, 2]))),
        (AlignmentError, "6 .* for 5", lambda: timeline(TRAJECTORY, STEP[:5])),
        (AlignmentError, "reward_s", lambda: step_returns(STEP_REWARD[:5], TRAJECTORY, STEP)),
        (AlignmentError, "group_s", lambda: gigpo(STEP_REWARD, TASK[:5], TRAJECTORY, STEP, STATE)),
        (AlignmentError, "5 anchor states", lambda: gigpo(*WORKED[:4], STATE[:5])),
        (AlignmentError, "Trajectory 1", lambda: gigpo(*CROSSED)),
        (AlignmentError, "Trajectory 1", lambda: gagpo(*CROSSED)),
        (RecipeError, "row 1 is a list", lambda: anchor_groups(TASK, ["a", ["b"], "c", "d", "e", "f"])),
        (RecipeError, "row 0 is a int", lambda: anchor_groups(TASK, [1, 2, 3, 4, 5, 6], similarity=0.9)),
        (RecipeError, "=0.0", lambda: anchor_groups(TASK, STATE, similarity=0.0)),
        (RecipeError, "=1.0", lambda: anchor_groups(TASK, STATE, similarity=1.0)),
        (RecipeError, "'mean'", lambda: gigpo(*WORKED, reward="mean")),
        (RecipeError, "'mean_norm'", lambda: gigpo(*WORKED, scale="mean_norm")),
        (RecipeError, "'mean_norm'", lambda: gagpo(*WORKED, scale="mean_norm")),
        (RecipeError, "'steps'", lambda: gigpo(*WORKED, over="steps")),
        (RecipeError, "'error'", lambda: gigpo(*WORKED, singleton="error")),
    ],
)
def test_rows_that_do_not_fit_and_options_without_a_meaning_are_refused(unchecked_shapes, error, says, call):
    with pytest.raises(error, match=says):
        call()
