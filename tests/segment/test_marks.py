"""Layouts whose marks no segmenter can look for, or two of which are one."""

import pytest

from spanwise.errors import LayoutError
from spanwise.layout import Layout

OVERLAPPING = [("items", "items[*].price"), ("a.b", "a.b"), ("a.b", 'a["b"]'), ("a[*]", "a[0].b"), ("a[0]", "a[*].b")]
TITLES = [{"a": ["#"]}, {"a": [" "]}, {"a": ["a\nb"]}, {"a": "Plan", "b": "plan"}]
NUMBERS = ["fixed:0", "fixed:a", "cuts:5@2", "cuts:@0.5", "low_probability:", "low_probability:nan", "steps:3"]
CODE = {"function": "function", "klingon.function": "klingon", "python.funktion": "python", "python.function_def": "python"}
PATTERNS = [r"(?<=a)b", r"a(?=b)", r"(a)\1", "(a", "a{2000}"]
#: The layout's segmenter, its blocks, and what the sentence names.
REFUSED = [
    *[("code", {"a": mark}, named) for mark, named in CODE.items()],
    *[("delimiters", blocks, r"\w") for blocks in ({"a": "think"}, {"a": "...x"}, {"a": "<a>...</a>", "b": "<a>...</b>"})],
    *[("regex", {"a": mark}, r"\w") for mark in PATTERNS],
    *[("markdown", blocks, r"\w") for blocks in TITLES],
    *[("tags", {"a[*]": mark}, r"\w") for mark in NUMBERS],
    ("tags", {"a[*]": "fixed:2", "b[*]": "fixed:3"}, r"\w"),
    ("turns", {"a": "turn"}, r"\w"),
    ("channels", ["thinking"], "thinking"),
    *[("json", {"x": mark, "y": other}, "overlap") for mark, other in OVERLAPPING],
    ("json", {"x[*]": "a[*].b", "y": "a[*]"}, "overlap"),
]


@pytest.mark.parametrize(("segmenter", "blocks", "named"), REFUSED)
def test_marks_that_cannot_be_are_refused_where_they_are_written(segmenter, blocks, named, capfd):
    with pytest.raises(LayoutError, match=named):
        Layout(blocks, segmenter=segmenter)
    assert capfd.readouterr().err == ""  # RE2 would write there


def test_no_prompt_opens_the_answer():
    with pytest.raises(LayoutError, match="answer"):
        Layout(["answer"], segmenter="channels", prefilled="answer")
