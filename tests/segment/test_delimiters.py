"""`delimiters`, written out token by token, and `regex`: bytes in, bytes out, and what RE2 refuses.

`tests/fuzz` holds both against oracles, also where signs are tokens of their own.
"""

import sys

import pytest

from segment_small import segment, text_of
from spanwise.errors import LayoutError
from spanwise.layout import Layout
from spanwise.segment import census
from spanwise.types import Fault


def test_a_sign_that_opens_and_closes():
    owners, text, fault = segment({"math": "delimiters:$$...$$", "rest": []}, ["So ", "$$", "x", "$$", " is", "$$", "y"])
    assert (owners, text_of(text, "math")) == (["rest", *["math"] * 3, "rest", *["math"] * 2], "x")
    assert fault == Fault.DUPLICATE | Fault.TRUNCATED


def test_prefilled_starts_inside():
    layout = Layout({"thinking": "delimiters:<think>...</think>", "rest": []}, prefilled="<think>...</think>")
    owners, text, fault = segment(layout, ["2+2", "</think>", "4"])
    assert (owners, text_of(text, "thinking"), fault) == (["thinking"] * 2 + ["rest"], "2+2", 0)
    owners, text, fault = segment(layout, ["2+2"])
    assert (owners, text_of(text, "thinking"), fault) == (["thinking"], None, Fault.TRUNCATED)


@pytest.mark.parametrize("blocks", [{"a": "think"}, {"a": "...x"}, {"a": "<a>...</a>", "b": "<a>...</b>"}])
def test_marks_that_are_no_pair_and_two_with_one_opening_sign(blocks):
    with pytest.raises(LayoutError):
        Layout(blocks, segmenter="delimiters")


def test_the_census_says_which_pairs_are_there_instead():
    counts = census(["<plan>go</plan> <<4>>", "<plan>go</plan>"], ["<<...>>", "<think>...</think>"], segmenter="delimiters")
    assert dict(counts.wanted) == {"<<...>>": 1, "<think>...</think>": 0}
    assert dict(counts.others) == {"<plan>...</plan>": 2}


def test_the_group_value_or_the_first_one_or_the_whole_match_is_what_a_part_says():
    for mark, expected in (
        (r"price: (\$)(?P<value>[0-9.]+)", "3.5"),
        (r"price: \$([0-9.]+)", "3.5"),
        (r"price: \$[0-9.]+", "price: $3.5"),
    ):
        owners, text, fault = segment({"price": f"regex:{mark}", "rest": []}, ["tea, ", "price: ", "$3.5", ", ", "hot"])
        assert (owners, text_of(text, "price"), fault) == (["rest", "price", "price", "rest", "rest"], expected, 0)


def test_a_group_that_takes_no_part_says_nothing_and_one_without_characters_says_that():
    assert text_of(segment({"n": "regex:a(b)?"}, ["ac"])[1], "n") is None
    assert text_of(segment({"n": "regex:a(b*)"}, ["ac"])[1], "n") == ""


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


@pytest.mark.parametrize("damage", [b"\xff", b"\xe6\x97", b"\x80"])
def test_offsets_are_bytes_and_bytes_that_are_no_text_match_nothing(damage):
    owners, text, _ = segment({"n": "regex:日(.)", "rest": []}, ["é", damage, "日", "本", damage, "日", damage, "x"])
    assert owners == ["rest", "rest", "n", "n", "rest", "rest", "rest", "rest"]
    assert text_of(text, "n") == "本"


@pytest.mark.parametrize("mark", [r"(?<=a)b", r"a(?=b)", r"(a)\1", "(a", "a{2000}"])
def test_what_re2_refuses_is_refused_where_it_is_written(mark, capfd):
    with pytest.raises(LayoutError):
        Layout({"a": f"regex:{mark}"})
    assert capfd.readouterr().err == ""


def test_without_the_package_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "re2", None)
    with pytest.raises(LayoutError, match="google-re2"):
        Layout({"a": "regex:b"})


def test_the_census_counts_matches():
    assert dict(census(["a1", "b"], ["[0-9]", "x"], segmenter="regex").wanted) == {"[0-9]": 1, "x": 0}
