"""Whole runs of `python -m verl.trainer.main_ppo` on CPU with verl's own critic: its values, our targets."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from verl_runs import CRITIC_RUNS, STEPS, read_again, with_critic

from spanwise import pipeline
from spanwise.credit import value_target
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.scheme import Scheme

pytestmark = pytest.mark.timeout(900)

WARM_UP, VALUE_LAM = 2, 0.9


def scheme_of(method):
    """The same rule, written out without the recipe."""
    objectives = (
        Objective("correct", pays=("solution",), if_missing=0.0),
        Objective("brier", pays=("confidence",), given="correct", if_missing=-1.0),
    )
    layout = Layout({"solution": ["reasoning", "answer"], "confidence": ["analysis", "confidence"]})
    return Scheme(method, layout, objectives, "completion", {"lam": 0.8}, values="shared")


@pytest.fixture(scope="module", params=list(CRITIC_RUNS))
def finished(request, tmp_path_factory):
    return with_critic(request.param, tmp_path_factory.mktemp(request.param))


def calls(finished):
    """The steps at which the policy trained."""
    return range(WARM_UP + 1, STEPS + 1) if finished.name == "gae" else range(1, STEPS + 1)


def expected(finished, rows, step):
    """Advantages (1 / length of the completion times the recursion's) and targets, by the dumped rollouts and the values."""
    tokens = {
        field: torch.nn.utils.rnn.pad_sequence([torch.tensor(row[name]) for row in rows], True)
        for field, name in (("value_nt", "values"), ("logp_nt", "old_log_probs"))
    }
    scheme = scheme_of(finished.name)
    batch, reading = read_again(finished, rows, step, scheme, **tokens)
    adv_nt = pipeline.advantages(pipeline.credit_batch(reading, batch, scheme), reading.spans, scheme)
    (part,) = pipeline.streams(reading, batch, scheme).inputs(batch.value_nt)
    return adv_nt, value_target(**part, lam=VALUE_LAM)


def test_every_token_was_trained_with_what_the_critics_values_say(finished):
    for call, step in enumerate(calls(finished), 1):
        rows = finished.seen("actor", call)
        adv_nt, _ = expected(finished, rows, step)
        for row, adv_t in zip(rows, adv_nt, strict=True):
            length = len(row["ids"])  # verl's loss divides by it
            torch.testing.assert_close(torch.tensor(row["advantages"]), adv_t[:length] * length, atol=1e-6, rtol=1e-6)
        assert adv_nt.abs().max() > 1e-3


def test_the_critic_was_fitted_to_the_targets_of_the_recipe(finished):
    for step in range(1, STEPS + 1):
        rows = finished.seen("critic", step)
        _, target_nt = expected(finished, rows, step)
        for row, target_t in zip(rows, target_nt, strict=True):
            torch.testing.assert_close(torch.tensor(row["returns"]), target_t[: len(row["ids"])], atol=1e-6, rtol=1e-6)


def test_the_critic_learned_and_the_policy_waited(finished):
    start = load_file(finished.folder / "model" / "model.safetensors")
    saved = finished.folder / f"checkpoints/global_step_{STEPS}"
    critic = load_file(saved / "critic/huggingface/model.safetensors")
    trunk = {name: weight for name, weight in critic.items() if name in start}
    assert len(trunk) >= len(start) - 1
    assert all(not torch.equal(weight, start[name].to(weight.dtype)) for name, weight in trunk.items())
    policy = load_file(saved / "actor/huggingface/model.safetensors")
    assert all(not torch.equal(weight, start[name].to(weight.dtype)) for name, weight in policy.items() if name in start)
    assert len(list((finished.folder / "record" / "actor").iterdir())) == len(calls(finished))
    assert ["actor/grad_norm" in line for line in finished.metrics] == [s in calls(finished) for s in range(1, STEPS + 1)]
