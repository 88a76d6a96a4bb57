"""A `Claim` is the text that a segmenter found for a part of a layout. `cut` turns claims into blocks."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from spanwise.layout import EACH, Layout, Part
from spanwise.registry import Registry
from spanwise.segment.vocabulary import Vocabulary
from spanwise.types import Fault

_BYTES = Vocabulary(tuple(bytes([byte]) for byte in range(256)))
#: The content of a part: its bytes [start, end), or its text without JSON escapes.
Inner = tuple[int, int] | bytes
#: One match of a mark, such as a tag: the mark, its first byte, the byte after it, and its content.
Match = tuple[str, int, int, Inner | None]
#: Matches a token that ends a turn or a text, such as `<|im_end|>`.
_END = re.compile("<\\|[^<>|\\n]{1,64}\\|>|</s>|<eos>|<end_of_turn>|<\uff5c[^<>\\n]{1,64}\uff5c>".encode())
#: Matches a token after which another turn begins. Other tokens, such as `<|channel|>`, stand inside a turn.
_TURN_END = re.compile(
    "<\\|(?:im_end|end|eo|return|call)[^<>|\\n]{0,60}\\|>|</s>|<eos>|<end_of_turn>|<\uff5cend[^<>\\n]{0,60}\uff5c>".encode()
)


def text_end(text: bytes) -> int:
    """Return the byte at which the end-of-sequence tokens of a completion begin.

    >>> text_end(b"Paris<|im_end|>"), text_end(b"Paris"), text_end(b"<s>Rome</s>")
    (5, 5, 11)
    """
    end_byte = len(text)
    open_tag_count: int | None = None  # how many HTML tags `<s>` are open just before the examined `</s>`
    while (start_byte := text.rfind(b"<", 0, end_byte)) >= 0 and _END.fullmatch(text, start_byte, end_byte):
        if text[start_byte:end_byte] == b"</s>":
            open_tag_count = 1 + (text.count(b"<s>") - text.count(b"</s>") if open_tag_count is None else open_tag_count)
            if open_tag_count > 0:
                break  # the examined `</s>` closes an HTML tag `<s>`
        end_byte = start_byte
    return end_byte


def with_line_ends(text: bytes) -> bytes:
    r"""Replace each end-of-turn token by spaces and a line feed, in equal length. Keep `</s>` in a text with `<s>`.

    >>> with_line_ends(b"Done.<|end|>Next")
    b'Done.      \nNext'
    >>> with_line_ends(b"<|channel|>final<|message|>Next")
    b'<|channel|>final<|message|>Next'
    """
    is_html = b"<s>" in text
    return _TURN_END.sub(lambda end: end[0] if is_html and end[0] == b"</s>" else b" " * (len(end[0]) - 1) + b"\n", text)


def without_end(text: str) -> str:
    """Remove end-of-sequence tokens from a text's end. Other libraries decode without them."""
    if not text.endswith(">"):
        return text
    text_bytes = text.encode(errors="surrogatepass")
    return text_bytes[: text_end(text_bytes)].decode(errors="surrogatepass")


def without_indent(code: str, width: int) -> str:
    r"""Remove a fence's indentation of `width` characters from its code, or the first line's if that is smaller.

    >>> without_indent("   if x:\n       y()\n", 3), without_indent("x()\n", 3)
    ('if x:\n    y()\n', 'x()\n')
    """
    first_line = code.lstrip("\n")
    width = min(width, len(first_line) - len(first_line.lstrip(" \t")))
    return re.sub(f"(?m)^[ \\t]{{0,{width}}}", "", code)


@dataclass(eq=False, slots=True)
class Sample:
    """One completion as a segmenter sees it: its trainable tokens, as if all others were deleted.

    Attributes:
        text: its bytes.
        id_t: its tokens.
        end_t: the byte at which each of them ends.
        column_t: where each of them stands in the row; what is left out was masked.
        logp_t: the log-probability that each was sampled with; empty where no segmenter of the layout asks for them.
        vocabulary: the bytes of every token.
    """

    text: bytes
    id_t: np.ndarray
    end_t: np.ndarray
    column_t: np.ndarray
    logp_t: np.ndarray
    vocabulary: Vocabulary

    @staticmethod
    def of(text: bytes) -> Sample:
        """Build a `Sample` from a completion's text, with every byte as a token.

        >>> Sample.of(b"abc").end_t
        array([1, 2, 3])
        """
        byte_indices = np.arange(len(text))
        return Sample(text, np.frombuffer(text, dtype=np.uint8), byte_indices + 1, byte_indices, np.empty(0), _BYTES)


class Claim(NamedTuple):
    """The bytes that a segmenter found for one part of the layout, such as a tag.

    Attributes:
        part: of the layout.
        start: its first byte.
        stop: the byte after its last one; None: it runs on to the next claim without an end, or to the end.
        inner: the bytes [start, end) of its content, or its content if JSON escapes had to be resolved; None if incomplete.

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
    inner: Inner | None = None


class Found(NamedTuple):
    """What a segmenter found in one completion: text (claims) and faults. Claims are disjoint or nested.

    Example:
        >>> Found([]).fault
        0
    """

    claims: Sequence[Claim]
    fault: int = 0


#: Finds the parts of a layout in a completion.
Finder = Callable[[Sample], Found]


@dataclass(frozen=True, eq=False)  # a segmenter is hashed by identity, because a function of the user may have no hash
class Segmenter:
    """A named method to find a layout's blocks in text. One function finds them, and others list a text's marks (tags, ...).

    Attributes:
        name: as in layouts.
        function: `(parts, *, layout) -> finder`: takes the parts of a layout that it has to find, refuses marks that it does not
            understand (LayoutError), and returns a function from a `Sample` to what it `Found` in it.
        kind: always "segmenter".
        reads_logp: it cuts by log-probabilities.
        says: a function from a completion's text to the marks that would find something in it, most telling first, for the
            sentence that says what completions have instead of what a layout asks for. None: it cannot tell.
        asks: a function from a mark to the words that a prompt must hold for a model to write it, for the sentence on prompts
            that do not. None: it finds what models write anyway.
        holds: a function of a text and a mark: whether the mark would find something in it; None: where `says` names the mark.
        opens: a function from a mark to what a prompt ends with that has opened it already. None: no prompt can.

    Example:
        >>> SEGMENTERS.find("json").reads_logp, SEGMENTERS.find("low_probability").reads_logp
        (False, True)
    """

    name: str
    function: Callable[..., Finder]
    kind: str = "segmenter"
    reads_logp: bool = False
    says: Callable[[str], Any] | None = None
    asks: Callable[[str], Sequence[str]] | None = None
    holds: Callable[[str, str], bool] | None = None
    opens: Callable[[str], Sequence[str]] | None = None


#: All segmenters by name. Check a new one with `spanwise.testing.check_segmenter`.
SEGMENTERS: Registry[Segmenter] = Registry("segmenter", kinds=("segmenter",), group="spanwise.segmenters", entry=Segmenter)


class Pieces(NamedTuple):
    """One completion, cut into runs of bytes (pieces) that each belong to one block."""

    blocks: tuple[int, ...]  # The index of each piece's block in the layout.
    starts: tuple[int, ...]  # The first byte of each piece. A piece ends where the next one starts.
    fault: int
    contents: Mapping[tuple[int, str], Inner]  # The content of each complete layout part, such as a tag.


def assign(
    matches: Iterable[Match],
    parts_of: Mapping[str, Sequence[Part]],
    *,
    surplus: Literal["keep", "report", "drop"],
    fault: int = 0,
) -> Found:
    """Assign the occurrences of each mark, such as a tag, to blocks in order. `surplus` decides on extra ones."""
    claims: list[Claim] = []
    match_counts = dict.fromkeys(parts_of, 0)
    for mark, match_start, match_stop, content in matches:
        parts_with_mark = parts_of[mark]
        part_index = match_counts[mark]
        match_counts[mark] += 1
        last_part = parts_with_mark[-1]
        if part_index >= len(parts_with_mark) and last_part.index is not None:
            fault |= Fault.MORE
            continue
        if part_index >= len(parts_with_mark) and surplus != "keep" and not last_part.mark.endswith(EACH):
            fault |= Fault.DUPLICATE
            if surplus == "drop":
                continue
        claims.append(Claim(parts_with_mark[min(part_index, len(parts_with_mark) - 1)], match_start, match_stop, content))
    return Found(claims, int(fault))


def group_by_mark(parts: Sequence[Part], *, bare: bool = True) -> dict[str, list[Part]]:
    """Group a layout's parts by their mark, such as a tag. `bare` removes the `[*]` at the end of marks."""
    parts_of_mark: dict[str, list[Part]] = {}
    for part in parts:
        parts_of_mark.setdefault(part.mark.removesuffix(EACH) if bare else part.mark, []).append(part)
    return parts_of_mark


def cut(layout: Layout, findings: Iterable[Found], length: int) -> Pieces:
    """Cut a completion into blocks where segmenters found them. The rules are in docs/segmenters.md."""
    fault_flags = 0
    claims = list[Claim]()
    for finding in findings:
        fault_flags |= finding.fault
        claims += finding.claims
    # Of texts that start at the same byte, the longest comes first.
    claims.sort(key=lambda claim: (claim.start, -sys.maxsize if claim.stop is None else -claim.stop))
    block_pieces, kept_claims = _carve(claims, layout.rest, length)
    if len(kept_claims) < len(claims):
        fault_flags |= Fault.NESTED
    if not layout.wanted.issubset([claim.part for claim in kept_claims]):
        fault_flags |= Fault.MISSING
    content_of_part: dict[tuple[int, str], Inner] = {}
    for claim in kept_claims:
        if claim.inner is not None:
            content_of_part[claim.part.block, claim.part.key] = claim.inner
    block_pieces[:1] = [(0, block_pieces[0][1] if block_pieces else 0)]
    # If several pieces start at the same byte, keep the last piece.
    piece_pairs = pairwise([(-1, -1), *block_pieces])
    block_by_start = {start: block for (_, previous_block), (start, block) in piece_pairs if block != previous_block}
    return Pieces(tuple(block_by_start.values()), tuple(block_by_start), int(fault_flags), content_of_part)


def _carve(claims: Sequence[Claim], rest: int | None, length: int) -> tuple[list[tuple[int, int]], list[Claim]]:
    """Cut a completion where segmenters found text. Return the pieces and the claims that were kept."""
    block_pieces = [] if rest is None else [(0, rest)]
    kept_claims = list[Claim]()
    # Text without an end of its own (`stop` is None) lasts until the next text without one, or to the completion's end.
    open_claim_starts = [claim.start for claim in claims if claim.stop is None]
    stops_of_open_claims = iter([*open_claim_starts[1:], length])
    open_stops_and_blocks = [(length, rest)]
    for claim in claims:
        claim_stop = next(stops_of_open_claims) if claim.stop is None else claim.stop
        block_pieces += _close_claims(open_stops_and_blocks, claim.start)
        content_stop = claim.inner[1] if isinstance(claim.inner, tuple) else claim.start
        known_stop = claim.stop or content_stop
        if known_stop <= open_stops_and_blocks[-1][0]:  # skip a text that reaches past the end of the text around it
            block_pieces.append((claim.start, claim.part.block))
            open_stops_and_blocks.append((min(claim_stop, open_stops_and_blocks[-1][0]), claim.part.block))
            kept_claims.append(claim)
    block_pieces += _close_claims(open_stops_and_blocks, length)
    return [piece for piece in block_pieces if piece[0] < length] or block_pieces[:1], kept_claims


def _close_claims(stack: list[tuple[int, int | None]], byte: int) -> list[tuple[int, int]]:
    """Pop the texts that end at or before `byte` from the stack, and return where the text around each goes on."""
    outer_pieces = []
    while len(stack) > 1 and stack[-1][0] <= byte:
        claim_stop, _ = stack.pop()
        _, outer_block = stack[-1]
        if outer_block is not None:
            outer_pieces.append((claim_stop, outer_block))
    return outer_pieces
