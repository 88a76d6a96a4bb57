"""Tags in bytes: which blocks a completion has, where each starts, what its tags hold, what is wrong with it."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from spanwise.layout import Layout
from spanwise.types import Fault

#: Sequences of more tags than this are not kept: hardly two completions share one, and each may be a megabyte.
_REPEATED = 64


class Mark(NamedTuple):
    """One tag in the text: its name, whether it closes, its bytes [start, end), and the block it lies in."""

    tag: str
    closes: bool
    start: int
    end: int
    block: int = 0


@dataclass(frozen=True)
class Parsed:
    """One completion, read.

    Attributes:
        blocks: the blocks found, in order.
        starts: the first byte of each of them; the first one starts at 0, each ends where the next one starts.
        fault: `Fault` bits.
        contents: the bytes [start, end) inside the last complete pair of each (block, tag) that has one.
    """

    blocks: tuple[int, ...]
    starts: tuple[int, ...]
    fault: int
    contents: dict[tuple[int, str], tuple[int, int]]


def compile_tags(layout: Layout) -> re.Pattern[bytes] | None:
    """A pattern of all opening and closing tags of `layout`; None if it has no tags.

    Example:
        >>> compile_tags(Layout({"all": ["answer"]})).findall(b"<answer>4</answer><answers>")
        [(b'', b'answer'), (b'/', b'answer')]
    """
    if not layout.tags:
        return None
    names = b"|".join(re.escape(tag.encode()) for tag in dict.fromkeys(layout.tags))
    return re.compile(b"<(/?)(" + names + b")>")


class TagParser:
    """Reads completions of one layout.

    Which tag matches, which block it opens and what is wrong depends only on the sequence of tags, not on what stands between
    them. So each sequence is worked out once, in places of the sequence, and the bytes are filled in per completion.

    Args:
        layout: the blocks and their tags.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._pattern = compile_tags(layout)
        self._known: dict[tuple[object, ...], Parsed] = {}

    def parse(self, text: bytes, start: int = 0, end: int | None = None) -> Parsed:
        """Find the blocks of `text[start:end]`: the layout's tags in order, the first opening at or after the last match wins.

        A tag that is not found is skipped without moving on. A block starts at its first matched tag; text before the first
        of these belongs to the first block of the layout. Without any match everything is the first block.

        Example:
            >>> parser = TagParser(Layout({"solution": ["answer"], "confidence": ["confidence"]}))
            >>> parsed = parser.parse(b"So <answer>4</answer><confidence>1")
            >>> parsed.blocks, parsed.starts, Fault(parsed.fault).name
            ((0, 1), (0, 21), 'TRUNCATED')
            >>> parsed.contents
            {(0, 'answer'): (11, 12)}
        """
        end = len(text) if end is None else end
        found = list(self._pattern.finditer(text, start, end)) if self._pattern else []
        tags = tuple(match[0] for match in found)
        at_start = bool(found) and found[0].start() == start
        known = self._known.get((at_start, tags))
        if known is None:
            known = self._work_out(tags, at_start)
            if len(tags) <= _REPEATED:
                self._known[at_start, tags] = known
        edges = [start, start]
        for match in found:
            edges += match.span()
        starts = tuple([edges[place] for place in known.starts])
        contents = {key: (edges[opened], edges[closed]) for key, (opened, closed) in known.contents.items()}
        return Parsed(known.blocks, starts, known.fault, contents)

    def _work_out(self, tags: tuple[bytes, ...], at_start: bool) -> Parsed:
        """The sequence read in places: place 0 is the first byte, tag i lies at the places [2i + 2, 2i + 3)."""
        layout = self.layout
        marks = [] if layout.prefilled is None else [Mark(layout.prefilled, False, 0, 0)]
        for i, tag in enumerate(tags):
            place = 0 if i == 0 and at_start else 2 * i + 2
            marks.append(Mark(tag.strip(b"</>").decode(), tag.startswith(b"</"), place, 2 * i + 3))
        slots = [(block, tag) for block, (_, names) in enumerate(layout.blocks) for tag in names]
        found = _match(marks, [tag for _, tag in slots])
        first: dict[int, int] = {}
        for (block, _), at in zip(slots, found, strict=True):
            if at is not None:
                first.setdefault(block, marks[at].start)
        if not first or (0 not in first and min(first.values()) > 0):
            first[0] = 0
        first = dict(sorted(first.items()))
        if 0 in first:
            first[0] = 0
        blocks, starts = tuple(first), tuple(first.values())
        placed = [_place(mark, blocks, starts) for mark in marks]
        fault, misplaced = _faults(placed, {at for at in found if at is not None}, layout)
        lost = {tag for (_, tag), at in zip(slots, found, strict=True) if at is None} - misplaced
        return Parsed(blocks, starts, int(fault | (Fault.MISSING if lost else Fault.NONE)), _contents(placed))


def _place(mark: Mark, blocks: tuple[int, ...], starts: tuple[int, ...]) -> Mark:
    # A prefilled tag has no bytes; it lies in the first block even where the second one opens at byte 0 too.
    at = 0 if mark.end == 0 else bisect_right(starts, mark.start) - 1
    return mark._replace(block=blocks[at])


def _match(marks: list[Mark], tags: list[str]) -> list[int | None]:
    """For each tag in order, the index of its first opening after the previous match, or None."""
    found: list[int | None] = []
    cursor = 0
    for tag in tags:
        at = next((i for i in range(cursor, len(marks)) if marks[i].tag == tag and not marks[i].closes), None)
        cursor = cursor if at is None else at + 1
        found.append(at)
    return found


def _faults(marks: list[Mark], matched: set[int], layout: Layout) -> tuple[Fault, set[str]]:
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
        if (mark.block, mark.tag) in seen and mark.tag in layout.blocks[mark.block][1]:
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
