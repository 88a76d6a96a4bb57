"""Layouts: which tags belong to which block, and which layouts are refused."""

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


@pytest.mark.parametrize(
    ("blocks", "prefilled", "sentence"),
    [
        ({}, None, "at least one block"),
        ({"a": ["a"], "b": []}, None, "No tag opens block 'b'"),
        ({"a": ["a"], "stop": ["b"]}, None, "No block can be called 'stop'"),
        ({"a": ["<a>"]}, None, "bare name"),
        ({"a": ["a", "a"]}, None, "names a tag twice"),
        ({"a": []}, "b", "must be the first tag .* which is 'none'"),
        ({"": ["a"]}, None, "The block with the tags a has no name; write {'solution': \\['answer'\\]}"),
        (["a", "a"], None, "Two blocks are called 'a'"),
        ({"a[*]": ["a"], "a[1]": ["b"]}, None, r"Two blocks are called 'a\[1\]'"),
        ("a", None, "A layout must be a mapping of blocks to tags, .* got 'a'"),
        ([("a", ["a"])], None, "A layout must be a mapping of blocks to tags"),
        ({"a": None}, None, "Block 'a' needs a list of tag names, .* got None"),
        ({"a": {"b"}}, None, "Block 'a' needs a list of tag names, .* got {'b'}"),
    ],
)
def test_a_layout_that_cannot_work_is_refused(unchecked_shapes, blocks, prefilled, sentence):
    with pytest.raises(LayoutError, match=sentence):
        Layout(blocks, prefilled=prefilled)
