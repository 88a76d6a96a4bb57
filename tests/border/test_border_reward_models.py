"""Reward models that are not there, or that are another kind than their options say."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaForTokenClassification

from border.case import Case, check
from spanwise import Layout, Objective, Scheme, score_all
from spanwise.types import PiecewiseText
from tokenizers_small import byte_level

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

LAYOUT = Layout({"plan": ["plan"], "answer": ["answer"]})
TEXT = [{"plan": {"": f"plan {n}", "plan": "x"}, "answer": {"": "4", "answer": "4"}} for n in range(3)]
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def asked(kind=None, text=TEXT, columns=None, labels=2, **options):
    """A scheme with a reward model for the plan, and its numbers of some completions; the model lies in the folder `judge`."""
    if kind is not None:
        tokenizer = byte_level(special=("<pad>",))
        tokenizer.pad_token = "<pad>"
        tokenizer.save_pretrained("judge")
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            num_labels=labels,
            pad_token_id=tokenizer.pad_token_id,
            max_position_embeddings=64,
            **SIZES,
        )
        kind(config).save_pretrained("judge")
    objective = Objective("reward_model", pays="plan", options={"model": "judge", **options})
    Scheme.preset("bae", LAYOUT, objectives=[objective])
    score_all([objective], text, columns={"prompt": ["2+2"] * len(text)} if columns is None else columns)


CASES = [
    Case(
        "A reward model without a name",
        lambda folder: asked(model=""),
        "The reward 'reward_model' has no model; name a folder or a hub's name: options: {model: NAME}.",
    ),
    Case(
        "A reward model that is not there",
        lambda folder: asked(model="./juge"),
        "The reward model './juge' cannot be loaded: ... Name a folder that holds one.",
    ),
    Case(
        "`sees: all`",
        lambda folder: asked(sees="all"),
        "There is no value of the reward model's option 'sees' 'all'. Known: part, prefix, whole.",
    ),
    Case(
        "An empty marker",
        lambda folder: asked(marker=""),
        "The reward model's marker is ''; write the text that stands behind each step.",
    ),
    Case(
        "A marker, and less than all steps",
        lambda folder: asked(marker="<step>", sees="prefix"),
        "A reward model with a marker reads all steps of a completion in one pass; leave sees out.",
    ),
    Case(
        "Choices without a marker",
        lambda folder: asked(choices={"+": 1, "-": 0}),
        "The reward model's choices are {'+': 1, '-': 0}; write two or more tokens with their numbers, and the marker at which the "
        "model writes one of them: {'+': 1, '-': 0}.",
    ),
    Case(
        "`batch_size: 0`",
        lambda folder: asked(batch_size=0),
        "The reward model's option 'batch_size' is 0; write a whole number of at least 1.",
    ),
    Case(
        "A classifier of whole texts that is to judge each step",
        lambda folder: asked(LlamaForSequenceClassification, marker="<step>"),
        "The reward model 'judge' is LlamaForSequenceClassification, which gives a row one number; leave marker out. sees: prefix "
        "shows a step and what is before.",
    ),
    Case(
        "A process reward model without its marker",
        lambda folder: asked(LlamaForTokenClassification),
        "The reward model 'judge' is LlamaForTokenClassification, which gives every token a number; set marker, the text behind "
        "each step.",
    ),
    Case(
        "A language model that is taken for a reward model",
        lambda folder: asked(LlamaForCausalLM),
        "The reward model 'judge' is LlamaForCausalLM, which writes tokens and no number; set marker and choices, or use the "
        "reward judge.",
    ),
    Case(
        "Choices for a model that has labels",
        lambda folder: asked(LlamaForTokenClassification, marker="<step>", choices={"+": 1, "-": 0}),
        "The reward model 'judge' is LlamaForTokenClassification, which has labels; name one with label, and leave choices out.",
    ),
    Case(
        "A choice that is no token",
        lambda folder: asked(LlamaForCausalLM, marker="<step>", choices={"good": 1, "bad": 0}),
        "The reward model's choice 'good' is 4 tokens; write words of one token.",
    ),
    Case(
        "A label that the model does not have",
        lambda folder: asked(LlamaForSequenceClassification, label="LABEL_2"),
        "The reward model 'judge': There is no label 'LABEL_2'. Did you mean 'LABEL_1'? Known: LABEL_0, LABEL_1.",
    ),
    Case(
        "A label of a model that gives one number",
        lambda folder: asked(LlamaForSequenceClassification, labels=1, label=0),
        "The reward model 'judge' has one label, whose number is the reward; leave label out.",
    ),
    Case(
        "A label beside choices",
        lambda folder: asked(LlamaForCausalLM, marker="<step>", choices={"+": 1, "-": 0}, label=0),
        "The reward model 'judge' has choices; leave label out.",
    ),
    Case(
        "A reward model without a column of prompts",
        lambda folder: asked(LlamaForSequenceClassification, columns={"answer": ["4"] * 3}),
        "A reward model reads the prompt from a column prompts, prompt or question; the columns are answer.",
    ),
    Case(
        "Fields of JSON, one after the other",
        lambda folder: asked(LlamaForSequenceClassification, [PiecewiseText({"plan": {"": "1"}}, "{1}")], sees="prefix"),
        "A reward model cannot read blocks one after the other that are found in pieces; leave sees, inside and marker out.",
    ),
    Case(
        "Completions that are all too long for the model",
        lambda folder: asked(LlamaForSequenceClassification, [{"plan": {"": "long" * 99}}] * 2),
        "The reward model 'judge' failed for all 2 completions. The first says: the prompt and the text have 399 tokens, "
        "and the reward model takes 64.",
    ),
]
test = check(CASES)
