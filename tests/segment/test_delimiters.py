"""`regex`: what a match says, and which of two counts; `delimiters` that completions have instead of those of a layout.

`test_claims` and `tests/fuzz` hold both against oracles, also where signs are tokens of their own.
"""

import sys

import pytest

from segment_small import segment, text_of
from spanwise.errors import LayoutError
from spanwise.layout import Layout
from spanwise.segment import census
from spanwise.types import Fault


def test_the_census_says_which_pairs_are_there_instead():
    counts = census(["<plan>go</plan> <<4>>", "<plan>go</plan>"], ["<<...>>", "<think>...</think>"], segmenter="delimiters")
    assert dict(counts.wanted) == {"<<...>>": 1, "<think>...</think>": 0}
    assert dict(counts.others) == {"<plan>...</plan>": 2}


def test_the_group_value_or_the_first_one_or_the_whole_match_is_what_a_part_says():
    for mark, expected in (
        (r"price: (\$)(?P<value>[0-9.]+)", "3.5"),
        (r"price: \$([0-9.]+)", "3.5"),
        (r"price: \$[0-9.]+", "price: $3.5"),
        (r"price: \$3.5(x)?", None),  # a group that takes no part says nothing
        (r"price: \$3.5(x*)", ""),
    ):
        owners, text, fault = segment({"price": f"regex:{mark}", "rest": []}, ["tea, ", "price: ", "$3.5", ", ", "hot"])
        assert (owners, text_of(text, "price"), fault) == (["rest", "price", "price", "rest", "rest"], expected, 0)


def test_an_empty_match_claims_nothing():
    owners, _, fault = segment({"n": "regex:x*", "rest": []}, ["a", "xx", "b"])
    assert (owners, fault) == (["rest", "n", "rest"], 0)
    assert segment({"n": "regex:x*", "rest": []}, ["a"])[2] == Fault.MISSING


def test_of_several_patterns_the_first_to_begin_wins_then_the_longer_one():
    layout = Layout({"word": "regex:[a-z]+", "line": "regex:b[a-z ]+", "rest": []})
    # "ab" begins at 0; "b c" begins inside it and is dropped; then "c" is a word.
    owners, _, fault = segment(layout, ["a", "b", " ", "c"])
    assert (owners, fault) == (["word", "word", "rest", "word"], Fault.MISSING)
    owners, _, _ = segment(layout, ["1", "b", " ", "c"])  # both begin at the b: the longer one
    assert owners == ["rest", "line", "line", "line"]


def test_without_the_package_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "re2", None)
    with pytest.raises(LayoutError, match="google-re2"):
        Layout({"a": "regex:b"})
