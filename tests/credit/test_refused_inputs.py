"""What estimators refuse with one sentence (an infinite reward, a mask that is not boolean), gradients and empty batches."""

import inspect
import itertools

import pytest
import torch

from credit_batches import GAE_MASK, GAE_REWARD, GAE_VALUE, STATE, STEP, STEP_REWARD, TASK, TRAJECTORY, WORKED
from spanwise import credit
from spanwise.credit import METHODS, HistoryWeight, Method, advantage, blended_baseline, step_returns, value_target
from spanwise.credit.methods._gigpo import anchor_groups
from spanwise.credit.trajectories.rollouts import build_timeline
from spanwise.credit.trajectories.turns import step_rewards
from spanwise.errors import AlignmentError, RecipeError, RewardError

INF, NAN = torch.inf, torch.nan
NAMES = sorted(name for name in METHODS if METHODS[name].estimator.__module__.startswith("spanwise."))
ONES = torch.ones(4, 3, dtype=torch.bool)
DATA = {
    "reward_n": torch.tensor([1.0, 0.0, 1.0, 0.5]),
    "correct_n": torch.tensor([1.0, 0.0, 1.0, 0.0]),
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
    "value_nt": torch.full((4, 3), 0.5),
    "logp_nt": torch.full((4, 3), -0.5),
    "importance_nt": torch.full((4, 3), 0.5),
    "adv_nt": torch.ones(4, 3),
    "ids_nt": torch.tensor([[1, 2, 3]] * 4),
    "mask_nt": ONES,
}


def inputs(name):
    """What a method must be called with, by the names of its parameters."""
    parameters = inspect.signature(METHODS[name].estimator).parameters.values()
    return {p.name: DATA[p.name] for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}


def rewards(name):
    return [entry for entry in inputs(name) if entry.rpartition("_")[0] in ("reward", "correct")]


def with_entry(values, place, number):
    changed = values.clone()
    changed[place] = number
    return changed


def refused(number, row):
    """The sentence: which completion (or row of steps), which number."""
    return pytest.raises(RewardError, match=rf"(completion|row) {row} is {number}")


@pytest.mark.parametrize("name", NAMES)
def test_an_infinite_reward_is_refused_by_every_method(name):
    arguments = inputs(name)
    assert bool(rewards(name)) != (name == "oar")  # it reshapes advantages and takes no reward
    for entry, number in itertools.product(rewards(name), (INF, -INF)):
        for place in itertools.product(*map(range, DATA[entry].shape)):
            with refused(number, place[0]):
                METHODS[name].estimator(**arguments | {entry: with_entry(DATA[entry], place, number)})
        # The sum of two that cancel is NaN, which would read as absent.
        cancels = DATA[entry].clone()
        cancels.view(-1)[:2] = torch.tensor([number, -number])
        with refused(number, 0):
            METHODS[name].estimator(**arguments | {entry: cancels})


@pytest.mark.parametrize("baseline", ["none", "batch", "group", "outcome", "blended"])
def test_an_infinite_reward_is_refused_by_every_baseline(baseline):
    # The outcome of the last completion is not known: it is in no stratum.
    outcome_no = torch.tensor([[1.0], [0.0], [1.0], [NAN]]) if baseline in ("outcome", "blended") else None
    for row, number in itertools.product(range(4), (INF, -INF)):
        with refused(number, row):
            advantage(with_entry(DATA["reward_n"], row, number), DATA["group_n"], baseline=baseline, outcome_no=outcome_no)


def test_an_infinite_reward_is_refused_beside_the_methods():
    reward_n, reward_s, reward_nt = (with_entry(DATA[name], 2, -INF) for name in ("reward_n", "reward_s", "reward_nt"))
    trajectory_s, step_s = DATA["trajectory_s"], DATA["step_s"]
    for call in (
        lambda: blended_baseline(reward_n, DATA["group_n"], DATA["correct_n"]),
        lambda: HistoryWeight()(reward_n, DATA["group_n"]),
        lambda: step_returns(reward_s, trajectory_s, step_s),
        lambda: build_timeline(trajectory_s, step_s, reward_s=reward_s),
        lambda: step_rewards(reward_nt, ONES),
        lambda: value_target(reward_nt, DATA["value_nt"], ONES),
    ):
        with refused(-INF, 2):
            call()


@pytest.mark.parametrize("name", [name for name in NAMES if "mask_nt" in inputs(name)])
def test_an_integer_mask_is_refused_by_every_method(name, unchecked_shapes):
    for options in [{}, {"boundary": "end"}] if name == "sae" else [{}]:
        with pytest.raises(AlignmentError, match="int64"):
            METHODS[name].estimator(**inputs(name) | {"mask_nt": ONES.long()} | options)


@pytest.mark.parametrize("name", [name for name in NAMES if "eps_at" in METHODS[name].options])
def test_an_unknown_place_of_epsilon_is_refused(name, unchecked_shapes):
    with pytest.raises(RecipeError, match="no place of eps 'var'"):
        METHODS[name].estimator(**inputs(name), eps_at="var")


@pytest.mark.parametrize("name", NAMES)
def test_advantages_are_constants_of_the_loss(name):
    """A reward model may return rewards with their graph; a loss would send gradients through the advantages into it."""
    floats = {key: value for key, value in inputs(name).items() if torch.is_tensor(value) and value.is_floating_point()}
    given = inputs(name) | {key: value.clone().requires_grad_() for key, value in floats.items()}
    assert floats
    assert not METHODS[name].estimator(**given).requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_nothing_in_nothing_out(name):
    options = {"gae": {"whiten": True}, "sae": {"boundary": "end"}}.get(name, {})
    nobody = {key: value[:0] for key, value in inputs(name).items()}
    assert len(METHODS[name].estimator(**nobody, **options)) == 0
    for given in (nobody, inputs(name)) if "mask_nt" in nobody else ():
        silent = {key: value[:, :0] if key.endswith("_nt") else value for key, value in given.items()}
        assert METHODS[name].estimator(**silent, **options).shape == silent["mask_nt"].shape


TWICE = (GAE_REWARD.repeat(2, 1), GAE_VALUE.repeat(2, 1), GAE_MASK.repeat(2, 1))
BROKEN = torch.cat([GAE_VALUE, torch.where(torch.arange(6) == 3, NAN, GAE_VALUE)])
FLOATS, MASK, ALONE = torch.ones(1, 2), torch.ones(1, 2).bool(), torch.zeros(1).long()
BAD, ALIKE = torch.tensor([0.5, -0.25]), torch.tensor([0, 0])
CROSSED = STEP_REWARD, torch.tensor([0, 0, 0, 0, 0, 3]), TRAJECTORY, STEP, STATE


@pytest.mark.parametrize(
    ("error", "sentence", "call"),
    [
        (AlignmentError, "value_nt", lambda: credit.gae(GAE_REWARD, GAE_VALUE[:, :5], GAE_MASK)),
        (AlignmentError, "logp_nt", lambda: credit.sae(GAE_REWARD, GAE_VALUE, GAE_VALUE[:, :2], GAE_MASK)),
        (RewardError, "completion 1 is nan at trainable token 3", lambda: credit.gae(TWICE[0], BROKEN, TWICE[2])),
        (RewardError, "token 4", lambda: credit.gae(torch.where(GAE_REWARD > 0, INF, GAE_REWARD), GAE_VALUE, GAE_MASK)),
        (RecipeError, "1.5", lambda: credit.gae(GAE_REWARD, GAE_VALUE, GAE_MASK, lam=torch.tensor([1.5]))),
        (RecipeError, "nan", lambda: credit.gae(*TWICE, lam=torch.tensor([0.5, NAN]))),
        (RecipeError, "-0.1", lambda: credit.gae(GAE_REWARD, GAE_VALUE, GAE_MASK, gamma=-0.1)),
        (RecipeError, "begin", lambda: credit.sae(GAE_REWARD, GAE_VALUE, GAE_VALUE, GAE_MASK, boundary="begin")),
        (RecipeError, "value_end_n", lambda: credit.bootstrap_values(torch.tensor([True]), truncated="bootstrap")),
        (RecipeError, "drop", lambda: credit.bootstrap_values(torch.tensor([True]), truncated="drop")),
        (RewardError, "Completion 0 has an importance of -1", lambda: credit.oar(FLOATS, -FLOATS, MASK)),
        (RecipeError, "25", lambda: credit.oar(FLOATS, FLOATS, MASK, quantile=25)),
        (AlignmentError, "importance_nt", lambda: credit.oar(FLOATS, torch.ones(1, 3), MASK)),
        (AlignmentError, "correct_n", lambda: credit.ktae(FLOATS, FLOATS.long(), MASK, torch.ones(2), ALONE)),
        (RecipeError, "papr", lambda: credit.ktae(FLOATS, FLOATS.long(), MASK, torch.ones(1), ALONE, form="papr")),
        (RewardError, "completion 1 is -0.25", lambda: credit.maxrl(BAD, ALIKE)),
        (AlignmentError, "3 weights for 1", lambda: credit.gdpo(BAD[:, None], ALIKE, weight_m=torch.ones(3))),
        (AlignmentError, "3 weights for 1", lambda: credit.rlcr(BAD[:, None], ALIKE, weight_m=torch.ones(3))),
        (AlignmentError, "2 rewards for 3", lambda: credit.rloo(BAD, torch.zeros(3, dtype=torch.long))),
        (RecipeError, "window is 1", lambda: HistoryWeight()(BAD, ALIKE, window=1)),
        (RecipeError, "history is 0", lambda: HistoryWeight()(BAD, ALIKE, history=0)),
        (AlignmentError, "6 .* for 5", lambda: build_timeline(TRAJECTORY, STEP[:5])),
        (AlignmentError, "reward_s", lambda: step_returns(STEP_REWARD[:5], TRAJECTORY, STEP)),
        (AlignmentError, "group_s", lambda: credit.gigpo(STEP_REWARD, TASK[:5], TRAJECTORY, STEP, STATE)),
        (AlignmentError, "5 anchor states", lambda: credit.gigpo(*WORKED[:4], STATE[:5])),
        (AlignmentError, "The trajectory id 1 occurs with prompt 0 and with prompt 3", lambda: credit.gagpo(*CROSSED)),
        (RecipeError, "row 1 is of type list", lambda: anchor_groups(TASK, ["a", ["b"], "c", "d", "e", "f"])),
        (RecipeError, "row 1 is of type tuple", lambda: anchor_groups(TASK, ["a", ("b", ["key"]), "c", "d", "e", "f"])),
        (RecipeError, "is 0.0", lambda: anchor_groups(TASK, STATE, similarity=0.0)),
        (RecipeError, "is 1.0", lambda: anchor_groups(TASK, STATE, similarity=1.0)),
        (RecipeError, "'mean'", lambda: credit.gigpo(*WORKED, reward="mean")),
        (RecipeError, "'mean_norm'", lambda: credit.gigpo(*WORKED, scale="mean_norm")),
        (RecipeError, "'mean_norm'", lambda: credit.gagpo(*WORKED, scale="mean_norm")),
        (RecipeError, "'steps'", lambda: credit.gigpo(*WORKED, over="steps")),
        (RecipeError, "'error'", lambda: credit.gigpo(*WORKED, singleton="error")),
    ],
)
def test_what_does_not_fit_and_options_without_a_meaning_are_refused(unchecked_shapes, error, sentence, call):
    with pytest.raises(error, match=sentence):
        call()


def test_a_plug_in_may_have_options_of_the_same_names_with_other_rules_and_types():
    def own(
        reward_n, group_n, *, window: int = 1, history: int = 0, beta: float = 0.0, quantile: float = 50.0, h1: float = 1.0
    ):
        return reward_n

    def wide(
        reward_n, group_n, *, clip: float = INF, mix: float | str = 0.5, soft: "bool | str" = False, share: float = 1.0
    ):
        return reward_n

    options = {"window": 1, "history": 0, "beta": -2.0, "quantile": 95.0, "h1": -1.0}
    Method("own", own, "completion", "a test").check_options(options)
    method = Method("wide", wide, "completion", "a test")
    method.check_options({"clip": INF, "mix": "auto", "soft": "late", "share": 2})
    with pytest.raises(RecipeError, match=r"The option share is '1'; write a finite number"):
        method.check_options({"share": "1"})
    ours = (("ha_dw", "window", 1), ("oar", "beta", -2.0), ("oar", "quantile", 95.0), ("ktae", "h1", -1.0))
    for name, option, value in ours:
        with pytest.raises(RecipeError, match=f"The option {option} is {value}"):
            METHODS[name].of_a_run().check_options({option: value})
