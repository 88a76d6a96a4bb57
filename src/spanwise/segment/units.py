"""Units of a completion one after the other: what the segmenters of prose and of runs of tokens share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from spanwise.errors import LayoutError
from spanwise.layout import EACH, Layout, Part
from spanwise.segment.claims import Claim, Finder, Found, Sample, numbered
from spanwise.types import Fault

_TEXT = re.compile(rb"[^\s]")


def in_a_row(parts: Sequence[Part], starts_of: Callable[[Sample], Sequence[int]], *, trimmed: bool) -> Finder:
    """A finder of units that begin at some bytes, in order, and end where the next one begins."""
    take = numbered(parts)

    def find(sample: Sample) -> Found:
        text = sample.text
        claims: list[Claim] = []
        for start, stop in pairwise([*starts_of(sample), len(text)]):
            inner = _trimmed(text, start, stop) if trimmed else (start, stop)
            if start == stop or inner is None:
                continue
            part = take(len(claims))
            if part is None:
                return Found(claims, Fault.MORE)
            claims.append(Claim(part, start, stop, inner))
        return Found(claims)

    return find


def _trimmed(text: bytes, start: int, stop: int) -> tuple[int, int] | None:
    first = _TEXT.search(text, start, stop)
    return None if first is None else (first.start(), start + len(text[start:stop].rstrip()))


def check_no_mark(parts: Sequence[Part], layout: Layout) -> None:
    """Refuse a mark where a segmenter takes none; a block of a list is marked by its own name."""
    for part in parts:
        name, own = layout.names[part.block], part.mark
        if own and name not in (own, own.replace(EACH, f"[{part.index}]", 1)):
            raise LayoutError(
                f"The segmenter '{part.segmenter}' takes no mark, and block '{name}' has '{own}'; write "
                f"{{'{part.segmenter.rstrip('s')}[*]': '{part.segmenter}:'}}."
            )
