"""What an engine must say of a batch: tags nobody writes, rewards nobody gets, blocks that are left out for free."""

import pytest

from spanwise import Batch, Layout, Objective, Scheme, Vocabulary, read, remarks

VOCABULARY = Vocabulary(
    (b"<answer>", b"</answer>", b"<sure>", b"</sure>", b"4", b"5", b"0.9", b"<plan>", b"</plan>", b"much")
)
LAYOUT = Layout({"solution": ["answer"], "report": ["sure"]})
PRICED = Scheme(
    "bae",
    LAYOUT,
    [
        Objective("correct", "solution", if_missing=0.0),
        Objective("brier", "report", given="correct", options={"tag": "sure"}, if_missing=-1.0),
        Objective("format", "report"),
    ],
)
WHOLE, SILENT, VAGUE, PLAN = [0, 4, 1, 2, 6, 3], [0, 5, 1], [0, 4, 1, 2, 9, 3], [7, 4, 8]


def scheme(**changes):
    report = {"given": "correct", "options": {"tag": "sure"}, **changes}
    return Scheme("bae", LAYOUT, [Objective("correct", "solution", if_missing=0.0), Objective("brier", "report", **report)])


def found(ids, rule=None, layout=None):
    rule = rule or scheme()
    batch = Batch.jagged(ids, [0] * len(ids), columns={"answer": ["4"] * len(ids)})
    return remarks(read(batch, rule, VOCABULARY), rule)


def test_nothing_to_say_of_whole_completions():
    assert found([WHOLE, WHOLE]) == {}


def test_other_tags_than_the_layouts():
    said = found([PLAN, PLAN, []])
    assert said["tags"] == (
        "<answer> is in 0 and <sure> is in 0 of 3 completions; they do contain <plan> (2). The layout asks for them, so what is "
        "read there earns nothing. Ask for these tags in the prompt, or write the layout of what the model writes."
    )
    assert list(said) == ["tags"], "what follows from it is not said again"


def test_one_tag_lacks_and_the_other_is_there():
    said = found([SILENT, SILENT])
    assert said["tags"].startswith("<sure> is in 0 of 2 completions; they do contain <answer> (2). The layout asks for it,")
    assert list(said) == ["tags"]


@pytest.mark.parametrize(
    ("ids", "start"),
    [
        ([WHOLE, SILENT, []], "1 of 3 completions leave out report, and objective 'brier' has no if_missing"),
        ([WHOLE, VAGUE], "1 of 2 write there what cannot be read, and objective 'brier' has no if_missing"),
        ([WHOLE, SILENT, VAGUE], "1 of 3 completions leave out report and 1 of 3 write there what cannot be read, and"),
    ],
)
def test_leaving_a_block_out_costs_nothing_without_if_missing(ids, start):
    said = found(ids)
    assert list(said) == ["free/brier"]
    assert said["free/brier"].startswith(start)
    assert found(ids, scheme(if_missing=-1.0)) == {}


def test_another_objective_charges_what_is_left_out():
    assert list(found([WHOLE, SILENT], PRICED)) == []


def test_an_empty_completion_leaves_nothing_out():
    assert found([WHOLE, []]) == {}


def nothing(blocks):
    return [None for _ in blocks]


def test_an_objective_that_scores_nobody():
    rule = Scheme("bae", LAYOUT, [Objective(nothing, "solution", if_missing=0.0)])
    assert found([WHOLE, SILENT], rule)["scored/nothing"].startswith(
        "Objective 'nothing' has no reward for any of 2 completions (2 absent), so it trains nothing."
    )


def test_a_batch_of_nobody_says_nothing():
    assert found([]) == {}
