"""Models as rewards in TRL's training: a judge, its cache, an async function of its verdicts, a reward model."""

import torch

from judge_server import Server, verdict
from spanwise.objective import Objective
from spanwise.rollouts.schema import score_columns
from trl_small import THIRD_PARTY, trainer

pytestmark = THIRD_PARTY
SOLVED = Objective("correct", pays="solution", options={"verify": "exact"})


def sure(part):
    """The stand-in's verdict on whether a completion is sure of itself."""
    return float(any(f">0.{digit}" in part for digit in "6789"))


def answer(part, request, times):
    return verdict("yes" if sure(part) else "no", f"I read {part}")


async def awaited(blocks):
    return [sure(block["confidence"][""]) if block["confidence"] else None for block in blocks]


def trained(folder, objective):
    run = trainer(folder, extra={"objectives": [SOLVED, objective]})
    run.train()
    return run


def test_judge_cache_and_async_function_train_with_the_same_advantages(tmp_path):
    options = {"model": "m", "cache": str(tmp_path / "judge.sqlite"), "criterion": "Is it sure?"}
    with Server(answer).serving() as server:
        judge = Objective("judge", pays="confidence", if_missing=-1.0, options={**options, "base_url": server.url})
        first = trained(tmp_path / "a", judge)
        requests = len(server.requests)
        second = trained(tmp_path / "b", judge)
        assert len(server.requests) == requests
    function = trained(tmp_path / "c", Objective(awaited, pays="confidence", if_missing=-1.0, name="judge"))
    adv_nt = first.last_rollouts.advantages_nt
    assert (adv_nt != 0).any()
    for other in (second, function):
        assert torch.equal(adv_nt, other.last_rollouts.advantages_nt)
    logs = [run.state.log_history[0] for run in (first, second, function)]
    counts = [(log.get("cost/judge/calls"), log.get("cost/judge/cached")) for log in logs]
    assert counts == [(requests, 0), (0, requests), (None, None)]
    notes = score_columns(first.last_rollouts.reading.scores)["note/judge"]
    text = first.last_rollouts.reading.text
    parts = [block["confidence"] and block["confidence"][""].removesuffix("<eos>") for block in text]
    assert notes == [part and f"I read {part}" for part in parts]
