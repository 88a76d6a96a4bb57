"""docs/border.md is what the cases say."""

from border import page


def test_the_page_is_made_of_the_cases():
    assert page.FILE.read_text(encoding="utf-8") == page.page(), "run: python tests/border/page.py"


def test_there_are_forty_cases_and_no_setup_twice():
    setups = [case.setup for module in page.modules() for case in module.CASES]
    assert len(setups) >= 40
    assert len(set(setups)) == len(setups)
    assert all(len(setup) < 100 for setup in setups)


def test_cells_keep_tags_and_columns():
    assert page.plain("`a|b` says <answer> | 2") == "`a\\|b` says \\<answer> \\| 2"
