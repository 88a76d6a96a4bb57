"""The blocks of a file: tags of completions, fields of their JSON, what `--pay` names; each has its reward and credit."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plain_files import save
from rollout_files import verl_file, write_lines
from spanwise.cli import app
from spanwise.commands.credit.blocks import layout_of, usual_fields, usual_tags
from spanwise.commands.credit.credit import credit, credit_rollouts
from spanwise.commands.credit.page import credit_page
from spanwise.commands.shared.options import CreditOptions
from spanwise.errors import RecipeError
from spanwise.rollouts import schema
from spanwise.rollouts.rows import read_rows, token_rows

GOLD = json.dumps({"a": 1, "b": [2, 3]})
SAID = ['So {"a": 1, "b": [2, 3]}', '{"a": 1, "b": [2, 9]}', '{"a": 9, "b": [2, 3]}', '{"b": [9, 9], "a": 9}']
#: Without a tokenizer credit is per word, and JSON without spaces would be one word, which only the first field could have.
WITHOUT_SPACES = ['{"a":1,"b":[2,3]}', '{"a":1,"b":[2,9]}', '{"a":9,"b":[2,3]}', '{"b":[9,9],"a" :9}']
#: A recipe with a block for each element of `b`.
LISTS = {"layout": {"rest": [], "a": "a", "b[*]": "b[*]"}, "segmenter": "json", "most": 2}
EACH_ELEMENT = {**LISTS, "objectives": [{"reward": "equals", "each": "b[*]"}, {"reward": "equals", "each": "a"}]}


def file(folder, texts):
    return write_lines(folder / "said.jsonl", [{"prompt": "p", "completion": text, "answer": GOLD} for text in texts])


@pytest.mark.parametrize("texts", [SAID, WITHOUT_SPACES], ids=["with spaces", "without"])
def test_the_fields_that_most_completions_have_are_blocks_and_elements_if_the_recipe_says_so(texts, tmp_path):
    result = credit_rollouts(file(tmp_path, texts))
    by_block = {arm.name: arm.by_block for arm in result.applied}
    # a: 1, 1, 0, 0; b: 1, 0, 1, 0: the mean of each is .5, and the order in which a completion writes them is its own business.
    assert by_block["bae"]["a"].tolist() == [0.5, 0.5, -0.5, -0.5]
    assert by_block["bae"]["b"].tolist() == [0.5, -0.5, 0.5, -0.5]
    assert by_block["rlcr"]["a"].tolist() == by_block["rlcr"]["b"].tolist() == [1.0, 0.0, 0.0, -1.0]
    assert "most completions hold JSON, so the blocks are its fields a, b" in result.note
    elements = credit_rollouts(file(tmp_path, texts), methods=["recipe"], overrides=EACH_ELEMENT).applied[0].by_block
    # b[0]: 1, 1, 1, 0, mean .75; b[1]: 1, 0, 1, 0, mean .5.
    assert elements["b[0]"].tolist() == [0.25, 0.25, 0.25, -0.75]
    assert elements["b[1]"].tolist() == [0.5, -0.5, 0.5, -0.5]


def test_half_of_the_completions_are_no_majority_and_very_many_tags_no_layout_and_a_lone_tag_is_the_completion():
    fields, tags = ['{"a": 1}', '{"a": 2}', "no", "no"], ["<a>1</a>", "<a>2</a>", "no", "no"]
    assert usual_fields(fields) == usual_fields([]) == ()
    assert usual_tags(tags) == usual_tags([]) == ((), 0)
    assert usual_fields(fields[:3]) == usual_tags(tags[:3])[0] == ("a",)
    text = "".join(f"<t{n}>4</t{n}>" for n in range(33))
    assert usual_tags([text]) == ((), 0)
    assert usual_tags([text[: text.index("<t32>")]]) == (tuple(f"t{n}" for n in range(32)), 1)
    names = [layout_of(tags).names for tags in (["plan", "code"], ["think"], ["confidence"])]
    assert names == [("plan", "code"), ("completion",), ("text", "confidence")]


def test_a_total_reward_that_verls_validation_writes_twice_is_paid_once(tmp_path):
    total, brier, marks = [2.0, -1.0, 1.0], [0.0, -0.5, -0.25], ["17.0", "nan", "21.0"]
    outputs = ["<think>a</think>", "<think>b</think>", "<think>c</think>"]
    dump = verl_file(tmp_path / "1.jsonl", outputs, score=total, reward=total, brier=brier, any_reward=marks)
    result = credit_rollouts(dump, methods=["bae"])
    assert result.scores.names == ("score", "brier")
    assert "No objective uses the file's rewards reward." in result.note


def test_repeated_blocks_are_one_row_and_pieces_are_kept(tmp_path):
    out = tmp_path / "out"
    credit(file(tmp_path, SAID), output=out, methods=["bae"], overrides=EACH_ELEMENT)
    page = credit_page(out)
    assert ("bae: b[*]" in page, "bae: b[0]" in page) == (True, False)
    table = read_rows(out / "credit.parquet", [0])
    row = token_rows(table, None)[0]
    # Words: 'So' ' {"a":' ' 1,' ' "b":' ' [2,' ' 3]}': a word belongs to the block of its first byte.
    owner = {t: name for name, pieces in row.spans.items() for start, end in pieces for t in range(start, end)}
    text_of = {name: "".join(row.tokens[t] for t in owner if owner[t] == name) for name in dict.fromkeys(owner.values())}
    assert (text_of["a"], text_of["rest"].startswith('So {"a": "b":')) == (" 1,", True)
    assert schema.BLOCK in table.column_names


PARTS = ["<a>", "</a>", "<b>", "</b>", "<a", "x", "</", "<c.d>", "</c.d>", "<a></b>"]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
def test_pairs_are_those_of_the_pattern(text):
    """A pattern with a back-reference finds the same pairs, but in quadratic time."""
    tags = tuple(re.findall(r"<([A-Za-z_][\w.-]*)>.*?</\1>", text, re.DOTALL))
    expected = (tags, 1) if tags and len(set(tags)) == len(tags) else ((), 0)
    assert usual_tags([text]) == expected


def test_a_layout_of_one_block_without_tags_is_not_replaced_by_the_tasks_blocks(tmp_path):
    rows = [{"prompt": "2+2", "completion": f"it is {said}", "score": float(said == "4")} for said in "4454"]
    file = write_lines(tmp_path / "b.jsonl", rows)
    result = credit_rollouts(file, methods=["grpo"], overrides={"layout": {"all": []}})
    assert result.arms.schemes["grpo"].layout.names == ("all",)
    with pytest.raises(RecipeError, match=r"no tag 'confidence' in all\. The tags there are: none\."):
        credit_rollouts(file, methods=["bae"], overrides={"layout": {"all": []}})


TEXTS = ["<draft>a b</draft><final>c</final>", "<draft>a</draft><final>c d</final>", "<final>e</final>"]


def paid(folder, completions=TEXTS):
    cells = zip(completions, (1, 0, 0), (0.2, 0.8, 0.5), strict=True)
    rows = [{"prompt": "p", "completion": text, "passed": p, "style": s} for text, p, s in cells]
    return write_lines(folder / "1.jsonl", rows)


def sheet(text):
    def write(folder):
        (folder / "sheet.csv").write_text(text)
        return folder / "sheet.csv"

    return write


BOTH, PAIR = ("draft=passed", "final=style"), ("draft", "final")
#: Passed is 1 0 among the two that have a draft, mean .5; style .2 .8 .5, mean .5.
BY_HAND = [[0.5, -0.3], [-0.5, 0.3]]
THIRDS = [[2 / 3], [-1 / 3], [-1 / 3]]
SHEET = "prompt,draft,final,passed,style\np,a b,c,1,.2\np,a,c d,0,.8\np,,e,0,.5\n"
SAID_AND_SHEET = "prompt,completion,draft,passed\np,<draft>x</draft>,no,1\np,<draft>y</draft>,no,0\n"
OBJECTIVES = [{"reward": "passed", "name": "right", "pays": ["draft"]}, {"reward": "style", "pays": ["final"]}]
RECIPE = {"overrides": {"layout": {"draft": ["draft"], "final": ["final"]}, "objectives": OBJECTIVES}}
ANSWERS = [f"so <answer>{n}</answer>" for n in "abc"]
CASES = {
    "a column each": (paid, BOTH, {}, PAIR, BY_HAND),
    "one column twice": (paid, ("draft=style", "final=style"), {}, PAIR, [[-0.3, -0.3], [0.3, 0.3]]),
    "no tags: the completion has any name": (lambda folder: paid(folder, [*"abc"]), ["text=passed"], {}, ("text",), THIRDS),
    "the only tag, and the thought before it": (lambda f: paid(f, ANSWERS), ["answer=passed"], {}, ("answer",), THIRDS),
    "the completion around it": (lambda f: paid(f, ANSWERS), ["completion=passed"], {}, ("completion",), THIRDS),
    "under a name of its own, by a recipe": (paid, (), RECIPE, PAIR, BY_HAND),
    "parts that are columns of a sheet": (sheet(SHEET), BOTH, {}, PAIR, BY_HAND),
    "completions go before columns of parts": (sheet(SAID_AND_SHEET), ["draft=passed"], {}, ("draft",), [[0.5], [-0.5]]),
}


@pytest.mark.parametrize("case", CASES)
def test_each_block_is_paid_by_its_column(case, tmp_path):
    write, pay, options, names, expected = CASES[case]
    result = credit_rollouts(write(tmp_path), **{**CreditOptions(pay=[*pay]).parsed(), **options, "methods": ["bae"]})
    assert result.file_spans.names == names
    (arm,) = result.applied
    assert arm.credit.block_nk[: len(expected)].tolist() == [pytest.approx(row) for row in expected]
    assert names != PAIR or arm.credit.block_nk[2, 1].item() == pytest.approx(0.0)


def test_the_page_repeats_the_command(tmp_path):
    file = save(tmp_path, [{"q": "p", "said": text, "key": "4", "passed": 1, "style": 0.5} for text in TEXTS], "csv")
    columns, pay = ["prompt=q", "completion=said", "answer=key"], ["draft=passed", "final=style"]
    together = ["--columns", ",".join(columns), "--pay", ",".join(pay)]
    alone = [word for said in columns for word in ("--columns", said)] + [f"--pay={said}" for said in pay]
    for words in (together, alone, ["--columns", ",".join(columns[:2]), "--columns", columns[2], *together[2:]]):
        command = ["credit", str(file), *words, "--output", str(tmp_path / "out")]
        app(command, exit_on_error=False, result_action="return_value")
        options = json.loads((tmp_path / "out" / "summary.json").read_text())["options"]
        assert options["columns"] == {"prompt": "q", "completion": "said", "answer": "key"}
        page = (tmp_path / "out" / "report.html").read_text()
        for said in ("--columns prompt=q --columns completion=said --columns answer=key", "--pay draft=passed,final=style"):
            assert said in page
