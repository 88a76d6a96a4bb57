"""The parser of tags."""

from spanwise.layout import Layout
from spanwise.segment import SEGMENTERS, Sample


def test_a_segmenter_of_ones_own_may_look_for_tags():
    layout = Layout({"a": ["x"], "b": ["y"]}, segmenter="regex")  # the parts are of another segmenter
    find = SEGMENTERS.find("tags").function(layout.parts, layout=layout)
    assert [(claim.part.block, claim.start) for claim in find(Sample.of(b"<x>1</x><y>1</y>")).claims] == [(0, 0), (1, 8)]
