"""The one table of completions: all that a file says of some rows; texts without ids, cut at every byte or encoded."""

import math

import numpy as np
import torch
from tokenizers import Tokenizer

import trl_small
from rollout_files import texts, write_lines
from spanwise.layout import Layout
from spanwise.rollouts import read_rollouts, rollout_table, write_rollouts
from spanwise.rollouts.cells import answer_text, whole_number
from spanwise.rollouts.rows import credited_units
from spanwise.rollouts.table import AT_ONCE, fitting_runs, gather, tokenize
from spanwise.segment import find_blocks


def test_a_table_holds_all_that_its_file_says(tmp_path):
    """What `test_what_is_written_is_read` (of readers_own) has no columns of; a run numbers the rollouts of each step from 0."""
    columns = {
        "step": [1, 1, 2, 2], "group": [0, 0, 1, 1], "rollout": [0, 0, 0, 1], "prompt": ["a", "a", "b", "b"],
        "answer": ["[4]", ["Paris"], None, ["4", "four"]], "start/all": [0] * 4, "end/all": [3, 0, 0, 4],
        "self_reward": [0.5, np.nan, 0.25, 1.0], "completion_ids": np.arange(9), "trainable": np.arange(9) % 4 != 1,
        "advantages/bae": np.arange(9) / 4,
    }  # fmt: skip
    pieces = [f"{n} ".encode() for n in range(9)]
    write_rollouts(tmp_path / "a.parquet", [rollout_table(columns, np.array([0, 3, 3, 5, 9]))], pieces=pieces)
    rollouts = read_rollouts(tmp_path / "a.parquet")
    # A list of one stays one, as rewards read its entry; the text `[4]` a completion may have to write.
    assert rollouts.columns["answer"] == ["[4]", ["Paris"], None, '["4", "four"]']
    assert rollouts.rollout_n.tolist() == [0, 0, 1, 2]
    assert rollouts.score_n.nan_to_num(nan=9.0).tolist() == [0.5, 9.0, 0.25, 1.0]
    assert rollouts.as_recorded.value.tolist() == [n / 4 for n in range(9)]
    assert rollouts.tokens.places(np.array([1, 2])).tolist() == [[-1, -1], [3, 4]]  # side by side, padded
    assert rollouts.tokens.places(slice(3, 3)).shape == (0, 0)


def test_runs_of_rows_fit_a_size_and_a_longer_row_is_its_own():
    assert list(fitting_runs(np.array([3, 1, 4]), 6)) == [(0, 2), (2, 3)]
    assert list(fitting_runs(np.array([4, 1, 9]), 6)) == [(0, 1), (1, 2), (2, 3)]


def test_credit_that_all_blocks_share_is_that_of_the_completion():
    credit = {"a": torch.tensor([0.5, torch.nan]), "b": torch.tensor([0.5, -0.5])}
    assert credited_units(credit, "completion")["completion"].tolist() == [0.5, -0.5]
    assert list(credited_units(credit, "block")) == ["a", "b"]


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
    ids_nt, layout = gather(places, table.tokens.values, 0), Layout({"before": [], "x": ["answer"]})
    spans, text = find_blocks(ids_nt, torch.from_numpy(places >= 0), layout=layout, vocabulary=table.vocabulary)
    assert text[0]["before"][""] == "\n\n"
    assert text[0]["x"]["answer"] == "4"
    assert spans.start_nk.tolist() == [[0, 1]]


def test_text_can_be_encoded_with_a_tokenizer(tmp_path):
    trl_small.tokenizer().save_pretrained(tmp_path / "model")

    def encoded(output):
        row = {"input": "2+2=", "output": output, "gts": "4", "score": 1.0, "step": 1}
        return read_rollouts(write_lines(tmp_path / "1.jsonl", [row]), tokenizer=tmp_path / "model")

    table = encoded("ab<answer>4</answer>")
    assert [table.vocabulary.pieces[i] for i in table.tokens.values] == [b"a", b"b", b"<answer>", b"4", b"</answer>"]
    assert table.note.startswith("The file holds no token ids; the text is encoded with the tokenizer of")
    assert "changes 1 of 1 texts" in encoded("xyz<answer>4</answer>").note  # not in its vocabulary


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
    assert answer_text(["Paris"]) == ["Paris"]
    assert (whole_number(None, "step"), whole_number(3.0, "step")) == (0, 3)
