"""The calibration of a training batch is that of the confidences that its scorer read."""

import pytest

from spanwise.commands.train.train import _batch_ece
from spanwise.objective import Objective
from spanwise.score import score_all
from spanwise.types import Scores


def scored(rule, rows):
    text = [
        {"solution": {"": "", "answer": answer}, "confidence": None if q is None else {"": "", "confidence": q}}
        for answer, q in rows
    ]
    objectives = [Objective("correct", pays="solution"), Objective(rule, pays="confidence", given="correct")]
    return score_all(objectives, text, columns={"answer": ["4"] * len(rows)})


@pytest.mark.parametrize("rule", ["brier", "log_score"])
def test_of_what_was_stated(rule):
    # Bins [0, .1): reports 0, 0 and .001, all wrong: .001/3 off on average. [.7, .8): .7 and .7, one right: .2 off.
    # [1, 1.1): 100 %, right. The rest states nothing or cannot be judged.
    rows = [("5", "0"), ("5", "0"), ("5", "0.001"), ("4", "0.7"), ("5", "70%"), ("4", "100%"), ("4", "high"), ("4", None)]
    scores = scored(rule, rows)
    assert _batch_ece(scores, 0, 1) == pytest.approx((3 * 0.001 / 3 + 2 * 0.2 + 0) / 6, abs=1e-12)


def test_of_nothing_stated():
    scores = scored("brier", [("4", None), ("5", "high")])
    assert _batch_ece(scores, 0, 1) is None
    bare = Scores(scores.names, scores.reward_nm, scores.status_nm, scores.by_outcome_nmo)
    assert _batch_ece(bare, 0, 1) is None
