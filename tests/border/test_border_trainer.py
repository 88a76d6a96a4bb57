"""Set-ups of a user's own script around `SpanGRPOTrainer` that cannot work, or not as they are meant."""

import pytest
from datasets import Dataset, DatasetDict
from transformers import TrainingArguments
from trl import GRPOConfig

from border.case import check
from spanwise.engines.trl import SpanGRPOConfig, SpanGRPOTrainer
from spanwise.objective import Objective
from spanwise.scheme import Scheme
from trl_small import LAYOUT, OBJECTIVES, SAID, THIRD_PARTY, config, policy, prompts, say, scheme, scripted, tokenizer

pytestmark = [*THIRD_PARTY, pytest.mark.usefixtures("unchecked_shapes")]
QUESTIONS = [{"prompt": "2+2="}, {"prompt": "1+2="}]
CPU = {"use_cpu": True, "bf16": False}


def right(completions, answer, **columns):
    return [float(f"<answer>{want}<" in text) for text, want in zip(completions, answer, strict=True)]


def script(folder, *, scripts=SAID, train=False, replaced=None, **options):
    """A training script with some arguments of the trainer `replaced` (None leaves one out); `options` are of its config."""
    usual = {
        "args": config(folder, **options),
        "train_dataset": prompts(),
        "processing_class": tokenizer(),
        "rollout_func": scripted(scripts),
        "scheme": scheme(),
    }
    arguments = {**usual, **(replaced or {})}
    run = SpanGRPOTrainer(policy(), **{name: value for name, value in arguments.items() if value is not None})
    if train:
        run.train()
    return "it trains"


def cut_off():
    completion = say("ab", "4", 0.9, 1.0)
    completion.pieces, completion.blocks = completion.pieces[:-1], completion.blocks[:-1]
    return [completion] * 8


CASES = {
    "SpanGRPOTrainer(..., reward_funcs=[right]), as with GRPOTrainer": lambda folder: script(
        folder, replaced={"reward_funcs": [right]}
    ),
    "SpanGRPOTrainer without a scheme": lambda folder: script(folder, replaced={"scheme": None}),
    "SpanGRPOTrainer(..., scheme='bae')": lambda folder: script(folder, replaced={"scheme": "bae"}),
    "SpanGRPOTrainer(..., layout=layout, objectives=objectives)": lambda folder: script(
        folder, replaced={"scheme": None, "layout": LAYOUT, "objectives": OBJECTIVES}
    ),
    "SpanGRPOTrainer(..., callback=[...])": lambda folder: script(folder, replaced={"callback": []}),
    "SpanGRPOTrainer(..., args=TrainingArguments(...))": lambda folder: script(
        folder, replaced={"args": TrainingArguments(str(folder), **CPU)}
    ),
    "SpanGRPOConfig(num_generations=1)": lambda folder: script(folder, num_generations=1),
    "8 completions per step and num_generations=3": lambda folder: SpanGRPOConfig(str(folder), num_generations=3, **CPU),
    "GRPOConfig(loss_type='dr-grpo')": lambda folder: script(
        folder, replaced={"args": GRPOConfig(str(folder), loss_type="dr-grpo", **CPU)}
    ),
    "loss_type='vespo' with importance_sampling_level='block'": lambda folder: script(
        folder, loss_type="vespo", importance_sampling_level="block"
    ),
    "importance_sampling_level='span'": lambda folder: script(folder, importance_sampling_level="span"),
    "dynamic_sampling='corect'": lambda folder: script(folder, dynamic_sampling="corect"),
    "dynamic_sampling='credit' with a dataset of images": lambda folder: script(
        folder,
        dynamic_sampling="credit",
        replaced={"train_dataset": Dataset.from_list([{**row, "image": "a"} for row in prompts()])},
    ),
    "dynamic_sampling='credit' with a streamed dataset": lambda folder: script(
        folder, dynamic_sampling="credit", replaced={"train_dataset": prompts().to_iterable_dataset()}
    ),
    "dynamic_sampling_rounds=0": lambda folder: script(folder, dynamic_sampling="credit", dynamic_sampling_rounds=0),
    "reward_weights=[1.0, 0.5]": lambda folder: script(folder, reward_weights=[1.0, 0.5]),
    "scale_rewards='batch'": lambda folder: script(folder, scale_rewards="batch"),
    "beta=0.1 with a model that was built in memory": lambda folder: script(folder, beta=0.1),
    'log_metrics="some"': lambda folder: script(folder, log_metrics="some"),
    "train_dataset=load_dataset(...) with its splits": lambda folder: script(
        folder, replaced={"train_dataset": DatasetDict({"train": prompts(), "test": prompts()})}
    ),
    "train_dataset=[{'prompt': ...}, ...], a list": lambda folder: script(folder, replaced={"train_dataset": QUESTIONS}),
    "no train_dataset": lambda folder: script(folder, replaced={"train_dataset": None}),
    "a streamed dataset without the answers that `correct` reads": lambda folder: script(
        folder, train=True, replaced={"train_dataset": Dataset.from_list(QUESTIONS).to_iterable_dataset()}
    ),
    "an eval_dataset without the answers that `correct` reads": lambda folder: script(
        folder, replaced={"eval_dataset": {"hard": Dataset.from_list(QUESTIONS)}}
    ),
    "mask_truncated_completions=True, and no completion ends before max_completion_length": lambda folder: script(
        folder, scripts=cut_off(), train=True, mask_truncated_completions=True
    ),
    "Scheme.preset('rlcr', ...) with objectives that pay different blocks": lambda folder: script(
        folder,
        replaced={"scheme": Scheme.preset("rlcr", LAYOUT, objectives=[OBJECTIVES[0], Objective(right, "confidence")])},
    ),
}

test = check(__doc__, CASES)
