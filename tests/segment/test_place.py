"""The parser of tags."""

from spanwise.layout import Layout
from spanwise.segment import SEGMENTERS, Sample
from spanwise.segment.place import TagParser


def test_the_parser_reads_the_whole_text():
    parser = TagParser(Layout({"one": ["a"], "two": ["c"]}))
    parsed, opens = parser.parse(b"<a>x</a><c>x</c>")
    assert (parsed.starts, opens, parsed.contents) == ((0, 8), [0, 8], {(0, "a"): (3, 4), (1, "c"): (11, 12)})
    assert parser.parse(b"<a>x</a>" * 32)[0].contents == {(0, "a"): (251, 252)}
    assert parser.parse(b"<a>x</a>" * 5000)[0].contents == {(0, "a"): (39_995, 39_996)}


def test_a_segmenter_of_ones_own_may_look_for_tags():
    layout = Layout({"a": ["x"], "b": ["y"]}, segmenter="regex")  # the parts are of another segmenter
    find = SEGMENTERS.find("tags").function(layout.parts, layout=layout)
    assert [(claim.part.block, claim.start) for claim in find(Sample.of(b"<x>1</x><y>1</y>")).claims] == [(0, 0), (1, 8)]
