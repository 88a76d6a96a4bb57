"""Tables that anybody made: what is read, as texts or as messages, what is the same in every kind of file, what is refused."""

import json
import math
import tempfile
from pathlib import Path

import numpy as np
import openai
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plain_files import KINDS, save
from rollout_files import tagged, texts, verl_rows, write_lines
from spanwise.errors import DataError, RecipeError
from spanwise.rollouts import read_rollouts
from spanwise.types import Status

ROWS = [
    {"question": "2+2=", "response": tagged("4", "0.9"), "gold": "04", "reward": 1.0, "acc": True, "note": "a, b"},
    {"question": "2+2=", "response": tagged("5", "0.2"), "gold": "04", "reward": None, "acc": False, "note": None},
    {"question": "3+3=", "response": "", "gold": None, "reward": 0.0, "acc": None, "note": 'say "6"\n'},
    {"question": "3+3=", "response": None, "gold": "6", "reward": 1.0, "acc": True, "note": "x"},
]  # fmt: skip


def plain(table):
    """Return all that a table holds except its writer and its path, as plain data with None for NaN."""
    return {
        "note": table.note, "prompts": list(table.prompts), "groups": table.group_n.tolist(), "steps": table.step_n.tolist(),
        "texts": texts(table), "trainable": table.trainable.tolist(), "keyed": table.keyed,
        "rewards": {
            name: ([None if math.isnan(v) else v for v in reward.value_n.tolist()], reward.status_n.tolist())
            for name, reward in table.rewards.items()
        },
        "columns": {
            name: [None if isinstance(v, float) and math.isnan(v) else v for v in values] for name, values in table.columns.items()
        },
        "recorded": None if table.as_recorded is None else (
            table.as_recorded.says, np.nan_to_num(table.as_recorded.value, nan=-9.0).tolist(), sorted(table.as_recorded.by_block)
        ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_questions_and_responses(kind, tmp_path):
    table = read_rollouts(save(tmp_path, [{**row, "rewards": {"right": row["acc"], "short": 0.5}} for row in ROWS], kind))
    assert table.prompts == ["2+2=", "2+2=", "3+3="]
    assert table.group_n.tolist() == [0, 0, 1]
    assert texts(table) == [tagged("4", "0.9"), tagged("5", "0.2"), ""]  # null is no completion, an empty text is one
    assert table.columns["answer"] == ["04", "04", None]  # and not 4
    assert table.columns["note"] == ["a, b", None, 'say "6"\n']
    assert set(table.rewards) == {"reward", "acc", "right", "short"}
    assert table.rewards["reward"].status_n.tolist() == [0, int(Status.UNSCORED), 0]
    assert table.rewards["acc"].value_n[:2].tolist() == [1.0, 0.0]
    assert table.rewards["right"].status_n.tolist() == [0, 0, int(Status.UNSCORED)]
    assert table.rewards["short"].value_n.tolist() == [0.5] * 3
    assert "Columns: prompt from 'question', completion from 'response', answer from 'gold'." in table.note
    assert "1 of 4 rows hold no completion and are left out." in table.note
    assert table.source == (kind if kind == "parquet" else kind.upper())


PIECES = st.sampled_from(["a", " b", "<answer>", "</answer>", "4", "é", '"', ",", "\t", "\n", ";", "'", "["])
WORDS = st.lists(PIECES, max_size=6).map("".join)
NUMBERS = st.none() | st.floats(-4, 4, width=16) | st.integers(-3, 3)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": WORDS}), min_size=1, max_size=3
).filter(lambda chat: len(chat) == 1 or any(message["role"] != "assistant" for message in chat))  # fmt: skip


@st.composite
def tables(draw):
    """Rows of one completion each, or of a list of them, as texts or as chats; with rewards, credit and further columns."""
    grouped, talk, computed = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    name = draw(st.sampled_from(["completions", "responses"] if grouped else ["completion", "response", "output"]))
    field = draw(st.sampled_from(["prompt", "question", "messages"]))
    said_once = MESSAGES if talk else WORDS
    rows, ids = [], draw(st.booleans())

    def column(size):
        return draw(st.lists(NUMBERS, min_size=size, max_size=size)) if grouped else draw(NUMBERS)

    for n in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 3))
        row = {
            field: [{"role": "user", "content": draw(WORDS)}] if field == "messages" else draw(WORDS.filter(lambda t: t != "")),
            name: draw(st.lists(said_once, min_size=size, max_size=size)) if grouped else draw(said_once),
            "rewards/correct": column(size),
            **({"advantage": column(size), "credit/solution": column(size), "credit/stop": column(size)} if computed else {}),
            "acc": draw(st.none() | st.booleans()), "answer": draw(st.none() | WORDS), "note": draw(st.none() | WORDS),
            **({"group_id": n // 2} if ids else {}), "step": draw(st.integers(0, 2)),
        }  # fmt: skip
        rows.append(row)
    return rows


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rows=tables())
def test_the_same_table_in_every_kind_of_file(rows):
    with tempfile.TemporaryDirectory() as folder:
        by_kind = {kind: plain(read_rollouts(save(Path(folder), rows, kind))) for kind in KINDS}
    for kind in KINDS[1:]:
        assert by_kind[kind] == by_kind["csv"], kind


def test_a_list_is_a_group_whatever_the_prompts_say(tmp_path):
    first = {"prompt": "2+2=", "completions": ["4", "5", "4"], "reward": [1, 0, None], "level": [1, 2], "answer": 4}
    rows = [first, {**first, "completions": ["4", None], "reward": [1, 0], "level": [3]}]
    table = read_rollouts(save(tmp_path, rows, "json"))
    assert table.group_n.tolist() == [0, 0, 0, 1]
    assert table.rewards["reward"].value_n.tolist()[:2] == [1.0, 0.0]
    assert table.rewards["reward"].status_n.tolist() == [0, 0, int(Status.UNSCORED), 0]
    assert table.columns["level"] == [[1, 2]] * 3 + [[3]]  # one list, not a number for each
    assert table.columns["answer"] == ["4"] * 4


def test_a_list_of_numbers_per_turn_is_told_but_not_the_texts_of_turns(tmp_path):
    for turns, is_told in (["2+2=", "And 3+3?"], False), ([0.5, None], True), ([], False):
        file = save(tmp_path, [{"prompt": "2+2=", "completion": "4", "reward": 1, "turns": turns}], "jsonl")
        assert ("a number per turn" in read_rollouts(file).note) is is_told


def test_groups_by_an_id(tmp_path):
    rows = [{"completion": c, "group_id": g, "step": 1} for c, g in (("a", "x"), ("b", "y"), ("c", "x"))]
    table = read_rollouts(save(tmp_path, rows, "csv"))
    assert (table.group_n.tolist(), table.keyed, table.prompts) == ([0, 1, 0], True, [""] * 3)
    two_writers = save(tmp_path, [{"completion": f"{g}", "group_id": g} for g in (1, 1.0, 1.5, "1")], "jsonl")
    assert read_rollouts(two_writers).group_n.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_gold_answer_in_a_list_of_one_stays_a_list(kind, tmp_path):
    table = read_rollouts(save(tmp_path, [{"prompt": "q", "completion": "a", "answer": ["Paris"]}], kind))
    assert table.columns["answer"] == [["Paris"]]


def test_what_pandas_writes(tmp_path):
    """Lists as Python prints them, NaN as no cell, the index as a column, `True`."""
    frame = pd.DataFrame({
        "prompt": [[{"role": "user", "content": "it's 2+2?"}]] * 3, "completion": ["4, or so", "5\n", "4"],
        "answer": [4, 4, 4], "reward": [1.0, float("nan"), 0.5], "ok": [True, False, True],
    })  # fmt: skip
    frame.to_csv(tmp_path / "a.csv")
    frame.to_csv(tmp_path / "b.csv", index=False, sep=";")
    frame.to_json(tmp_path / "c.json", orient="records")
    frame.to_json(tmp_path / "d.jsonl", orient="records", lines=True)
    frame.assign(answer="4").to_parquet(tmp_path / "e.parquet")
    first, *others = (plain(read_rollouts(file)) for file in sorted(tmp_path.iterdir()))
    assert first["prompts"] == ['[{"role": "user", "content": "it\'s 2+2?"}]'] * 3
    assert first["texts"] == ["4, or so", "5\n", "4"]
    reward = [1.0, None, 0.5], [0, int(Status.UNSCORED), 0]
    assert first["rewards"] == {"reward": reward, "ok": ([1.0, 0.0, 1.0], [0, 0, 0])}
    assert others == [first] * 4


def test_gaps_as_r_and_sql_write_them_integers_that_run_away_and_other_line_ends(tmp_path):
    def read(text):
        (tmp_path / "a.csv").write_bytes(text.encode())
        return read_rollouts(tmp_path / "a.csv")

    table = read("prompt,completion,acc,answer\np,a,1,NA\np,b,NA,None\np,c,0,7\n")
    assert table.rewards["acc"].status_n.tolist() == [0, int(Status.UNSCORED), 0]
    assert table.columns["answer"] == ["NA", "None", "7"]  # a text is what it says
    table = read("prompt,completion,length\nq,4,7\nq,5," + "9" * 5000 + "\n")  # Python reads at most 4,300 digits
    assert table.rewards["length"].value_n.tolist()[0] == 7.0
    table = read("\ufeffprompt,completion,acc\r\np,a,1\r\np,b,0\r\n")
    assert (table.prompts, texts(table), table.rewards["acc"].value_n.tolist()) == (["p", "p"], ["a", "b"], [1.0, 0.0])


def test_verls_dump_as_a_table_and_as_an_array(tmp_path):
    dump, array, table = (read_rollouts(save(tmp_path, verl_rows(), kind)) for kind in ("jsonl", "json", "csv"))
    assert (array.source, plain(array)) == ("verl", plain(dump))
    for name in ("groups", "texts", "rewards"):
        assert plain(table)[name] == plain(dump)[name]
    assert table.columns["answer"] == dump.columns["answer"]


def test_columns_by_option(tmp_path):
    rows = [{"q": "2+2=", "said": "4", "prompt": "no", "key": "4", "uid": 7, "epoch": 3}] * 2
    file = save(tmp_path, rows, "jsonl")
    columns = {"prompt": "q", "completion": "said", "answer": "key", "group": "uid", "step": "epoch"}
    table = read_rollouts(file, columns=columns)
    assert (table.prompts, table.columns["answer"], table.step_n.tolist()) == (["2+2="] * 2, ["4"] * 2, [3, 3])
    assert set(table.rewards) == set()
    lists = save(tmp_path, [{"prompt": "p", "samples": ["a", "b"]}], "csv")
    assert read_rollouts(lists, columns={"completions": "samples"}).group_n.tolist() == [0, 0]
    dump = save(tmp_path, [{**row, "mine": "5"} for row in verl_rows()], "jsonl")
    columns = {"prompt": "input", "completion": "output", "answer": "mine"}
    assert read_rollouts(dump, columns=columns).columns["answer"] == ["5"] * 8
    with pytest.raises(DataError, match="--columns answer=golds: "):
        read_rollouts(file, columns={"answer": "golds"})
    with pytest.raises(DataError, match="holds verifiers' traces"):
        read_rollouts(write_lines(tmp_path / "traces.jsonl", [{"traces": []}]), columns={"prompt": "q"})


@pytest.mark.parametrize("columns", [{"completion": "a", "completions": "b"}, {"prompt": "a", "answer": "a"}])
def test_roles_that_cannot_be(columns, tmp_path):
    with pytest.raises(RecipeError, match=" and ".join(columns)):
        read_rollouts(save(tmp_path, [{"prompt": "p", "completion": "a"}], "csv"), columns=columns)


def test_lines_with_columns_that_verl_or_verifiers_has_not_are_a_table(tmp_path):
    """A table credits the same completions in the same groups, whatever its format; the dumps have no such columns."""
    rows = [
        {"input": "q", "output": text, "group_id": group, "ground_truth": "4"} for text, group in ("4a", "5a", "4b", "4b")
    ]
    tables = [read_rollouts(save(tmp_path / kind, rows, kind)) for kind in ("jsonl", "csv")]
    assert [table.group_n.tolist() for table in tables] == [[0, 0, 1, 1]] * 2
    assert [table.columns["answer"] for table in tables] == [["4"] * 4] * 2
    rows = [{"prompt": "q", "completion": "4", "example_id": 1, "step": step, "reward": 1.0} for step in (1, 1, 2, 2)]
    tables = [read_rollouts(save(tmp_path / kind, rows, kind)) for kind in ("jsonl", "csv")]  # verifiers writes no steps
    assert [(table.group_n.tolist(), list(table.rewards)) for table in tables] == [([0, 0, 1, 1], ["reward"])] * 2
    said = [{"role": "assistant", "content": "4"}, {"role": "tool", "content": "t"}]
    (chat,) = texts(read_rollouts(write_lines(tmp_path / "chat.jsonl", [{"input": "q", "output": said}])))
    assert chat == "4t"


def test_an_agents_log_is_credited_after_its_last_user_message(tmp_path):
    """A conversation as the OpenAI client holds it: its own messages beside the caller's."""
    own = openai.types.chat.ChatCompletionMessage

    def said(**fields):
        return own(role="assistant", **fields).model_dump()

    opening = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi é"}]
    first = [*opening, said(content="Yes?"), {"role": "user", "content": [{"type": "text", "text": "2+2"}]}]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    acts = [said(tool_calls=[call]), {"role": "tool", "tool_call_id": "1", "content": "4"}, said(content="It is 4.")]
    rows = [{"messages": [*first, *acts], "passed": True}, {"messages": first, "passed": None}]
    table = read_rollouts(save(tmp_path, rows, "jsonl"))
    spoken = [(message["role"], message["content"]) for message in json.loads(table.prompts[0])]
    assert spoken == [("system", "Be brief."), ("user", "Hi é"), ("assistant", "Yes?"), ("user", "2+2")]
    assert texts(table) == ['add({"a": 2})4It is 4.']
    sampled = table.tokens.with_values(table.trainable).slice(0, 1)
    assert 0 < (~sampled).sum() == 1  # what the tool said is one word
    assert "1 of 2 rows hold no completion" in table.note


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None, "function_call": {"name": "sum", "arguments": "{}"}}, "sum({})"),
        ({"content": "4", "reasoning": "Add."}, "Add.\n4"),
        ({"content": "4", "reasoning": "Add.", "reasoning_content": "Add."}, "Add.\n4"),
        ({"content": None, "refusal": "No."}, "No."),
        ({"refusal": "No."}, "No."),
        ({"reasoning_content": "Add."}, "Add."),
        ({"reasoning": "Add."}, "Add."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": None, "tool_calls": [{"name": "sum", "arguments": {"of": [2]}}]}, 'sum({"of": [2]})'),
        ({"content": None, "tool_calls": [], "function_call": {"name": "sum", "arguments": "{}"}}, "sum({})"),
    ],
)
def test_what_servers_call_otherwise_is_part_of_a_completion(message, text, tmp_path):
    """OpenAI's calls before tools, verifiers' calls, the reasoning of vLLM and OpenRouter, a refusal, which has no content."""
    row = {"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", **message}]}
    assert texts(read_rollouts(write_lines(tmp_path / "log.jsonl", [row]))) == [text]


@pytest.mark.parametrize("field", ["name", "reasoning"])
def test_an_answer_in_json_that_names_a_role_is_no_message(field, tmp_path):
    row = {"prompt": "Who?", "completion": json.dumps({field: "Ada", "role": "engineer"})}
    assert texts(read_rollouts(write_lines(tmp_path / "results.jsonl", [row]))) == [row["completion"]]


def test_prompts_that_differ_in_a_call_are_two_groups(tmp_path):
    calls = {name: {"tool_calls": [{"function": {"name": name, "arguments": {"a": 1}}}]} for name in ("left", "right")}
    prompts = {name: [{"role": "user", "content": "go"}, {"role": "assistant", **call}] for name, call in calls.items()}
    rows = [{"prompt": prompts[name], "completion": "x"} for name in ("left", "right", "left")]
    table = read_rollouts(write_lines(tmp_path / "results.jsonl", rows))
    assert json.loads(table.prompts[0])[1] == {"role": "assistant", "content": 'left({"a": 1})'}
    assert table.group_n.tolist() == [0, 1, 0]
