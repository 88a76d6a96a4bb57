"""Segmenters that cut a completion into units: lines, sentences, steps, or runs of tokens.

They are for repeated blocks, `Layout({"step[*]": "steps:"})` or `Layout(["step[*]"], segmenter="steps")`. Units follow each other
without a gap; what stands before the first one belongs to it, or to the rest where the layout has one. More units than `most`: the
fault MORE, and the others belong to the last one, or to the rest.

`lines`, `paragraphs`, `sentences` and `steps` take no mark. Their units say their text without the white space around it (bytes 9
to 13 and 32), and white space alone is none: it belongs to the line or paragraph before it. `fixed`, `cuts`, `low_probability` and
`turns` find runs of tokens. The text of a run leaves out tokens that end a turn. At a cut, a token without bytes belongs to the
run before it. A run without bytes does not count.

A step begins in a line with at most three spaces before it, after up to six `#` and spaces, and after `**`, if there are any: at
`Step`, `step` or `STEP` with spaces and a number, or at a number of up to three digits with `.` or `)` and white space or `**`.
The numbers themselves are not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from spanwise.errors import LayoutError
from spanwise.layout import EACH, Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import Finder, Found, Match, Sample, assign, text_end, with_line_ends

#: Returns the bytes at which the units of a completion begin, in order.
_Starts = Callable[[Sample], Iterable[int]]

_NON_SPACE = re.compile(rb"[^\s]")
_LINE = re.compile(rb"\n(?:\s*(?:\n|\Z))?")
_PARAGRAPH = re.compile(rb"(?:\A|\n)\s*(?:\n|\Z)")
_EMPTY_LINE = re.compile(rb"\n[^\S\n]*+\n")
# Closing quotes and brackets: " ' ) ] * _ and their curly and CJK forms.
_CLOSING = rb"(?:[\"')\]*_]|\xe2\x80[\x99\x9d]|\xe3\x80[\x8d\x8f]|\xef\xbc\x89)*+"
_SENTENCE = re.compile(
    rb"(?<![.!?])(?<!\xe2\x80\xa6)(?:[.!?]|\xe2\x80\xa6)++"
    + _CLOSING
    + rb"\s++(?![a-z])|(?:\xe3\x80\x82|\xef\xbc[\x81\x9f])++"
    + _CLOSING
    + rb"\s*+|(?:\A|\n)[^\S\n]*+\n\s*+"
)
_SHORT_WORDS = ("Dr", "Mr", "Mrs", "Ms", "Prof", "St", "vs", "cf", "Fig", "Eq", "Sec", "No", "e.g", "i.e", "approx")
#: Matches a short word or number before a full stop that does not end a sentence.
_NO_END = re.compile(
    rf"\b(?:{'|'.join(map(re.escape, _SHORT_WORDS))})(?=\.)|^[ \t\r\v\f]*+[0-9]{{1,3}}(?=\.)".encode(), re.MULTILINE
)
#: Matches the start of a step: `Step 1`, `1.` or `1)`, plain, bold or as a heading.
_STEP = re.compile(
    rb"^ {0,3}(?:#{1,6} ++)?(?:\*\*)?(?:[Ss]tep ++[0-9]++\b|STEP ++[0-9]++\b|[0-9]{1,3}[.)](?=\s|\*\*))", re.MULTILINE
)


def _unit_finder(parts: Sequence[Part], starts_of: _Starts, *, trimmed: bool) -> Finder:
    """Return a function that finds a completion's units, such as lines. `trimmed` drops white space around units."""

    def find(sample: Sample) -> Found:
        text = with_line_ends(sample.text) if trimmed else sample.text
        end_byte = text_end(sample.text)
        unit_matches = list[Match]()
        for start, stop in pairwise([*starts_of(replace(sample, text=text)), len(text)]):
            first_match = _NON_SPACE.search(text, start, min(stop, end_byte)) if trimmed else None
            if first_match is not None:
                unit_matches.append(
                    ("", start, stop, (first_match.start(), start + len(text[start : min(stop, end_byte)].rstrip())))
                )
            elif start < stop and not trimmed:
                unit_matches.append(("", start, stop, (start, start + text_end(text[start:stop]))))
        return assign(unit_matches, {"": parts}, surplus="keep")

    return find


def _register_unmarked(name: str, starts_of: _Starts, *, trimmed: bool = True) -> None:
    """Register a segmenter, such as `lines`, that takes no mark; a block's own name is allowed as its mark."""

    def segmenter(parts: Sequence[Part], *, layout: Layout) -> Finder:
        """Find consecutive units, such as lines. The docstring of this module has the rules."""
        for part in parts:
            block_name = layout.names[part.block]
            if part.mark and block_name not in (part.mark, part.mark.replace(EACH, f"[{part.index}]", 1)):
                unit_name = part.segmenter.rstrip("s")
                layout_example = f"{{'{unit_name}[*]': '{part.segmenter}:'}}"
                raise LayoutError(
                    f"The segmenter '{part.segmenter}' takes no mark, but block '{block_name}' has the mark '{part.mark}'. "
                    f"Write {layout_example}."
                )
        return _unit_finder(parts, starts_of, trimmed=trimmed)

    register(name, kind="segmenter")(segmenter)


def _start_after(pattern: re.Pattern[bytes]) -> _Starts:
    """Return a function that lists where units begin: at the start, and after each match of a pattern."""
    return lambda sample: [0, *(match.end() for match in pattern.finditer(sample.text))]


def _sentence_starts(sample: Sample) -> list[int]:
    """Return the bytes at which sentences begin.

    A sentence ends after a run of `.`, `!`, `?` or U+2026, before white space and no small letter a to z. Closing quotes and
    brackets belong to it, and then the white space. A full stop after a short word, or after a number of up to three digits that
    begins its line, does not end it. CJK signs need no white space after them. An empty line always ends a sentence.
    """
    text = sample.text
    sentence_starts = [0]
    inner_stop_ends = {match.end() for match in _NO_END.finditer(text)}
    for match in _SENTENCE.finditer(text):
        if match.start() not in inner_stop_ends or _EMPTY_LINE.search(text, *match.span()):
            sentence_starts.append(match.end())
    return sentence_starts


def _start_at_tokens(cuts_of: Callable[[Sample], np.ndarray]) -> _Starts:
    """Return a function that lists the bytes at which units start: 0, and where the tokens in `cuts_of` start."""

    def starts_of(sample: Sample) -> list[int]:
        cut_positions = cuts_of(sample)
        is_inside_text = (cut_positions > 0) & (cut_positions < len(sample.end_t))
        return [0, *sample.end_t[cut_positions[is_inside_text] - 1].tolist()]

    return starts_of


_register_unmarked("lines", _start_after(_LINE))
_register_unmarked("paragraphs", _start_after(_PARAGRAPH))
_register_unmarked("sentences", _sentence_starts)
_register_unmarked("steps", lambda sample: [match.start() for match in _STEP.finditer(sample.text)])
# A turn begins after masked tokens, such as the output of a tool.
_register_unmarked("turns", _start_at_tokens(lambda sample: np.flatnonzero(np.diff(sample.column_t) > 1) + 1), trimmed=False)


@register("fixed", kind="segmenter")
def fixed(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Cut a completion after every so many trainable tokens, such as 32 in `fixed:32`."""
    run_length = int(_parse_number(_single_mark(parts), parts, example="fixed:32"))
    find_starts = _start_at_tokens(lambda sample: np.arange(run_length, len(sample.end_t), run_length))
    return _unit_finder(parts, find_starts, trimmed=False)


@register("cuts", kind="segmenter", reads_logp=True)
def cuts(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Cut after each N-th unlikely token. `cuts:5@0.8`: after each fifth of probability below 0.8 (0.9 without `@`).

    Reference:
        "Segment Policy Optimization" 2025 (arXiv 2505.23564), SPO-chain: cutpoints below .9, five to a segment.
    """
    count_text, at_sign, limit_text = _single_mark(parts).partition("@")
    stride = int(_parse_number(count_text, parts, example="cuts:5@0.9"))
    probability_limit = _parse_number(limit_text if at_sign else "0.9", parts, example="cuts:5@0.9", probability=True)
    logp_limit = math.log(probability_limit)

    def cuts_of(sample: Sample) -> np.ndarray:
        unlikely_positions = np.flatnonzero(sample.logp_t < logp_limit)
        return unlikely_positions[stride - 1 :: stride] + 1

    return _unit_finder(parts, _start_at_tokens(cuts_of), trimmed=False)


@register("low_probability", kind="segmenter", reads_logp=True)
def low_probability(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Cut before every token below a probability, such as 0.2 in `low_probability:0.2`. The method `sae` cuts there too.

    Reference:
        "Segmental Advantage Estimation" 2026 (arXiv 2601.07320); the side of the cut is that of `sae(boundary="start")`.
    """
    probability_limit = _parse_number(_single_mark(parts), parts, example="low_probability:0.2", probability=True)
    logp_limit = math.log(probability_limit)
    return _unit_finder(parts, _start_at_tokens(lambda sample: np.flatnonzero(sample.logp_t < logp_limit)), trimmed=False)


def _single_mark(parts: Sequence[Part]) -> str:
    """Return the mark that all parts have, such as `32` in `fixed:32`, and raise an error if the parts differ."""
    other_mark = next((part.mark for part in parts if part.mark != parts[0].mark), None)
    if other_mark is not None:
        raise LayoutError(
            f"The layout cuts the same tokens twice, by '{parts[0].mark}' and by '{other_mark}'. Keep one of the two marks, in "
            "a block called 'name[*]'."
        )
    return parts[0].mark


def _parse_number(written: str, parts: Sequence[Part], *, example: str, probability: bool = False) -> int | float:
    """Parse the number in a mark, such as 32 in `fixed:32`: a whole number from 1 on, or a probability."""
    number_kind = "a probability above 0 and at most 1" if probability else "a whole number of tokens that is at least 1"
    try:
        whole_number = int(written) if written.isascii() and written.isdecimal() else 0
        number = float(written) if probability else whole_number
    except ValueError:
        number = 0
    if number > 0 and (number <= 1 or not probability):
        return number
    raise LayoutError(
        f"The segmenter '{parts[0].segmenter}' needs {number_kind}, such as {example}, but it has '{written}'."
    )
