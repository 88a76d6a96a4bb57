"""Every step of every tutorial runs, prints what the page shows, and leads where its links say."""

import pytest
import torch

import tutorial_pages
from spanwise.credit import METHODS
from trl_small import THIRD_PARTY

PAGES = sorted(page for page in tutorial_pages.FOLDER.glob("*.md") if page.stem != "index")
MARKS = {"calibrated_answers": pytest.mark.long}  # it trains twice
pytestmark = [
    *THIRD_PARTY,
    pytest.mark.usefixtures("unchecked_shapes"),
    pytest.mark.filterwarnings("ignore:Every advantage of the batch at step:UserWarning"),
]


def test_the_tutorials_are_there():
    names = "a_judge agent_turns calibrated_answers json_fields your_own_method"
    assert [page.stem for page in PAGES] == names.split()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [pytest.param(page, marks=MARKS.get(page.stem, ()), id=page.stem) for page in PAGES])
def test_each_step_prints_what_the_page_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before, state = set(METHODS), torch.get_rng_state()
    steps = 0
    try:
        for step, printed in tutorial_pages.run(page.read_text(encoding="utf-8"), page.stem):
            steps += 1
            expected = step["output"] or ""
            assert tutorial_pages.agree(expected, printed, about=step["about"]), f"step {steps} prints\n{printed}"
    finally:
        torch.set_rng_state(state)
        for name in set(METHODS) - before:
            del METHODS[name]
    assert 5 <= steps <= 12
