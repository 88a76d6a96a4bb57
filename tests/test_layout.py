"""Layouts: which tags belong to which block, and which layouts and marks are refused where they are written."""

import pytest

from spanwise.errors import LayoutError
from spanwise.layout import Layout, any_index, together


def test_tags_and_names_of_a_layout():
    assert Layout({"whole": [], "c": ["c"]}).names == ("whole", "c")
    assert Layout({"a": r"steps: (\d+)"}, segmenter="regex").parts[0].mark == r"steps: (\d+)"
    mixed = Layout({"unsure": "low_probability: 0.2", "answer": "delimiters:\nAnswer:...", "rest": []})
    expected = [("low_probability", " 0.2"), ("delimiters", "\nAnswer:...")]
    assert [(part.segmenter, part.mark) for part in mixed.parts] == expected
    assert Layout({"solution": "answer"}) == Layout({"solution": ["answer"]})
    assert any_index("equals.items[3].price") == "equals.items[*].price"
    assert together({"total": 5, "items[0].price": 1, "items[1].price": 2}) == {"total": [5], "items[*].price": [1, 2]}


OVERLAPPING = [("items", "items[*].price"), ("a.b", "a.b"), ("a.b", 'a["b"]'), ("a[*]", "a[0].b"), ("a[0]", "a[*].b")]
TITLES = [{"a": ["#"]}, {"a": [" "]}, {"a": ["a\nb"]}, {"a": "Plan", "b": "plan"}]
NUMBERS = ["fixed:0", "fixed:a", "cuts:5@2", "cuts:@0.5", "low_probability:", "low_probability:nan", "steps:3"]
CODE = {"function": "function", "klingon.function": "klingon", "python.funktion": "python", "python.function_def": "python"}
PATTERNS = [r"(?<=a)b", r"a(?=b)", r"(a)\1", "(a", "a{2000}"]
#: The layout's segmenter, its blocks, and what the sentence names.
REFUSED = [
    ("tags", {}, "at least one block"),
    ("tags", {"a": ["a"], "b": []}, "No tag opens block 'b'"),
    ("tags", {"a": ["a"], "stop": ["b"]}, "No block can be called 'stop'"),
    ("tags", {"a": ["<a>"]}, "bare name"),
    ("tags", {"a": ["a", "a"]}, "names a tag twice"),
    ("tags", {"": ["a"]}, "The block with the tags a has no name; write {'solution': \\['answer'\\]}"),
    ("tags", ["a", "a"], "Two blocks are called 'a'"),
    ("tags", {"a[*]": ["a"], "a[1]": ["b"]}, r"Two blocks are called 'a\[1\]'"),
    ("tags", "a", "A layout must be a mapping of blocks to tags, .* got 'a'"),
    ("tags", [("a", ["a"])], "A layout must be a mapping of blocks to tags"),
    ("tags", {"a": None}, "Block 'a' needs a list of tag names, .* got None"),
    ("tags", {"a": {"b"}}, "Block 'a' needs a list of tag names, .* got {'b'}"),
    *[("tags", {"a[*]": mark}, r"\w") for mark in NUMBERS],
    ("tags", {"a[*]": "fixed:2", "b[*]": "fixed:3"}, r"\w"),
    *[("code", {"a": mark}, named) for mark, named in CODE.items()],
    *[("delimiters", blocks, r"\w") for blocks in ({"a": "think"}, {"a": "...x"}, {"a": "<a>...</a>", "b": "<a>...</b>"})],
    *[("regex", {"a": mark}, r"\w") for mark in PATTERNS],
    *[("markdown", blocks, r"\w") for blocks in TITLES],
    ("turns", {"a": "turn"}, r"\w"),
    ("channels", ["thinking"], "thinking"),
    *[("json", {"x": mark, "y": other}, "overlap") for mark, other in OVERLAPPING],
    ("json", {"x[*]": "a[*].b", "y": "a[*]"}, "overlap"),
]


@pytest.mark.parametrize(("segmenter", "blocks", "named"), REFUSED)
def test_a_layout_that_cannot_work_is_refused(unchecked_shapes, segmenter, blocks, named, capfd):
    with pytest.raises(LayoutError, match=named):
        Layout(blocks, segmenter=segmenter)
    assert capfd.readouterr().err == ""  # RE2 would write there


@pytest.mark.parametrize(
    ("blocks", "options", "named"),
    [
        ({"a": []}, {"prefilled": "b"}, "must be the first tag .* which is 'none'"),
        (["answer"], {"prefilled": "answer", "segmenter": "channels"}, "answer"),
    ],
)
def test_what_no_prompt_opens_is_refused(blocks, options, named):
    with pytest.raises(LayoutError, match=named):
        Layout(blocks, **options)
