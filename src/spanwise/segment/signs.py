"""Where fixed signs stand in a completion, such as `<think>`: as the one token that the vocabulary has for each, or as bytes."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from spanwise.segment.claims import Sample


class Sign(NamedTuple):
    """One sign in the text, and its bytes [start, end)."""

    written: bytes
    start: int
    end: int


def finder_of(signs: Collection[bytes], *, tokens_only: Collection[bytes] = ()) -> Callable[[Sample], list[Sign]]:
    """A function that finds signs in a completion, from left to right, the longer one where two begin.

    A sign that the tokenizer added beside its vocabulary is that token and nothing else: the same characters spelled in other
    tokens are text.
    """
    compiled: dict[frozenset[bytes], tuple[frozenset[bytes], re.Pattern[bytes]]] = {}

    def find(sample: Sample) -> list[Sign]:
        vocabulary = sample.vocabulary
        added = vocabulary.added_pieces
        if added not in compiled:
            tokens = frozenset(signs) & added
            spelled = set(signs) - tokens - (set(tokens_only) if added else set())
            longest = sorted(spelled, key=lambda sign: (-len(sign), sign))
            compiled[added] = tokens, re.compile(b"|".join(map(re.escape, longest)) or rb"(?!)")
        tokens, pattern = compiled[added]
        spelled_signs = [Sign(match.group(), *match.span()) for match in pattern.finditer(sample.text)]
        if not tokens:
            return spelled_signs
        at = np.flatnonzero(vocabulary.is_added[sample.id_t])
        written = zip((vocabulary.pieces[index] for index in sample.id_t[at]), sample.end_t[at].tolist(), strict=True)
        return _merged(spelled_signs, [Sign(piece, end - len(piece), end) for piece, end in written if piece in tokens])

    return find


def _merged(spelled: Sequence[Sign], whole: Sequence[Sign]) -> list[Sign]:
    """Both in order; what is spelled across a token that is a sign is none."""
    starts, ends = [sign.start for sign in whole], [sign.end for sign in whole]
    apart = [sign for sign in spelled if bisect_left(starts, sign.end) == bisect_left(ends, sign.start + 1)]
    return sorted([*apart, *whole], key=lambda sign: sign.start)


class Places:
    """Which of some signs comes next, in logarithmic time."""

    def __init__(self, signs: Sequence[Sign]) -> None:
        self._size = len(signs)
        self._of: dict[bytes, list[int]] = {}
        for place, sign in enumerate(signs):
            self._of.setdefault(sign.written, []).append(place)

    def after(self, place: int, *wanted: bytes) -> int:
        """The place of the first wanted sign after a place; the number of signs if there is none."""
        first = self._size
        for written in wanted:
            places = self._of.get(written, ())
            at = bisect_left(places, place + 1)
            if at < len(places):
                first = min(first, places[at])
        return first
