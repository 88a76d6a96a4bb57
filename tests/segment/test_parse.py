"""The parser of tags: sequences worked out once."""

from spanwise.layout import Layout
from spanwise.segment.parse import TagParser

LAYOUT = Layout({"one": ["a"], "two": ["c"]})


def test_the_parser_reads_the_whole_text():
    parsed = TagParser(LAYOUT).parse(b"<a>x</a><c>x</c>")
    assert (parsed.starts, parsed.contents) == ((0, 8), {(0, "a"): (3, 4), (1, "c"): (11, 12)})


def test_the_parser_works_a_sequence_out_once(monkeypatch):
    parser, calls = TagParser(LAYOUT), []
    work_out = parser._work_out
    monkeypatch.setattr(parser, "_work_out", lambda *key: calls.append(key) or work_out(*key))
    for text in (b"<a>x</a>", b"<a>xyz</a>", b"x<a>x</a>"):
        parser.parse(text)
    assert len(calls) == 2  # it begins with a tag, or it does not


def test_a_sequence_that_hardly_comes_twice_is_not_kept():
    parser = TagParser(LAYOUT)
    assert parser.parse(b"<a>x</a>" * 32).contents == {(0, "a"): (251, 252)}
    assert parser.parse(b"<a>x</a>" * 5000).contents == {(0, "a"): (39_995, 39_996)}
    assert [len(tags) for _, tags in parser._known] == [64]
