"""Completions sampled beside the training: credited by the same rule, and the trainer remembers nothing of them."""

import copy

import pytest

from trl_small import SAID, THIRD_PARTY, prompts, scripted, step, trainer

pytestmark = THIRD_PARTY


def test_sampled_rollouts_are_credited_and_forgotten(tmp_path):
    run = trainer(tmp_path, extra={"rollout_func": scripted(SAID)})
    step(run)
    remembered = (run.last_rollouts, run.last_metrics, run.step, run.zero_batches, copy.deepcopy(dict(run._metrics)))
    logged = {name: list(values) for name, values in run._logs.items()}
    sample = run.sample_rollouts([prompts()[0]])
    assert list(sample.prompts) == ["2+2="] * 4
    assert sample.mode == "eval"
    rewards = [said.right for said in SAID[:4]]
    expected = [reward - sum(rewards) / 4 for reward in rewards]  # the group's mean is the baseline of `correct`
    assert sample.credit.block_nk[:, 0].tolist() == pytest.approx(expected)
    assert run.last_rollouts is remembered[0]
    assert (run.last_metrics, run.step, run.zero_batches) == remembered[1:4]
    assert {name: dict(values) for name, values in run._metrics.items() if values} == {
        name: dict(values) for name, values in remembered[4].items() if values
    }
    assert {name: list(values) for name, values in run._logs.items()} == logged
    assert run.model.training
