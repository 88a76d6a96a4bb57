"""The calibration of a training batch is that of the confidences that its scorer read."""

import math

import pytest
import torch

from spanwise.commands.train.recorder import _batch_ece
from spanwise.engines.trl.batch import pack, unpack
from spanwise.objective import Objective
from spanwise.score import Reward, score
from spanwise.types import Scores, Spans


def scored(rule, rows):
    text = [
        {"solution": {"": "", "answer": answer}, "confidence": None if q is None else {"": "", "confidence": q}}
        for answer, q in rows
    ]
    objectives = [Objective("correct", pays="solution"), Objective(rule, pays="confidence", given="correct")]
    return score(objectives, text, columns={"answer": ["4"] * len(rows)})


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


def test_what_was_read_travels_between_ranks():
    rewards = [Reward.of([1.0, 0.0]), Reward.of([-0.09, None], by_outcome=[(-0.49, -0.09), None], stated=[0.7, None])]
    spans = Spans(("a",), torch.zeros(2, 1).long(), torch.ones(2, 1).long(), torch.zeros(2, 1).long(), torch.zeros(2).long())
    scores, length_nk, fault_n = unpack(pack(rewards, spans).repeat(2, 1), ("correct", "brier"), 1)
    assert scores.stated_nm is not None
    assert scores.stated_nm[:, 1].nan_to_num(nan=-1.0).tolist() == [0.7, -1, 0.7, -1]
    assert scores.stated_nm[:, 0].isnan().all()
    assert scores.by_outcome_nmo[2, 1].tolist() == [-0.49, -0.09]
    assert (length_nk.tolist(), fault_n.tolist()) == ([[1]] * 4, [0] * 4)
    assert math.isnan(float(scores.reward_nm[1, 1]))
