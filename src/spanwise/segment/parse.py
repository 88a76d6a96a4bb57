"""Tags in bytes: which blocks a completion has, where each starts, what its tags hold, what is wrong with it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spanwise.errors import LayoutError
from spanwise.layout import Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import Claim, Finder, Found, Pieces, Sample
from spanwise.types import Fault

#: Sequences of more tags than this are not kept: hardly two completions share one, and each may be a megabyte.
_REPEATED = 64
_TAG = re.compile(r"<([A-Za-z_][\w.-]*)>")
#: Special tokens of tokenizers that look like tags.
_SPECIAL = frozenset(("bos", "eos", "mask", "pad", "s", "unk"))


class Mark(NamedTuple):
    """One tag in the text: its name, whether it closes, its bytes [start, end), and the block it lies in."""

    tag: str
    closes: bool
    start: int
    end: int
    block: int = 0


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
    """Reads completions of one layout.

    Which tag matches, which block it opens and what is wrong depends only on the sequence of tags, not on what stands between
    them. So each sequence is worked out once, in places of the sequence, and the bytes are filled in per completion.
    """

    def __init__(self, layout: Layout, parts: Sequence[Part] | None = None) -> None:
        self._parts = list(layout.parts if parts is None else parts)
        tags = [part.mark for part in self._parts]
        self._tags_of = {
            part.block: {other.mark for other in self._parts if other.block == part.block} for part in self._parts
        }
        self._key_of = {(part.block, part.mark): part.key for part in self._parts}
        self._prefilled = layout.prefilled if layout.prefilled in tags else None
        names = b"|".join(re.escape(tag.encode()) for tag in dict.fromkeys(tags))
        self._pattern = re.compile(b"<(/?)(" + names + b")>") if tags else None
        self._known: dict[tuple[object, ...], tuple[Pieces, list[int | None]]] = {}

    def parse(self, text: bytes) -> Pieces:
        """Find the blocks of a text: the layout's tags in order, the first opening at or after the last match wins.

        A tag that is not found is skipped without moving on. A block starts at its first matched tag; text before the first
        of these belongs to the first block of the layout. Without any match everything is the first block.
        """
        edges, (known, _) = self._read(text)
        starts = tuple([edges[place] for place in known.starts])
        contents = {key: (edges[opened], edges[closed]) for key, (opened, closed) in known.contents.items()}
        return Pieces(known.blocks, starts, known.fault, contents)

    def find(self, sample: Sample) -> Found:
        """The tags of a completion as claims, for layouts that other segmenters have a share in: each runs on to the next."""
        edges, (known, places) = self._read(sample.text)
        claims = []
        for part, place in zip(self._parts, places, strict=True):
            if place is not None:
                inner = known.contents.get((part.block, part.key))
                claims.append(Claim(part, edges[place], None, inner and (edges[inner[0]], edges[inner[1]])))
        return Found(claims, known.fault)

    def _read(self, text: bytes) -> tuple[list[int], tuple[Pieces, list[int | None]]]:
        """Where the tags stand, and what their sequence means."""
        matches = list(self._pattern.finditer(text)) if self._pattern else []
        tags = tuple(match[0] for match in matches)
        at_start = bool(matches) and matches[0].start() == 0
        known = self._known.get((at_start, tags))
        if known is None:
            known = self._work_out(tags, at_start)
            if len(tags) <= _REPEATED:
                self._known[at_start, tags] = known
        edges = [0, 0]
        for match in matches:
            edges += match.span()
        return edges, known

    def _work_out(self, tags: tuple[bytes, ...], at_start: bool) -> tuple[Pieces, list[int | None]]:
        """The sequence read in places: place 0 is the first byte, tag i lies at the places [2i + 2, 2i + 3)."""
        marks = [] if self._prefilled is None else [Mark(self._prefilled, False, 0, 0)]
        for i, tag in enumerate(tags):
            place = 0 if i == 0 and at_start else 2 * i + 2
            marks.append(Mark(tag.strip(b"</>").decode(), tag.startswith(b"</"), place, 2 * i + 3))
        matched = _match(marks, [part.mark for part in self._parts])
        first: dict[int, int] = {}
        for part, at in zip(self._parts, matched, strict=True):
            if at is not None:
                first.setdefault(part.block, marks[at].start)
        if not first or (0 not in first and min(first.values()) > 0):
            first[0] = 0
        first = dict(sorted(first.items()))
        if 0 in first:
            first[0] = 0
        blocks, starts = tuple(first), tuple(first.values())
        placed = [_place(mark, blocks, starts) for mark in marks]
        fault, misplaced = _faults(placed, {at for at in matched if at is not None}, self._tags_of)
        wanted = zip(self._parts, matched, strict=True)
        lost = {part.mark for part, at in wanted if at is None and not part.index} - misplaced
        inside = _contents(placed).items()
        contents = {(pair[0], self._key_of[pair]): at for pair, at in inside if pair in self._key_of}
        pieces = Pieces(blocks, starts, int(fault | (Fault.MISSING if lost else Fault.NONE)), contents)
        return pieces, [None if at is None else marks[at].start for at in matched]


def _place(mark: Mark, blocks: tuple[int, ...], starts: tuple[int, ...]) -> Mark:
    # A prefilled tag has no bytes; it lies in the first block even where the second one opens at byte 0 too.
    at = 0 if mark.end == 0 else bisect_right(starts, mark.start) - 1
    return mark._replace(block=blocks[at])


def _match(marks: list[Mark], tags: list[str]) -> list[int | None]:
    """For each tag in order, the index of its first opening after the previous match, or None."""
    matched: list[int | None] = []
    cursor = 0
    for tag in tags:
        at = next((i for i in range(cursor, len(marks)) if marks[i].tag == tag and not marks[i].closes), None)
        cursor = cursor if at is None else at + 1
        matched.append(at)
    return matched


def _faults(marks: list[Mark], matched: set[int], tags_of: Mapping[int, set[str]]) -> tuple[Fault, set[str]]:
    """The faults that the marks show, and the tags that open outside the order of the layout."""
    fault = Fault.NONE
    opened: set[str] = set()
    seen: set[tuple[int, str]] = set()
    misplaced: set[str] = set()
    for index, mark in enumerate(marks):
        if mark.closes:
            fault |= Fault.NONE if mark.tag in opened else Fault.ORDER
            opened.discard(mark.tag)
            continue
        if (mark.block, mark.tag) in seen and mark.tag in tags_of.get(mark.block, ()):
            fault |= Fault.DUPLICATE
        elif index not in matched:
            fault |= Fault.ORDER
            misplaced.add(mark.tag)
        seen.add((mark.block, mark.tag))
        if opened - {mark.tag}:
            fault |= Fault.NESTED
        opened.add(mark.tag)
    return fault | (Fault.TRUNCATED if opened else Fault.NONE), misplaced


def _contents(marks: list[Mark]) -> dict[tuple[int, str], tuple[int, int]]:
    """The inside of the last pair of each block and tag: a closing tag with the nearest opening one before it."""
    pending: dict[tuple[int, str], int] = {}
    contents: dict[tuple[int, str], tuple[int, int]] = {}
    for mark in marks:
        key = (mark.block, mark.tag)
        if not mark.closes:
            pending[key] = mark.end
        elif key in pending:
            contents[key] = (pending.pop(key), mark.start)
    return contents
