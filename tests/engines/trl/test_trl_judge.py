"""A judge in TRL's training: from its cache it trains with the same advantages, and what it cost and said is kept."""

import torch

from judge_server import Server, verdict
from spanwise.objective import Objective
from spanwise.rollouts.schema import score_columns
from trl_small import trainer

SOLVED = Objective("correct", pays="solution", options={"verify": "exact"})


def answer(part, request, times):
    """The stand-in's verdict on whether a completion is sure of itself."""
    return verdict("yes" if any(f">0.{digit}" in part for digit in "6789") else "no", f"I read {part}")


def test_a_judge_and_its_cache_train_with_the_same_advantages(tmp_path):
    options = {"model": "m", "cache": str(tmp_path / "judge.sqlite"), "criterion": "Is it sure?"}
    with Server(answer).serving() as server:
        judge = Objective("judge", pays="confidence", if_missing=-1.0, options={**options, "base_url": server.url})
        first, second = (trainer(tmp_path / name, extra={"objectives": [SOLVED, judge]}) for name in "ab")
        first.train()
        requests = len(server.requests)
        second.train()
        assert len(server.requests) == requests
    assert first.last_rollouts.advantages_nt.any()
    assert torch.equal(first.last_rollouts.advantages_nt, second.last_rollouts.advantages_nt)
    logs = [run.state.log_history[0] for run in (first, second)]
    assert [(log["cost/judge/calls"], log["cost/judge/cached"]) for log in logs] == [(requests, 0), (0, requests)]
    notes = score_columns(first.last_rollouts.reading.scores)["note/judge"]
    text = first.last_rollouts.reading.text
    parts = [block["confidence"] and block["confidence"][""].removesuffix("<eos>") for block in text]
    assert notes == [part and f"I read {part}" for part in parts]
