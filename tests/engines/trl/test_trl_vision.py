"""A tiny vision-language model: images beside the prompt change nothing of the credit, and reach model and run folder."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import (
    AutoProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForTokenClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from trl import GRPOTrainer

from plain_files import save
from spanwise import CriticConfig, Laser
from spanwise.commands.shared.task import load_model
from spanwise.commands.train.train import train
from spanwise.engines.sample import sample
from spanwise.engines.trl import SpanGRPOTrainer
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.recipe import load
from spanwise.scheme import Scheme
from tokenizers_small import byte_level
from trl_small import config, largest_difference, many_a, plain, weights

TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{% endif %}{% endfor %}"
)
SIDE, PATCH, WIDTH = 8, 4, 16


def processor():
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.pad_token = tokenizer.eos_token
    size = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    return LlavaProcessor(
        CLIPImageProcessorPil(**size), tokenizer, patch_size=PATCH, vision_feature_select_strategy="default",
        chat_template=TEMPLATE, num_additional_image_tokens=1,
    )  # fmt: skip


def model(tokenizer):
    layers = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **layers)
    vision = CLIPVisionConfig(image_size=SIDE, patch_size=PATCH, projection_dim=WIDTH, **layers)
    torch.manual_seed(0)
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=image_token))


def questions():
    pixels_nhwc = np.random.default_rng(0).integers(0, 255, (4, SIDE, SIDE, 3), dtype=np.uint8)
    prompts = [[{"role": "user", "content": f"Picture {n}?"}] for n in range(4)]
    return Dataset.from_dict({"prompt": prompts, "image": [Image.fromarray(pixels_hwc) for pixels_hwc in pixels_nhwc]})


def many_letters(completions, **columns):
    return many_a([turns[0]["content"] for turns in completions])


def trained(folder, *, ours):
    sizes = {"max_steps": 3, "max_completion_length": 8, "num_generations": 2, "per_device_train_batch_size": 4}
    args = config(folder, optim="adamw_torch", learning_rate=1e-2, loss_type="grpo", keep_rollouts=1, **sizes)
    shared = {"train_dataset": questions(), "processing_class": processor()}
    policy = model(shared["processing_class"].tokenizer)
    torch.manual_seed(0)
    if ours:
        objective = Objective(many_letters, pays="completion", scale="std")
        scheme = Scheme.preset("bae", Layout({"completion": []}), objectives=[objective], per="completion", eps=1e-4)
        run = SpanGRPOTrainer(policy, args=args, scheme=scheme, **shared)
    else:
        run = GRPOTrainer(policy, args=plain(args), reward_funcs=[many_letters], **shared)
    run.train()
    return weights(run.model)


def test_a_saved_one_is_loaded_to_be_evaluated(tmp_path):
    reader = processor()
    model(reader.tokenizer).save_pretrained(tmp_path)
    reader.save_pretrained(tmp_path)
    loaded, tokenizer = load_model(tmp_path)
    assert isinstance(loaded, LlavaForConditionalGeneration)
    assert len(sample(loaded, tokenizer, ["2+2="], samples=2, max_new_tokens=3)[0]) == 2


@pytest.mark.filterwarnings("ignore::UserWarning")  # the untrained model writes no tags
@pytest.mark.parametrize("has_processor", [True, False])
def test_spanwise_train_saves_the_processor_too(tmp_path, capsys, has_processor):
    reader = processor()
    model(reader.tokenizer).save_pretrained(tmp_path / "model")
    (reader if has_processor else reader.tokenizer).save_pretrained(tmp_path / "model")
    data = save(tmp_path / "data", [{"question": f"{n} + 2?", "answer": "4"} for n in range(10)], "jsonl")
    sizes = {"steps": 1, "prompts": 2, "group_size": 2, "eval_prompts": 2, "eval_samples": 2, "max_completion_length": 8}
    paths = {"model": str(tmp_path / "model"), "dataset": str(data), "output": str(tmp_path / "run")}
    train(load(None, {"task": "confidence", **paths, **sizes, "instruction": "", "report": False}))
    assert ("image processor of" in capsys.readouterr().out) != has_processor
    if has_processor:
        assert isinstance(AutoProcessor.from_pretrained(tmp_path / "run" / "model"), LlavaProcessor)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours")
    return folder, trained(folder, ours=True)


def test_one_block_is_trls_own_trainer_with_images_too(ours, tmp_path):
    theirs = trained(tmp_path, ours=False)
    # AdamW divides by second moments near 0, so that rounding, which differs by machine, shows in some weights.
    assert largest_difference(ours[1], theirs) < 1e-4
    start = weights(model(processor().tokenizer))
    assert largest_difference(ours[1], start) > 1e-3, "the steps were too small to show anything"


def test_a_run_folder_names_the_image_and_no_memory_address(ours):
    prompts = pq.read_table(sorted((ours[0] / "rollouts").glob("*.parquet"))[0])["prompt"].to_pylist()
    assert "image mode=RGB size=8x8" in prompts[0]
    assert " at 0x" not in "".join(prompts)
    assert len(set(prompts)) == 2  # two completions of each


class Watched:
    """A trainer of completions `a`, `aa` or shorter with an end, and the policy's own view of its first batch, row by row."""

    def __init__(self, folder, part, **options):
        processing = processor()
        self.tokenizer = tokenizer = processing.tokenizer
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "<|score|>"]})
        self.policy = model(tokenizer)
        for weight in self.policy.parameters():  # so that the image matters
            torch.nn.init.normal_(weight, std=0.4)
        unwritten = sorted({*range(len(tokenizer))} - {tokenizer.eos_token_id, *tokenizer.encode("a")})
        args = config(folder, max_completion_length=2, generation_kwargs={"suppress_tokens": unwritten})
        data = {"train_dataset": questions(), "processing_class": processing}
        run = SpanGRPOTrainer(self.policy, args=args, **data, **options)
        self.part = run.parts[part]
        self.fill, self.part.fill = self.part.fill, self.watched
        run.train()
        self.batch = run.last_rollouts.batch

    def watched(self, read_batch, output):
        self.replies, self.logps = [], []
        for n, pixels in enumerate(output["pixel_values"].split(1)):
            prompt, reply = (output[f"{name}_ids"][n][output[f"{name}_mask"][n] > 0] for name in ("prompt", "completion"))
            with torch.no_grad():
                logits = self.policy(input_ids=torch.cat([prompt, reply])[None], pixel_values=pixels).logits[0]
            self.logps.append(logits[len(prompt) - 1 :].log_softmax(dim=1))
            self.replies.append(reply)
        return self.fill(read_batch, output)


VERDICT = Objective(lambda completions: [n % 2 for n in range(len(completions))], pays="all", name="correct")


def test_a_self_rewarding_score_is_read_beside_the_image(tmp_path):
    """Also of completions that end in the last step of the generation, which need a pass of their own."""
    laser = Laser("<|score|>", beta=1.0, mix=0.5, self_rewarding_warmup=0)
    scheme = Scheme.preset("bae", Layout({"all": []}), objectives=[VERDICT], laser=laser)
    seen = Watched(tmp_path, "laser", scheme=scheme)
    ended = [n for n, reply in enumerate(seen.replies) if reply[-1] == seen.tokenizer.eos_token_id]
    assert {len(seen.replies[n]) for n in ended} == {1, 2}
    logp_n = torch.full((8,), torch.nan)
    logp_n[ended] = torch.stack([seen.logps[n][-1, seen.part.token] for n in ended])
    expected_n = logp_n - logp_n.nanmean()  # the reference that it measures
    torch.testing.assert_close(seen.batch.score_n, expected_n, atol=1e-4, rtol=0, equal_nan=True)


def test_the_log_probabilities_that_sae_reads_are_those_beside_the_image(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForTokenClassification(LlamaConfig(vocab_size=1000, num_labels=1, **sizes)).save_pretrained(tmp_path / "critic")
    scheme = Scheme.preset("sae", Layout({"all": []}), objectives=[VERDICT])
    seen = Watched(tmp_path, "critic", scheme=scheme, critic=CriticConfig(model=str(tmp_path / "critic")))
    for n, reply in enumerate(seen.replies):
        expected_t = seen.logps[n][:-1].gather(1, reply[:, None])[:, 0]
        torch.testing.assert_close(seen.batch.logp_nt[n, : len(reply)], expected_t, atol=1e-4, rtol=0)
