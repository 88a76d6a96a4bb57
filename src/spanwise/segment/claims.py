"""What finders see and say: `Sample`, the bytes of one completion; `Claim`, where a part lies; and the blocks that makes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from spanwise.layout import EACH, Layout, Part
from spanwise.segment.vocabulary import Vocabulary
from spanwise.types import Fault

_BYTES = Vocabulary(tuple(bytes([byte]) for byte in range(256)))


@dataclass(eq=False)
class Chunk:
    """Some completions in a row: their bytes, and of every trainable token its id, its end in them and its place."""

    data: bytes
    id_t: np.ndarray
    end_t: np.ndarray
    column_t: np.ndarray
    logp_t: np.ndarray | None  # where a finder asks for it
    vocabulary: Vocabulary

    @cached_property
    def added(self) -> np.ndarray:
        """The positions of the tokens that the tokenizer added beside its vocabulary, such as `<think>`."""
        return np.flatnonzero(self.vocabulary.is_added[self.id_t])


class Sample:
    """One completion as a finder sees it: the trainable tokens alone, as if all others were deleted.

    Attributes:
        text: its bytes.
    """

    __slots__ = ("_byte", "_chunk", "_first", "_last", "text")

    def __init__(self, chunk: Chunk, first: int, last: int, start: int, stop: int) -> None:
        self._chunk, self._first, self._last, self._byte = chunk, first, last, start
        self.text = chunk.data[start:stop]

    @staticmethod
    def of(text: bytes) -> Sample:
        """A completion whose every byte is a token.

        >>> Sample.of(b"abc").end_t
        array([1, 2, 3])
        """
        size = len(text)
        ids = np.frombuffer(text, dtype=np.uint8)
        return Sample(Chunk(text, ids, np.arange(1, size + 1), np.arange(size), None, _BYTES), 0, size, 0, size)

    @property
    def end_t(self) -> np.ndarray:
        """The byte at which each of its tokens ends."""
        return self._chunk.end_t[self._first : self._last] - self._byte

    @property
    def column_t(self) -> np.ndarray:
        """Where each of its tokens stands in the row; what is left out was masked."""
        return self._chunk.column_t[self._first : self._last]

    @property
    def logp_t(self) -> np.ndarray:
        """The log-probability that each of its tokens was sampled with."""
        assert self._chunk.logp_t is not None, "asked for where the registry entry says so"
        return self._chunk.logp_t[self._first : self._last]

    @property
    def known(self) -> frozenset[bytes]:
        """What the tokens that its tokenizer added beside its vocabulary are written as, whether they occur here or not."""
        return self._chunk.vocabulary.added_pieces

    @property
    def added(self) -> list[tuple[int, int]]:
        """The bytes [start, end) of the tokens that the tokenizer added beside its vocabulary, such as `<think>`."""
        chunk = self._chunk
        low, high = np.searchsorted(chunk.added, (self._first, self._last))
        if low == high:
            return []
        at = chunk.added[low:high]
        starts = np.where(at == 0, 0, chunk.end_t[at - 1]) - self._byte
        return list(zip(starts.tolist(), (chunk.end_t[at] - self._byte).tolist(), strict=True))


class Claim(NamedTuple):
    """Where one part lies, in bytes of a completion.

    Attributes:
        part: of the layout.
        start: its first byte.
        stop: the byte after its last one; None: it runs on to the next claim without an end, or to the end.
        inner: the bytes [start, end) of what it says, or what it says where that is spelled otherwise (escapes of JSON); None
            where it is not complete.

    Example:
        >>> from spanwise import Layout
        >>> (part,) = Layout(["answer"]).parts_of("tags")
        >>> text = b"<answer>42</answer>"
        >>> claim = Claim(part, start=0, stop=None, inner=(8, 10))
        >>> text[claim.inner[0] : claim.inner[1]]
        b'42'
    """

    part: Part
    start: int
    stop: int | None = None
    inner: tuple[int, int] | bytes | None = None


class Found(NamedTuple):
    """What a finder says of one completion: claims that do not overlap, or lie one inside the other, and what is wrong with it.

    Example:
        >>> Found([]).fault
        0
    """

    claims: Sequence[Claim]
    fault: int = 0


#: What a registered segmenter makes of its parts: the finder of one layout.
Finder = Callable[[Sample], Found]


@dataclass(frozen=True)
class Pieces:
    """One completion, cut into pieces that belong to blocks.

    Attributes:
        blocks: the block of each piece; a block may have several.
        starts: the first byte of each piece; the first one starts at 0, each ends where the next one starts.
        fault: `Fault` bits.
        contents: what each (block, key) says that says something complete, see `Claim.inner`.
    """

    blocks: tuple[int, ...]
    starts: tuple[int, ...]
    fault: int
    contents: Mapping[tuple[int, str], tuple[int, int] | bytes]


def numbered(parts: Sequence[Part]) -> Callable[[int], Part | None]:
    """Of the parts of one mark, in order, the one that takes match number i.

    Each takes one; the last takes all the others too, unless it is an element of a repeated block: then nobody does.

    >>> one, two = Part(0, "lines", "", "line[0]", 0), Part(1, "lines", "", "line[1]", 1)
    >>> [part and part.key for part in map(numbered([one, two]), range(3))], numbered([Part(0, "lines", "", "all")])(7).key
    (['line[0]', 'line[1]', None], 'all')
    """
    listed = list(parts)
    surplus = listed[-1] if listed[-1].index is None else None
    return lambda index: listed[index] if index < len(listed) else surplus


class Taker:
    """The parts of one mark, which take its matches in turn, and what becomes of a match after the last part of a single block."""

    def __init__(self, parts: Sequence[Part], *, again: Literal["taken", "duplicate", "refused"]) -> None:
        self.part = numbered(parts)
        once = parts[-1].index is None and not parts[-1].mark.endswith(EACH)
        self.most = len(parts) if once and again != "taken" else sys.maxsize
        self.refuses = again == "refused"


class Claims:
    """The claims on one completion, made match by match."""

    def __init__(self) -> None:
        self.made: list[Claim] = []
        self.fault = 0
        self._count: dict[Taker, int] = {}

    def take(self, taker: Taker, start: int, stop: int, inner: tuple[int, int] | None) -> None:
        """Claim the next match of a mark for the part whose turn it is, if there is one."""
        number = self._count.get(taker, 0)
        self._count[taker] = number + 1
        if number >= taker.most:
            self.fault |= Fault.DUPLICATE
            if taker.refuses:
                return
        part = taker.part(number)
        if part is None:
            self.fault |= Fault.MORE
        else:
            self.made.append(Claim(part, start, stop, inner))

    def found(self) -> Found:
        """All that was claimed, and what is wrong."""
        return Found(self.made, int(self.fault))


def by_mark(parts: Sequence[Part], *, bare: bool = True) -> dict[str, list[Part]]:
    """The parts of each mark, which is written without `[*]` if it is to be bare."""
    grouped: dict[str, list[Part]] = {}
    for part in parts:
        grouped.setdefault(part.mark.removesuffix(EACH) if bare else part.mark, []).append(part)
    return grouped


def cut(layout: Layout, found: Iterable[Found], size: int) -> Pieces:
    """The pieces that the claims on one completion make of it.

    Without a block for the rest a piece runs on to the next one and the first begins at byte 0. With one, a piece ends where its
    claim ends; a claim inside another one takes its bytes out of it, and what nobody claims is the rest.
    """
    fault, claims = 0, []
    for one in found:
        fault |= one.fault
        claims += one.claims
    claims.sort(key=lambda claim: (claim.start, -sys.maxsize if claim.stop is None else -claim.stop))  # the outer one first
    if not layout.wanted.issubset([claim.part for claim in claims]):
        fault |= Fault.MISSING
    contents: dict[tuple[int, str], tuple[int, int] | bytes] = {}
    pieces: list[tuple[int, int]] = []
    for part, start, _, inner in claims:
        pieces.append((start, part.block))
        if inner is not None:
            contents[part.block, part.key] = inner
    if layout.rest is not None:
        pieces = _carved(claims, layout.rest, size)
    pieces[:1] = [(0, pieces[0][1] if pieces else 0)]
    starts: list[int] = []
    blocks: list[int] = []
    last = at = -1
    for start, block in pieces:
        if start == at:
            blocks[-1] = last = block
        elif block != last:
            starts.append(start)
            blocks.append(block)
            at, last = start, block
    return Pieces(tuple(blocks), tuple(starts), int(fault), contents)


def _carved(claims: Sequence[Claim], rest: int, size: int) -> list[tuple[int, int]]:
    """Starts and blocks of pieces where every claim has its own bytes and the rest the others."""
    pieces = [(0, rest)]
    open_ends = iter([*[claim.start for claim in claims if claim.stop is None][1:], size])
    stack: list[tuple[int, int]] = [(size, rest)]
    for claim in claims:
        stop = next(open_ends) if claim.stop is None else claim.stop
        while len(stack) > 1 and stack[-1][0] <= claim.start:
            pieces.append((stack.pop()[0], stack[-1][1]))
        pieces.append((claim.start, claim.part.block))
        stack.append((min(stop, stack[-1][0]), claim.part.block))
    while len(stack) > 1:
        pieces.append((stack.pop()[0], stack[-1][1]))
    return [piece for piece in pieces if piece[0] < size] or pieces[:1]
