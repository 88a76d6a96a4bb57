"""Set-ups of a user's own script around `SpanGRPOTrainer` that cannot work, or not as they are meant."""

from dataclasses import replace

import pytest
from datasets import Dataset, DatasetDict
from transformers import TrainingArguments
from trl import GRPOConfig

from border.case import case, check
from spanwise import Objective, Scheme
from spanwise.engines.trl import SpanGRPOConfig, SpanGRPOTrainer
from spanwise.layout import Layout
from trl_small import LAYOUT, OBJECTIVES, SAID, THIRD_PARTY, Said, config, cut, policy, prompts, scheme, scripted, tokenizer

pytestmark = [*THIRD_PARTY, pytest.mark.usefixtures("unchecked_shapes")]
QUESTIONS = [{"prompt": "2+2="}, {"prompt": "1+2="}]
CPU = {"use_cpu": True, "bf16": False}


def right(completions, answer, **columns):
    return [float(f"<answer>{want}<" in text) for text, want in zip(completions, answer, strict=True)]


def logging(completions, log_extra):
    log_extra("first", completions[:1])
    return [0.0] * len(completions)


def masked(batch, trainer):
    """A rollout function that takes every token for the environment's."""
    said = scripted()(batch, trainer)
    return {**said, "env_mask": [[0] * len(ids) for ids in said["completion_ids"]]}


@case
def script(folder, replaced=None, *, scripts=SAID, train=False, kind=SpanGRPOConfig, **options):
    """A training script with some arguments of the trainer `replaced` (None leaves one out); `options` are of its config."""
    args = config(folder, **options) if kind is SpanGRPOConfig else kind(str(folder), **CPU, **options)
    usual = {"args": args, "train_dataset": prompts(), "processing_class": tokenizer(), "scheme": scheme()}
    arguments = {**usual, "rollout_func": scripted(scripts), **(replaced or {})}
    run = SpanGRPOTrainer(policy(), **{name: value for name, value in arguments.items() if value is not None})
    if train:
        run.train()
    return "it trains"


def prefilled_again(folder):
    """Every other completion calls a tool, and the chat template opens the tag again after the tool's output."""
    end = ["4", "</answer>", "<confidence>", "1", "</confidence>", "<eos>"]
    with_tool = Said(["4", "</answer>", "<tool>", "<answer>", *end], [0, 0, -1, -1, *[0] * 6], 1.0, 1.0)
    scripts = [Said(end, [0] * 6, 1.0, 1.0), with_tool]
    opened = Dataset.from_list([{**row, "prompt": f"{row['prompt']}<answer>"} for row in prompts()])
    inside = scheme(layout=Layout(dict(LAYOUT.blocks), prefilled="answer"))
    replaced = {"scheme": inside, "train_dataset": opened, "rollout_func": scripted(scripts, tools=True)}
    return script(replaced, train=True)(folder)


def own_metrics(folder):
    """An `output_dir` with a file of the user's own under a name that the run folder needs."""
    (folder / "metrics.jsonl").write_text("mine\n")
    return script(keep_rollouts=1, train=True)(folder)


CASES = {
    "SpanGRPOTrainer(..., reward_funcs=[right]), as with GRPOTrainer": script({"reward_funcs": [right]}),
    "SpanGRPOTrainer without a scheme": script({"scheme": None}),
    "SpanGRPOTrainer(..., scheme='bae')": script({"scheme": "bae"}),
    "SpanGRPOTrainer(..., layout=layout, objectives=objectives)": script(
        {"scheme": None, "layout": LAYOUT, "objectives": OBJECTIVES}
    ),
    "SpanGRPOTrainer(..., callback=[...])": script({"callback": []}),
    "SpanGRPOTrainer(..., args=TrainingArguments(...))": script(kind=TrainingArguments),
    "SpanGRPOConfig(num_generations=1)": script(num_generations=1),
    "8 completions per step and num_generations=3": lambda folder: SpanGRPOConfig(str(folder), num_generations=3, **CPU),
    "GRPOConfig(loss_type='dr-grpo')": script(kind=GRPOConfig, loss_type="dr-grpo"),
    "loss_type='vespo' with importance_sampling_level='block'": script(loss_type="vespo", importance_sampling_level="block"),
    "max_completion_length=None": script(max_completion_length=None),
    "importance_sampling_level='span'": script(importance_sampling_level="span"),
    "dynamic_sampling='corect'": script(dynamic_sampling="corect"),
    "dynamic_sampling='credit' with a dataset of images": script(
        {"train_dataset": Dataset.from_list([{**row, "image": "a"} for row in prompts()])},
        dynamic_sampling="credit",
    ),
    "dynamic_sampling='credit' with a streamed dataset": script(
        {"train_dataset": prompts().to_iterable_dataset()}, dynamic_sampling="credit"
    ),
    "dynamic_sampling_rounds=0": script(dynamic_sampling="credit", dynamic_sampling_rounds=0),
    "reward_weights=[1.0, 0.5]": script(reward_weights=[1.0, 0.5]),
    "scale_rewards='batch'": script(scale_rewards="batch"),
    "remove_unused_columns=True, and `correct` reads the gold answers": script(remove_unused_columns=True, train=True),
    "keep_rollouts=1 with an output_dir that has a metrics.jsonl of one's own": own_metrics,
    "beta=0.1 with a model that was built in memory": script(beta=0.1),
    'log_metrics="some"': script(log_metrics="some"),
    "train_dataset=load_dataset(...) with its splits": script(
        {"train_dataset": DatasetDict({"train": prompts(), "test": prompts()})}
    ),
    "train_dataset=[{'prompt': ...}, ...], a list": script({"train_dataset": QUESTIONS}),
    "no train_dataset": script({"train_dataset": None}),
    "a dataset with a column 'completions'": script({"train_dataset": prompts().add_column("completions", ["4", "3"])}),
    "a streamed dataset without the answers that `correct` reads": script(
        {"train_dataset": Dataset.from_list(QUESTIONS).to_iterable_dataset(), "rollout_func": None}
    ),
    "an eval_dataset without the answers that `correct` reads": script(
        {"eval_dataset": {"hard": Dataset.from_list(QUESTIONS)}, "rollout_func": None}
    ),
    "an eval_dataset with a prompt that is None": script(
        {
            "eval_dataset": {"hard": Dataset.from_dict({"prompt": ["2+2=", None], "answer": ["4", "3"]})},
            "rollout_func": None,
        }
    ),
    "mask_truncated_completions=True, and no completion ends before max_completion_length": script(
        scripts=[cut(SAID[0])] * 8, train=True, mask_truncated_completions=True
    ),
    "a rollout_func whose env_mask is 0 everywhere": script({"rollout_func": masked}, train=True),
    "tool output that ends with the tag of `prefilled`": prefilled_again,
    "a rollout_func that returns 'answer', a column of the dataset": script(
        {"rollout_func": lambda batch, trainer: {**scripted()(batch, trainer), "answer": ["4"] * len(batch)}}, train=True
    ),
    "a reward function that logs one value of `log_extra` for 8 completions": script(
        {"scheme": scheme(objectives=[Objective(logging, "solution")])}, train=True
    ),
    "every objective with weight=0.0": script(
        {"scheme": scheme(objectives=[replace(one, weight=0.0) for one in OBJECTIVES])}, train=True
    ),
    "Scheme.preset('rlcr', ...) with objectives that pay different blocks": lambda folder: Scheme.preset(
        "rlcr", LAYOUT, objectives=[OBJECTIVES[0], Objective(right, "confidence")]
    ),
}

test = check(__doc__, CASES)
