"""The pages say what runs: every python block is executed, every recipe is planned, tables agree with the code."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from spanwise.credit import METHODS
from spanwise.credit.registry import ENTRY_POINT_GROUP, PROPERTIES
from spanwise.recipe import load, plan
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
    filled = plan(load(recipe), DIGITS_LAYOUT, 32)
    assert filled.estimator == "median"
    assert filled.sum_first


def test_the_entry_point_is_the_one_we_read():
    project = tomllib.loads(blocks(OWN, "toml")[0])["project"]
    assert list(project["entry-points"]) == [ENTRY_POINT_GROUP]


def test_the_table_of_properties_is_complete():
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \| (.+) \|$", OWN.read_text(encoding="utf-8"), re.MULTILINE)
    table = {name: (kinds, says) for name, kinds, says in rows if name in PROPERTIES}
    for name, says in PROPERTIES.items():
        kinds = [kind for kind, names in BY_KIND.items() if name in names]
        if kinds:
            assert table[name] == ("all" if len(kinds) == len(BY_KIND) else ", ".join(kinds), says)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=lambda page: page.stem)
def test_yaml_blocks_are_yaml(page):
    for text in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(text), dict)
