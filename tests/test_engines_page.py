"""docs/engines.md: every test that it names exists, and every column is an engine; a small engine stays small."""

import ast
import re

import pytest

from pages import DOCS, ROOT, rows

#: What stands in backticks and parentheses is the name of a test file: (`gradient`) or (`settings`, `main_ppo`).
NAMED = re.compile(r"\(((?:`[a-z_]+`(?:, )?)+)\)")


@pytest.mark.parametrize("row", rows(DOCS / "engines.md", "setting"), ids=lambda row: row[0])
def test_the_tests_that_a_row_names_exist(row):
    setting, *cells = row
    for engine, cell in zip(("trl", "verl", "skyrl"), cells, strict=True):
        for name in re.findall(r"[a-z_]+", " ".join(NAMED.findall(cell))):
            places = [f"test_{engine}_{name}.py", f"test_{name}.py"]
            assert any((ROOT / "tests" / "engines" / engine / place).is_file() for place in places), f"{engine}: {name}"
        if cell.startswith(("works (", "works: ")):
            assert NAMED.search(cell) or "[how]" in cell or "make " in cell, f"{setting}: no test for {engine}"


def lines_of_code(file):
    """The lines of a file without blank lines, comments and docstrings."""
    text = file.read_text(encoding="utf-8")
    documented = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node)
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    lines = {number: line.strip() for number, line in enumerate(text.splitlines(), 1) if number not in documented}
    return sum(line != "" and not line.startswith("#") for line in lines.values())


@pytest.mark.parametrize("name", ["nemo_rl", "prime_rl", "slime", "swift", "tinker", "unsloth"])
def test_a_small_engine_has_under_150_lines_and_a_page_of_60(name):
    place = ROOT / "src" / "spanwise" / "engines" / name
    files = [*place.glob("*.py")] or [place.with_suffix(".py")]
    assert 20 < sum(map(lines_of_code, files)) < 150
    page = DOCS / f"{name}.md"
    assert name == "tinker" or len(page.read_text(encoding="utf-8").splitlines()) <= 60
