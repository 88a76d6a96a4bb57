"""The conformance rollouts in a training that samples with vLLM: the advantages are the same."""

import os

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")

import pytest
from trl.generation import vllm_generation

import conformance
from served_small import write_model
from trl_conformance_small import CASES, assert_defined, replayed, trained

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("kept_weights")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model with the vocabulary of the file."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, conformance.tokenizer())
    return folder


@pytest.fixture(scope="module")
def one_engine():
    """A vLLM that all trainings share: it takes the weights of each."""
    build, engines = vllm_generation.LLM, []

    def built_once(*args, **options):
        if not engines:
            engines.append(build(*args, **options))
        return engines[0]

    return built_once


@pytest.mark.filterwarnings("ignore:.*Such rewards are ignored:UserWarning")
@pytest.mark.parametrize(("recipe", "group"), CASES, ids=[f"{recipe}-{group[0][0]['group']}" for recipe, group in CASES])
def test_the_advantages_are_those_of_the_definitions(tmp_path, monkeypatch, model, one_engine, recipe, group):
    monkeypatch.setattr(vllm_generation, "LLM", one_engine)
    rows = [row for row, _ in group]
    options = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.1, "vllm_max_model_length": 256}
    # The sampler's log-probabilities are far off, which shows in a metric and not in the credit.
    sampler = {"model": str(model), "rollout_func": replayed(rows, logps=-9.0)}
    run = trained(tmp_path, recipe, rows, extra=sampler, learning_rate=1e-3, **options)
    assert_defined(run, group)
    assert run.state.log_history[0]["sampling/sampling_logp_difference/mean"] > 1
