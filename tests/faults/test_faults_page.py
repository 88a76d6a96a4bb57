"""Every fault of the list has a test or a reason, and docs/reliability.md is what these say."""

from faults import faults_page as page

LAST = 55


def test_every_fault_is_tested_or_cannot_happen_here():
    tested, listed = page.tests(), [number for number, *_ in page.NOT_OURS]
    assert sorted([*tested, *listed]) == list(range(1, LAST + 1))
    assert all(len(cases) == 1 for cases in tested.values())


def test_the_section_is_made_of_the_tests():
    assert page.written()[1] == page.section(), "run: python tests/faults/faults_page.py"
