"""Markdown by its lines: fenced code blocks and headings, for the segmenters `code` and `markdown`.

The rules are CommonMark's for text outside of lists, quotes and HTML, where a line tells what it is by itself: a fence is three or
more backticks or tildes at the start of a line, and ends at as many of the same sign or more, alone on a line; a heading is one to
six `#` and white space, at most three spaces from the left, outside of fences. Two things are read more kindly, since lists are
where models indent: a fence may be indented as far as it likes. Underlined headings are text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_FENCE = re.compile(rb"^[ \t]*+(`{3,}+|~{3,}+)([^\n]*+)\n?", re.MULTILINE)
_HEADING = re.compile(rb"^ {0,3}+(#{1,6}+)(?![^ \t\r\n])([^\n]*+)\n?", re.MULTILINE)


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


def fences(text: bytes) -> list[Fence]:
    """The fenced code blocks of a text, in order; one that never closes runs to the end."""
    blocks: list[Fence] = []
    start = end = 0
    sign, language = b"", ""
    for match in _FENCE.finditer(text):
        run, info = match[1], match[2].strip()
        if not sign:
            if run[:1] == b"~" or b"`" not in info:
                start, end, sign = match.start(), match.end(), run
                language = info.split(None, 1)[0].decode(errors="replace").lower() if info else ""
        elif run.startswith(sign) and not info:
            blocks.append(Fence(start, match.end(), (end, match.start()), language, True))
            sign = b""
    if sign:
        blocks.append(Fence(start, len(text), (end, len(text)), language, False))
    return blocks


def headings(text: bytes, code: Sequence[Fence]) -> Iterator[Heading]:
    """The headings of a text outside of its fenced code blocks."""
    blocks = iter([*code, Fence(len(text), len(text) + 1, (0, 0), "", True)])
    block = next(blocks)
    for match in _HEADING.finditer(text):
        while block.stop <= match.start():
            block = next(blocks)
        if match.start() < block.start:
            title = match[2].strip()
            bare = title.rstrip(b"#")
            title = bare.rstrip() if bare[-1:] in (b"", b" ", b"\t") else title
            yield Heading(match.start(), match.end(), len(match[1]), title.decode(errors="replace"))
