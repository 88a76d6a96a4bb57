"""The segmenter `markdown`: blocks by headings.

A mark is the title of a heading of any level, in small or capital letters, `Plan` for `## plan`; or `section`, any heading that no
other mark names. A `#` in a fenced code block is none.

Rules. A section runs to the next heading of its own level or a higher one, or to the end, and says all of that without the line of
its heading. A section inside it that has a block of its own takes its bytes out of the outer block; without a block for the rest
that block then runs on to where the next one starts. A title takes its first match, one in two blocks its first two; another
match is a DUPLICATE and belongs to what it stands in. With `[*]` it takes them all; of a repeated block, one each, up to `most`
(MORE).

Lines are read by CommonMark's rules for text outside of lists, quotes and HTML, where a line tells what it is by itself: a fence
(what the segmenter `code` finds) is three or more backticks or tildes at the start of a line, and ends at as many of the same sign
or more, alone on a line; a heading is one to six `#` and white space, at most three spaces from the left, outside of fences. One
thing is read more kindly, since lists are where models indent: a fence may be indented as far as it likes. Underlined headings are
text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from spanwise.errors import LayoutError
from spanwise.layout import Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import Finder, Found, Sample, by_mark, taken

_ANY = "section"
# A line that opens or closes a fence, or a heading; and what stands behind its signs.
_LINE = re.compile(rb"^(?:[ \t]*+(`{3,}+|~{3,}+)| {0,3}+(#{1,6}+)(?![^ \t\r\n]))([^\n]*+)\n?", re.MULTILINE)


class Fence(NamedTuple):
    """A fenced code block: its bytes with the fences and without, the first word after the opening one, and whether it ends."""

    start: int
    stop: int
    inner: tuple[int, int]
    language: str
    closed: bool


class Heading(NamedTuple):
    """A heading: the bytes of its line, its level, what it says."""

    start: int
    end: int
    level: int
    title: str


def outline(text: bytes) -> tuple[list[Fence], list[Heading]]:
    """The fenced code blocks of a text, one that never closes to the end, and the headings outside of them."""
    blocks, titled = list[Fence](), list[Heading]()
    opening: re.Match[bytes] | None = None
    for match in _LINE.finditer(text):
        sign, level, line = match[1], match[2], match[3].strip()
        if opening is not None:
            if sign and sign.startswith(opening[1]) and not line:
                blocks.append(_fence(opening, match.start(), match.end(), closed=True))
                opening = None
        elif level:
            bare = line.rstrip(b"#")
            title = bare.rstrip() if bare[-1:] in (b"", b" ", b"\t") else line
            titled.append(Heading(match.start(), match.end(), len(level), title.decode(errors="replace")))
        elif sign[:1] == b"~" or b"`" not in line:
            opening = match
    if opening is not None:
        blocks.append(_fence(opening, len(text), len(text), closed=False))
    return blocks, titled


def _fence(opening: re.Match[bytes], end: int, stop: int, *, closed: bool) -> Fence:
    language = b"".join(opening[3].split(None, 1)[:1]).decode(errors="replace").lower()
    return Fence(opening.start(), stop, (opening.end(), end), language, closed)


def _titles(text: str) -> list[str]:
    titled = outline(text.encode(errors="replace"))[1]
    return list(dict.fromkeys(heading.title for heading in titled if heading.title))


@register("markdown", kind="segmenter", says=_titles)
def markdown(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find the sections of Markdown; see the module."""
    parts_of: dict[str, list[Part]] = {}
    for mark, own in by_mark(parts).items():
        if not mark.strip("# \t") or "\n" in mark:
            raise LayoutError(
                f"'{mark}' is no heading of Markdown; write its title without the #, such as Plan, or section for any heading."
            )
        if mark.lower() in parts_of:
            raise LayoutError(
                f"'{mark}' stands in the layout with other capital letters, too; write it the same way everywhere."
            )
        parts_of[mark.lower()] = own

    def find(sample: Sample) -> Found:
        _, titled = outline(sample.text)
        marks = [title if (title := heading.title.lower()) in parts_of else _ANY for heading in titled]
        sections = zip(marks, titled, _stops(titled, len(sample.text)), strict=True)
        matches = [(mark, one.start, stop, (one.end, stop)) for mark, one, stop in sections if mark in parts_of]
        return taken(matches, parts_of, again="refused")

    return find


def _stops(titled: Sequence[Heading], size: int) -> list[int]:
    """Where each section ends."""
    stops: list[int] = []
    next_of = [size] * 8  # of each level, where the next heading starts that ends it
    for heading in reversed(titled):
        stops.append(next_of[heading.level])
        next_of[heading.level :] = [heading.start] * (8 - heading.level)
    return stops[::-1]
