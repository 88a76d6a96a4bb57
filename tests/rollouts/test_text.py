"""Texts without ids: cut into pieces that keep every byte, or encoded with a tokenizer."""

import math

import torch
from tokenizers import Tokenizer

import trl_small
from rollout_files import texts, write_lines
from spanwise.layout import Layout
from spanwise.rollouts import read_rollouts
from spanwise.rollouts.cells import answer_text, whole_number
from spanwise.rollouts.table import AT_ONCE, gather, tokenize
from spanwise.segment import find_blocks

HOSTILE = [
    "", " ", "\n\n<answer>4</answer>", "a<b> <", "<<answer>>4</answer", "é\u2028日本 <answer>½</answer>\r\n", "\ud800x",
]  # fmt: skip


def test_pieces_keep_every_byte_and_cut_at_tags(tmp_path):
    rows = [{"input": "q", "output": text, "gts": "4", "score": 0.0, "step": 1} for text in HOSTILE]
    table = read_rollouts(write_lines(tmp_path / "1.jsonl", rows))
    assert texts(table) == [*HOSTILE[:-1], "\ufffdx"]
    tagged = [table.vocabulary.pieces[i].decode() for i in table.tokens.slice(5, 6)]
    assert tagged == ["é", "\u2028日本", " ", "<answer>", "½", "</answer>", "\r\n"]
    places = table.tokens.places(slice(2, 3))
    spans, text = find_blocks(
        gather(places, table.tokens.values, 0), torch.from_numpy(places >= 0), layout=Layout({"before": [], "x": ["answer"]}),
        vocabulary=table.vocabulary,
    )  # fmt: skip
    assert text[0]["before"][""] == "\n\n"
    assert text[0]["x"]["answer"] == "4"
    assert spans.start_nk.tolist() == [[0, 1]]


def test_text_can_be_encoded_with_a_tokenizer(tmp_path):
    trl_small.tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"input": "2+2=", "output": "ab<answer>4</answer>", "gts": "4", "score": 1.0, "step": 1}]
    table = read_rollouts(write_lines(tmp_path / "1.jsonl", rows), tokenizer=tmp_path / "model")
    assert [table.vocabulary.pieces[i] for i in table.tokens.values] == [b"a", b"b", b"<answer>", b"4", b"</answer>"]
    assert table.note.startswith("The file holds no token ids; the text is encoded with the tokenizer of")
    rows[0]["output"] = "xyz<answer>4</answer>"  # not in its vocabulary
    table = read_rollouts(write_lines(tmp_path / "1.jsonl", rows), tokenizer=tmp_path / "model")
    assert "changes 1 of 1 texts" in table.note


def test_completions_encoded_some_at_a_time_are_each_encoded_as_alone(tmp_path):
    """Parts that were not sampled and empty completions lie at the seams between two calls of the tokenizer."""
    trl_small.tokenizer().save_pretrained(tmp_path / "model")
    backend = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    seams = {AT_ONCE - 1, AT_ONCE, 2 * AT_ONCE - 1, 2 * AT_ONCE}
    completions = [
        [] if n in seams and n % 2 else [("<answer>", True), ("4" * (n % 5), n % 3 > 0), ("</answer>", True)]
        for n in range(2 * AT_ONCE + 1)
    ]
    cut = tokenize(completions, tmp_path / "model")
    assert len(cut.ids) == len(completions)
    for n, parts in enumerate(completions):
        alone = [(token, sampled) for text, sampled in parts for token in backend.encode(text, add_special_tokens=False).ids]
        assert cut.ids.slice(n, n + 1).tolist() == [token for token, _ in alone]
        assert cut.ids.with_values(cut.trainable).slice(n, n + 1).tolist() == [sampled for _, sampled in alone]
    assert not tokenize([], tmp_path / "model").trainable.size


def test_cells_become_text_and_whole_numbers():
    assert [answer_text(cell) for cell in (4, {"city": "Rome"}, math.nan, "04")] == ["4", '{"city": "Rome"}', None, "04"]
    assert (whole_number(None, "step"), whole_number(3.0, "step")) == (0, 3)
