"""Units of prose: what ends one, by hand."""

import pytest

from segment_small import made, said
from spanwise.errors import LayoutError
from spanwise.layout import Layout
from spanwise.segment import SEGMENTERS, Sample
from spanwise.types import Fault


def shown(segmenter, text):
    """What each unit of a text says."""
    layout = Layout({"unit[*]": f"{segmenter}:"}, most=16)
    found = SEGMENTERS.find(segmenter).function(layout.parts, layout=layout)(Sample.of(text))
    return [text[slice(*claim.inner)].decode() for claim in found.claims]


@pytest.mark.parametrize(
    ("segmenter", "text", "units"),
    [
        ("lines", "one\r\ntwo\n\n\n three ", ["one", "two", "three"]),
        ("lines", "\n\none", ["one"]),
        ("lines", " \n ", []),
        ("paragraphs", "a\nb\n\n\nc\n \t\nd", ["a\nb", "c", "d"]),
        ("sentences", "It is 3.5. Good!", ["It is 3.5.", "Good!"]),
        (
            "sentences",
            "Mr. Fu, e.g. Li, cf. Fig. 3. So?! Yes... and no.",
            ["Mr. Fu, e.g. Li, cf. Fig. 3.", "So?!", "Yes... and no."],
        ),
        ("sentences", "The answer is B. Next.", ["The answer is B.", "Next."]),
        ("sentences", "1. Add.\n2. Halve. 3 is left", ["1. Add.", "2. Halve.", "3 is left"]),
        ("sentences", "She said “Go.” He went.) **Done.** End", ["She said “Go.”", "He went.)", "**Done.**", "End"]),
        ("sentences", "是。不是\uff01“真\uff1f”好", ["是。", "不是\uff01", "“真\uff1f”", "好"]),
        ("sentences", "No end\n\nnew", ["No end", "new"]),
        ("paragraphs", "a\n\x0c\nb", ["a", "b"]),
        ("sentences", "See Fig.\n\nNew", ["See Fig.", "New"]),
        ("sentences", "a\n\x0c\nb", ["a", "b"]),
        ("sentences", "So\n            1. Add", ["So\n            1. Add"]),
        ("sentences", "Wait… What", ["Wait…", "What"]),
        ("steps", "1. a\n2) b\nStep 3: c\n**Step 4** d", ["1. a", "2) b", "Step 3: c", "**Step 4** d"]),
        ("steps", "### Step 5\n**6.** e", ["### Step 5", "**6.** e"]),
        ("steps", "Plan:\n1. a\n    1. inner\n3.5 is none\nsteps 2\n2. b", ["1. a\n    1. inner\n3.5 is none\nsteps 2", "2. b"]),
        ("steps", "no step", []),
    ],
)  # fmt: skip
def test_units(segmenter, text, units):
    assert shown(segmenter, text.encode()) == units


def test_tokens_of_steps_and_what_stands_before_the_first():
    pieces = ["Plan", ":\n1", ". a\n2", ". b", "<eos>"]
    owners, text, fault = made({"step[*]": "steps:"}, pieces, most=3)
    assert (owners, fault) == (["step[0]"] * 3 + ["step[1]"] * 2, 0)  # ". a\n2" begins in the first step
    assert (said(text, "step[0]"), text["step[0]"][""], text["step[2]"]) == ("1. a", "Plan:\n1. a\n", None)
    owners, text, _ = made({"preface": [], "step[*]": "steps:"}, pieces, most=3)
    assert owners == ["preface", "preface", "step[0]", "step[1]", "step[1]"]


def test_more_than_there_are_belong_to_the_last_one_or_the_rest():
    pieces = ["a\n", "b\n", "c\n", "d"]
    owners, text, fault = made(["line[*]"], pieces, segmenter="lines", most=2)
    assert (owners, fault, said(text, "line[1]")) == (["line[0]"] + ["line[1]"] * 3, Fault.MORE, "b")
    owners, _, fault = made({"line[*]": "lines:", "rest": []}, pieces, most=2)
    assert (owners, fault) == (["line[0]", "line[1]", "rest", "rest"], Fault.MORE)
    owners, text, fault = made({"first": "lines:", "others": "lines:"}, pieces)
    assert (owners, fault, said(text, "others")) == (["first"] + ["others"] * 3, 0, "d")


@pytest.mark.parametrize(
    ("blocks", "segmenter", "sentence"),
    [
        (
            {"step[*]": "steps:3"},
            "tags",
            r"'steps' takes no mark, and block 'step\[0\]' has '3'; write {'step\[\*\]': 'steps:'}",
        ),
        ({"a": "turn"}, "turns", r"'turns' takes no mark"),
    ],
)
def test_a_mark_is_refused(blocks, segmenter, sentence):
    with pytest.raises(LayoutError, match=sentence):
        Layout(blocks, segmenter=segmenter)
