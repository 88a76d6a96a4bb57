"""Reward models that are not there, or that are another kind than their options say."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaForTokenClassification

from border.case import case, check
from spanwise import Layout, Objective, Scheme, score_all
from spanwise.types import PiecewiseText
from tokenizers_small import byte_level

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

LAYOUT = Layout({"plan": ["plan"], "answer": ["answer"]})
TEXT = [{"plan": {"": f"plan {n}", "plan": "x"}, "answer": {"": "4", "answer": "4"}} for n in range(3)]
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
SIZES["max_position_embeddings"] = 64


@case
def asked(kind=None, text=TEXT, columns=None, labels=2, **options):
    """A scheme with a reward model for the plan, and its numbers of some completions; the model lies in the folder `judge`."""
    if kind is not None:
        tokenizer = byte_level(special=("<pad>",))
        tokenizer.pad_token = "<pad>"
        tokenizer.save_pretrained("judge")
        about = {"vocab_size": len(tokenizer), "num_labels": labels, "pad_token_id": tokenizer.pad_token_id}
        kind(LlamaConfig(**about, **SIZES)).save_pretrained("judge")
    objective = Objective("reward_model", pays="plan", options={"model": "judge", **options})
    Scheme.preset("bae", LAYOUT, objectives=[objective])
    score_all([objective], text, columns={"prompt": ["2+2"] * len(text)} if columns is None else columns)


CASES = {
    "A reward model without a name": asked(model=""),
    "A reward model that is not there": asked(model="./juge"),
    "`sees: all`": asked(sees="all"),
    "An empty marker": asked(marker=""),
    "A marker, and less than all steps": asked(marker="<step>", sees="prefix"),
    "Choices without a marker": asked(choices={"+": 1, "-": 0}),
    "`batch_size: 0`": asked(batch_size=0),
    "A classifier of whole texts that is to judge each step": asked(LlamaForSequenceClassification, marker="<step>"),
    "A process reward model without its marker": asked(LlamaForTokenClassification),
    "A language model that is taken for a reward model": asked(LlamaForCausalLM),
    "Choices for a model that has labels": asked(LlamaForTokenClassification, marker="<step>", choices={"+": 1, "-": 0}),
    "A choice that is no token": asked(LlamaForCausalLM, marker="<step>", choices={"good": 1, "bad": 0}),
    "A label that the model does not have": asked(LlamaForSequenceClassification, label="LABEL_2"),
    "A label of a model that gives one number": asked(LlamaForSequenceClassification, labels=1, label=0),
    "A label beside choices": asked(LlamaForCausalLM, marker="<step>", choices={"+": 1, "-": 0}, label=0),
    "A reward model without a column of prompts": asked(LlamaForSequenceClassification, columns={"answer": ["4"] * 3}),
    "Fields of JSON, one after the other": asked(
        LlamaForSequenceClassification, [PiecewiseText({"plan": {"": "1"}}, "{1}")], sees="prefix"
    ),
    "Completions that are all too long for the model": asked(
        LlamaForSequenceClassification, [{"plan": {"": "long" * 99}}] * 2
    ),
}
test = check(__doc__, CASES)
