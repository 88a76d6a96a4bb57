"""Scores: absent, failed and zero kept apart, and objectives that are refused before training."""

import pytest

from helpers import NAN, assert_close
from score_small import ABSENT, BRIER, CORRECT, ERROR, OK, TIMEOUT, UNPARSABLE, UNSCORED, completion
from spanwise.errors import RecipeError
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.score import Reward, score_all
from spanwise.score.score import check_objectives
from spanwise.types import Status


def test_correct_and_brier_keep_absent_failed_and_zero_apart():
    cases = [  # (answer, confidence), correct, its status, brier, its status, brier if wrong and if right
        (("4", "0.7"), 1, OK, -0.09, OK, (-0.49, -0.09)),
        (("5", "0.7"), 0, OK, -0.49, OK, (-0.49, -0.09)),
        ((None, "0"), 0, OK, 0, OK, (0, -1)),  # a block without an answer is wrong: a reward of zero
        ((False, "0.5"), NAN, ABSENT, NAN, ABSENT, (-0.25, -0.25)),  # no solution: nothing to judge the confidence by
        (("4", "high"), 1, OK, NAN, UNPARSABLE, (NAN, NAN)),
        (("4", None), 1, OK, NAN, ABSENT, (NAN, NAN)),  # block there, tag not
        (("4", False), 1, OK, NAN, ABSENT, (NAN, NAN)),  # block not there
        (("4", "100%"), NAN, ERROR, NAN, ERROR, (-1, 0)),  # no gold answer: never zero
    ]
    pairs, right, right_status, brier, brier_status, by_outcome = zip(*cases, strict=True)
    scores = score_all([CORRECT, BRIER], [completion(*pair) for pair in pairs], columns={"answer": ["4"] * 7 + [None]})
    assert scores.names == ("correct", "brier")
    assert_close(scores.reward_nm, [*zip(right, brier, strict=True)], 1e-12, equal_nan=True)
    assert scores.status_nm.T.tolist() == [[*right_status], [*brier_status]]
    assert_close(scores.by_outcome_nmo[:, 1], [*by_outcome], 1e-12, equal_nan=True)
    assert scores.by_outcome_nmo[:, 0].isnan().all()


def test_the_text_says_why_a_recorded_score_is_missing_if_no_confidence_is_stated():
    confidences = ["0.7", None, "high", None, "high", None]
    recorded_status = [ERROR, ERROR, ERROR, UNSCORED, UNSCORED, TIMEOUT]
    recorded = Reward.of([None] * 6, status=[Status(status) for status in recorded_status])
    text = [completion("4", confidence) for confidence in confidences]
    scores = score_all([CORRECT, BRIER], text, columns={"answer": ["4"] * 6}, recorded={"brier": recorded})
    assert scores.status_nm[:, 1].tolist() == [ERROR, ABSENT, UNPARSABLE, ABSENT, UNPARSABLE, TIMEOUT]


TOLERANCES = [{"rel": -0.1}, {"abs": float("inf")}, {"rel": "1%"}, {"abs": True}]
LIMITS = [("workers", 0), ("workers", 1.5), ("deadline", 0), ("deadline", float("inf"))]
LIMITED = {"correct": {}, "json_schema": {}, "second_attempt": {"first": "solution"}, "runs": {"allow": True}}
LAYOUT = Layout({"solution": ["reasoning", "answer"], "confidence": ["analysis", "confidence"]})


@pytest.mark.parametrize(
    ("objectives", "names"),
    [
        ([], "no objective"),
        ([{"reward": "correct", "options": {"tga": "answer"}}], "'tga'.*'tag'"),
        ([{"reward": "correct", "options": {"tag": "reply"}}], "'reply' in solution.*reasoning, answer"),
        ([{"reward": "correct", "pays": ("confidence",)}], "'answer' in confidence"),
        ([{"reward": "brier", "pays": ("confidence",)}], "'brier'.*'correct'"),
        (
            [{"reward": "brier", "pays": ("confidence",), "given": "correct"}, {"reward": "correct"}],
            "'correct' before 'brier'",
        ),
        ([{"reward": "correct"}, {"reward": "brier", "pays": ("confidence",), "options": {"of": "c"}}], "'c'"),
        ([{"reward": "second_attempt"}], "'first'"),
        ([{"reward": "second_attempt", "options": {"first": "confidence"}}], "'answer' in confidence"),
        *[([{"reward": "near", "options": {"tag": "answer", **tolerance}}], "'rel'|'abs'") for tolerance in TOLERANCES],
        *[([{"reward": r, "options": {"tag": "answer", **LIMITED[r], k: v}}], f"'{k}'") for r in LIMITED for k, v in LIMITS],
    ],
)
def test_objectives_that_cannot_work_are_refused_before_training(objectives, names):
    with pytest.raises(RecipeError, match=names):
        check_objectives([Objective(**{"pays": "solution", **objective}) for objective in objectives], LAYOUT)
