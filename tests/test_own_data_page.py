"""Every example of docs/howto/own_data.md: its files are written, its commands run, its Python too."""

import re
import shlex

import pytest
import torch

from pages import DOCS, FENCED, blocks
from spanwise.cli import app
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.recipe import load
from spanwise.rollouts.readers.plain import NAMES
from spanwise.tasks.hub import check_cells, find_columns, read_rows

OWN_DATA = DOCS / "howto" / "own_data.md"
PAGE = OWN_DATA.read_text(encoding="utf-8")
FILES = {name: text for kind, name, text in FENCED.findall(PAGE) if kind in ("text", "json") and name}
COMMANDS = [shlex.split(line)[1:] for line in re.findall(r"^spanwise .*$", PAGE, re.MULTILINE)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")


CREDITED = [words for words in COMMANDS if words[0] == "credit" and words[1] in FILES]


@pytest.mark.parametrize("words", CREDITED, ids=[words[1] for words in CREDITED])
def test_the_command_makes_a_report(words, tmp_path):
    app(words)
    assert (tmp_path / "runs" / "credit" / "report.html").is_file()


def test_every_file_has_its_command_and_the_table_of_roles_is_that_of_the_code():
    used = {word for words in COMMANDS for word in words if word in FILES}
    files = {"sums.csv", "samples.json", "chats.jsonl", "agent.jsonl", "theirs.csv", "problems.csv"}
    assert used == set(FILES) == files
    for role, names in NAMES.items():
        (row,) = re.findall(rf"^\| `{role}` \|[^|]*\|(.*)\|$", PAGE, re.MULTILINE)
        assert re.findall(r"`(\w+)`", row) == list(names)


def test_the_credit_of_the_first_example_and_the_python_prints_what_it_says(capsys):
    # One of two is right, and both of two: the verdicts are +-1/2 and 0.
    result = credit_rollouts("sums.csv", methods=["bae"], reward={"correct": "text"})
    assert result.applied[0].credit.block_nk[:, 0].tolist() == pytest.approx([0.5, -0.5, 0.0, 0.0])
    assert "Some recorded numbers are missing or not finite: 1 of 4 values of 'reward'" in result.note
    capsys.readouterr()
    (code,), namespace = blocks(OWN_DATA, "python"), {}
    exec(compile(code, "own_data.md", "exec"), namespace)
    assert capsys.readouterr().out.strip() == re.findall(r"^print\(.*#\s*(.*)$", code, re.MULTILINE)[0]
    assert torch.isnan(namespace["table"].rewards["acc"].value_n[2])


def test_the_problems_can_be_trained_on():
    (words,) = [words for words in COMMANDS if words[0] == "train"]
    pairs = dict(pair.split("=") for pair in words[words.index("--columns") + 1].split(","))
    columns = {f"{role}_column": name for role, name in pairs.items()}
    recipe = load(None, {"model": "m", "dataset": "problems.csv", **columns})
    rows = read_rows("problems.csv", "train", texts=(recipe.question_column, recipe.answer_column))
    columns = find_columns(rows.column_names, recipe.question_column, None, recipe.answer_column, None)
    check_cells(rows, "problems.csv", columns, template=True)
    assert rows["gold"][:] == ["4", "6", "8"]
