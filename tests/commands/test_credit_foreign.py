"""`spanwise credit` on files as they really come: gaps, bad cells, no tags, equal prompts, tool calls, damaged records."""

import gzip
import json
import os
import re
import shlex
from io import StringIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from spanwise.cli import app
from spanwise.commands.credit.arms import choose_arms
from spanwise.commands.credit.credit import credit_rollouts, figures_table, summary
from spanwise.commands.credit.score import score_file
from spanwise.errors import AlignmentError, DataError, RecipeError
from spanwise.recipe import load
from spanwise.rollouts import read_rollouts
from spanwise.types import Status

pytestmark = pytest.mark.filterwarnings("ignore:Every advantage of the batch at step:UserWarning")

LAYOUT = {"solution": ["answer"], "confidence": ["confidence"]}
OK, ABSENT, UNPARSABLE, ERROR = (int(s) for s in (Status.OK, Status.ABSENT, Status.UNPARSABLE, Status.ERROR))


def said(answer, confidence):
    return f"so <answer>{answer}</answer><confidence>{confidence}</confidence>"


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def verl_file(path, outputs, *, prompts=None, step=1, **columns):
    rows = [{"input": prompts[n] if prompts else "2+2=", "output": text, "step": step} for n, text in enumerate(outputs)]
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return write_lines(path, rows)


def trl_file(path, outputs, **columns):
    pq.write_table(pa.table({"prompt": ["2+2="] * len(outputs), "completion": outputs, **columns}), path)
    return path


def episode(text, rewards, *, answer="4", group="g", **fields):
    message = {"role": "user", "content": "2+2="}, {"role": "assistant", "content": text}
    nodes = [{"parent": None, "message": message[0]}, {"parent": 0, "message": message[1], "sampled": True}]
    trace = {"task": {"data": {"answer": answer}}, "agent": {"name": "a"}, "nodes": nodes, "rewards": rewards, **fields}
    return {"group": {"id": group}, "run": {"work": {"step": 1}}, "traces": [trace]}


def verifiers_file(path, outputs, **columns):
    rows = [{name: {"score": values[n], "weight": 1.0} for name, values in columns.items()} for n in range(len(outputs))]
    return write_lines(path, [episode(text, row) for text, row in zip(outputs, rows, strict=True)])


WRITERS = {
    "TRL": lambda folder, outputs, **columns: trl_file(folder / "a.parquet", outputs, **columns),
    "verl": lambda folder, outputs, **columns: verl_file(folder / "1.jsonl", outputs, **columns),
    "verifiers": lambda folder, outputs, **columns: verifiers_file(folder / "traces.jsonl", outputs, **columns),
}
WELL_FORMED = [said("4", "0.9"), said("4", "0.8"), said("4", "0.7"), said("5", "0.1")]
TAGLESS = [rf"The answer is \boxed{{{x}}}" for x in (4, 4, 3, 5)]


# --------------------------------------------------------------------------- one arm, one set of rewards


def test_an_arm_under_two_names_is_one_arm(tmp_path, monkeypatch):
    """Two chunks with other rewards in each: the second must not get those of the first."""
    monkeypatch.setattr("spanwise.commands.credit.score.AT_A_TIME", 25)
    outputs = [*[said("4", "0.5")] * 4, *[said("4", "0.5")] * 4]
    file = verl_file(tmp_path / "1.jsonl", outputs, prompts=[*"aaaabbbb"], correct=[1, 1, 1, 0, 0, 0, 0, 1])
    result = credit_rollouts(file, methods=["recipe", "bae"], overrides={"layout": LAYOUT})
    assert [one.arm.name for one in result.applied] == ["bae"]
    assert len(list(result.table.tokens.chunks(25))) > 1
    assert result.applied[0].credit.block_nk[:, 0].tolist() == [0.25, 0.25, 0.25, -0.75, -0.25, -0.25, -0.25, 0.75]


def test_two_arms_of_one_name_do_not_go_unnoticed(tmp_path):
    table = read_rollouts(verl_file(tmp_path / "1.jsonl", WELL_FORMED, correct=[1, 1, 1, 0]))
    arms, _ = choose_arms(load(None, {"layout": LAYOUT}), ["bae"], table)
    with pytest.raises(AlignmentError, match="Method 'bae' has 8 rewards for 4 completions"):
        score_file(table, [*arms, *arms])


# --------------------------------------------------------------------------- gaps in recorded rewards


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("gap", [None, float("nan")])
def test_a_reward_that_was_never_scored_costs_nothing(kind, gap, tmp_path):
    file = WRITERS[kind](tmp_path, WELL_FORMED, acc=[1.0, gap, 1.0, 0.0])
    result = credit_rollouts(file, methods=["bae"], reward={"correct": "acc"}, overrides={"layout": LAYOUT})
    assert result.scores.status_nm.T.tolist() == [[OK, ERROR, OK, OK]] * 2  # brier's outcome is not known either
    assert re.search("1 of 4 recorded values of 'acc' (and .*)?are missing", result.table.note)
    block_nk = result.applied[0].credit.block_nk
    # By hand: 1, 1 and 0 have mean 2/3. Brier -.01 and -.09 of the right ones have mean -.05; the wrong one is alone.
    torch.testing.assert_close(block_nk[:, 0], torch.tensor([1 / 3, 0, 1 / 3, -2 / 3], dtype=torch.float64))
    torch.testing.assert_close(block_nk[:, 1], torch.tensor([0.04, 0, -0.04, 0], dtype=torch.float64))
    assert result.applied[0].credit.stop_n.tolist() == [0.0] * 4


def test_a_gap_of_the_completions_own_doing_is_charged(tmp_path):
    """A recorded Brier score is missing where the confidence cannot be read (charged), and where it was not scored (free)."""
    outputs = [said("4", "0.9"), said("4", "high"), said("4", "0.7"), said("4", "0.5")]
    file = trl_file(tmp_path / "a.parquet", outputs, correct=[1.0] * 4, brier=[-0.01, None, -0.09, None])
    result = credit_rollouts(file, methods=["bae"], overrides={"layout": LAYOUT})
    assert result.scores.status_nm[:, 1].tolist() == [OK, UNPARSABLE, OK, ERROR]
    expected = torch.tensor([0.04, -0.95, -0.04, 0.0], dtype=torch.float64)  # mean -.05; -1 stands for the unreadable one
    torch.testing.assert_close(result.applied[0].credit.block_nk[:, 1], expected)


@pytest.mark.parametrize("cell", [float("inf"), "1.0", 10**400])
def test_one_bad_cell_does_not_drop_the_column(cell, tmp_path):
    file = verl_file(tmp_path / "1.jsonl", WELL_FORMED, correct=[0.0, cell, 1.0, 1.0], gts=["4"] * 4)
    result = credit_rollouts(file, methods=["grpo"], overrides={"layout": LAYOUT})
    assert result.scores.status_nm[:, 0].tolist() == [OK, ERROR, OK, OK]
    assert result.scores.reward_nm[[0, 2, 3], 0].tolist() == [0.0, 1.0, 1.0]  # the text would say 1 1 0
    assert "correct from the file" in result.note
    assert "1 of 4 recorded values of 'correct' are missing or not finite" in result.note


def test_a_column_without_numbers_is_no_reward(tmp_path):
    file = verl_file(tmp_path / "1.jsonl", WELL_FORMED, acc=["good", "bad", 1, "good"], none=[None] * 4, score=["1"] * 4)
    assert list(read_rollouts(file).rewards) == []
    with pytest.raises(RecipeError, match=r"--reward correct=acc: that column of .* holds no numbers; it has 'good'"):
        credit_rollouts(file, reward={"correct": "acc"}, overrides={"layout": LAYOUT})
    with pytest.raises(RecipeError, match=r"--reward correct=none: that column of .* is empty"):
        credit_rollouts(file, reward={"correct": "none"}, overrides={"layout": LAYOUT})


def own_run(folder, *, rewards, status=None, outputs=WELL_FORMED, recipe="group_size: 2\nprompts: 2\n"):
    """A run folder of ours as `keep_rollouts` leaves it, without the model."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(f"layout: {json.dumps(LAYOUT)}\n{recipe}")
    columns = {
        "step": [1] * 4, "prompt": ["2+2="] * 4, "completion_ids": [[1]] * 4, "trainable": [[True]] * 4, "text": outputs,
        "reward/correct": rewards, **({"status/correct": status} if status else {}),
    }  # fmt: skip
    pq.write_table(pa.table(columns), folder / "rollouts" / "step_000001.parquet")
    return folder


def test_statuses_of_our_own_files(tmp_path):
    rewards = [1.0, None, None, 0.0]
    kept = read_rollouts(own_run(tmp_path / "a", rewards=rewards, status=["ok", "timeout", "absent", "ok"]))
    assert kept.rewards["correct"].status_n.tolist() == [OK, int(Status.TIMEOUT), ABSENT, OK]
    bare = read_rollouts(own_run(tmp_path / "b", rewards=rewards))
    assert bare.rewards["correct"].status_n.tolist() == [OK, ERROR, ERROR, OK]
    with pytest.raises(DataError, match=r"Completion 1 of .* has 'late' as 'status/correct', which is none of ok, absent"):
        read_rollouts(own_run(tmp_path / "c", rewards=rewards, status=["ok", "late", "ok", "ok"]))


# --------------------------------------------------------------------------- groups


def test_a_run_of_ours_is_cut_by_its_own_group_size_under_any_recipe(tmp_path):
    run = own_run(tmp_path / "run", rewards=[1.0, 0.0, 1.0, 1.0], status=["ok"] * 4)
    other = tmp_path / "other.yaml"
    other.write_text(f"layout: {json.dumps(LAYOUT)}\nmethod: rlcr\n")
    for recipe in (None, run / "recipe.yaml", other):
        result = credit_rollouts(run, methods=["dr_grpo"], recipe=recipe)
        assert result.group_n.tolist() == [0, 0, 1, 1]
        assert result.applied[0].credit.block_nk[:, 0].tolist() == [0.5, -0.5, 0.0, 0.0]
    chosen = credit_rollouts(run, methods=["dr_grpo"], recipe=other, overrides={"group_size": 4})
    assert chosen.group_n.tolist() == [0] * 4


def test_a_foreign_file_is_cut_by_the_group_size_that_is_given(tmp_path):
    file = verl_file(tmp_path / "1.jsonl", WELL_FORMED, score=[1, 0, 1, 1])
    options = {"methods": ["dr_grpo"], "reward": {"correct": "score"}}
    assert credit_rollouts(file, **options, overrides={"layout": LAYOUT}).group_n.tolist() == [0] * 4
    result = credit_rollouts(file, **options, overrides={"layout": LAYOUT, "group_size": 2})
    assert result.group_n.tolist() == [0, 0, 1, 1]
    assert result.applied[0].credit.block_nk[:, 0].tolist() == [0.5, -0.5, 0.0, 0.0]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"layout: {json.dumps(LAYOUT)}\ngroup_size: 2\n")
    assert credit_rollouts(file, **options, recipe=recipe).group_n.tolist() == [0, 0, 1, 1]
    three = credit_rollouts(file, **options, overrides={"layout": LAYOUT, "group_size": 3})
    assert three.group_n.tolist() == [0, 0, 0, 1]
    assert "1 groups have fewer than 3 completions" in three.note


def test_uids_of_verl_that_rows_share_are_its_groups(tmp_path):
    outputs = [said("4", "0.5")] * 4
    shared = read_rollouts(verl_file(tmp_path / "1.jsonl", outputs, uid=["p", "q", "p", "q"]))
    assert shared.group_n.tolist() == [0, 1, 0, 1]
    own = read_rollouts(verl_file(tmp_path / "2.jsonl", outputs, uid=["p", "q", "r", "s"]))
    assert own.group_n.tolist() == [0] * 4  # a name for each row says nothing of prompts
    some = read_rollouts(verl_file(tmp_path / "3.jsonl", outputs, uid=["p", None, "p", "q"]))
    assert some.group_n.tolist() == [0] * 4


def test_uneven_groups_of_a_step_are_pointed_out(tmp_path):
    outputs, prompts = [said("4", "0.5")] * 8, [*"aaaabbcc"]
    options = {"methods": ["grpo"], "reward": {"correct": "score"}}
    columns = {"score": [1, 0] * 4, "prompts": prompts}
    uneven = credit_rollouts(verl_file(tmp_path / "1.jsonl", outputs, **columns), **options, overrides={"layout": LAYOUT})
    assert "Groups hold 2 to 4 completions; a prompt drawn twice in a step is one group here" in uneven.note
    advice = re.search(r"--set group_size=(\d+)", uneven.note)
    cut = {"layout": LAYOUT, "group_size": int(advice[1])}
    split = credit_rollouts(tmp_path / "1.jsonl", **options, overrides=cut)
    assert split.group_n.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert "drawn twice" not in split.note
    keys = {"uid": [*"aaaabbcc"]}
    keyed = credit_rollouts(
        verl_file(tmp_path / "2.jsonl", outputs, **columns, **keys), **options, overrides={"layout": LAYOUT}
    )
    assert "drawn twice" not in keyed.note
    even = verl_file(tmp_path / "3.jsonl", outputs, score=[1, 0] * 4, prompts=[*"aaaabbbb"])
    assert "drawn twice" not in credit_rollouts(even, **options, overrides={"layout": LAYOUT}).note


# --------------------------------------------------------------------------- files without tags


def test_a_file_without_tags_is_credited_by_its_recorded_reward(tmp_path):
    file = verl_file(tmp_path / "1.jsonl", TAGLESS, gts=["4"] * 4, score=[1.0, 1.0, 0.0, 0.0])
    for layout in (None, {"all": []}, {"solution": ["answer"]}):
        overrides = {} if layout is None else {"layout": layout}
        for methods in ([], ["grpo"]):
            result = credit_rollouts(file, methods=methods, reward={"correct": "score"}, overrides=overrides)
            names = [one.arm.name for one in result.applied]
            assert names == ["grpo"]
            # By hand: 1 1 0 0 have mean .5 and standard deviation .5774 (ddof 1).
            expected = 0.5 / (1 / 3) ** 0.5
            assert result.applied[0].credit.block_nk[:, 0].tolist() == pytest.approx(
                [expected, expected, -expected, -expected], rel=1e-5
            )
            assert ("rlcr and bae are left out" in result.note or "bae is left out" in result.note) == (not methods)


def test_a_method_that_was_asked_for_is_not_left_out(tmp_path):
    file = verl_file(tmp_path / "1.jsonl", TAGLESS, gts=["4"] * 4, score=[1.0, 1.0, 0.0, 0.0])
    with pytest.raises(RecipeError, match="occur in none of the 4 completions"):
        credit_rollouts(file, methods=["grpo", "bae"], reward={"correct": "score"})
    with pytest.raises(RecipeError, match="'brier' reads the tag 'confidence'"):
        credit_rollouts(file, methods=["recipe"], reward={"correct": "score"}, overrides={"layout": {"all": []}})


@pytest.mark.parametrize("scores", [{"score": [1.0, 1.0, 0.0, 0.0]}, {}])
@pytest.mark.parametrize("outputs", [TAGLESS, [f"<think>hm</think> {text}" for text in TAGLESS]])
def test_the_remedy_in_the_message_runs(outputs, scores, tmp_path):
    file = verl_file(tmp_path / "1.jsonl", outputs, gts=[*outputs[:3], None], **scores)
    with pytest.raises(RecipeError, match="occur in none of the 4 completions") as error:
        credit_rollouts(file)
    remedy = re.search(r"whole completions with (--methods .*)", str(error.value))
    command = ["credit", str(file), *shlex.split(remedy[1]), "--output", str(tmp_path / "out")]
    app(command, exit_on_error=False, result_action="return_value")
    rewards = [row["reward/correct"] for row in pq.read_table(tmp_path / "out" / "credit.parquet").to_pylist()]
    assert rewards == scores.get("score", [1.0, 1.0, 1.0, None])  # without a right answer, no verdict


def test_usual_methods_without_a_source_are_left_out(tmp_path):
    """No right answers, correctness recorded: the second attempt cannot be judged, the rest can."""
    layout = {"first": ["answer"], "second": ["answer"]}
    file = verl_file(tmp_path / "1.jsonl", ["<answer>3</answer><answer>4</answer>"] * 4, score=[1, 1, 0, 0])
    result = credit_rollouts(file, reward={"correct": "score"}, overrides={"layout": layout})
    assert [one.arm.name for one in result.applied] == ["grpo"]
    assert "rlcr and bae are left out: Reward 'second_attempt' needs the right answers" in result.note
    with pytest.raises(DataError, match="Reward 'second_attempt' needs the right answers"):
        credit_rollouts(file, methods=["bae"], reward={"correct": "score"}, overrides={"layout": layout})


# --------------------------------------------------------------------------- messages


def text_of(table, n=0):
    return "".join(table.vocabulary.pieces[i].decode() for i in table.tokens.slice(n, n + 1))


@pytest.mark.parametrize("nested", [True, False])
def test_calls_of_tools_and_reasoning_are_part_of_a_completion(nested, tmp_path):
    call = {"name": "sum", "arguments": '{"of": [2, 2]}'}
    calls = [{"id": "1", "type": "function", "function": call} if nested else call]
    turns = [
        {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "Add."},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    table = read_rollouts(trl_file(tmp_path / "a.parquet", [turns]))
    assert text_of(table) == 'Add.\nsum({"of": [2, 2]})' + "4" + "It is 4."
    sampled = table.tokens.with_values(table.trainable)
    kept = [table.vocabulary.pieces[i].decode() for i in table.tokens.values[sampled.values]]
    assert "".join(kept) == 'Add.\nsum({"of": [2, 2]})It is 4.'


def test_prompts_that_differ_in_a_call_are_two_groups(tmp_path):
    def prompt(name):
        call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": name, "arguments": {"a": 1}}}]}
        return [{"role": "user", "content": "go"}, call]

    rows = [{"prompt": prompt(name), "completion": "x"} for name in ("left", "right", "left")]
    table = read_rollouts(write_lines(tmp_path / "results.jsonl", rows))
    assert table.prompts[0] == '[user] go\n[assistant] left({"a": 1})'
    assert table.group_n.tolist() == [0, 1, 0]


# --------------------------------------------------------------------------- what no writer should write


def verl_with(**fields):
    return lambda f: write_lines(f / "1.jsonl", [{"input": "q", "output": "a"}, {"input": "q", "output": "a", **fields}])


def trace_with(**fields):
    def make(folder):
        line = episode("hm", {})
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
        "Completion 0 of '{}' has '1' as 'step', which must be a whole number.",
    ),
    "types": (other_types, "The files of '{}' do not fit together ("),
    "two columns": (two_columns, "has more than one column 'acc'"),
    "packed": (packed, "'{}' is compressed; unpack it first."),
    "name": (no_utf8, "caf\ufffd.jsonl' is not valid UTF-8; rename it."),
    "task": (trace_with(task="sums"), LINE + "'sums' as 'task', which must be an object."),
    "agent": (trace_with(agent="a"), LINE + "'a' as 'agent', which must be an object."),
    "group": (lambda f: write_lines(f / "t.jsonl", [episode("a", {}) | {"group": "g"}]), LINE + "'g' as 'group', which"),
    "work": (lambda f: write_lines(f / "t.jsonl", [episode("a", {}) | {"run": {"work": 3}}]), LINE + "3 as 'work', which"),
    "step of a trace": (
        lambda f: write_lines(f / "t.jsonl", [episode("a", {}) | {"run": {"work": {"step": "x"}}}]),
        LINE + "'x' as 'step', which must be a whole number.",
    ),
    "traces": (lambda f: write_lines(f / "t.jsonl", [{"traces": [None]}]), LINE + "null in 'traces', which must be a list of"),
    "message": (node_with(message="hi"), LINE + "'hi' as 'message', which must be an object."),
    "node": (trace_with(nodes=[None]), LINE + "null in 'nodes', which must be a list of objects."),
    "nodes": (trace_with(nodes={"a": 1}), LINE + "{{'a': 1}} as 'nodes', which must be a list of objects."),
    "parent": (node_with(parent="0"), LINE + "'0' as 'parent', which must be a whole number."),
    "ids": (node_with(parent=0, token_ids=["a"], mask=[True]), LINE + "'a' in 'token_ids', which must be a list of ids."),
    "mask": (node_with(parent=0, token_ids=[1, 2], mask=[1]), LINE + "2 tokens and 1 values of 'mask' in one node"),
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


def test_null_steps_of_trl_are_no_steps(tmp_path):
    table = read_rollouts(trl_file(tmp_path / "a.parquet", ["a", "b"], step=pa.array([None, 3], pa.int64())))
    assert table.step_n.tolist() == [0, 3]


def test_a_score_that_is_not_there_is_a_failure_of_the_scoring(tmp_path):
    rewards = [
        {"a": {"weight": 0.5}, "b": 1.0},
        {"a": {"score": None}, "b": 0.0},
        {"a": {"score": 1.0, "weight": None}, "b": 1.0},
    ]
    table = read_rollouts(write_lines(tmp_path / "traces.jsonl", [episode("x", row) for row in rewards]))
    assert table.rewards["a"].status_n.tolist() == [ERROR, ERROR, OK]
    assert table.rewards["reward"].value_n.tolist() == [1.0, 0.0, 2.0]  # a weight that is not written is 1


# --------------------------------------------------------------------------- figures


def test_a_completion_without_tokens_is_charged_nothing(tmp_path):
    file = verl_file(tmp_path / "1.jsonl", ["", *WELL_FORMED[:3]], correct=[0, 1, 1, 0])
    result = credit_rollouts(file, methods=["bae"], overrides={"layout": LAYOUT})
    assert result.table.tokens.lengths[0] == 0
    assert result.applied[0].credit.stop_n.tolist() == [0.0] * 4  # it leaves out both blocks, and no token could carry it
    assert summary(result)["methods"]["bae"]["stop_mean_abs"] == 0.0


def test_brackets_in_a_path_are_shown(tmp_path):
    folder = tmp_path / "[bold]" / "a[red]b"
    folder.mkdir(parents=True)
    file = verl_file(folder / "1.jsonl", WELL_FORMED, correct=[0, 1, 1, 0])
    result = credit_rollouts(file, methods=["bae"], overrides={"layout": LAYOUT})
    console = Console(file=StringIO(), width=400)
    console.print(figures_table(result))
    assert str(file) in console.file.getvalue().replace("\n", "")
