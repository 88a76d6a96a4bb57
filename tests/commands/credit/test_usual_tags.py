"""The tags that completions are made of, whatever else they hold."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import quickly
from spanwise.commands.credit.blocks import layout_of, usual_tags

PARTS = ["<a>", "</a>", "<b>", "</b>", "<a", "x", "</", "<c.d>", "</c.d>", "<a></b>"]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
def test_pairs_are_those_of_the_pattern(text):
    """A pattern with a back-reference says the same, in a time that is quadratic."""
    tags = tuple(re.findall(r"<([A-Za-z_][\w.-]*)>.*?</\1>", text, re.DOTALL))
    expected = (tags, 1) if tags and len(set(tags)) == len(tags) else ((), 0)
    assert usual_tags([text]) == expected


def test_tags_that_never_close_are_looked_at_once():
    assert quickly(usual_tags, ["<answer>" * 10_000]) == ((), 0)
    assert quickly(usual_tags, ["".join(f"<t{n}>" for n in range(10_000))]) == ((), 0)


def test_a_text_of_very_many_tags_is_no_layout():
    text = "".join(f"<t{n}>4</t{n}>" for n in range(33))
    assert usual_tags([text]) == ((), 0)
    assert usual_tags([text[: text.index("<t32>")]]) == (tuple(f"t{n}" for n in range(32)), 1)


def test_a_lone_tag_is_the_completion_and_a_lone_confidence_ends_it():
    names = [layout_of(tags).names for tags in (["plan", "code"], ["think"], ["confidence"])]
    assert names == [("plan", "code"), ("completion",), ("text", "confidence")]
