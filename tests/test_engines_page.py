"""docs/engines.md: every test that it names exists, and every column is an engine."""

import re

import pytest

from pages import DOCS, ROOT, rows

#: What stands in backticks and parentheses is the name of a test file: (`gradient`) or (`settings`, `main_ppo`).
NAMED = re.compile(r"\(((?:`[a-z_]+`(?:, )?)+)\)")


@pytest.mark.parametrize("row", rows(DOCS / "engines.md", "setting"), ids=lambda row: row[0])
def test_the_tests_that_a_row_names_exist(row):
    setting, *cells = row
    assert len(cells) == 3, setting
    for engine, cell in zip(("trl", "verl", "skyrl"), cells, strict=True):
        for name in re.findall(r"[a-z_]+", " ".join(NAMED.findall(cell))):
            places = [f"test_{engine}_{name}.py", f"test_{name}.py"]
            assert any((ROOT / "tests" / "engines" / engine / place).is_file() for place in places), f"{engine}: {name}"
        if cell.startswith(("works (", "works: ")):
            assert NAMED.search(cell) or "[how]" in cell or "make " in cell, f"{setting}: no test for {engine}"
