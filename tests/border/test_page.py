"""docs/border.md has no section and no line without its case."""

import ast
from pathlib import Path

from border.case import sections


def test_every_section_is_a_file_of_cases():
    """That each has the lines of its section and no other, `check` asserts."""
    files = sorted(Path(__file__).parent.glob("test_border_*.py"))
    titles = [(ast.get_docstring(ast.parse(file.read_text())) or "").removesuffix(".") for file in files]
    assert list(sections()) == titles


def test_no_setup_stands_on_the_page_twice():
    setups = [done for lines in sections().values() for done in lines]
    assert len(setups) >= 40
    assert len(set(setups)) == len(setups)
    assert all(len(setup) < 100 for setup in setups)
