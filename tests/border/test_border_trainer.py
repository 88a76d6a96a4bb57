"""Set-ups of a user's own script around `SpanGRPOTrainer` that cannot work, or not as they are meant."""

import pytest
from datasets import Dataset, DatasetDict
from transformers import TrainingArguments
from trl import GRPOConfig

from border.case import Case, check
from spanwise.engines.trl import SpanGRPOConfig, SpanGRPOTrainer
from spanwise.objective import Objective
from spanwise.scheme import Scheme
from trl_small import LAYOUT, OBJECTIVES, SAID, THIRD_PARTY, config, policy, prompts, say, scheme, scripted, tokenizer

pytestmark = [*THIRD_PARTY, pytest.mark.usefixtures("unchecked_shapes")]
QUESTIONS = [{"prompt": "2+2="}, {"prompt": "1+2="}]
CPU = {"use_cpu": True, "bf16": False}


def right(completions, answer, **columns):
    return [float(f"<answer>{want}<" in text) for text, want in zip(completions, answer, strict=True)]


def script(folder, *, said=SAID, train=False, given=None, **options):
    """A training script; `given` replaces arguments of the trainer (None leaves one out), `options` are of its config."""
    usual = {
        "args": config(folder, **options),
        "train_dataset": prompts(),
        "processing_class": tokenizer(),
        "rollout_func": scripted(said),
        "scheme": scheme(),
    }
    arguments = {**usual, **(given or {})}
    run = SpanGRPOTrainer(policy(), **{name: value for name, value in arguments.items() if value is not None})
    if train:
        run.train()
    return "it trains"


def cut_off():
    one = say("ab", "4", 0.9, 1.0)
    one.pieces, one.blocks = one.pieces[:-1], one.blocks[:-1]
    return [one] * 8


CASES = [
    Case(
        "SpanGRPOTrainer(..., reward_funcs=[right]), as with GRPOTrainer",
        lambda folder: script(folder, given={"reward_funcs": [right]}),
        "The trainer builds reward_funcs from the objectives. Pass each reward as Objective(reward, pays=[...]), which names the "
        "blocks that it pays.",
    ),
    Case(
        "SpanGRPOTrainer without a scheme",
        lambda folder: script(folder, given={"scheme": None}),
        "The scheme is None, which is no Scheme. Write scheme=Scheme.preset('bae', layout, objectives=",
    ),
    Case(
        "SpanGRPOTrainer(..., scheme='bae')",
        lambda folder: script(folder, given={"scheme": "bae"}),
        "The scheme is 'bae', which is no Scheme. Write scheme=Scheme.preset(",
    ),
    Case(
        "SpanGRPOTrainer(..., layout=layout, objectives=objectives), as in older versions",
        lambda folder: script(folder, given={"scheme": None, "layout": LAYOUT, "objectives": OBJECTIVES}),
        "Set layout and objectives in the scheme, not in the trainer. Write scheme=Scheme.preset(",
    ),
    Case(
        "SpanGRPOTrainer(..., callback=[...])",
        lambda folder: script(folder, given={"callback": []}),
        "There is no argument of SpanGRPOTrainer called 'callback'. Did you mean 'callbacks'? Known: args, callbacks, ...",
    ),
    Case(
        "SpanGRPOTrainer(..., args=TrainingArguments(...))",
        lambda folder: script(folder, given={"args": TrainingArguments(str(folder), **CPU)}),
        "args is a TrainingArguments; pass SpanGRPOConfig(...) or TRL's GRPOConfig(...).",
    ),
    Case(
        "SpanGRPOConfig(num_generations=1)",
        lambda folder: script(folder, num_generations=1),
        "num_generations is 1: a completion that is alone in its group has no other to be compared with, so its credit is "
        "always 0.",
    ),
    Case(
        "8 completions per step and num_generations=3",
        lambda folder: SpanGRPOConfig(str(folder), num_generations=3, **CPU),
        "generation_batch_size (8) must be divisible by num_generations (3).",
    ),
    Case(
        "GRPOConfig(loss_type='dr-grpo')",
        lambda folder: script(folder, given={"args": GRPOConfig(str(folder), loss_type="dr-grpo", **CPU)}),
        "There is no loss_type 'dr-grpo'. Did you mean 'dr_grpo'? Known: bnpo, ...",
    ),
    Case(
        "loss_type='vespo' with importance_sampling_level='block'",
        lambda folder: script(folder, loss_type="vespo", importance_sampling_level="block"),
        "importance_sampling_level is 'block', but loss_type 'vespo' weighs every token by the ratio of its whole completion. "
        "Leave importance_sampling_level at 'token', or use another loss_type.",
    ),
    Case(
        "importance_sampling_level='span'",
        lambda folder: script(folder, importance_sampling_level="span"),
        "There is no importance_sampling_level 'span'. Known: block, sequence, token.",
    ),
    Case(
        "dynamic_sampling='corect'",
        lambda folder: script(folder, dynamic_sampling="corect"),
        "There is no dynamic_sampling 'corect'. Did you mean 'correct'? Known: brier, correct, credit.",
    ),
    Case(
        "dynamic_sampling='credit' with a dataset of images",
        lambda folder: script(
            folder,
            dynamic_sampling="credit",
            given={"train_dataset": Dataset.from_list([{**row, "image": "a"} for row in prompts()])},
        ),
        "dynamic_sampling cannot exchange images in the middle of a batch. Leave dynamic_sampling out.",
    ),
    Case(
        "dynamic_sampling='credit' with a streamed dataset",
        lambda folder: script(folder, dynamic_sampling="credit", given={"train_dataset": prompts().to_iterable_dataset()}),
        "dynamic_sampling draws other prompts by their number, and train_dataset is a IterableDataset; pass a datasets.Dataset.",
    ),
    Case(
        "dynamic_sampling_rounds=0",
        lambda folder: script(folder, dynamic_sampling="credit", dynamic_sampling_rounds=0),
        "dynamic_sampling_rounds is 0; set it to 1 or more.",
    ),
    Case(
        "reward_weights=[1.0, 0.5]",
        lambda folder: script(folder, reward_weights=[1.0, 0.5]),
        "reward_weights is [1.0, 0.5]: TRL would weigh only the logged reward. Set the weight of each objective instead, for "
        "example Objective('brier', weight=0.5, ...).",
    ),
    Case(
        "scale_rewards='batch'",
        lambda folder: script(folder, scale_rewards="batch"),
        "scale_rewards='batch' changes nothing: ... but spanwise takes advantages from the objectives "
        "(their baseline, scale and weight).",
    ),
    Case(
        "beta=0.1 with a model that was built in memory",
        lambda folder: script(folder, beta=0.1),
        "beta is 0.1, so TRL must load the reference model by name, but your model has no name: ... Save it and "
        "its tokenizer in a folder and pass the folder as model, or set beta=0.",
    ),
    Case(
        'log_metrics="some"',
        lambda folder: script(folder, log_metrics="some"),
        "There is no log_metrics 'some'. Known: all, few.",
    ),
    Case(
        "train_dataset=load_dataset(...) with its splits",
        lambda folder: script(folder, given={"train_dataset": DatasetDict({"train": prompts(), "test": prompts()})}),
        "train_dataset holds the splits train, test; pass one of them: train_dataset=data['train'].",
    ),
    Case(
        "train_dataset=[{'prompt': ...}, ...], a list",
        lambda folder: script(folder, given={"train_dataset": QUESTIONS}),
        "train_dataset is a list; make a dataset: datasets.Dataset.from_list(rows).",
    ),
    Case(
        "no train_dataset",
        lambda folder: script(folder, given={"train_dataset": None}),
        "train_dataset is missing: pass a dataset with the column 'prompt' and the columns of the rewards.",
    ),
    Case(
        "a streamed dataset without the answers that `correct` reads",
        lambda folder: script(
            folder, train=True, given={"train_dataset": Dataset.from_list(QUESTIONS).to_iterable_dataset()}
        ),
        "Objective 'correct' reads the dataset column 'answer', which does not exist; the columns are prompt.",
    ),
    Case(
        "an eval_dataset without the answers that `correct` reads",
        lambda folder: script(folder, given={"eval_dataset": {"hard": Dataset.from_list(QUESTIONS)}}),
        "eval_dataset['hard']: Objective 'correct' reads the dataset column 'answer', which does not exist; the columns are "
        "prompt.",
    ),
    Case(
        "mask_truncated_completions=True, and no completion ends before max_completion_length",
        lambda folder: script(folder, said=cut_off(), train=True, mask_truncated_completions=True),
        "Step 0: all 8 completions were cut off at max_completion_length=16, and mask_truncated_completions leaves them out of "
        "the loss, so nothing is learned.",
    ),
    Case(
        "Scheme.preset('rlcr', ...) with objectives that pay different blocks",
        lambda folder: script(
            folder,
            given={"scheme": Scheme.preset("rlcr", LAYOUT, objectives=[OBJECTIVES[0], Objective(right, "confidence")])},
        ),
        "Method 'rlcr' gives a completion one number, but 'correct' pays solution and 'right' pays confidence. Let all objectives "
        "pay the same blocks, or use method 'bae'.",
    ),
]

test = check(CASES)
