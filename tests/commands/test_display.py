"""What a terminal of 80 columns shows: whole words, whole numbers, and what is wrong."""

import io

import pytest
from rich.console import Console

from spanwise.commands.compare.compare import FIGURES, comparison_tables
from spanwise.commands.shared.display import figure_table, interval_table, pull_note, text_plot
from spanwise.commands.shared.fitted import say
from spanwise.commands.shared.samples import unmeasured
from spanwise.layout import Layout
from spanwise.measure import Interval, compare_arms
from spanwise.scheme import Scheme

TAGS = {"answer": "answer", "confidence": "confidence"}


def shown(*parts, width=80):
    console = Console(width=width, file=io.StringIO())
    say(console, *parts)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_comparison_fits_whatever_the_terminal(width):
    values = {
        name: {s: 0.8 + (3 * s + k) % 7 / 100 for s in range(5)}
        for k, name in enumerate(["outcome", "blended", "rlcr", "two_attempts"])
    }
    figures = [*FIGURES, "majority@16", "weighted@16", "second_accuracy"]
    runs = {
        arm: {s: dict.fromkeys(figures, v) | {"refusal_rate": 0.0} for s, v in seeds.items()}
        for arm, seeds in values.items()
    }
    comparison = compare_arms(runs)
    text = shown(*comparison_tables(comparison), width=width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for figure in figures:
        assert figure.replace("_", " ") in text
    table = text.split("Paired")[0]
    for line in comparison.markdown().splitlines()[2:6]:
        assert all(cell in table for cell in line.strip("| ").split(" | "))
    assert (table.count("accuracy") < 3) if width == 60 else True
    headings = [line for line in table.splitlines() if "accuracy" in line]
    assert ("weighted@16" in headings[0]) == (width == 200)


def test_tables_of_one_run_mark_what_is_wrong():
    good = {"accuracy": 0.85, "ece": 0.03}
    text = shown(*figure_table("train: a", {"start": good, "end": {"accuracy": 0.0, "ece": 0.001}}))
    assert "! end: hardly any answer is right (accuracy, ece)" in text
    assert next(line.split() for line in text.splitlines() if "ece" in line) == ["ece", "0.030", "0.001", "!"]
    assert "!" not in shown(*figure_table("train: a", {"start": good}))
    some = Interval(0.001, 0.0, 0.01, 0.001, 0.95, 4)
    text = shown(*interval_table("a", {"accuracy": some, "auroc": None}))
    assert "0.001 !" in text
    assert "! hardly any answer is right (accuracy)" in text
    assert "auroc" not in shown(*interval_table("a", {"accuracy": some, "auroc": None}, absent=["auroc"]))


def test_what_a_layout_cannot_tell():
    judged = {"ece", "brier", "auroc", "mean_confidence", "sharpness"}
    assert unmeasured(Layout({"solution": ["answer"], "confidence": ["confidence"]}), TAGS) == {}
    assert unmeasured(Layout({"all": []}), TAGS) == unmeasured(None, TAGS) == {}  # the task's own tags
    assert unmeasured(Layout({"all": "answer", "sure": "confidence"}), TAGS) == {}
    twice = unmeasured(Layout({"first": ["answer"], "second": ["answer"]}), TAGS)
    assert set(twice) == {"coverage", *judged}
    assert set(twice.values()) == {"the last block, second, has no tag <confidence>, only <answer>"}
    other = unmeasured(Layout({"plan": ["plan"], "sure": ["confidence"]}), TAGS)
    assert set(other) == {"accuracy", "refusal_rate", "verdict_rate", *judged}
    assert unmeasured(Layout({"plan": ["plan"], "sure": ["p"]}), {"answer": "plan", "confidence": "p"}) == {}


def test_what_a_layout_without_tags_cannot_tell_is_said_of_its_parts():
    assert unmeasured(Layout(["answer", "confidence"], segmenter="json"), TAGS) == {}
    fields = unmeasured(Layout(["g", "h"], segmenter="json"), TAGS)
    assert len(set(fields.values())) == 1
    assert {"coverage", "accuracy"} < set(fields)
    rest = unmeasured(Layout({"answer": "json:answer", "rest": []}), TAGS)
    assert set(rest.values()) == {"the last block, rest, has no part 'confidence'"}


def test_curves_are_drawn_as_text():
    assert text_plot({"accuracy": [0.0, 0.5, 1.0]}, height=2) == "accuracy  1 |  █\n          0 | ██"


def test_only_small_groups_get_a_note_on_their_pull():
    scheme = Scheme.preset("bae", Layout({"solution": ["answer"], "report": ["confidence"]}))
    assert "drives a confidence of .70 to .80;" in pull_note(scheme, group_size=4)
    assert pull_note(scheme, group_size=16) is None
