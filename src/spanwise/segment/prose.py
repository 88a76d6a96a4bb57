"""The segmenters `lines`, `paragraphs`, `sentences` and `steps`: plain text in units, one after the other.

They are for repeated blocks, `Layout({"step[*]": "steps:"})` or `Layout(["step[*]"], segmenter="steps")`, and take no mark. Units
follow each other without a gap; what stands before the first one belongs to it, or to the rest where the layout has one. A unit
says its text without the white space around it (bytes 9 to 13 and 32), and white space alone is none. More units than `most`: the
fault MORE, and the others belong to the last one, or to the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from spanwise.layout import Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import Finder
from spanwise.segment.units import check_no_mark, in_a_row

_LINE = re.compile(rb"\n(?:\s*(?:\n|\Z))?")
_PARAGRAPH = re.compile(rb"(?:\A|\n)\s*(?:\n|\Z)")
_EMPTY_LINE = re.compile(rb"\n[^\S\n]*+\n")
# Closing quotes and brackets are " ' ) ] * _ and their curly and CJK forms.
_SHUT = rb"(?:[\"')\]*_]|\xe2\x80[\x99\x9d]|\xe3\x80[\x8d\x8f]|\xef\xbc\x89)*+"
_SENTENCE = re.compile(
    rb"(?<![.!?])(?<!\xe2\x80\xa6)(?:[.!?]|\xe2\x80\xa6)++"
    + _SHUT
    + rb"\s++(?![a-z])|(?:\xe3\x80\x82|\xef\xbc[\x81\x9f])++"
    + _SHUT
    + rb"\s*+|(?:\A|\n)[^\S\n]*+\n\s*+"
)
_WORDS = ("Dr", "Mr", "Mrs", "Ms", "Prof", "St", "vs", "cf", "Fig", "Eq", "Sec", "No", "e.g", "i.e", "approx")
_SHORT_ENDS = (*(word.encode() for word in _WORDS), *(bytes([digit]) for digit in b"0123456789"))
_SHORT = re.compile(rf"\b(?:{'|'.join(map(re.escape, _WORDS))})\.\Z".encode())
_STEP = re.compile(
    rb"^ {0,3}(?:#{1,6} ++)?(?:\*\*)?(?:[Ss]tep ++[0-9]++\b|STEP ++[0-9]++\b|[0-9]{1,3}[.)](?=\s|\*\*))", re.MULTILINE
)


@register("lines", kind="segmenter")
def lines(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find lines: one ends after its line feed; lines of white space alone belong to the line before them."""
    return _units(parts, layout, lambda text: [0, *(match.end() for match in _LINE.finditer(text))])


@register("paragraphs", kind="segmenter")
def paragraphs(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find paragraphs: one ends after lines of white space alone."""
    return _units(parts, layout, lambda text: [0, *(match.end() for match in _PARAGRAPH.finditer(text))])


@register("sentences", kind="segmenter")
def sentences(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find sentences: one ends after `.`, `!`, `?`, U+2026 or a run of these, before white space and no small letter a to z.

    Closing quotes and brackets belong to it, and then the white space. A full stop after the word Dr, Mr, Mrs, Ms, Prof, St, vs,
    cf, Fig, Eq, Sec, No, e.g, i.e or approx ends none, with whatever signs follow it, nor does one after a number of up to three
    digits that begins its line; a decimal point has no white space after it. The CJK signs end one without white space, and a
    line of white space alone always does.
    """
    return _units(parts, layout, _sentence_starts)


@register("steps", kind="segmenter")
def steps(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find numbered steps: one begins with a line that begins with `1.`, `2)`, `Step 3` or one of these in `**` or after `#`.

    At most three spaces may stand before it: what is indented further is a list inside a step. The numbers themselves are not read.
    `1.` and `2)` have up to three digits and white space or `**` behind them; the word is `Step`, `step` or `STEP` with spaces, a
    number and no further letter; of `#` there are up to six and then spaces.
    """
    return _units(parts, layout, lambda text: [match.start() for match in _STEP.finditer(text)])


def _sentence_starts(text: bytes) -> list[int]:
    starts = [0]
    for match in _SENTENCE.finditer(text):
        at = match.start()
        short = text[at] == 46 and text.endswith(_SHORT_ENDS, 0, at)  # worth a closer look
        if not short or not _ends_none(text, at) or _EMPTY_LINE.search(text, at, match.end()):
            starts.append(match.end())
    return starts


def _ends_none(text: bytes, at: int) -> bool:
    """Whether the full stop at a byte comes after a short word or a number that begins its line."""
    if _SHORT.search(text, max(0, at - 8), at + 1):
        return True
    near = text[max(0, at - 4) : at]
    first = at - len(near) + len(near.rstrip(b"0123456789"))
    if not 1 <= at - first <= 3:
        return False
    while first and text[first - 1] in b" \t\r\v\f":
        first -= 1
    return first == 0 or text[first - 1] == 10


def _units(parts: Sequence[Part], layout: Layout, starts_of: Callable[[bytes], list[int]]) -> Finder:
    check_no_mark(parts, layout)
    return in_a_row(parts, lambda sample: starts_of(sample.text), trimmed=True)
