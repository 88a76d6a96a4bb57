"""Both notebooks run from the first cell to the last, and print what is stored in them."""

import re
from pathlib import Path

import nbformat
import pytest

import notebook_pages
from tutorial_pages import agree

PAGES = sorted(notebook_pages.FOLDER.glob("*.ipynb"))
#: Whose numbers come from a training.
TRAINED = {"two_ways"}
# The kernel is a process of its own; what its libraries say of themselves is not of spanwise.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def test_the_notebooks_are_there_with_their_outputs():
    assert [page.stem for page in PAGES] == ["first_look", "two_ways"]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        notebook = nbformat.reads(text, as_version=4)
        nbformat.validate(notebook)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        outputs = [output for cell in code for output in cell.outputs]
        assert all(cell.execution_count for cell in code)
        assert not any(output.output_type == "error" for output in outputs)
        assert any(output.get("data", {}).keys() & {"text/html", "image/svg+xml"} for output in outputs)
        assert len(text) < 400_000
        assert not re.search(r"/(tmp|home|root|Users)/", text)  # folders of the author
        assert str(Path(__file__).parents[1]) not in text


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_it_runs_and_prints_what_is_stored(page, tmp_path):
    stored = notebook_pages.printed(nbformat.read(page, as_version=4))
    now = notebook_pages.printed(notebook_pages.executed(page, tmp_path))
    for cell, (expected, printed) in enumerate(zip(stored, now, strict=True)):
        assert agree(expected, printed, about=page.stem in TRAINED), f"code cell {cell + 1} prints\n{printed}"
