"""A model and a dataset by name: a small local folder and local files go the same road as hub names."""

import math
import re

import datasets
import pytest
from datasets import Dataset, DatasetDict

from plain_files import save
from spanwise import DataError, Layout, RecipeError
from spanwise.tasks import load_task
from spanwise.tasks.hub import read_rows
from tokenizers_small import digits_model

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "note": "x"} for n in range(10)]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    templates = {"plain": None, "system": TEMPLATE, "user": NO_SYSTEM}
    return {name: digits_model(tmp_path_factory.mktemp(name), template) for name, template in templates.items()}


def file_of(folder, rows) -> str:
    return str(save(folder, rows, "jsonl"))


@pytest.fixture
def jsonl(tmp_path) -> str:
    return file_of(tmp_path / "sums", ROWS)


def test_plain_prompts_without_a_chat_template_and_those_of_two_attempts(models, jsonl) -> None:
    task = load_task(models["plain"], jsonl)
    assert task.train.column_names == task.evaluation.column_names == ["prompt", "answer", "question", "note"]
    row = next(row for row in task.train if "7 + 7" in row["prompt"] or "6 + 6" in row["prompt"])
    assert row["answer"] in ("14", "12")
    for tag in ("reasoning", "answer", "analysis", "confidence"):
        assert row["prompt"].index(f"<{tag}>") < row["prompt"].index(f"</{tag}>") < row["prompt"].index("What is")
    assert (task.model, task.layout.names) == (models["plain"], ("solution", "confidence"))
    task = load_task(models["plain"], jsonl, prompt_format="two_attempts")
    assert task.layout.blocks == (("first", ("reasoning", "answer")), ("second", ("reasoning", "answer")))
    prompt = task.train[0]["prompt"]
    assert (prompt.count("<reasoning>"), prompt.count("<answer>"), prompt.count("<confidence>")) == (2, 2, 0)
    assert prompt.index("<reasoning>") < prompt.index("<answer>") < prompt.rindex("<reasoning>") < prompt.rindex("<answer>")


def test_evaluation_is_set_aside_and_limits_hold(models, jsonl, tmp_path) -> None:
    task = load_task(models["plain"], jsonl)
    assert (len(task.train), len(task.evaluation)) == (8, 2)  # a fifth of ten
    assert not set(task.train["prompt"]) & set(task.evaluation["prompt"])
    assert task.evaluation["prompt"][:] == load_task(models["plain"], jsonl).evaluation["prompt"][:]
    assert task.train["answer"][:] == sorted(task.train["answer"], key=int)
    small = load_task(models["plain"], jsonl, limit=3, eval_limit=1)
    assert (len(small.train), len(small.evaluation)) == (3, 1)
    assert small.train["answer"][:] == task.train["answer"][:3]  # what is trained on does not hang on the evaluation's size
    assert set(small.evaluation["answer"]) < set(task.evaluation["answer"])
    # Three solutions of each question: a fifth of the ten questions is set aside, with all of its rows.
    task = load_task(models["plain"], file_of(tmp_path / "x", [{**row, "note": note} for note in "xyz" for row in ROWS]))
    assert not set(task.train["prompt"]) & set(task.evaluation["prompt"])
    assert (len(task.train), len(task.evaluation)) == (8 * 3, 2)


def test_of_three_prompts_in_many_rows_none_is_lost_to_the_evaluation(models, tmp_path) -> None:
    """Rows are set aside one by one."""
    rows = [{"question": f"{row % 3}=", "answer": f"{row}"} for row in range(60)]
    with pytest.warns(UserWarning, match="is 3, so evaluations repeat prompts of the training. To .* 10 or more"):
        task = load_task(models["plain"], file_of(tmp_path, rows), instruction="", eval_limit=9)
    assert (len(task.train), len(task.evaluation)) == (48, 9)
    assert {*task.train["prompt"]} == {*task.evaluation["prompt"]} == {"0=", "1=", "2="}
    assert not {*task.train["answer"]} & {*task.evaluation["answer"]}


@pytest.mark.parametrize(("name", "nothing"), [("image", None), ("image", ""), ("images", [])])
def test_a_column_of_images_without_an_image_is_left_out(models, tmp_path, name, nothing) -> None:
    Dataset.from_list([{**row, name: nothing} for row in ROWS]).to_parquet(tmp_path / "sums.parquet")
    assert name not in load_task(models["plain"], str(tmp_path / "sums.parquet")).train.column_names


@pytest.mark.parametrize(
    "cells",
    [
        [f"2024-03-{day}" for day in range(10, 20)],
        [f"2024-03-{day} 10:30:00" for day in range(10, 20)],
        [2.5, *range(1, 10)],
        ["  return 4\n#### end\n"] * 10,
    ],
    ids=["dates", "times", "numbers", "texts"],
)
def test_a_json_file_keeps_answers_as_they_are_written(models, tmp_path, cells) -> None:
    """pyarrow reads such texts as times, and such integers as floats."""
    file = file_of(tmp_path, [{**row, "answer": cell} for row, cell in zip(ROWS, cells, strict=True)])
    task = load_task(models["plain"], file)
    assert {*task.train["answer"], *task.evaluation["answer"]} == {*map(str, cells)}


@pytest.mark.parametrize("kind", ["folder", "saved"])
def test_a_folder_may_have_a_split_for_evaluation_and_numbers_as_answers(models, tmp_path, kind) -> None:
    rows = Dataset.from_list([{"problem": row["question"], "gold": int(row["answer"])} for row in ROWS])
    if kind == "saved":
        DatasetDict({"train": rows, "test": rows.select([4])}).save_to_disk(tmp_path / "data")
    else:
        rows.to_json(tmp_path / "data" / "train.jsonl")
        rows.select([4]).to_json(tmp_path / "data" / "test.jsonl")
    columns = {"question_column": "problem", "answer_column": "gold"}
    task = load_task(models["plain"], str(tmp_path / "data"), eval_split="test", **columns)
    assert task.train["answer"][:] == [str(2 * n) for n in range(10)]
    assert task.evaluation["answer"][:] == ["8"]


def test_a_dotted_name_is_a_field_of_a_column_of_objects(models, tmp_path) -> None:
    """So verl's files name their answers."""
    prompts = [[{"role": "user", "content": row["question"]}] for row in ROWS]
    golds = [{"style": "rule", "ground_truth": row["answer"]} for row in ROWS]
    file = tmp_path / "train.parquet"
    columns = {"prompt": prompts, "reward_model": golds, "a": [{"b": 0}] * len(ROWS), "a.b": [1] * len(ROWS)}
    Dataset.from_dict(columns).to_parquet(file)
    task = load_task(models["system"], str(file), layout=PLAN, instruction="", answer_column="reward_model.ground_truth")
    assert {*task.train["answer"], *task.evaluation["answer"]} == {row["answer"] for row in ROWS}
    assert {**task.train[0]["reward_model"]} == golds[0]
    listed = r"no column 'answer'; .* prompt, a\.b, reward_model\.style, reward_model\.ground_truth\."
    with pytest.raises(DataError, match=listed):
        load_task(models["system"], str(file), layout=PLAN, instruction="")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "saved"])
def test_what_has_no_splits_is_not_read_twice(models, tmp_path, kind) -> None:
    """The rows of the training would be those of the evaluation."""
    place = tmp_path / "data"
    if kind == "saved":
        Dataset.from_list(ROWS).save_to_disk(place)
    else:
        place = save(place, ROWS, kind)
    for splits in ({"eval_split": "test"}, {"split": "test"}, {"eval_split": "train"}):
        with pytest.raises(DataError, match="split"):
            load_task(models["plain"], str(place), **splits)


def test_a_name_with_a_dot_is_no_file_without_splits_and_a_folder_may_be_called_as_a_file(models, tmp_path) -> None:
    with pytest.raises(DataError, match=r"Split 'test' of the dataset name 'owner/news:3\.0\.0'"):  # no hub here
        read_rows("owner/news:3.0.0", "test")
    Dataset.from_list(ROWS).to_parquet(tmp_path / "sums.parquet" / "train.parquet")
    assert len(load_task(models["plain"], str(tmp_path / "sums.parquet")).train) == 8


def test_a_csv_file_keeps_answers_as_they_are_written(models, tmp_path) -> None:
    lines = (f'"{n} + 0, or so?",0{n},{n}.5,True,\n' for n in range(8))
    (tmp_path / "a.csv").write_text("question,answer,level,ok,note\n" + "".join(lines))
    task = load_task(models["plain"], str(tmp_path / "a.csv"))
    assert set(task.train["answer"]) <= {f"0{n}" for n in range(8)}  # 04, and not 4
    row = task.train[0]
    assert (type(row["level"]), row["ok"], row["note"]) == (float, True, None)
    assert "+ 0, or so?" in row["prompt"]


@pytest.mark.parametrize("kind", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_the_same_prompts_from_every_kind_of_file(models, tmp_path, kind) -> None:
    rows = [{"messages": [{"role": "user", "content": f"<answer> {n}?"}], "answer": f"{n}"} for n in range(6)]
    task = load_task(models["system"], str(save(tmp_path, rows, kind)), layout=Layout(["answer"]))
    assert task.train["prompt"][0] == [{"role": "user", "content": f"<answer> {task.train['answer'][0]}?"}]
    assert len(task.train) == 5


CHAT = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (ROWS[:1], "is 1, and"),
        ([*ROWS[:3], {**ROWS[3], "answer": None}, *ROWS], "Row 3 "),
        ([{**row, "answer": math.nan} for row in ROWS], "Row 0 .* has nothing in column 'answer'"),
        ([{"messages": CHAT, "answer": "4"}] * 4, "assistant"),  # the answer stands in the conversation
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused(models, tmp_path, rows, sentence) -> None:
    file = save(tmp_path, rows, "parquet")
    with pytest.raises(DataError, match=sentence):
        load_task(models["system"], str(file), layout=Layout(["answer"]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.json", "{nope", "JSON parse error"), ("bad.parquet", "xx", "Parquet"),
        ("absent.csv", None, "is neither in "), ("notes.txt", "hello", "not a kind of file"),
    ],
)  # fmt: skip
def test_unreadable_file_is_named_with_the_option(models, tmp_path, name, content, message) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=rf"^[^\n]*{re.escape(str(file))}[^\n]*$") as caught:
        load_task(models["plain"], str(file))
    assert message in str(caught.value)


# ------------------------------------------------------------------------------------------------- what the model is told

PLAN = Layout({"plan": ["plan"], "code": ["code"]})
SYSTEM = {"role": "system", "content": "Write <plan> and <code>."}
TALKS = [[SYSTEM, {"role": "user", "content": f"Sort list {n}."}] for n in range(5)]
TEXTS = [f"Write <plan> and <code>: sort {n}. " for n in range(5)]
ASK, SUM = "Write <plan>, <code>.", "What is 1 + 1?"


@pytest.mark.parametrize(
    ("style", "instruction", "turns"),
    [
        ("user", ASK, [("user", f"{ASK}\n\n{SUM}")]), ("user", "", [("user", SUM)]),
        ("system", ASK, [("system", ASK), ("user", SUM)]), ("system", "", [("user", SUM)]),
        ("plain", ASK, f"{ASK}\n\nProblem:\n{SUM}\n\n"), ("plain", "", SUM),
    ],
)  # fmt: skip
def test_an_instruction_of_ones_own_goes_where_there_is_room(models, jsonl, style, instruction, turns) -> None:
    task = load_task(models[style], jsonl, layout=PLAN, instruction=instruction)
    prompt = turns if style == "plain" else [{"role": role, "content": content} for role, content in turns]
    assert prompt in [*task.train["prompt"], *task.evaluation["prompt"]]
    assert task.layout == PLAN


@pytest.mark.parametrize("prompts", [TEXTS, TALKS], ids=["text", "conversation"])
@pytest.mark.parametrize("column", [None, "prompt"])
def test_whole_prompts_are_used_as_they_are(models, tmp_path, prompts, column) -> None:
    rows = [{"prompt": prompts[n], "answer": "4", "tests": ["f(1) == 1"], "n": n, "prompts": "x"} for n in range(5)]
    task = load_task(models["system"], file_of(tmp_path, rows), layout=PLAN, prompt_column=column)
    assert task.train["prompt"][:] == [prompts[n] for n in task.train["n"]]
    assert task.train.column_names == ["prompt", "answer", "tests", "n"]  # those of reward functions stay, TRL's own do not
    assert task.train["tests"][:] == [["f(1) == 1"]] * 4
    assert sorted([*task.train["n"], *task.evaluation["n"]]) == list(range(5))


def test_a_column_of_prompts_with_another_name_and_no_answers(models, tmp_path) -> None:
    rows = [{"messages": talk, "question": "?", "answer": ["a", "b"]} for talk in TALKS]
    task = load_task(models["system"], file_of(tmp_path, rows), layout=PLAN, prompt_column="messages", answer_column=None)
    assert task.train["prompt"][0] in TALKS
    assert task.train["answer"][0] == ["a", "b"], "an answer that no check of ours reads may be anything"
    assert task.train.column_names == ["prompt", "question", "answer"]


def test_a_question_wins_over_a_prompt_and_that_is_said(models, tmp_path) -> None:
    file = file_of(tmp_path, [{"question": f"{n}: 2 + 2?", "prompt": f"{n}: say 4.", "answer": "4"} for n in range(5)])
    with pytest.warns(UserWarning, match="the columns 'prompt' and 'question'"):
        task = load_task(models["user"], file)
    assert task.train["prompt"][0][0]["content"].endswith("2 + 2?")
    asked = load_task(models["user"], file, question_column="prompt").train["prompt"][0][0]["content"]
    assert asked.endswith(": say 4.")
    assert "<confidence>" in asked


def test_tags_that_no_prompt_asks_for_are_refused_or_said(models, jsonl, tmp_path) -> None:
    with pytest.raises(RecipeError, match="has <code>, but"):
        load_task(models["system"], jsonl, layout=Layout({"a": ["answer"], "b": ["code"]}))
    with pytest.warns(UserWarning, match="first 8 prompts asks for the layout's tags <code>"):
        load_task(models["system"], jsonl, layout=PLAN, instruction="Write <plan>, then code.")
    unasked = [{"prompt": f"Sort list {n}.", "answer": "4"} for n in range(5)]
    with pytest.warns(UserWarning, match="first 4 prompts asks for the layout's tags <plan>, <code>"):
        load_task(models["system"], file_of(tmp_path, unasked), layout=PLAN)


@pytest.mark.parametrize(
    ("layout", "question"),
    [
        (Layout({"solution": ["reasoning", "answer"]}), "2 + 2?"),  # some of what the usual instruction asks for
        (Layout({"all": []}), "2 + 2?"),
        (Layout({"all": "markdown:Plan"}), "2 + 2?"),  # no tags are looked for
        (Layout({"all": ["plan"]}), "Write <plan> first. 2 + 2?"),  # the question itself asks
        (Layout({"all": ["think", "answer"]}, prefilled="think"), "2 + 2?"),  # the prompt opens it
    ],
)
def test_nothing_is_refused_where_the_prompts_say_it(models, tmp_path, layout, question) -> None:
    rows = [{"question": f"{n}: {question}", "answer": "4"} for n in range(5)]
    load_task(models["system"], file_of(tmp_path, rows), layout=layout)


def test_keys_of_fields_must_be_asked_for_as_tags_must(models, tmp_path) -> None:
    rows = [{"question": f"total: {n}, subtotals: 2", "answer": '{"total": 3, "items": []}'} for n in range(5)]
    layout = Layout(["total", "items[*].subtotal"], segmenter="json", most=2)
    with pytest.raises(RecipeError, match="has items, subtotal, but"):
        load_task(models["system"], file_of(tmp_path, rows), layout=layout)
    with pytest.warns(UserWarning, match="the layout's keys subtotal"):
        load_task(models["system"], file_of(tmp_path, rows), layout=layout, instruction="JSON with items.")


def test_tags_of_the_chat_template_count_and_a_conversation_it_refuses_is_said(tmp_path, jsonl) -> None:
    model = digits_model(tmp_path / "model", "Write <plan> and <code>." + NO_SYSTEM)
    load_task(model, jsonl, layout=PLAN)
    with pytest.raises(DataError, match="no system role"):
        load_task(model, file_of(tmp_path, [{"prompt": talk, "answer": "4"} for talk in TALKS]), layout=PLAN)


def test_a_question_keeps_its_line_break_at_the_end(models, tmp_path) -> None:
    file = file_of(tmp_path, [{"question": f"  {n} + {n} =\n", "answer": str(2 * n)} for n in range(10)])
    task = load_task(models["plain"], file, instruction="", layout=Layout(["total"], segmenter="json"))
    assert {prompt[:2] + prompt[-2:] for prompt in task.train["prompt"]} == {"  =\n"}
