"""Layouts: which tags belong to which block, and which layouts are refused."""

import pytest

from spanwise.errors import LayoutError, RecipeError
from spanwise.layout import Layout, any_index, together


def test_layout_sentences():
    assert Layout({"X": ["X"]}).tags == ("X",)
    assert Layout({"whole": [], "c": ["c"]}).names == ("whole", "c")
    assert Layout({"one": ["a", "b"]}, prefilled="a").prefilled == "a"
    with pytest.raises(LayoutError, match="'b' must be the first tag of the first block, which is 'a'"):
        Layout({"one": ["a", "b"]}, prefilled="b")
    with pytest.raises(LayoutError, match="'b' must be the first tag of the first block, which is 'none'"):
        Layout({"one": []}, prefilled="b")
    with pytest.raises(LayoutError, match=r"^A layout needs at least one block"):
        Layout({})
    with pytest.raises(LayoutError, match="names a tag twice: a, b, a"):
        Layout({"one": ["a", "b", "a"]})


def test_one_string_is_one_tag():
    assert Layout({"solution": "answer"}) == Layout({"solution": ["answer"]})


def test_an_unknown_segmenter_is_refused_where_it_is_written():
    with pytest.raises(RecipeError, match=r"There is no segmenter 'tag'. Did you mean 'tags'"):
        Layout({"a": ["answer"]}, segmenter="tag")


@pytest.mark.parametrize(
    ("blocks", "prefilled", "said"),
    [
        ({}, None, "at least one block"),
        ({"a": ["a"], "b": []}, None, "No tag opens block 'b'"),
        ({"a": ["a"], "stop": ["b"]}, None, "No block can be called 'stop'"),
        ({"a": ["<a>"]}, None, "bare name"),
        ({"a": ["a", "a"]}, None, "names a tag twice"),
        ({"a": ["a", "b"]}, "b", "must be the first tag"),
        ({"": ["a"]}, None, "A block of the tags a has no name; write {'solution': \\['answer'\\]}"),
        ("a", None, "A layout is a mapping of blocks to tags, .* got 'a'"),
        ([("a", ["a"])], None, "A layout is a mapping of blocks to tags"),
        ({"a": None}, None, "Block 'a' is made of a list of tag names, .* got None"),
        ({"a": {"b"}}, None, "Block 'a' is made of a list of tag names, .* got {'b'}"),
    ],
)
def test_a_layout_that_cannot_work_is_refused(unchecked_shapes, blocks, prefilled, said):
    with pytest.raises(LayoutError, match=said):
        Layout(blocks, prefilled=prefilled)


def test_columns_of_a_repeated_block_are_collected():
    assert any_index("equals.items[3].price") == "equals.items[*].price"
    columns = {"total": 5, "items[0].price": 1, "items[1].price": 2}
    assert together(columns) == {"total": [5], "items[*].price": [1, 2]}
