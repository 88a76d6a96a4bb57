"""Rewards of one's own, in our signature and in TRL's, registered or handed over."""

import math

import numpy as np
import pytest
import torch

from helpers import NAN, assert_close
from score_small import ABSENT, CORRECT, OK, TIMEOUT, completion, trl_reward
from spanwise import register
from spanwise.errors import DataError, RecipeError, RewardError
from spanwise.objective import Objective
from spanwise.score import Reward, score, score_one
from spanwise.score.reward import REWARDS
from spanwise.types import Scores, Status


def test_a_trl_reward_gets_prompts_completions_ids_and_every_column():
    columns = {"prompts": ["ab"], "completions": ["abc"], "completion_ids": [[1]], "answer": ["4"], "level": [2]}
    objective = Objective(trl_reward, pays=("solution",))
    assert_close(score_one(objective, [completion()], columns=columns, scored={}).value_n, [6.0], 1e-12)
    with pytest.raises(RewardError, match="TRL's signature and there are no 'completions'"):
        score_one(objective, [completion()], columns={"prompts": ["ab"]}, scored={})


def test_our_reward_gets_blocks_and_only_what_it_asks_for():
    def level_times(blocks, level, factor=1.0):
        return [factor * rank * len(block["solution"]["answer"]) for block, rank in zip(blocks, level, strict=True)]

    objective = Objective(level_times, pays=("solution",), options={"factor": 10.0})
    columns = {"level": [2, 3], "other": [0, 0], "factor": [5, 5]}
    assert_close(
        score_one(objective, [completion("4"), completion("44")], columns=columns, scored={}).value_n, [20.0, 60.0], 1e-12
    )
    with pytest.raises(DataError, match=r"needs the column 'level'; the dataset has factor, other\."):
        score_one(objective, [completion()], columns={"other": [0]}, scored={})


@pytest.mark.parametrize("container", [list, tuple, np.array, torch.tensor])
def test_none_is_absent_zero_is_zero_and_a_missing_block_is_absent_whatever_is_returned(container):
    text = [completion(), completion(False), completion()]
    values = score_one(Objective(lambda blocks: container([0.0, 1.0, 2.0]), pays=("solution",)), text, columns={}, scored={})
    assert_close(values.value_n, [0.0, NAN, 2.0], 1e-12, equal_nan=True)
    none = score_one(Objective(lambda blocks: [0.0, 1.0, None], pays=("solution",)), text, columns={}, scored={})
    assert none.status_n.tolist() == [OK, ABSENT, ABSENT]
    own = Reward.of([1.0] * 3, by_outcome=[(0.0, 1.0)] * 3)
    returned = score_one(Objective(lambda blocks: own, pays=("solution",)), text, columns={}, scored={})
    assert_close(returned.by_outcome_n2, [[0, 1], [NAN, NAN], [0, 1]], 1e-12, equal_nan=True)


@pytest.mark.parametrize("known", [None, Reward.of([0.0, -1.0, 2.0, None], status=[Status.ERROR] * 4)])
def test_a_number_for_a_block_that_is_not_there_is_no_reward_and_is_kept(known):
    def mine(blocks):
        return [0.0, -1.0, 2.0, None]

    text = [completion(), completion(False), completion(), completion(False)]
    objectives = [Objective(mine, pays="solution"), CORRECT]
    scores = score(objectives, text, columns={"answer": ["4"] * 4}, recorded={} if known is None else {"mine": known})
    assert_close(scores.reward_nm[:, 0], [0.0, NAN, 2.0, NAN], 1e-12, equal_nan=True)
    assert scores.status_nm[:, 0].tolist() == [OK, ABSENT, OK, ABSENT]
    assert_close(scores.unused_nm[:, 0], [NAN, -1.0, NAN, NAN], 1e-12, equal_nan=True)
    assert scores.unused_nm[:, 1].isnan().all()
    assert_close(scores.take(slice(1, 3)).unused_nm[:, 0], [-1.0, NAN], 1e-12, equal_nan=True)
    twice = Scores.joined([scores.take(slice(1, 2)), scores.take(slice(2, 3))])
    assert_close(twice.unused_nm[:, 0], [-1.0, NAN], 1e-12, equal_nan=True)


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ([1.0, NAN], r"Objective 'mine' gives completion 1 of 2 the reward nan"),
        ([math.inf, 1.0], r"gives completion 0 of 2 the reward inf"),
        (["high", 1.0], r"gives completion 0 of 2 the reward 'high'"),
        ([1.0], r"'mine': its reward function returned 1 rewards for 2 completions"),
        (1.0, r"returned float; return a list of 2 numbers"),
        (Reward.of([1.0]), r"returned 1 rewards for 2"),
    ],
)
def test_what_is_no_reward_is_refused_with_its_place(returned, sentence):
    with pytest.raises(RewardError, match=sentence):
        score_one(
            Objective(lambda blocks: returned, pays=("solution",), name="mine"), [completion()] * 2, columns={}, scored={}
        )


def test_an_exception_in_a_reward_is_named_and_chained():
    def broken(blocks):
        return 1 / 0

    with pytest.raises(RewardError, match="'broken': its reward function raised ZeroDivisionError") as caught:
        score_one(Objective(broken, pays=("solution",)), [completion()], columns={}, scored={})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_reward_pairs_numbers_with_ok_only():
    one, row = torch.ones(1, dtype=torch.float64), torch.full((1, 2), NAN, dtype=torch.float64)
    with pytest.raises(RewardError, match=r"1\.0 with status TIMEOUT"):
        Reward(one, torch.tensor([TIMEOUT]), row)
    with pytest.raises(RewardError, match="nan with status OK"):
        Reward(one * NAN, torch.tensor([OK]), row)
    with pytest.raises(RewardError, match="completion 1 is nan"):
        Reward.of([None, NAN])


def test_a_registered_reward_works_by_name_and_names_are_taken_once():
    try:

        @register("length_of_answer", kind="reward", tags=("tag",))
        def length_of_answer(text, *, pays, columns, scored, tag="answer"):
            return Reward.of([float(len(blocks[pays[0]][tag])) for blocks in text])

        objective = Objective("length_of_answer", pays=("solution",))
        assert_close(score_one(objective, [completion("444")], columns={}, scored={}).value_n, [3.0], 1e-12)
        with pytest.raises(RecipeError, match="There is a reward 'length_of_answer' already"):
            register("length_of_answer", kind="reward")(completion)
    finally:
        REWARDS.pop("length_of_answer", None)
