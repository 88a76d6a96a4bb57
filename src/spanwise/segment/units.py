"""Segmenters that cut a completion into units, one after the other: prose by its text, and runs of tokens, whatever they say.

They are for repeated blocks, `Layout({"step[*]": "steps:"})` or `Layout(["step[*]"], segmenter="steps")`. Units follow each other
without a gap; what stands before the first one belongs to it, or to the rest where the layout has one. More units than `most`: the
fault MORE, and the others belong to the last one, or to the rest.

`lines`, `paragraphs`, `sentences` and `steps` take no mark. Their units say their text without the white space around it (bytes 9
to 13 and 32), and white space alone is none: it belongs to the line or paragraph before it. `fixed`, `cuts`, `low_probability` and
`turns` find runs of tokens, which say all of their text. A token without bytes at a cut belongs to the run before it; a run
without bytes is none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np

from spanwise.errors import LayoutError
from spanwise.layout import EACH, Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import Finder, Found, Match, Sample, taken

#: Returns the bytes where the units of a completion begin, in order; each unit ends where the next one begins.
_Starts = Callable[[Sample], Iterable[int]]

_TEXT = re.compile(rb"[^\s]")
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
_SHORT = re.compile(rf"\b(?:{'|'.join(map(re.escape, _WORDS))})\.\Z".encode())
# At most three spaces may stand before a step: a list indented further lies inside a step. The numbers themselves are not read.
# `1.` and `2)` have up to three digits and white space or `**` behind them; the word is `Step`, `step` or `STEP` with spaces, a
# number and no further letter; of `#` there are up to six and then spaces.
_STEP = re.compile(
    rb"^ {0,3}(?:#{1,6} ++)?(?:\*\*)?(?:[Ss]tep ++[0-9]++\b|STEP ++[0-9]++\b|[0-9]{1,3}[.)](?=\s|\*\*))", re.MULTILINE
)


def _in_a_row(parts: Sequence[Part], starts_of: _Starts, *, trimmed: bool) -> Finder:
    """Return a finder of units; with `trimmed` their text has no white space around it."""

    def find(sample: Sample) -> Found:
        text, units = sample.text, list[Match]()
        for start, stop in pairwise([*starts_of(sample), len(text)]):
            first = _TEXT.search(text, start, stop) if trimmed else None
            if first is not None:
                units.append(("", start, stop, (first.start(), start + len(text[start:stop].rstrip()))))
            elif start < stop and not trimmed:
                units.append(("", start, stop, (start, stop)))
        return taken(units, {"": parts}, again="taken")

    return find


def check_no_mark(parts: Sequence[Part], layout: Layout) -> None:
    """Refuse a mark for a segmenter that takes none; a block of a list is marked by its own name."""
    for part in parts:
        name, mark = layout.names[part.block], part.mark
        if mark and name not in (mark, mark.replace(EACH, f"[{part.index}]", 1)):
            raise LayoutError(
                f"The segmenter '{part.segmenter}' takes no mark, and block '{name}' has '{mark}'; write "
                f"{{'{part.segmenter.rstrip('s')}[*]': '{part.segmenter}:'}}."
            )


def _unmarked(starts_of: _Starts, *, trimmed: bool = True) -> Callable[..., Finder]:
    """Return a segmenter without marks that finds some units."""

    def units(parts: Sequence[Part], *, layout: Layout) -> Finder:
        check_no_mark(parts, layout)
        return _in_a_row(parts, starts_of, trimmed=trimmed)

    return units


def _after(ends: re.Pattern[bytes]) -> _Starts:
    """Return a function that starts a unit after each match of a pattern."""
    return lambda sample: [0, *(match.end() for match in ends.finditer(sample.text))]


def _sentence_starts(sample: Sample) -> list[int]:
    """Return the bytes where sentences begin."""
    # A sentence ends after a run of `.`, `!`, `?` or U+2026, before white space and no small letter a to z. Closing quotes and
    # brackets belong to it, and then the white space. Signs after a short word (see _SHORT) or after a number of up to three digits
    # that begins its line do not end it. CJK signs need no white space after them. An empty line always ends a sentence.
    text, starts = sample.text, [0]
    for match in _SENTENCE.finditer(text):
        unit_start = match.start()
        if text[unit_start] != 46 or not _ends_none(text, unit_start) or _EMPTY_LINE.search(text, unit_start, match.end()):
            starts.append(match.end())
    return starts


def _ends_none(text: bytes, at: int) -> bool:
    """Return whether the full stop at a byte follows a short word, or a number at the start of a line."""
    if _SHORT.search(text, max(0, at - 8), at + 1):
        return True
    near = text[max(0, at - 4) : at]
    first = at - len(near) + len(near.rstrip(b"0123456789"))
    if not 1 <= at - first <= 3:
        return False
    while first and text[first - 1] in b" \t\r\v\f":
        first -= 1
    return first == 0 or text[first - 1] == 10


def _after_tokens(cuts_of: Callable[[Sample], np.ndarray]) -> _Starts:
    """Return a function that starts a unit at each of some token numbers."""

    def starts_of(sample: Sample) -> list[int]:
        firsts = cuts_of(sample)
        return [0, *sample.end_t[firsts[(firsts > 0) & (firsts < len(sample.end_t))] - 1].tolist()]

    return starts_of


register("lines", kind="segmenter")(_unmarked(_after(_LINE)))
register("paragraphs", kind="segmenter")(_unmarked(_after(_PARAGRAPH)))
register("sentences", kind="segmenter")(_unmarked(_sentence_starts))
register("steps", kind="segmenter")(_unmarked(lambda sample: [match.start() for match in _STEP.finditer(sample.text)]))
# Only this segmenter sees masked tokens (tool output): a turn begins after them.
_TURNS = _after_tokens(lambda sample: np.flatnonzero(np.diff(sample.column_t) > 1) + 1)
register("turns", kind="segmenter")(_unmarked(_TURNS, trimmed=False))


@register("fixed", kind="segmenter")
def fixed(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Cut after every so many trainable tokens: `fixed:32`."""
    size = int(_number(_one_mark(parts), parts, example="fixed:32"))
    return _in_a_row(parts, _after_tokens(lambda sample: np.arange(size, len(sample.end_t), size)), trimmed=False)


@register("cuts", kind="segmenter", reads_logp=True)
def cuts(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Cut after every so many tokens that the policy was not sure of: `cuts:5`, of probability below .9, or `cuts:5@0.8`.

    Reference:
        "Segment Policy Optimization" 2025 (arXiv 2505.23564), SPO-chain: cutpoints below .9, five to a segment.
    """
    number, at, threshold = _one_mark(parts).partition("@")
    size = int(_number(number, parts, example="cuts:5@0.9"))
    low = math.log(_number(threshold if at else "0.9", parts, example="cuts:5@0.9", share=True))
    return _in_a_row(
        parts, _after_tokens(lambda sample: np.flatnonzero(sample.logp_t < low)[size - 1 :: size] + 1), trimmed=False
    )


@register("low_probability", kind="segmenter", reads_logp=True)
def low_probability(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Cut before every token less probable than this: `low_probability:0.2`, the segments that the method `sae` bootstraps from.

    Reference:
        "Segmental Advantage Estimation" 2026 (arXiv 2601.07320); the side of the cut is that of `sae(boundary="start")`.
    """
    low = math.log(_number(_one_mark(parts), parts, example="low_probability:0.2", share=True))
    return _in_a_row(parts, _after_tokens(lambda sample: np.flatnonzero(sample.logp_t < low)), trimmed=False)


def _one_mark(parts: Sequence[Part]) -> str:
    """Return the mark of all parts; refuse several marks, because a completion is cut in one way."""
    other_mark = next((part.mark for part in parts if part.mark != parts[0].mark), None)
    if other_mark is not None:
        raise LayoutError(
            f"'{parts[0].mark}' and '{other_mark}' cut the same tokens in two ways; write one of them, in a block called 'name[*]'."
        )
    return parts[0].mark


def _number(written: str, parts: Sequence[Part], *, example: str, share: bool = False) -> int | float:
    """Return the number in a mark: a whole number from 1 on, or a share above 0 and up to 1."""
    expected = "a probability above 0 and up to 1" if share else "a whole number of tokens from 1 on"
    try:
        value = float(written) if share else int(written) if written.isascii() and written.isdecimal() else 0
    except ValueError:
        value = 0
    if value > 0 and (value <= 1 or not share):
        return value
    raise LayoutError(f"The segmenter '{parts[0].segmenter}' takes {expected}, such as {example}; there is '{written}'.")
