"""Tags in bytes: which blocks a completion has, where each starts, what its tags hold, what is wrong with it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from spanwise.errors import LayoutError
from spanwise.layout import Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import Claim, Finder, Found, Pieces, Sample
from spanwise.types import Fault

_TAG = re.compile(r"<([^\W\d][\w.-]* ?)>")
#: Longer sequences of tags are worked out each time: they hardly come twice, and would fill the memory.
_REPEATED = 64
#: Special tokens of tokenizers that look like tags.
_SPECIAL = frozenset(("bos", "eos", "mask", "pad", "s", "unk"))


class _Mark(NamedTuple):
    """One tag in the text: its name, whether it closes, and its bytes [start, end)."""

    tag: str
    closes: bool
    start: int
    end: int


def _opened(text: str) -> list[str]:
    """The tags that a text opens, without special tokens that look like tags."""
    return [tag for tag in _TAG.findall(text) if tag not in _SPECIAL]


@register("tags", kind="segmenter", says=_opened, asks=lambda mark: [f"<{mark}>"], opens=lambda mark: (f"<{mark}>",))
def tags(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find blocks by tags: `answer` is `<answer>...</answer>`; see `TagParser`."""
    for part in parts:
        if not part.mark or any(sign in part.mark for sign in "<>/ \t\n"):
            raise LayoutError(
                f"Tag '{part.mark}' of block '{layout.names[part.block]}' must be a bare name, without brackets or spaces."
            )
    return TagParser(layout, parts).find


class TagParser:
    """Reads completions of one layout."""

    def __init__(self, layout: Layout, parts: Sequence[Part] | None = None) -> None:
        self._parts = list(layout.parts if parts is None else parts)
        tags = [part.mark for part in self._parts]
        self._key_of = {(part.block, part.mark): part.key for part in self._parts}
        self._before = [_Mark(layout.prefilled, False, 0, 0)] if layout.prefilled in tags else []
        names = b"|".join(re.escape(tag.encode()) for tag in dict.fromkeys(tags))
        self._pattern = re.compile(b"(</?(?:" + names + b")>)" if tags else rb"((?!))")
        self._known = lru_cache(4096)(self._work_out)

    def find(self, sample: Sample) -> Found:
        """The tags of a completion as claims, for layouts that other segmenters have a share in: each runs on to the next."""
        pieces, starts = self.parse(sample.text)
        places = zip(self._parts, starts, strict=True)
        opened = [(part, at, pieces.contents.get((part.block, part.key))) for part, at in places if at is not None]
        return Found([Claim(part, at, None, inner) for part, at, inner in opened], pieces.fault)

    def parse(self, text: bytes) -> tuple[Pieces, list[int | None]]:
        """Find the blocks of a text, and where each part opens: in order, the first opening at or after the last match wins.

        A tag that is not found is skipped without moving on. A block starts at its first matched tag; text before the first
        of these belongs to the first block of the layout. Without any match everything is the first block. A sequence of tags
        that came before is not worked out again.
        """
        stretches = self._pattern.split(text)  # what stands between tags, and the tags
        edges, tags = [0, *accumulate(map(len, stretches))], tuple(stretches[1::2])
        read = self._known if len(tags) <= _REPEATED else self._work_out
        pieces, starts = read(tags, edges[1] == 0)
        contents = {key: (edges[opened], edges[closed]) for key, (opened, closed) in pieces.contents.items()}
        placed = Pieces(pieces.blocks, tuple([edges[at] for at in pieces.starts]), pieces.fault, contents)
        return placed, [None if at is None else edges[at] for at in starts]

    def _work_out(self, tags: tuple[bytes, ...], at_start: bool) -> tuple[Pieces, list[int | None]]:
        """What a sequence of tags means, in places: 0 is the first byte, tag i lies at [2i + 1, 2i + 2)."""
        marks = [*self._before]
        for i, tag in enumerate(tags):
            closes = tag.startswith(b"</")
            marks.append(_Mark(tag[1 + closes : -1].decode(), closes, 0 if at_start and not i else 2 * i + 1, 2 * i + 2))
        matched: dict[Part, int] = {}  # each part's first opening after the match before
        cursor = 0
        for part in self._parts:
            at = next((i for i in range(cursor, len(marks)) if marks[i].tag == part.mark and not marks[i].closes), None)
            if at is not None:
                matched[part], cursor = at, at + 1
        first = {part.block: marks[at].start for part, at in reversed(matched.items())}
        if 0 in first or 0 not in first.values():
            first[0] = 0
        blocks, starts = zip(*sorted(first.items()), strict=True)
        fault, misplaced, contents = self._judge(marks, set(matched.values()), blocks, starts)
        lost = {part.mark for part in self._parts if part not in matched and not part.index}
        pieces = Pieces(blocks, starts, int(fault | (Fault.MISSING if lost - misplaced else 0)), contents)
        return pieces, [marks[matched[part]].start if part in matched else None for part in self._parts]

    def _judge(
        self, marks: Sequence[_Mark], matched: Collection[int], blocks: Sequence[int], starts: Sequence[int]
    ) -> tuple[int, set[str], dict[tuple[int, str], tuple[int, int]]]:
        """What is wrong with the marks, the tags that open outside the order of the layout, and the last pair of each tag."""
        fault, opened, seen, misplaced = 0, set[str](), set[tuple[int, str]](), set[str]()
        pending: dict[tuple[int, str], int] = {}
        contents: dict[tuple[int, str], tuple[int, int]] = {}
        for index, mark in enumerate(marks):
            # A prefilled tag has no bytes; it lies in the first block even where the second one opens at byte 0 too.
            pair = blocks[0 if mark.end == 0 else bisect_right(starts, mark.start) - 1], mark.tag
            if mark.closes:
                fault |= 0 if mark.tag in opened else Fault.ORDER
                opened.discard(mark.tag)
                if pair in pending and pair in self._key_of:
                    contents[pair[0], self._key_of[pair]] = pending.pop(pair), mark.start
                continue
            if pair in seen and pair in self._key_of:
                fault |= Fault.DUPLICATE
            elif index not in matched:
                fault |= Fault.ORDER
                misplaced.add(mark.tag)
            fault |= Fault.NESTED if opened - {mark.tag} else 0
            seen.add(pair)
            opened.add(mark.tag)
            pending[pair] = mark.end
        return fault | (Fault.TRUNCATED if opened else 0), misplaced, contents
