"""A mode from a folder outside the library works on files and in TRL; nothing in the library knows its name."""

import statistics
from pathlib import Path

import pytest
import torch

import spanwise
import trl_small as small
from modes.toy.mode import Brevity
from spanwise import Batch, Layout, RecipeError, Scheme, Vocabulary, credit_batch, read
from spanwise.modes import MODES
from spanwise.recipe import load, resolved, scheme_of
from spanwise.registry import register
from spanwise.report.train import mode_headlines, mode_sections
from spanwise.rollouts import read_rollouts

pytestmark = small.THIRD_PARTY
TOY = Path(__file__).parent / "toy"
VOCABULARY = Vocabulary((b"<answer>", b"4", b"5", b"</answer>", b"a"))
LENGTHS = [len(completion.pieces) for completion in small.SAID]
#: How many tokens each completion is shorter than the mean of its group of four.
SHORTER = [statistics.mean(LENGTHS[n // 4 * 4 :][:4]) - length for n, length in enumerate(LENGTHS)]


@pytest.fixture(autouse=True)
def register_brevity():
    """Register the mode for one test; other tests list the library's own modes."""
    register("brevity", kind="mode")(Brevity)
    yield
    del MODES["brevity"]


def test_it_is_one_folder_of_at_most_a_hundred_lines_that_nothing_here_names():
    assert sum(len(file.read_text().splitlines()) for file in TOY.glob("*.py")) <= 100
    room = Path(spanwise.__file__).parent
    assert not [file for file in room.rglob("*.py") if "brevity" in file.read_text().lower()]


def test_in_files_it_changes_the_credit_of_any_method():
    layout = Layout({"all": ["answer"]})
    batch = Batch.jagged([[0, 1, 3], [4, 4, 0, 2, 3], [0, 1, 3], [4, 0, 1, 3]], [0, 0, 1, 1], columns={"answer": ["4"] * 4})
    for method in ("rloo", "grpo"):
        plain, mine = (Scheme.preset(method, layout, per="completion", modes=modes) for modes in ((), (Brevity(0.5),)))
        reading = read(batch, plain, VOCABULARY)
        change_n = (credit_batch(reading, batch, mine).block_nk - credit_batch(reading, batch, plain).block_nk)[:, 0]
        torch.testing.assert_close(change_n, torch.tensor([0.5, -0.5, 0.25, -0.25]).double())
    assert mine.plain()["brevity"] == {"bonus": 0.5, "pull": 0.0}
    assert Scheme.preset(method, layout, per="completion", brevity=Brevity(0.5)) == mine
    with pytest.raises(RecipeError, match="brevity pays blocks"):
        Scheme.preset("gae", layout, modes=[Brevity()])


def test_a_recipe_has_a_section_for_it():
    recipe = load(None, {"method": "grpo", "brevity": {"bonus": 0.5}})
    assert recipe.scheme_modes == (Brevity(0.5),)
    plain = resolved(recipe, scheme_of(recipe, Layout({"all": ["answer"]}), 9))
    assert load(None, plain).modes["brevity"] == Brevity(0.5)
    for wrong in (3, {"bonus": -1}, {"bonnus": 1}):
        with pytest.raises(RecipeError, match="brevity"):
            load(None, {"brevity": wrong})


def test_its_page_its_column_and_its_alarm_show(tmp_path):
    run = small.trainer(tmp_path, extra={"credit": {"modes": [Brevity()]}}, max_steps=4, keep_rollouts=1)
    alarm = r"Step 3: In 3 batches in a row \(steps 1 to 3\): 100 % of the ends are foregone conclusions. Usually bonus is large."
    with pytest.warns(UserWarning, match=alarm):
        run.train()
    assert read_rollouts(tmp_path).columns["shorter"][: len(small.SAID)] == SHORTER
    lines = [{"step": step, "brevity/sure": 1.0} for step in (1, 2)]
    section = next(section for section in mode_sections(lines) if section.title == "Brevity")
    assert [panel.title for panel in section.panels] == ["Ends"]
    assert [(line.label, line.value) for line in mode_headlines(lines)] == [("sure of its ends", "1.00")]


def test_in_trl_the_gradient_is_that_of_its_credit_and_its_loss(tmp_path):
    bonus, pull = 0.05, 0.3
    extra = {"credit": {"modes": [Brevity(bonus, pull)]}}
    run = small.trainer(tmp_path / "mine", extra=extra, save_strategy="steps", save_steps=1)
    with_mode, without = small.step(run), small.step(small.trainer(tmp_path / "plain"))
    model, total, last = small.policy(), 0.0, []
    for shorter, completion, row in zip(SHORTER, small.SAID, small.log_probs(model, small.SAID), strict=True):
        for t, block in enumerate(completion.blocks):
            ratio = (row[t] - row[t].detach()).exp()
            total = total - bonus * shorter * ratio / completion.blocks.count(block) / len(small.SAID)
        last.append(row[-1])
    gradient = small.gradient_of(model, total - pull * sum(last) / len(small.SAID))
    assert small.largest_difference({name: with_mode[name] - without[name] for name in with_mode}, gradient) < 2e-6
    logged = next(line["brevity/last"] for line in run.state.log_history if "brevity/last" in line)
    assert logged == pytest.approx(statistics.mean(float(value.detach()) for value in last), abs=1e-5)
    assert (tmp_path / "mine" / "checkpoint-1" / "brevity.txt").read_text() == "0.05\n"
