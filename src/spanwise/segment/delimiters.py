"""The segmenters `delimiters`, for blocks between two signs of any spelling, and `regex`, for blocks by a pattern.

A mark of `delimiters` is `<think>...</think>`: the opening sign, three dots, the closing one. `### Answer:...` has no closing
sign: the part runs on to the next opening sign of the layout. A sign that the tokenizer added beside its vocabulary is that token
and nothing else; any other sign is its bytes, however they are cut into tokens.

Rules. What stands between an opening and its closing sign is text, whatever it holds (NESTED if it opens another part). A part
that never closes ends where the next one opens and says nothing (TRUNCATED). A closing sign of nothing is text (ORDER), in a part
that has not closed too. A part says its last complete pair; a second pair is a DUPLICATE unless the mark ends in `[*]` or the
block is repeated.

A mark of `regex` is a pattern of RE2, which never backtracks: whatever a completion holds, a search takes time linear in it. It
has no look-around and no back-references for that. Text and pattern are UTF-8, offsets are bytes; bytes that are no UTF-8 match
nothing, not even `.`. Needs `pip install 'spanwise[segment]'`.

Rules. A part is a whole match; it says what the group `value` holds, or else the first group, or else the whole match. Matches of
one pattern do not overlap; of several patterns the one that begins first wins, then the longer one, then the one that the layout
names first. An empty match claims nothing. A block that is not repeated takes every match and says the last one.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from spanwise.errors import LayoutError
from spanwise.layout import EACH, Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import Finder, Found, Match, Sample, by_mark, taken
from spanwise.segment.vocabulary import Vocabulary
from spanwise.types import Fault

_BETWEEN = "..."
_TAG_PAIR = re.compile(r"<(/?)([A-Za-z_][\w.:-]{0,59})>")
_INSTEAD = {
    "invalid perl operator: (?": "it uses lookaround, which no linear-time search supports; match the text around it too "
    "and put the part you want into a group, such as 'Answer: (?P<value>[0-9]+)'",
    "invalid escape sequence: \\": "RE2 has no such escape, and no back-reference, since no search with that is linear in time; "
    "write out what may repeat, or use delimiters",
}


class Sign(NamedTuple):
    """One sign in the text: its number and its bytes [start, end)."""

    written: bytes
    start: int
    end: int


def finder_of(signs: Collection[bytes], *, tokens_only: Collection[bytes] = ()) -> Callable[[Sample], list[Sign]]:
    """Return a function that finds signs in a completion in order, the longer sign first; an empty sign marks its end."""

    @lru_cache(maxsize=4)
    def compiled(vocabulary: Vocabulary) -> tuple[list[int], re.Pattern[bytes]]:
        """Return the ids that are signs, and a search for the signs that are spelled."""
        ids = [index for index in vocabulary.added if vocabulary.pieces[index] in signs]
        texts = set(signs) - {vocabulary.pieces[index] for index in ids} - set(tokens_only if vocabulary.added else ())
        longest = sorted(texts, key=lambda sign: (-len(sign), sign))
        return ids, re.compile(b"|".join(map(re.escape, longest)) or rb"(?!)")

    def find(sample: Sample) -> list[Sign]:
        sign_ids, pattern = compiled(sample.vocabulary)
        spelled_texts = [Sign(match.group(), *match.span()) for match in pattern.finditer(sample.text)]
        places = np.flatnonzero(np.isin(sample.id_t, sign_ids))
        tokens = zip(
            (sample.vocabulary.pieces[index] for index in sample.id_t[places]), sample.end_t[places].tolist(), strict=True
        )
        token_signs = [Sign(piece, end - len(piece), end) for piece, end in tokens]
        starts, ends = [sign.start for sign in token_signs], [sign.end for sign in token_signs]
        # An added token is that sign and no part of another: drop spelled signs that overlap such a token.
        free_signs = [sign for sign in spelled_texts if bisect_left(starts, sign.end) == bisect_left(ends, sign.start + 1)]
        end = len(sample.text)
        return [*sorted([*free_signs, *token_signs], key=lambda sign: sign.start), Sign(b"", end, end)]

    return find


def first_of(signs: Sequence[Sign], places: range, wanted: Collection[bytes]) -> int:
    """Return the first place of a wanted sign; the place after the last if there is none."""
    return next((place for place in places if signs[place].written in wanted), places.stop)


def signs_of(mark: str) -> tuple[str, str]:
    """Return the opening and the closing sign of a mark; the closing sign may be empty."""
    opening, dots, closing = mark.removesuffix(EACH).partition(_BETWEEN)
    if not dots or not opening:
        raise LayoutError(
            f"'{mark}' is no pair of delimiters; write the opening and the closing one with three dots between them, such as "
            f"<think>...</think>, or 'Answer:...' for one that nothing closes."
        )
    return opening, closing


def _opens(mark: str) -> tuple[str, ...]:
    """Return the signs at the end of a prompt that open a mark; a sign that also closes tells nothing."""
    opening, closing = signs_of(mark)
    return () if opening == closing else (opening,)


def _says(text: str) -> list[str]:
    """Return the pairs of tags in a text, as marks."""
    tags = _TAG_PAIR.findall(text)
    closed = {name for slash, name in tags if slash}
    return [f"<{name}>...</{name}>" for name in dict.fromkeys(name for slash, name in tags if not slash) if name in closed]


@register(
    "delimiters",
    kind="segmenter",
    says=_says,
    opens=_opens,
    holds=lambda text, mark: signs_of(mark)[0] in text,
)
def delimiters(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find the text between two signs, such as `<think>...</think>`; see the module."""
    parts_of = by_mark(parts, bare=False)
    mark_of_opening: dict[bytes, tuple[str, bytes]] = {}  # opening sign -> mark and closing sign
    for mark in parts_of:
        opening, closing = (sign.encode() for sign in signs_of(mark))
        if opening in mark_of_opening:
            raise LayoutError(
                f"'{mark}' starts with the opening sign of another mark; give each mark an opening sign of its own."
            )
        mark_of_opening[opening] = mark, closing
    find_signs = finder_of({*mark_of_opening, *(closing for _, closing in mark_of_opening.values() if closing)})
    prefilled_signs = [Sign(opening, 0, 0) for opening, (mark, _) in mark_of_opening.items() if mark == layout.prefilled]

    def find(sample: Sample) -> Found:
        pairs, fault, signs = list[Match](), 0, [*prefilled_signs, *find_signs(sample)]
        last, at = {sign.written: place for place, sign in enumerate(signs)}, 0
        while at < len(signs) - 1:
            sign = signs[at]
            if sign.written not in mark_of_opening:
                fault |= Fault.ORDER
                at += 1
                continue
            mark, closing = mark_of_opening[sign.written]
            has_closing = closing != b"" and last.get(closing, 0) > at
            place = first_of(signs, range(at + 1, len(signs) - 1), (closing,) if has_closing else mark_of_opening)
            end = signs[place]
            if has_closing:
                fault |= Fault.NESTED if any(inside.written in mark_of_opening for inside in signs[at + 1 : place]) else 0
            else:
                fault |= Fault.ORDER if place > at + 1 else 0  # the signs in between close nothing
                fault |= Fault.TRUNCATED if closing else 0
            inner = None if closing and not has_closing else (sign.end, end.start)
            pairs.append((mark, sign.start, end.end if has_closing else end.start, inner))
            at = place + has_closing
        return taken(pairs, parts_of, again="duplicate", fault=fault)

    return find


@register("regex", kind="segmenter", holds=lambda text, mark: _compiled(mark).search(text.encode()) is not None)
def regex(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find the matches of regular expressions; see the module."""
    parts_of = by_mark(parts, bare=False)
    patterns = [(mark, _compiled(mark)) for mark in parts_of]

    def find(sample: Sample) -> Found:
        claimed, end = list[Match](), 0
        matches = [(mark, pattern, match) for mark, pattern in patterns for match in pattern.finditer(sample.text)]
        for mark, pattern, match in sorted(matches, key=lambda one: (one[2].start(), -one[2].end())):
            start = match.start()
            if end <= start < match.end():
                end = match.end()
                inner = match.span(pattern.groupindex.get(b"value", min(pattern.groups, 1)))
                claimed.append((mark, start, end, inner if inner[0] >= 0 else None))
        return taken(claimed, parts_of, again="taken")

    return find


def _compiled(mark: str) -> Any:
    """Compile a pattern of bytes."""
    try:
        import re2  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise LayoutError(
            "The segmenter 'regex' needs google-re2. Install it with: pip install 'spanwise[segment]'"
        ) from None
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(mark.encode(), options)
    except re2.error as error:
        message = error.args[0] if error.args else b""
        reason = message.decode(errors="replace") if isinstance(message, bytes) else str(message)
        advice = next((f": {text}" for start, text in _INSTEAD.items() if reason.startswith(start)), "")
        raise LayoutError(f"'{mark}' is no pattern of RE2 ({reason}){advice}.") from None
