"""What every estimator refuses with one sentence: an infinite reward, and a mask that is not boolean."""

import inspect
import itertools
import math

import pytest
import torch

from credit_batches import trajectory_outcomes
from spanwise.credit import (
    METHODS,
    HistoryWeight,
    advantage,
    blended_baseline,
    step_returns,
    step_rewards,
    value_target,
)
from spanwise.errors import AlignmentError, RewardError

INF, NAN = math.inf, math.nan
NAMES = sorted(name for name in METHODS if METHODS[name].estimator.__module__.startswith("spanwise."))
ONES = torch.ones(4, 3, dtype=torch.bool)
DATA = {
    "reward_n": torch.tensor([1.0, 0.0, 1.0, 0.5]),
    "correct_n": torch.tensor([1.0, 0.0, 1.0, 0.0]),
    "calibration_n": torch.tensor([-0.25, -0.5, -0.01, -0.04]),
    "reward_nm": torch.tensor([[1.0, 0.5], [0.0, 0.25], [1.0, 0.0], [0.0, 1.0]]),
    "reward_nk": torch.tensor([[1.0, -0.25], [0.0, -0.5], [1.0, -0.01], [0.0, -0.04]]),
    "reward_nt": torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.5, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
    "reward_s": torch.tensor([0.0, 1.0, 0.5, 0.0]),
    "group_n": torch.tensor([3, 3, -1, -1]),
    "group_s": torch.zeros(4, dtype=torch.long),
    "trajectory_s": torch.tensor([0, 0, 1, 1]),
    "step_s": torch.tensor([0, 1, 0, 1]),
    "anchor_s": ["door", "key", "door", "key"],
    "length_n": torch.tensor([3, 1, 2, 2]),
    "stratum_n": torch.tensor([0, 0, 1, 1]),
    "value_nt": torch.full((4, 3), 0.5),
    "logp_nt": torch.full((4, 3), -0.5),
    "importance_nt": torch.full((4, 3), 0.5),
    "adv_nt": torch.ones(4, 3),
    "ids_nt": torch.tensor([[1, 2, 3]] * 4),
    "block_nt": torch.tensor([[0, 0, 1]] * 4),
    "mask_nt": ONES,
}
REWARDS = ("reward", "correct", "calibration")
#: Methods that reshape advantages and are told no reward.
WITHOUT_REWARD = {"oar"}


def inputs(name):
    """What a method must be called with, by the names of its parameters."""
    parameters = inspect.signature(METHODS[name].estimator).parameters.values()
    return {p.name: DATA[p.name] for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}


def rewards(name):
    return [entry for entry in inputs(name) if entry.rpartition("_")[0] in REWARDS]


def with_entry(values, place, number):
    changed = values.clone()
    changed[place] = number
    return changed


def places(values):
    return itertools.product(*(range(size) for size in values.shape))


def refused(number, row):
    """The sentence: which completion (or row of steps), which number."""
    return pytest.raises(RewardError, match=rf"(completion|row) {row} is {number}")


@pytest.mark.parametrize("number", [INF, -INF])
@pytest.mark.parametrize("name", NAMES)
def test_an_infinite_reward_is_refused_by_every_method(name, number):
    assert bool(rewards(name)) != (name in WITHOUT_REWARD)
    for entry in rewards(name):
        for place in places(DATA[entry]):
            with refused(number, place[0]):
                METHODS[name].estimator(**inputs(name) | {entry: with_entry(DATA[entry], place, number)})


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_REWARD])
def test_two_that_cancel_are_refused_as_well(name):
    # Their sum is NaN, which would read as absent: in one completion, one group, one trajectory, one stretch of tokens.
    given = inputs(name)
    for entry in rewards(name):
        values = given[entry].clone()
        values.view(-1)[:2] = torch.tensor([INF, -INF])
        given[entry] = values
    if len(rewards(name)) == 2:
        given[rewards(name)[1]][:2] = torch.tensor([-INF, INF])
    with refused(INF, 0):
        METHODS[name].estimator(**given)


@pytest.mark.parametrize("baseline", ["none", "batch", "group", "outcome", "blended"])
@pytest.mark.parametrize("number", [INF, -INF])
def test_every_baseline(baseline, number):
    for row in range(4):
        with refused(number, row):
            # The outcome of the last completion is not known: it is in no stratum.
            advantage(
                with_entry(DATA["reward_n"], row, number),
                DATA["group_n"],
                baseline=baseline,
                outcome_no=torch.tensor([[1.0], [0.0], [1.0], [NAN]]) if baseline in ("outcome", "blended") else None,
            )


def test_what_stands_beside_the_methods():
    reward_n, reward_s, reward_nt = (with_entry(DATA[name], 2, -INF) for name in ("reward_n", "reward_s", "reward_nt"))
    group_n, trajectory_s, step_s = DATA["group_n"], DATA["trajectory_s"], DATA["step_s"]
    calls = [
        lambda: blended_baseline(reward_n, group_n, DATA["correct_n"]),
        lambda: HistoryWeight()(reward_n, group_n),
        lambda: step_returns(reward_s, trajectory_s, step_s),
        lambda: trajectory_outcomes(reward_s, DATA["group_s"], trajectory_s, step_s),
        lambda: trajectory_outcomes(reward_s, DATA["group_s"], trajectory_s, step_s, reward="sum"),
        lambda: step_rewards(reward_nt, ONES),
        lambda: value_target(reward_nt, DATA["value_nt"], ONES),
    ]
    for call in calls:
        with refused(-INF, 2):
            call()


MASKED = [name for name in NAMES if "mask_nt" in inputs(name)]
SAYS = r"^mask_nt holds torch\.int64; a mask is boolean, pass mask_nt\.bool\(\)\.$"


@pytest.mark.parametrize("name", MASKED)
def test_an_integer_mask_is_refused_by_every_method(name, unchecked_shapes):
    boundaries = [{}, {"boundary": "end"}] if name == "sae" else [{}]
    for options in boundaries:
        with pytest.raises(AlignmentError, match=SAYS):
            METHODS[name].estimator(**inputs(name) | {"mask_nt": ONES.long()} | options)
