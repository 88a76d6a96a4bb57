"""`delimiters`: every case is written out token by token; blocks, texts and faults are worked out by hand."""

import pytest

from segment_small import made, said
from spanwise.errors import LayoutError
from spanwise.layout import Layout
from spanwise.segment import census
from spanwise.types import Fault

TWO = Layout({"thinking": "delimiters:<think>...</think>", "answer": "delimiters:<<...>>"})
T, A = "thinking", "answer"

CASES = {
    "clean": (["<think>", "2+2", "</think>", "\n", "<<", "4", ">>", "."], [T] * 4 + [A] * 4, "2+2", "4", 0),
    "straddled: a token belongs to the block of its first byte": (
        ["<th", "ink>2", "</think><", "<4", ">>"], [T] * 3 + [A] * 2, "2", "4", 0,
    ),
    "never closed: it ends where the next one opens": (
        ["<think>", "2+2", "<<", "4", ">>"], [T] * 2 + [A] * 3, None, "4", Fault.TRUNCATED,
    ),
    "what stands inside is text": (
        ["<think>", "<<", "5", ">>", "</think>", "<<", "4", ">>"], [T] * 5 + [A] * 3, "<<5>>", "4", Fault.NESTED,
    ),
    "the last complete pair": (
        ["<<", "3", ">>", "<think>", "no", "</think>", "<<", "4", ">>", "<<", "5"],
        [A] * 3 + [T] * 3 + [A] * 5, "no", "4", Fault.DUPLICATE | Fault.TRUNCATED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_blocks_texts_and_faults(case):
    pieces, owners, thinking, answer, fault = CASES[case]
    found, text, faults = made(TWO, pieces)
    assert (found, faults) == (owners, Fault(fault))
    assert [None if text[name] is None else said(text, name) for name in (T, A)] == [thinking, answer]


def test_a_part_without_a_token_of_its_own_is_straddled():
    owners, text, fault = made(TWO, ["<think>2</think><<4>>"])
    assert (owners, text["answer"], fault) == ([T], None, Fault.STRADDLED)


def test_a_sign_that_the_vocabulary_has_as_a_token_is_that_token_only():
    pieces = ["<think>", "a", "</", "think>", "b", "</think>", "<<", "4", ">>"]
    owners, text, fault = made(TWO, pieces, added=("<think>", "</think>"))
    assert (owners, said(text, T), fault) == ([T] * 6 + [A] * 3, "a</think>b", 0)
    owners, text, fault = made(TWO, pieces)  # in a vocabulary without that token it is its bytes
    assert (owners, said(text, T), fault) == ([T] * 6 + [A] * 3, "a", Fault.ORDER)
    owners, text, fault = made(TWO, ["<", "think>", "a", "</", "think>"], added=("<think>", "</think>"))
    assert (owners, said(text, T), fault) == ([T] * 5, None, Fault.MISSING)


def test_a_spelled_sign_may_stand_right_before_and_after_a_token_but_not_across_it():
    layout = Layout({"a": "delimiters:<x>...<y>", "b": "delimiters:<<..."})
    owners, text, fault = made(layout, ["<x>", "1", "<y>", "<<", "2"], added=("<x>", "<y>"))
    assert (owners, text["b"]["<<..."], fault) == (["a"] * 3 + ["b"] * 2, "2", 0)


def test_what_closes_nothing_is_out_of_order_inside_a_part_that_has_not_closed():
    layout = Layout(
        {"plan": "delimiters:Plan:...", "thinking": "delimiters:<think>...</think>", "code": "delimiters:<<...>>"}
    )
    owners, text, fault = made(layout, ["Plan:", "a", "</think>", "<think>", "b", ">>", "<<", "c", ">>"])
    assert owners == ["plan"] * 3 + ["thinking"] * 3 + ["code"] * 3
    assert (said(text, "plan"), said(text, "thinking"), fault) == ("a</think>", None, Fault.ORDER | Fault.TRUNCATED)


def test_a_sign_that_opens_and_closes():
    owners, text, fault = made({"math": "delimiters:$$...$$", "rest": []}, ["So ", "$$", "x", "$$", " is", "$$", "y"])
    assert (owners, said(text, "math")) == (["rest", *["math"] * 3, "rest", *["math"] * 2], "x")
    assert fault == Fault.DUPLICATE | Fault.TRUNCATED


def test_prefilled_starts_inside():
    layout = Layout({"thinking": "delimiters:<think>...</think>", "rest": []}, prefilled="<think>...</think>")
    owners, text, fault = made(layout, ["2+2", "</think>", "4"])
    assert (owners, said(text, T), fault) == ([T, T, "rest"], "2+2", 0)
    owners, text, fault = made(layout, ["2+2"])
    assert (owners, said(text, T), fault) == ([T], None, Fault.TRUNCATED)


def test_two_blocks_of_one_mark_take_their_pairs_in_turn():
    pieces = ["<<", "1", ">>", "<<", "2", ">>"]
    owners, text, fault = made({"one": "delimiters:<<...>>", "two": "delimiters:<<...>>"}, pieces)
    assert (owners, said(text, "one"), said(text, "two"), fault) == (["one"] * 3 + ["two"] * 3, "1", "2", 0)


@pytest.mark.parametrize(("mark", "sentence"), [("think", "is no pair of delimiters"), ("...x", "is no pair")])
def test_marks_that_are_no_pair(mark, sentence):
    with pytest.raises(LayoutError, match=sentence):
        Layout({"a": f"delimiters:{mark}"})


def test_two_marks_with_one_opening_sign():
    with pytest.raises(LayoutError, match="starts with the opening sign of another mark"):
        Layout({"a": "delimiters:<a>...</a>", "b": "delimiters:<a>...</b>"})


def test_the_census_says_which_pairs_are_there_instead():
    found = census(["<plan>go</plan> <<4>>", "<plan>go</plan>"], ["<<...>>", "<think>...</think>"], segmenter="delimiters")
    assert found.sentence == (
        "'<think>...</think>' is in 0 of 2 completions; they do contain '<<...>>' (1), '<plan>...</plan>' (2)."
    )
