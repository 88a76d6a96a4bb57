"""Scores: absent, failed and zero kept apart, and objectives that are refused before training."""

import pytest
import torch

from helpers import NAN, assert_close
from score_small import ABSENT, BRIER, CORRECT, ERROR, OK, UNPARSABLE, completion, trl_reward
from spanwise.errors import RecipeError
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.score import check_objectives, score_all
from spanwise.segment import Vocabulary, find_blocks


def test_correct_and_brier_keep_absent_failed_and_zero_apart():
    text = [
        completion("4", "0.7"),  # right: -(0.7 - 1)^2
        completion("5", "0.7"),  # wrong: -(0.7 - 0)^2
        completion(None, "0"),  # a block without an answer is wrong: -(0 - 0)^2, a reward of zero
        completion(False, "0.5"),  # no solution: nothing to judge the confidence by
        completion("4", "high"),  # there and cannot be read
        completion("4", None),  # block there, tag not
        completion("4", False),  # block not there
        completion("4", "100%"),  # no gold answer: never zero
    ]
    scores = score_all([CORRECT, BRIER], text, columns={"answer": ["4"] * 7 + [None]})
    assert scores.names == ("correct", "brier")
    assert_close(scores.reward_nm[:, 0], [1, 0, 0, NAN, 1, 1, 1, NAN], 1e-12, equal_nan=True)
    assert scores.status_nm[:, 0].tolist() == [OK, OK, OK, ABSENT, OK, OK, OK, ERROR]
    assert_close(scores.reward_nm[:, 1], [-0.09, -0.49, 0, NAN, NAN, NAN, NAN, NAN], 1e-12, equal_nan=True)
    assert scores.status_nm[:, 1].tolist() == [OK, OK, OK, ABSENT, UNPARSABLE, ABSENT, ABSENT, ERROR]
    missing = [NAN, NAN]
    assert_close(
        scores.by_outcome_nmo[:, 1],
        [[-0.49, -0.09], [-0.49, -0.09], [0, -1], [-0.25, -0.25], missing, missing, missing, [-1, 0]],
        1e-12,
        equal_nan=True,
    )
    assert scores.by_outcome_nmo[:, 0].isnan().all()


LAYOUT = Layout({"solution": ["reasoning", "answer"], "confidence": ["analysis", "confidence"]})


def build(*objectives):
    return [Objective(**{"pays": ("solution",), **objective}) for objective in objectives]


@pytest.mark.parametrize(
    ("objectives", "sentence"),
    [
        ([], "no objective"),
        ([{"reward": "correct"}, {"reward": "correct"}], "Two objectives are called 'correct'"),
        ([{"reward": "corect"}], "no reward 'corect'. Did you mean 'correct'"),
        ([{"reward": "correct", "pays": ("solutoin",)}], "pays 'solutoin'.*Did you mean 'solution'"),
        ([{"reward": "correct", "options": {"tga": "answer"}}], "called 'tga'.*Did you mean 'tag'"),
        ([{"reward": "correct", "options": {"tag": "reply"}}], "tag 'reply' in solution, which has reasoning, answer"),
        ([{"reward": "correct", "pays": ("confidence",)}], "tag 'answer' in confidence"),
        ([{"reward": "brier", "pays": ("confidence",)}], "'brier' is given 'correct', which is no objective before it"),
        ([{"reward": "brier", "pays": ("confidence",), "given": "correct"}, {"reward": "correct"}], "Put 'correct' first"),
        ([{"reward": "correct"}, {"reward": "brier", "pays": ("confidence",), "options": {"of": "c"}}], "is given 'c'"),
        ([{"reward": "second_attempt"}], "reads block 'first'"),
        ([{"reward": "second_attempt", "options": {"first": "confidence"}}], "tag 'answer' in confidence"),
    ],
)
def test_objectives_that_cannot_work_are_refused_before_training(objectives, sentence):
    with pytest.raises(RecipeError, match=sentence):
        check_objectives(build(*objectives), LAYOUT)


def test_objectives_that_work_pass():
    check_objectives([CORRECT, BRIER, Objective(trl_reward, pays=("solution", "confidence"))], LAYOUT)
    check_objectives(build({"reward": "correct", "pays": ("all",), "options": {"tag": ""}}), Layout({"all": []}))
    two = Layout({"first": ["answer"], "second": ["answer"]})
    check_objectives([Objective("correct", pays=("first",)), Objective("second_attempt", pays=("second",))], two)


def test_from_token_ids_to_rewards():
    texts = [
        "<reasoning>1+3</reasoning><answer> 4\n</answer><analysis>sure</analysis><confidence>80%</confidence>",
        "<reasoning>1+3</reasoning><answer>4</answer>",
        "<reasoning>1+3</reasoning><answer>5</answer><analysis>hm</analysis><confidence>0.1",
    ]
    length = max(map(len, texts))
    ids = torch.tensor([list(text.encode().ljust(length, b"\0")) for text in texts])
    _, text = find_blocks(ids, ids > 0, layout=LAYOUT, vocabulary=Vocabulary(tuple(bytes([byte]) for byte in range(256))))
    objectives = [CORRECT, BRIER, Objective("format", pays=("solution", "confidence"))]
    scores = score_all(objectives, text, columns={"answer": ["4"] * 3})
    assert_close(scores.reward_nm, [[1, -0.04, 1], [1, NAN, 0], [0, NAN, 0]], 1e-12, equal_nan=True)
    assert scores.status_nm[:, 1].tolist() == [OK, ABSENT, ABSENT]
