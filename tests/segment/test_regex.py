"""`regex`: bytes in, bytes out, linear time; what RE2 refuses is one sentence."""

import sys

import pytest

from segment_small import made, said
from spanwise.errors import LayoutError
from spanwise.layout import Layout
from spanwise.segment import census
from spanwise.types import Fault


def test_the_group_value_or_the_first_one_or_the_whole_match_is_what_a_part_says():
    for mark, expected in (
        (r"price: (\$)(?P<value>[0-9.]+)", "3.5"),
        (r"price: \$([0-9.]+)", "3.5"),
        (r"price: \$[0-9.]+", "price: $3.5"),
    ):
        owners, text, fault = made({"price": f"regex:{mark}", "rest": []}, ["tea, ", "price: ", "$3.5", ", ", "hot"])
        assert (owners, said(text, "price"), fault) == (["rest", "price", "price", "rest", "rest"], expected, 0)


def test_a_group_that_takes_no_part_says_nothing_and_one_without_characters_says_that():
    assert said(made({"n": "regex:a(b)?"}, ["ac"])[1], "n") is None
    assert said(made({"n": "regex:a(b*)"}, ["ac"])[1], "n") == ""


def test_an_empty_match_claims_nothing():
    owners, _, fault = made({"n": "regex:x*", "rest": []}, ["a", "xx", "b"])
    assert (owners, fault) == (["rest", "n", "rest"], 0)
    assert made({"n": "regex:x*", "rest": []}, ["a"])[2] == Fault.MISSING


def test_blocks_run_on_to_the_next_match_where_nothing_is_the_rest():
    owners, _, fault = made({"a": "regex:A:", "b": "regex:B:"}, ["So ", "A:", " 1 ", "B", ": 2"])
    assert (owners, fault) == (["a"] * 3 + ["b"] * 2, 0)


def test_of_several_patterns_the_first_to_begin_wins_then_the_longer_one():
    layout = Layout({"word": "regex:[a-z]+", "line": "regex:b[a-z ]+", "rest": []})
    # "ab" begins at 0; "b c" begins inside it and is dropped; then "c" is a word.
    owners, _, fault = made(layout, ["a", "b", " ", "c"])
    assert (owners, fault) == (["word", "word", "rest", "word"], Fault.MISSING)
    owners, _, _ = made(layout, ["1", "b", " ", "c"])  # both begin at the b: the longer one
    assert owners == ["rest", "line", "line", "line"]


@pytest.mark.parametrize("damage", [b"\xff", b"\xe6\x97", b"\x80"])
def test_offsets_are_bytes_and_bytes_that_are_no_text_match_nothing(damage):
    owners, text, _ = made({"n": "regex:日(.)", "rest": []}, ["é", damage, "日", "本", damage, "日", damage, "x"])
    assert owners == ["rest", "rest", "n", "n", "rest", "rest", "rest", "rest"]
    assert said(text, "n") == "本"


@pytest.mark.parametrize(
    ("mark", "sentence"),
    [
        (
            r"(?<=a)b",
            r"no pattern of RE2 \(invalid perl operator: \(\?<=\): it uses lookaround, .* put the part you want into a group",
        ),
        (r"a(?=b)", r"it uses lookaround"),
        (r"a(?!b)", r"it uses lookaround"),
        (r"(a)\1", r"no back-reference, since no search with that is linear in time"),
        ("(a", r"^'\(a' is no pattern of RE2 \(missing \): \(a\)\.$"),
        ("a{2000}", r"invalid repetition size"),
    ],
)
def test_what_re2_refuses_is_refused_where_it_is_written(mark, sentence, capfd):
    with pytest.raises(LayoutError, match=sentence):
        Layout({"a": f"regex:{mark}"})
    assert capfd.readouterr().err == ""


def test_without_the_package_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "re2", None)
    with pytest.raises(LayoutError, match="google-re2"):
        Layout({"a": "regex:b"})


def test_the_census_counts_matches():
    assert census(["a1", "b"], ["[0-9]", "x"], segmenter="regex").sentence == (
        "'x' is in 0 of 2 completions; they do contain '[0-9]' (1)."
    )
