"""The pages say what runs: every python block is executed, every recipe is planned, tables agree with the code."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch

import trl_small
from spanwise.credit import METHODS
from spanwise.credit.registry import PROPERTIES
from spanwise.recipe import load, scheme_of
from spanwise.tasks.digits import DIGITS_LAYOUT
from spanwise.testing import BY_KIND

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
pytestmark = pytest.mark.usefixtures("unchecked_shapes")


def blocks(page, language):
    return [
        code
        for kind, rest, code in BLOCK.findall(page.read_text(encoding="utf-8"))
        if kind == language and "notest" not in rest
    ]


@pytest.fixture
def page_runs():
    """Run the python blocks of a page, one after the other, in one namespace; what they register is forgotten afterwards."""
    before = dict(METHODS)

    def run(page, *, first_only=False):
        namespace = {"__name__": f"docs.{page.stem}"}
        for position, code in enumerate(blocks(page, "python")[: 1 if first_only else None]):
            exec(compile(code, f"{page.name}, python block {position + 1}", "exec"), namespace)

    yield run
    for name in set(METHODS) - set(before):
        del METHODS[name]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_python_blocks_run(page, page_runs):
    page_runs(page)


OWN = ROOT / "docs" / "write_your_own.md"


def test_the_example_method_is_short_and_runs_from_a_recipe(page_runs, tmp_path):
    first = blocks(OWN, "python")[0]
    assert len([line for line in first.splitlines() if line.strip()]) < 30
    page_runs(OWN, first_only=True)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(blocks(OWN, "yaml")[0])
    filled = scheme_of(load(recipe), DIGITS_LAYOUT, 32)
    assert filled.estimator == "median"
    assert filled.sum_first


def test_the_entry_point_is_the_one_we_read():
    project = tomllib.loads(blocks(OWN, "toml")[0])["project"]
    assert list(project["entry-points"]) == [METHODS.group]


def test_the_table_of_properties_is_complete():
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \| (.+) \|$", OWN.read_text(encoding="utf-8"), re.MULTILINE)
    table = {name: (kinds, says) for name, kinds, says in rows if name in PROPERTIES}
    for name, says in PROPERTIES.items():
        kinds = [kind for kind, names in BY_KIND.items() if name in names]
        if kinds:
            assert table[name] == ("all" if len(kinds) == len(BY_KIND) else ", ".join(kinds), says)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=lambda page: page.stem)
def test_yaml_blocks_are_recipes(page, page_runs, tmp_path):
    page_runs(page)  # a page may register the method that its recipe names
    for text in blocks(page, "yaml"):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(text)
        assert scheme_of(load(recipe), DIGITS_LAYOUT, 32).objectives


@pytest.mark.filterwarnings("ignore")  # those of the libraries that a trainer loads
def test_the_trainer_of_the_readme_can_be_built(tmp_path):
    """With a small model and a small dataset in place of the names."""
    (code,) = [code for _, rest, code in BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8")) if "notest" in rest]
    trl_small.policy(dtype=torch.float32).save_pretrained(tmp_path / "model")
    trl_small.tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = {
        "Qwen/Qwen2.5-3B-Instruct": tmp_path / "model",
        "my/problems.jsonl": tmp_path / "sums.jsonl",
        '"out"': f'"{tmp_path}"',
    }
    for name, place in named.items():
        assert name in code
        code = code.replace(name, str(place))
    code = code.replace("num_generations=16,", "num_generations=16, use_cpu=True, bf16=False,").replace(
        "trainer.train()", ""
    )
    namespace = {}
    exec(compile(code, "README.md, the trainer", "exec"), namespace)
    assert namespace["trainer"].args.num_generations == 16
    assert namespace["task"].train.column_names == ["prompt", "answer"]
