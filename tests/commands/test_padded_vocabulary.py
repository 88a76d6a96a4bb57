"""Models with more embedding rows than their tokenizer has tokens, which sample the rows that stand for nothing."""

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import trl_small
from spanwise.commands.eval.evaluate import evaluate
from spanwise.fidelity.rerolls import Roller, collect_last_blocks, collect_tokens
from spanwise.recipe import load
from spanwise.segment import Vocabulary
from spanwise.tasks import DIGITS_LAYOUT, Task, build_tokenizer

#: What comes after what, with certainty; two of the tokens are rows that the tokenizer does not know.
CHAIN = {
    "=": "<reasoning>", "<reasoning>": 62, 62: "</reasoning>", "</reasoning>": "<answer>", "<answer>": "2",
    "2": "</answer>", "</answer>": "<analysis>", "<analysis>": 63, 63: "</analysis>", "</analysis>": "<confidence>",
    "<confidence>": "1", "1": "</confidence>", "</confidence>": "<eos>",
}  # fmt: skip
ROWS = Dataset.from_dict({"prompt": ["1+1=", "1+2="], "answer": ["2", "3"]})
(TRL_NOTICE,) = trl_small.THIRD_PARTY
TASK = Task("digits-easy", "nowhere", ROWS, ROWS, DIGITS_LAYOUT, 16)


@pytest.fixture(scope="module")
def padded():
    """A transformer of no layers that looks at the last token only: 64 rows, of which the tokenizer names 61."""
    tokenizer = build_tokenizer()
    assert len(tokenizer) == 61
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=8, num_hidden_layers=0, num_attention_heads=1,
            num_key_value_heads=1, tie_word_embeddings=False, pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(64))
        model.lm_head.weight.zero_()
        for before, after in CHAIN.items():
            row, column = (tokenizer.get_vocab().get(token, token) for token in (before, after))
            model.lm_head.weight[column, row] = 8.0
    return model, tokenizer


def test_evaluate_reads_them_as_nothing(padded):
    samples = evaluate(*padded, TASK, load(None), prompts=2, samples=2)
    assert samples.answers["solution"] == ["2"] * 4
    assert samples.correct["solution"].tolist() == [1, 1, 0, 0]
    assert samples.confidence_n.tolist() == [1.0] * 4


def test_fidelity_reads_them_as_nothing(padded):
    rolled = collect_last_blocks(Roller(*padded, TASK, 1.0, 16), ROWS, samples=2, rerolls=3)
    assert rolled.outcome_xs.tolist() == [[1, 1], [0, 0]]
    assert rolled.confidence_xs.tolist() == [[1, 1], [1, 1]]
    assert rolled.again_dm.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_token_rollouts_read_them_as_nothing_with_one_vocabulary(padded, monkeypatch):
    read = []
    of = Vocabulary.of
    monkeypatch.setattr(Vocabulary, "of", lambda *inputs: read.append(inputs) or of(*inputs))
    blocks, trajectories, again_ntm = collect_tokens(Roller(*padded, TASK, 1.0, 16), ROWS, samples=2, rerolls=3)
    assert blocks.ids_nt[0, 1] == 62
    assert blocks.reward_n.tolist() == [1, 1, 0, 0]
    assert trajectories.value_nt[:, :6].tolist() == [[1] * 6] * 2 + [[0] * 6] * 2
    assert again_ntm[:2, :6].unique().tolist() == [1]
    assert len(read) == 1


@TRL_NOTICE
def test_the_trainer_knows_them_too(tmp_path):
    model = trl_small.policy()
    model.resize_token_embeddings(32, mean_resizing=False)
    run = trl_small.trainer(tmp_path, extra={"model": model})
    assert run.step.vocabulary.pieces[22:] == (b"b", *[b""] * 9)
