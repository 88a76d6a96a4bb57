"""Whole steps of ms-swift's GRPO trainer on CPU, through our door: `make test-swift`."""

import json
import os

os.environ |= {"HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1", "USE_HF": "1"}

import pytest
import torch
from swift import RLHFArguments, rlhf_main
from swift.template import TemplateMeta, register_template
from swift.trainers import TrainerFactory
from transformers import Qwen2Config, Qwen2ForCausalLM

import conformance
import trl_small as small
from spanwise.engines.swift import LOSS_TYPES, install
from spanwise.engines.swift.trainer import SwiftSpanTrainer
from spanwise.errors import RecipeError
from tokenizers_small import tag_level

pytestmark = pytest.mark.filterwarnings("default")  # their packages warn of themselves

#: Two prompts of different lengths.
ASKED = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "0001+2=", "answer": "3"}]
register_template(TemplateMeta("spanwise", prefix=[], prompt=["{{QUERY}}"], chat_sep=[], suffix=["<eos>"]))


def prepare(folder, *, pieces=small.PIECES, tasks=ASKED, recipe=conformance.RECIPES["blocks"]):
    tag_level(pieces).save_pretrained(folder / "model")
    for seed, name in enumerate(("model", "reference")):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=len(pieces), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=4, max_position_embeddings=128, initializer_range=0.1, pad_token_id=0, eos_token_id=1,
                bos_token_id=None, tie_word_embeddings=False,
            )
        ).save_pretrained(folder / name)  # fmt: skip
    rows = [{"messages": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in tasks]
    (folder / "data.json").write_text(json.dumps(rows))
    (folder / "recipe.yaml").write_text(recipe)
    (folder / "plugin.py").write_text(
        f"from spanwise.engines.swift import install\ninstall({str(folder / 'recipe.yaml')!r})\n"
    )
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(small, "prompts", lambda count=2: ASKED)
    return prepare(tmp_path)


class Recorded(SwiftSpanTrainer):
    """Record the weights before the step, and by number of a sample the advantages that were trained."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        Recorded.last = self
        self.before = {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def _postprocess_batch(self, samples, batch_encoded_inputs):
        super()._postprocess_batch(samples, batch_encoded_inputs)
        self.seen = {}
        for chunk, part in zip(self.split_by_mini_batches(samples), batch_encoded_inputs, strict=True):
            batch = part["grpo_batch"]
            for i, sample in enumerate(chunk):
                mask_t = batch.completion_mask[i].bool()
                assert not batch.advantages[i][~mask_t].any()
                self.seen[self.number_of(sample)] = batch.advantages[i][mask_t].tolist()


class Scripted(Recorded):
    """Answer with the script."""

    truncated = ()

    def number_of(self, sample):
        return sample.extra["number"]

    def _generate_completions(self, samples):
        samples = self._preprocess_inputs(samples)
        counts = {}
        for sample in samples:
            group = [question["prompt"] for question in ASKED].index(sample.messages[0]["content"])
            n = group * 4 + counts.setdefault(group, 0)
            counts[group] += 1
            pieces = small.SAID[n].pieces
            sample.extra["number"] = n
            sample.messages.append({"role": "assistant", "content": "".join(pieces)})
            sample.response_token_ids = [small.PIECES.index(piece) for piece in pieces]
            sample.finish_reason = "length" if n in self.truncated else "stop"
        return samples


def trained(folder, *, trainer=f"{__name__}.Scripted", **options):
    """One plain gradient step of `swift rlhf`; returns the trainer and its gradient."""
    usual = {
        "rlhf_type": "grpo", "model": str(folder / "model"), "model_type": "qwen2", "template": "spanwise",
        "dataset": [str(folder / "data.json")], "torch_dtype": "float32", "tuner_type": "full", "reward_funcs": ["spanwise"],
        "num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_completion_length": 16,
        "max_steps": 1, "learning_rate": 1.0, "lr_scheduler_type": "constant", "warmup_ratio": 0.0, "optim": "sgd",
        "max_grad_norm": 0.0, "weight_decay": 0.0, "report_to": ["none"], "output_dir": str(folder / "out"),
        "save_strategy": "no", "logging_steps": 1, "beta": 0.0, "use_cpu": True, "split_dataset_ratio": 0.0,
        "gradient_checkpointing": False, "load_from_cache_file": False, "add_version": False, "dataset_shuffle": False,
        "check_model": False, "temperature": 1.0, "external_plugins": [str(folder / "plugin.py")],
    }  # fmt: skip
    args = RLHFArguments(**{**usual, **options})
    TrainerFactory.TRAINER_MAPPING["grpo"] = trainer
    rlhf_main(args)
    run = Recorded.last
    return run, {name: run.before[name] - value.detach() for name, value in run.model.named_parameters()}


def same(gradient, expected):
    return small.largest_difference(gradient, expected) < 1e-5


def paper(folder, **options):
    return small.paper_gradient(Qwen2ForCausalLM.from_pretrained(folder / "model"), **options)


def test_the_plugin_puts_our_trainer_in_the_place_of_theirs(folder):
    before = TrainerFactory.TRAINER_MAPPING["grpo"]
    try:
        install(folder / "recipe.yaml")
        assert TrainerFactory.get_trainer_cls(type("Args", (), {"rlhf_type": "grpo"})) is SwiftSpanTrainer
    finally:
        TrainerFactory.TRAINER_MAPPING["grpo"] = before


@pytest.mark.parametrize("rows", [4, 8])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_one_step_is_the_gradient_of_the_paper(folder, loss_type, rows):
    shape = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 8 // rows}
    run, gradient = trained(folder, loss_type=loss_type, **shape)
    for n, advantages in enumerate(small.token_advantages(small.SAID)):
        assert run.seen[n] == pytest.approx(advantages, abs=1e-6)
    assert same(gradient, paper(folder, loss_type=loss_type))


def test_completions_that_were_cut_off_are_left_out(folder, monkeypatch):
    monkeypatch.setattr(Scripted, "truncated", (0, 6))
    _, gradient = trained(folder, loss_type="grpo", overlong_filter=True)
    assert same(gradient, paper(folder, unlearned=(0, 6)))


def test_the_kl_is_the_token_mean_of_each_completion(folder):
    _, gradient = trained(folder, loss_type="grpo", beta=0.3, ref_model=str(folder / "reference"), ref_model_type="qwen2")
    policy, reference = (Qwen2ForCausalLM.from_pretrained(folder / name) for name in ("model", "reference"))
    kl = small.kl_gradient(policy, beta=0.3, reference=reference, corrected=False, cut=10)
    assert same(gradient, small.added(paper(folder), kl))


def test_two_passes_over_a_batch(folder):
    run, _ = trained(folder, loss_type="dr_grpo", num_iterations=2, max_steps=2, learning_rate=1e-4)
    assert run.state.global_step == 2


def test_settings_reach_the_checks(folder):
    """docs/border.md has the sentence for each setting."""
    with pytest.raises(RecipeError, match="There is no loss_type 'real'"):
        trained(folder, loss_type="real")
    with pytest.raises(RecipeError, match="dynamic_sample is True"):
        trained(folder, dynamic_sample=True)
