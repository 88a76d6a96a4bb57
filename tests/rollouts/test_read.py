"""Files and records that no writer should write: one sentence each."""

import gzip
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plain_files import save
from rollout_files import small_episode, trl_file, verl_file, write_lines, write_own
from spanwise.errors import DataError
from spanwise.rollouts import read_rollouts


def verl_with(**fields):
    return lambda f: write_lines(f / "1.jsonl", [{"input": "q", "output": "a"}, {"input": "q", "output": "a", **fields}])


def trace_with(**fields):
    return line_with(traces=[small_episode("hm", {})["traces"][0] | fields])


def node_with(**fields):
    return trace_with(nodes=[{"parent": None, "message": {"role": "user", "content": "q"}}, {"sampled": True, **fields}])


def table(*rows):
    return lambda f: save(f, rows, "json")


def nested(begin, depth):
    return raw("1.jsonl", (begin + "[" * depth + "]" * depth + "}\n").encode())


def raw(name, content):
    """A file of these bytes."""

    def make(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return make


def damaged(folder):
    """A file of our own columns whose heading and footer are whole."""
    data = write_own(folder / "a.parquet", [[1] * 9], text=["abc"]).read_bytes()
    return raw("a.parquet", data[:4] + bytes(396) + data[400:])(folder)


def line_with(**fields):
    return lambda f: write_lines(f / "t.jsonl", [small_episode("a", {}) | fields])


def other_types(folder):
    trl_file(folder / "completions_1.parquet", ["a"], acc=[1.0])
    trl_file(folder / "completions_2.parquet", ["b"], acc=[["x"]])
    return folder


def two_columns(folder):
    table = pa.table([["q"], ["q"], ["x"], ["x"]], names=["prompt", "completion", "acc", "acc"])
    pq.write_table(table, folder / "a.parquet")
    return folder


def no_utf8(folder):
    file = verl_file(folder / "1.jsonl", ["a"])
    return file.rename(Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.jsonl")))


ONE, SAID = {"prompt": "p", "completion": "a"}, {"role": "assistant", "content": "a"}
#: What writes the record, and the numbers and names in what is said of it.
SENTENCES = {
    "step of words": (verl_with(step="abc"), "Line 2 of '{}': 'step' is 'abc'"),
    "step NaN": (verl_with(step=float("nan")), "Line 2 of '{}': 'step' is nan"),
    "step beyond 64 bits": (verl_with(step=10**30), "'step' is 10000"),
    "nesting": (nested('{"input": "q", "output": ', 100_000), "Line 1 of '{}': a field is nested"),
    "nesting of messages": (nested('{"output": "q", "input": ', 900), "Line 1 of '{}': a field is nested"),
    "types": (other_types, "The files of '{}' differ in their columns ("),
    "two columns": (two_columns, "'acc'"), "name": (no_utf8, "caf\ufffd.jsonl'"),
    "task": (trace_with(task="sums"), "Line 1 of '{}': 'task' is 'sums'"),
    "agent": (trace_with(agent="a"), "Line 1 of '{}': 'agent' is 'a'"),
    "group": (line_with(group="g"), "Line 1 of '{}': 'group' is 'g'"),
    "work": (line_with(run={"work": 3}), "Line 1 of '{}': 'work' is 3"),
    "step of a trace": (line_with(run={"work": {"step": "x"}}), "Line 1 of '{}': 'step' is 'x'"),
    "traces": (line_with(traces=[None]), "Line 1 of '{}': 'traces' contains null"),
    "message": (node_with(message="hi"), "Line 1 of '{}': 'message' is 'hi'"),
    "node": (trace_with(nodes=[None]), "Line 1 of '{}': 'nodes' contains null"),
    "nodes": (trace_with(nodes={"a": 1}), "Line 1 of '{}': 'nodes' is {{'a': 1}}"),
    "parent": (node_with(parent="0"), "Line 1 of '{}': 'parent' is '0'"),
    "ids": (node_with(parent=0, token_ids=["a"], mask=[True]), "Line 1 of '{}': 'token_ids' contains 'a'"),
    "mask": (node_with(parent=0, token_ids=[1, 2], mask=[1]), "Line 1 of '{}': node 1 has 2 tokens but 1 values of 'mask'"),
    "weights": (
        node_with(parent=0, sampled=True, token_ids=[1, 2], mask=[0, 1], loss_weights={"rl": [1.0]}),
        "Line 1 of '{}': node 1 has 2 tokens but 1 values of 'loss_weights' 'rl'",
    ),
    "later parent": (node_with(parent=1), "Line 1 of '{}': node 1 has the parent 1"),
    "logprobs": (node_with(parent=0, token_ids=[1], mask=[1], logprobs=[None]), "Line 1 of '{}': 'logprobs' contains null"),
    "weight": (trace_with(rewards={"r": {"score": 1, "weight": "x"}}), "Line 1 of '{}': the weight of the reward 'r' is 'x'"),
    "rewards": (trace_with(rewards=[1]), "Line 1 of '{}': 'rewards' is [1]"),
    "metrics before 1.0": (
        lambda f: write_lines(f / "results.jsonl", [{"prompt": "q", "completion": "a", "metrics": [1]}]),
        "Line 1 of '{}': 'metrics' is [1]",
    ),
    "damaged": (damaged, "it is damaged or cut off"),
    "no lines": (raw("a.jsonl", b"\n"), "holds no completions."), "nothing": (raw("a.csv", b"\n"), "is empty."),
    "nothing there": (lambda f: f / "a.csv", "There is no file or folder"), "no rollouts": (lambda f: f, "holds no rollouts"),
    "latin 1": (raw("a.csv", "prompt,completion\np,caf\xe9\n".encode("latin-1")), "it is not UTF-8; save it in UTF-8."),
    "utf-16": (raw("a.csv", "prompt,completion\np,a\n".encode("utf-16")), "is UTF-16; save it as CSV in UTF-8."),
    "twice": (raw("a.csv", b"prompt,completion,completion\np,a,b\n"), "has several columns called 'completion'"),
    "columns first": (raw("a.json", b'{"prompt": {"0": "p"},\n "completion": {"0": "a"}}'), "to_json(FILE, orient='records')."),
    "an array of numbers": (raw("a.json", b"[1]"), "Entry 1 of '{}' holds 1; each entry of the array must be a JSON object."),
    "CSV as parquet": (raw("a.parquet", b"prompt,completion\n2+2=,4\n"), "looks like CSV; let its name end in '.csv'"),
    "a spreadsheet": (raw("a.xlsx", b"PK"), "is a spreadsheet; save it as CSV in UTF-8."),
    "no prompts": (table({"completion": "a", "acc": 1}), "No column says which completions belong to one prompt"),
    "alpaca": (table({"instruction": "p", "input": "a", "output": "b"}), "input and instruction, and each may hold the prompt"),
    "one and several": (table({**ONE, "completions": ["a"]}), "has the columns completion and completions, and each may hold"),
    "an empty prompt": (table(ONE, {"prompt": None, "completion": "a"}), "Row 1 of '{}' has nothing in column 'prompt'"),
    "an id that is not there": (table({**ONE, "group_id": 1}, ONE), "1 of 2 completions of '{}' have no 'group_id'"),
    "a step of words": (table({**ONE, "step": "x"}), "Row 0 of '{}': 'step' is 'x', but it must be a whole number."),
    "two of one reward": (table({**ONE, "acc": 1, "rewards/acc": 0}), "for the reward 'acc'. One of them is 'rewards/acc'"),
    "one or several": (table({"prompt": "p", "completions": [SAID] * 2}), "Write one completion as a text. Write several"),
    "one object": (table({"completions": ["a"] * 2, "prompt": "p", "reward": {"b": 1}}), "one value of 'reward', {{'b'"),
    "numbers in a list": (table({"prompt": "p", "completions": [{"a": 1}]}), "a completion must be a text, or a list of messages"),
    "packed": (raw("1.jsonl.gz", gzip.compress(b'{"input": "q", "output": "a"}\n')), "'{}' is compressed; unpack it first."),
}  # fmt: skip


@pytest.mark.parametrize("case", SENTENCES)
def test_a_record_that_cannot_be_read_is_one_sentence(case, tmp_path):
    make, sentence = SENTENCES[case]
    place = make(tmp_path)
    with pytest.raises(DataError) as error:
        read_rollouts(place)
    assert sentence.format(place) in str(error.value)
    assert "\n" not in str(error.value)
    assert ("damaged" in str(error.value)) == ("damaged" in sentence)
    str(error.value).encode()


def test_lines_are_known_by_what_they_hold(tmp_path):
    """A file without a line beside them is of any format."""
    (tmp_path / "0.jsonl").write_text("\n")
    file = verl_file(tmp_path / "1.jsonl", ["a", "b"])
    assert read_rollouts(tmp_path).source == "verl"
    assert len(read_rollouts(file.rename(tmp_path / "dump.txt"))) == 2
