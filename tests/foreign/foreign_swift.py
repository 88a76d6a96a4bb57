"""Whole steps of ms-swift's GRPO trainer on CPU, through our door: `make test-swift`."""

import json
import os

os.environ |= {"HF_HUB_OFFLINE": "1", "MODELSCOPE_OFFLINE": "1", "USE_HF": "1"}

import pytest
import torch
from swift import RLHFArguments, rlhf_main
from swift.template import TemplateMeta, register_template
from swift.trainers import TrainerFactory
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from spanwise.engines.swift import install
from spanwise.engines.swift.settings import LOSS_TYPES
from spanwise.engines.swift.trainer import SwiftSpanTrainer
from spanwise.errors import RecipeError

pytestmark = pytest.mark.filterwarnings("default")  # their packages warn of themselves

PIECES = ["<pad>", "<eos>", "<answer>", "</answer>", "<confidence>", "</confidence>", "<tool>", *"0123456789.+=?ab"]
RECIPE = """
layout: {solution: [answer], confidence: [confidence]}
method: bae
objectives:
  - {reward: correct, pays: [solution], options: {verify: exact}}
  - {reward: brier, pays: [confidence], given: correct, baseline: outcome, if_missing: -1.0}
"""
#: Two prompts of different lengths, four completions each: thought, answer, confidence, whether it is right.
ASKED = [("2+2=", "4"), ("0001+2=", "3")]
SAID = [("ab", "4", 0.9, 1), ("", "4", 0.6, 1), ("aabb", "3", 0.8, 0), ("b", "5", 0.1, 0),
        ("a", "3", 0.75, 1), ("bb", "3", None, 1), ("", "3", 0.5, 1), ("abab", "7", 0.3, 0)]  # fmt: skip
S, C = 0, 1
register_template(TemplateMeta("spanwise", prefix=[], prompt=["{{QUERY}}"], chat_sep=[], suffix=["<eos>"]))


def pieces_of(thought, answer, confidence):
    """The pieces of a completion, and the block of each."""
    solution = [*thought, "<answer>", answer, "</answer>"]
    report = [] if confidence is None else ["<confidence>", *str(confidence), "</confidence>"]
    return [*solution, *report, "<eos>"], [S] * len(solution) + [C] * len(report) + [C if report else S]


def mean(values):
    return sum(values) / len(values)


def credit(n):
    """The credit of the solution, of the confidence, and of stopping: loops over the definitions."""
    group = range(n // 4 * 4, n // 4 * 4 + 4)
    brier = {m: -((SAID[m][2] - SAID[m][3]) ** 2) for m in group if SAID[m][2] is not None}
    peers = [brier[m] for m in brier if SAID[m][3] == SAID[n][3]]
    solution = SAID[n][3] - mean([SAID[m][3] for m in group])
    if n not in brier:
        return solution, 0.0, -1.0 - mean(peers)
    return solution, brier[n] - mean(peers) if len(peers) > 1 else 0.0, 0.0


def token_advantages(n):
    _, blocks = pieces_of(*SAID[n][:3])
    *parts, stop = credit(n)
    values = [parts[block] / blocks.count(block) for block in blocks]
    return [*values[:-1], values[-1] + stop]


def log_probs(policy, n):
    ids = [[PIECES.index(sign) for sign in ASKED[n // 4][0]], [PIECES.index(one) for one in pieces_of(*SAID[n][:3])[0]]]
    logits = policy(torch.tensor([ids[0] + ids[1]])).logits[0, len(ids[0]) - 1 : -1]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(ids[1])[:, None])[:, 0]


def gradient(folder, *, slope=1.0, beta=0.0, reference=None, left_out=()):
    """Of -(1/N) sum over completions and tokens of advantage times log-probability, plus beta times the KL's mean of means."""
    policy, total = Qwen2ForCausalLM.from_pretrained(folder), 0.0
    for n in range(len(SAID)):
        row = log_probs(policy, n)
        if n not in left_out:
            total = total - slope * (torch.tensor(token_advantages(n)) * row).sum() / len(SAID)
        if beta:
            apart = log_probs(reference, n).detach() - row
            total = total + beta * (apart.exp() - apart - 1).clamp(max=10).mean() / len(SAID)
    total.backward()
    return {name: value.grad for name, value in policy.named_parameters()}


def prepare(folder, *, pieces=PIECES, asked=ASKED, recipe=RECIPE):
    """A tiny model with its tokenizer, the prompts, the recipe and the plug-in."""
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?[a-z]+>|."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    signs = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "?", "padding_side": "left"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **signs).save_pretrained(folder / "model")
    for seed, name in enumerate(("model", "reference")):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=len(pieces), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=4, max_position_embeddings=128, initializer_range=0.1, pad_token_id=0, eos_token_id=1,
                bos_token_id=None, tie_word_embeddings=False,
            )
        ).save_pretrained(folder / name)  # fmt: skip
    rows = [{"messages": [{"role": "user", "content": prompt}], "answer": answer} for prompt, answer in asked]
    (folder / "data.json").write_text(json.dumps(rows))
    (folder / "recipe.yaml").write_text(recipe)
    (folder / "plugin.py").write_text(
        f"from spanwise.engines.swift import install\ninstall({str(folder / 'recipe.yaml')!r})\n"
    )
    return folder


@pytest.fixture
def folder(tmp_path):
    return prepare(tmp_path)


class Scripted(SwiftSpanTrainer):
    """Answers with the script, and keeps what it trained."""

    truncated = ()

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        Scripted.last = self
        self.before = {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def _generate_completions(self, samples):
        samples = self._preprocess_inputs(samples)
        seen = {}
        for sample in samples:
            group = [prompt for prompt, _ in ASKED].index(sample.messages[0]["content"])
            n = group * 4 + seen.setdefault(group, 0)
            seen[group] += 1
            pieces, _ = pieces_of(*SAID[n][:3])
            sample.extra["number"] = n
            sample.messages.append({"role": "assistant", "content": "".join(pieces)})
            sample.response_token_ids = [PIECES.index(one) for one in pieces]
            sample.finish_reason = "length" if n in self.truncated else "stop"
        return samples

    def _postprocess_batch(self, samples, batch_encoded_inputs):
        super()._postprocess_batch(samples, batch_encoded_inputs)
        chunks = self.split_by_mini_batches(samples)
        self.seen = {
            sample.extra["number"]: part["grpo_batch"].advantages[i][part["grpo_batch"].completion_mask[i]].tolist()
            for chunk, part in zip(chunks, batch_encoded_inputs, strict=True)
            for i, sample in enumerate(chunk)
        }


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
    run = Scripted.last
    return run, {name: run.before[name] - value.detach() for name, value in run.model.named_parameters()}


def same(found, expected, tolerance=1e-5):
    scale = max(float(value.abs().max()) for value in expected.values())
    return max(float((found[name] - expected[name]).abs().max()) for name in expected) / scale < tolerance


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
    run, found = trained(folder, loss_type=loss_type, **shape)
    for n in range(len(SAID)):
        assert run.seen[n] == pytest.approx(token_advantages(n), abs=1e-6)
    assert same(found, gradient(folder / "model", slope=0.2 if loss_type == "cispo" else 1.0))  # its clip is at epsilon_high


def test_completions_that_were_cut_off_are_left_out(folder, monkeypatch):
    monkeypatch.setattr(Scripted, "truncated", (0, 6))
    _, found = trained(folder, loss_type="grpo", overlong_filter=True)
    assert same(found, gradient(folder / "model", left_out=(0, 6)))


def test_the_kl_is_the_token_mean_of_each_completion(folder):
    reference = Qwen2ForCausalLM.from_pretrained(folder / "reference")
    _, found = trained(folder, loss_type="grpo", beta=0.3, ref_model=str(folder / "reference"), ref_model_type="qwen2")
    assert same(found, gradient(folder / "model", beta=0.3, reference=reference))


def test_two_passes_over_a_batch(folder):
    run, _ = trained(folder, loss_type="dr_grpo", num_iterations=2, max_steps=2, learning_rate=1e-4)
    assert run.state.global_step == 2


def test_settings_reach_the_checks(folder):
    """What each setting says stands in docs/border.md."""
    with pytest.raises(RecipeError, match="There is no loss_type 'real'"):
        trained(folder, loss_type="real")
    with pytest.raises(RecipeError, match="dynamic_sample is True"):
        trained(folder, dynamic_sample=True)
