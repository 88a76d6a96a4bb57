"""The segmenter `markdown`: blocks by headings.

A mark is the title of a heading of any level, in small or capital letters, `Plan` for `## plan`; or `section`, any heading that no
other mark names. Which lines are headings, see `spanwise.segment.fences`: a `#` in a fenced code block is none.

Rules. A section runs to the next heading of its own level or a higher one, or to the end, and says all of that without the line of
its heading. A section inside it that has a block of its own takes its bytes out of the outer block; without a block for the rest
that block then runs on to where the next one starts. A title takes its first match, one in two blocks its first two; another
match is a DUPLICATE and belongs to what it stands in. With `[*]` it takes them all; of a repeated block, one each, up to `most`
(MORE).
"""

from __future__ import annotations

from collections.abc import Sequence

from spanwise.errors import LayoutError
from spanwise.layout import Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import Claims, Finder, Found, Taker, by_mark
from spanwise.segment.fences import fences, headings

_ANY = "section"


def _titles(text: str) -> list[str]:
    data = text.encode(errors="replace")
    return list(dict.fromkeys(heading.title for heading in headings(data, fences(data)) if heading.title))


@register("markdown", kind="segmenter", says=_titles)
def markdown(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find the sections of Markdown; see the module."""
    takers: dict[str, Taker] = {}
    for mark, own in by_mark(parts).items():
        if not mark.strip("# \t") or "\n" in mark:
            raise LayoutError(
                f"'{mark}' is no heading of Markdown; write its title without the #, such as Plan, or section for any heading."
            )
        if mark.lower() in takers:
            raise LayoutError(
                f"'{mark}' stands in the layout with other capital letters, too; write it the same way everywhere."
            )
        takers[mark.lower()] = Taker(own, again="refused")
    return lambda sample: _find(sample.text, takers)


def _find(text: bytes, takers: dict[str, Taker]) -> Found:
    claims = Claims()
    titled = list(headings(text, fences(text)))
    for heading, stop in zip(
        titled, _stops([heading.level for heading in titled], [h.start for h in titled], len(text)), strict=True
    ):
        mark = heading.title.lower()
        mark = mark if mark in takers else _ANY
        if mark in takers:
            claims.take(takers[mark], heading.start, stop, (heading.end, stop))
    return claims.found()


def _stops(levels: Sequence[int], starts: Sequence[int], size: int) -> list[int]:
    """Where each section ends."""
    stops: list[int] = []
    next_of = [size] * 8  # of each level, where the next heading starts that ends it
    for level, start in zip(reversed(levels), reversed(starts), strict=True):
        stops.append(next_of[level])
        next_of[level:] = [start] * (8 - level)
    return stops[::-1]
