"""Records that no writer should write: one sentence each."""

import gzip
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout_files import small_episode, trl_file, verl_file, write_lines
from spanwise.errors import DataError
from spanwise.rollouts import read_rollouts


def verl_with(**fields):
    return lambda f: write_lines(f / "1.jsonl", [{"input": "q", "output": "a"}, {"input": "q", "output": "a", **fields}])


def trace_with(**fields):
    def make(folder):
        line = small_episode("hm", {})
        line["traces"][0].update(fields)
        return write_lines(folder / "traces.jsonl", [line])

    return make


def node_with(**fields):
    return trace_with(nodes=[{"parent": None, "message": {"role": "user", "content": "q"}}, {"sampled": True, **fields}])


def deep(folder):
    (folder / "1.jsonl").write_text('{"input": "q", "output": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    return folder / "1.jsonl"


def deep_prompt(folder):
    (folder / "1.jsonl").write_text('{"output": "q", "input": ' + "[" * 900 + "]" * 900 + "}\n")
    return folder / "1.jsonl"


def other_types(folder):
    trl_file(folder / "completions_1.parquet", ["a"], acc=[1.0])
    trl_file(folder / "completions_2.parquet", ["b"], acc=[["x"]])
    return folder


def two_columns(folder):
    names = ["prompt", "completion", "acc", "acc"]
    pq.write_table(pa.Table.from_arrays([pa.array(["q"])] * 2 + [pa.array([1.0])] * 2, names=names), folder / "a.parquet")
    return folder


def packed(folder):
    (folder / "1.jsonl.gz").write_bytes(gzip.compress(b'{"input": "q", "output": "a"}\n'))
    return folder / "1.jsonl.gz"


def no_utf8(folder):
    file = verl_file(folder / "1.jsonl", ["a"])
    return file.rename(Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.jsonl")))


LINE = "Line 1 of '{}' has "
SENTENCES = {
    "step of words": (verl_with(step="abc"), "Line 2 of '{}' has 'abc' as 'step', which must be a whole number."),
    "step as a list": (verl_with(step=[1]), "Line 2 of '{}' has [1] as 'step', which must be a whole number."),
    "step NaN": (verl_with(step=float("nan")), "Line 2 of '{}' has nan as 'step', which must be a whole number."),
    "step beyond 64 bits": (verl_with(step=10**30), "as 'step', which must be a whole number."),
    "nesting": (deep, "Line 1 of '{}' is nested too deeply to be read"),
    "nesting of messages": (deep_prompt, "Line 1 of '{}' is nested too deeply to be read"),
    "step of TRL": (
        lambda f: trl_file(f / "a.parquet", ["a", "b"], step=["1", "x"]),
        "Row 0 of '{}' has '1' as 'step', which must be a whole number.",
    ),
    "types": (other_types, "The files of '{}' do not fit together ("),
    "two columns": (two_columns, "has several columns called 'acc'"),
    "packed": (packed, "'{}' is compressed; unpack it first."),
    "name": (no_utf8, "caf\ufffd.jsonl' is not valid UTF-8; rename it."),
    "task": (trace_with(task="sums"), LINE + "'sums' as 'task', which must be an object."),
    "agent": (trace_with(agent="a"), LINE + "'a' as 'agent', which must be an object."),
    "group": (lambda f: write_lines(f / "t.jsonl", [small_episode("a", {}) | {"group": "g"}]), LINE + "'g' as 'group', which"),
    "work": (lambda f: write_lines(f / "t.jsonl", [small_episode("a", {}) | {"run": {"work": 3}}]), LINE + "3 as 'work', which"),
    "step of a trace": (
        lambda f: write_lines(f / "t.jsonl", [small_episode("a", {}) | {"run": {"work": {"step": "x"}}}]),
        LINE + "'x' as 'step', which must be a whole number.",
    ),
    "traces": (lambda f: write_lines(f / "t.jsonl", [{"traces": [None]}]), LINE + "null in 'traces', which must be a list of"),
    "message": (node_with(message="hi"), LINE + "'hi' as 'message', which must be an object."),
    "node": (trace_with(nodes=[None]), LINE + "null in 'nodes', which must be a list of objects."),
    "nodes": (trace_with(nodes={"a": 1}), LINE + "{{'a': 1}} as 'nodes', which must be a list of objects."),
    "parent": (node_with(parent="0"), LINE + "'0' as 'parent', which must be a whole number."),
    "ids": (node_with(parent=0, token_ids=["a"], mask=[True]), LINE + "'a' in 'token_ids', which must be a list of ids."),
    "mask": (node_with(parent=0, token_ids=[1, 2], mask=[1]), LINE + "2 tokens and 1 values of 'mask' in node 1;"),
    "stream": (
        node_with(parent=0, sampled=True, token_ids=[1, 2], mask=[0, 1], advantages=[0.5, 0.5]),
        LINE + "1 sampled tokens and 2 values of 'advantages' in node 1; there must be one for each of them.",
    ),
    "weights": (
        node_with(parent=0, sampled=True, token_ids=[1, 2], mask=[0, 1], loss_weights={"rl": [1.0]}),
        LINE + "2 tokens and 1 values of 'loss_weights' 'rl' in node 1; there must be one for each token.",
    ),
    "later parent": (node_with(parent=1), LINE + "node 1 go on from node 1, which does not come before it."),
    "logprobs": (
        node_with(parent=0, token_ids=[1], mask=[1], logprobs=[None]),
        LINE + "null in 'logprobs', which must be a list of numbers.",
    ),
    "weight": (trace_with(rewards={"r": {"score": 1, "weight": "x"}}), LINE + "'x' as 'weight' of the reward 'r', which"),
    "rewards": (trace_with(rewards=[1]), LINE + "[1] as 'rewards', which must be an object."),
    "metrics before 1.0": (
        lambda f: write_lines(f / "results.jsonl", [{"prompt": "q", "completion": "a", "metrics": [1]}]),
        LINE + "[1] as 'metrics', which must be an object.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SENTENCES)
def test_a_record_that_cannot_be_read_is_one_sentence(case, tmp_path):
    make, sentence = SENTENCES[case]
    place = make(tmp_path)
    with pytest.raises(DataError) as error:
        read_rollouts(place)
    assert sentence.format(place) in str(error.value)
    assert "\n" not in str(error.value)
    assert "damaged" not in str(error.value)
    str(error.value).encode()


CSV = "prompt,completion,answer\n2+2=,4,4\n"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.parquet", CSV, "looks like CSV; rename it to '.csv' (or '.tsv') (it begins 'prompt,completion,answer')."),
        ("a.md", "# Notes\n", "is text, which is no rollout format. Known here: "),
        ("a.xlsx", "PK", "is a spreadsheet; save it as CSV in UTF-8."),
    ],
)
def test_text_is_not_called_damaged(name, content, sentence, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as error:
        read_rollouts(tmp_path / name)
    assert sentence in str(error.value)
    assert "damaged" not in str(error.value)


def test_lines_are_known_by_what_they_hold(tmp_path):
    file = verl_file(tmp_path / "1.jsonl", ["a", "b"])
    assert len(read_rollouts(file.rename(tmp_path / "dump.txt"))) == 2
