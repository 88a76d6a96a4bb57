"""TRL's trainer samples with a vLLM in its own process: credit comes from what vLLM wrote, and the sampler's error is a metric."""

import os

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")

import pytest
import torch
import vllm.model_executor.layers.utils as layers
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer

from spanwise import CriticConfig, Layout, Objective, Scheme
from spanwise.engines.trl import SpanGRPOConfig, SpanGRPOTrainer

pytestmark = pytest.mark.timeout(600)
GROUP, LONGEST, STEPS = 4, 16, 3
GAP = "sampling/sampling_logp_difference/max"
LAYOUT = Layout({"all": []})
#: What differs between the runs: more of the configuration, and of the trainer.
RUNS = {
    "plain": ({}, {}),
    "without the sampler's ratio": ({"vllm_importance_sampling_correction": False}, {}),
    "two updates of a batch": ({"num_iterations": 2}, {}),
    "an adapter": ({}, {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}),
    "a critic": ({}, {"method": "gae", "critic": CriticConfig(policy_training_start_step=0)}),
}


def ascii_signs(completions, **columns):
    """A reward that a random model earns."""
    return [float(sum(sign.isascii() for sign in text)) for text in completions]


@pytest.fixture
def kept_weights(monkeypatch):
    """On CPU vLLM packs the weights of linear layers, so that a second set cannot be loaded; keep them as they are."""

    def keep(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    monkeypatch.setattr(layers, "dispatch_cpu_unquantized_gemm", keep)


@pytest.mark.usefixtures("kept_weights")
@pytest.mark.parametrize("name", RUNS)
def test_it_trains_by_what_vllm_wrote(tmp_path, tiny_model, name):
    config, more = RUNS[name]
    method = more.get("method", "bae")
    baseline = {"baseline": "group"} if method == "bae" else {}
    scheme = Scheme.preset(method, LAYOUT, objectives=[Objective(ascii_signs, pays="all", **baseline)])
    args = SpanGRPOConfig(
        str(tmp_path / "out"), per_device_train_batch_size=8, num_generations=GROUP, max_completion_length=LONGEST,
        max_steps=STEPS, learning_rate=1e-3, use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no",
        logging_steps=1, report_to="none", disable_tqdm=True, use_vllm=True, vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.1, vllm_max_model_length=256, **config,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": f"{n}+2="} for n in range(8)])
    given = {"train_dataset": rows, "processing_class": AutoTokenizer.from_pretrained(tiny_model)}
    given |= {key: value for key, value in more.items() if key != "method"}
    run = SpanGRPOTrainer(model=str(tiny_model), args=args, scheme=scheme, **given)
    before = {key: weight.detach().clone() for key, weight in run.model.named_parameters() if weight.requires_grad}
    run.train()
    logs, rollouts = run.state.log_history[:STEPS], run.last_rollouts
    assert any(not torch.equal(weight, before[key]) for key, weight in run.model.named_parameters() if key in before)
    # The sampler's log-probabilities are those of the policy that trains, also after its updates; TRL says it where it corrects.
    gaps = [log[GAP] for log in logs if GAP in log]
    assert bool(gaps) == run.args.vllm_importance_sampling_correction
    assert all(0 < gap < 0.02 for gap in gaps)
    if method == "bae":
        reward_n = torch.tensor(ascii_signs(rollouts.completions)).double()
        mean_n = reward_n.view(-1, GROUP).mean(dim=1).repeat_interleave(GROUP)
        summed_n = rollouts.advantages_nt.double().sum(dim=1)
        torch.testing.assert_close(summed_n, reward_n - mean_n, atol=1e-4, rtol=1e-4)
