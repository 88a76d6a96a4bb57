"""`find_blocks`: from token ids to the blocks of a layout, exact to the byte; and the segmenter `tags`."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from spanwise.errors import AlignmentError, LayoutError, RecipeError
from spanwise.layout import Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import SEGMENTERS, Claim, Finder, Found, Pieces, Sample, cut
from spanwise.segment.vocabulary import Vocabulary
from spanwise.types import BlockText, Fault, PiecewiseText, Spans

_TAG = re.compile(r"<([^\W\d][\w.-]* ?)>")
#: The longest sequence of tags that is cached; longer ones rarely repeat, and would fill the memory.
_REPEATED = 64
#: Tokenizers' special tokens that look like tags.
_SPECIAL = frozenset(("bos", "eos", "mask", "pad", "s", "unk"))
_TOKENS_AT_A_TIME = 1_000_000


def find_blocks(
    ids_nt: Int[Tensor, "n t"],
    mask_nt: Shaped[Tensor, ...],
    *,
    layout: Layout,
    vocabulary: Vocabulary,
    logp_nt: Float[Tensor, "n t"] | None = None,
) -> tuple[Spans, list[BlockText]]:
    """Find the blocks of every completion, in tokens and as text.

    What the layout's segmenters find are pieces of bytes, see `spanwise.segment.claims.cut` and, for tags,
    `TagParser`. A token belongs to the block that holds its first byte. A token that straddles a boundary
    thus belongs to the block before it, and so does a token without bytes at a boundary (an unused id). A block that is left
    without tokens is absent; if it has bytes, the completion has the fault STRADDLED. Masked tokens count as deleted: their ids
    are never read, a part may span them, and spans keep the original coordinates.

    Args:
        ids_nt: (N, T) sampled token ids; any value where the mask is 0.
        mask_nt: (N, T) bool or 0/1 integers: the trainable tokens (no prompt, padding or tool output).
        layout: the blocks, what they are made of and what finds them.
        vocabulary: the bytes of every token id.
        logp_nt: (N, T) log-probabilities of the sampled tokens, for segmenters that cut by them.

    Returns:
        Spans on the device of `ids_nt`: `start_nk` is the first trainable token of a block, `end_nk` 1 + its last one (tokens that
        are masked or of other blocks may lie between), both 0 where the block is absent; `block_nt` int8 (int16 above 127
        blocks). And per completion the text: block -> None if absent, else key -> what that part says, not stripped, or None if
        it says nothing complete; "" -> the block's whole text, cut at exact bytes. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        AlignmentError: the shapes differ, the mask holds anything but 0 and 1, or a trainable id is not in the vocabulary; a
            log-probability that a segmenter cuts by is NaN.
        RecipeError: a segmenter of the layout needs log-probabilities and there are none.

    Example:
        >>> vocabulary = Vocabulary((b"So ", b"<a>", b"4", b"</a", b"><", b"c>", b"0.9", b"</c>"))
        >>> ids = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, -100]])
        >>> layout = Layout({"solution": ["a"], "confidence": ["c"]})
        >>> spans, text = find_blocks(ids, ids >= 0, layout=layout, vocabulary=vocabulary)
        >>> spans.block_nt.tolist(), spans.start_nk.tolist(), spans.end_nk.tolist()
        ([[0, 0, 0, 0, 0, 1, 1, 1, -1]], [[0, 5]], [[5, 8]])
        >>> text[0]
        {'solution': {'a': '4', '': 'So <a>4</a>'}, 'confidence': {'c': '0.9', '': '<c>0.9</c>'}}
    """
    valid_nt = _valid(ids_nt, mask_nt)
    ids = ids_nt.detach().cpu().numpy()
    logp = _logp(layout, logp_nt, valid_nt)
    cutter = _cutter(layout)
    size = max(1, _TOKENS_AT_A_TIME // max(ids.shape[1], 1))
    tables, texts = [], []
    for first in range(0, max(len(ids), 1), size):
        rows = slice(first, first + size)
        chunk_logp = None if logp is None else logp[rows]
        table, text = _segment_rows(ids[rows], valid_nt[rows], chunk_logp, layout, cutter, vocabulary, first)
        tables.append(table)
        texts += text
    *columns, length_nk = (torch.from_numpy(np.concatenate(parts)).to(ids_nt.device) for parts in zip(*tables, strict=True))
    spans = Spans(layout.names, *columns)
    vars(spans)["length_nk"] = length_nk  # fill the cached property, because the value is known already
    return spans, texts


#: A function from the texts of completions, and their samples, to their pieces.
_Cutter = Callable[[Sequence[bytes], Iterable[Sample]], list[Pieces]]


def _cutter(layout: Layout) -> _Cutter:
    """Return a function that cuts completions into the pieces of a layout."""
    if layout.segmenters == ("tags",):
        parser = TagParser(layout)  # the parser knows the order of tags, which claims cannot express, and reads only text
        return lambda texts, _: [parser.parse(text)[0] for text in texts]
    finders = [SEGMENTERS.find(name).function(layout.parts_of(name), layout=layout) for name in layout.segmenters]
    return lambda _, samples: [cut(layout, [find(sample) for find in finders], len(sample.text)) for sample in samples]


def _segment_rows(
    ids_nt: np.ndarray,
    valid_nt: np.ndarray,
    logp_nt: np.ndarray | None,
    layout: Layout,
    cutter: _Cutter,
    vocabulary: Vocabulary,
    first: int,
) -> tuple[tuple[np.ndarray, ...], list[BlockText]]:
    """Segment some completions at once; return the tables of `Spans` (start, end, block, fault, length), and the texts."""
    (n, t), count = valid_nt.shape, len(layout.names)
    row_t, column_t = np.nonzero(valid_nt)
    id_t = ids_nt[valid_nt]
    logp_t = np.empty(0) if logp_nt is None else logp_nt[valid_nt]
    data, end_t = _join(vocabulary, id_t, row_t + first)
    # The tokens and bytes of completion i lie between the edges i and i + 1.
    token_edge = np.concatenate(([0], np.cumsum(valid_nt.sum(axis=1))))
    byte_edge = np.concatenate(([0], end_t))[token_edge]
    edges = list(zip(pairwise(token_edge.tolist()), pairwise(byte_edge.tolist()), strict=True))
    chunks = [data[start:stop] for _, (start, stop) in edges]
    samples = (
        Sample(text, id_t[low:high], end_t[low:high] - start, column_t[low:high], logp_t[low:high], vocabulary)
        for text, ((low, high), (start, _)) in zip(chunks, edges, strict=True)
    )
    pieces = cutter(chunks, samples)

    row = np.repeat(np.arange(n), [len(cut_up.starts) for cut_up in pieces])
    block = np.array([k for cut_up in pieces for k in cut_up.blocks], dtype=np.int64)
    byte = np.array([byte for cut_up in pieces for byte in cut_up.starts], dtype=np.int64) + byte_edge[row]
    # The first token of each piece; a boundary inside token j starts its piece at j + 1.
    begin = np.searchsorted(end_t, byte, side="right")
    begin += np.concatenate(([0], end_t))[begin] != byte
    begin = np.minimum(begin, token_edge[row + 1])
    begin[np.flatnonzero(np.diff(row, prepend=-1))] = token_edge[:-1]  # also takes tokens without bytes
    tokens, size = np.diff(begin, append=len(end_t)), np.diff(byte, append=byte_edge[-1])
    block_nt = np.full((n, t), -1, dtype=np.int8 if count <= 127 else np.int16)
    block_nt[valid_nt] = np.repeat(block, tokens)
    length_nk = np.bincount(row * count + block, weights=tokens, minlength=n * count).astype(np.int64).reshape(n, count)
    used = np.flatnonzero(tokens)
    cells = row[used], block[used]  # not start_nk[at] = ...: a block may come twice, and numpy may keep either value
    start_nk, end_nk = np.full((n, count), t, dtype=np.int64), np.zeros((n, count), dtype=np.int64)
    np.minimum.at(start_nk, cells, column_t[begin[used]])
    np.maximum.at(end_nk, cells, column_t[begin[used] + tokens[used] - 1] + 1)
    fault_n = np.array([cut_up.fault for cut_up in pieces], dtype=np.int64)
    fault_n[row[(size > 0) & (length_nk[row, block] == 0)]] |= int(Fault.STRADDLED)
    fault_n[np.diff(token_edge) == 0] = int(Fault.EMPTY)
    texts = [_text(*each, layout.keys) for each in zip(chunks, pieces, (length_nk > 0).tolist(), strict=True)]
    return (np.where(length_nk > 0, start_nk, 0), end_nk, block_nt, fault_n, length_nk), texts


def _join(vocabulary: Vocabulary, ids: np.ndarray, completion: np.ndarray) -> tuple[bytes, np.ndarray]:
    try:
        return vocabulary.join(ids)
    except AlignmentError as error:
        bad_index = np.flatnonzero((ids < 0) | (ids >= len(vocabulary)))
        raise AlignmentError(f"Completion {completion[bad_index[0]]}: {error}") from None


def _logp(layout: Layout, logp_nt: Tensor | None, valid_nt: np.ndarray) -> np.ndarray | None:
    """Return the log-probabilities, if a segmenter of the layout reads them."""
    segmenter = next((name for name in layout.segmenters if SEGMENTERS.find(name).reads_logp), None)
    if segmenter is None:
        return None
    if logp_nt is None:
        raise RecipeError(f"The segmenter '{segmenter}' cuts by log-probabilities (logp_nt), which are not there.")
    _check_shape(logp_nt, valid_nt.shape, "logp_nt")
    logp = logp_nt.detach().float().cpu().numpy()
    for n, t in np.argwhere(np.isnan(logp) & valid_nt)[:1].tolist():
        raise AlignmentError(
            f"The log-probability of completion {n} is nan at trainable token {t}, and the segmenter '{segmenter}' cuts by it; "
            f"give that of every sampled token."
        )
    return logp


def _valid(ids_nt: Tensor, mask_nt: Tensor) -> Bool[np.ndarray, "n t"]:
    _check_shape(mask_nt, tuple(ids_nt.shape), "mask_nt")
    if mask_nt.is_floating_point() or mask_nt.is_complex():
        raise AlignmentError(
            f"mask_nt is {mask_nt.dtype}: a mask says yes or no. Pass a bool tensor or integers 0 and 1; if these are "
            f"advantages, the arguments are swapped."
        )
    mask = mask_nt.detach().cpu().numpy()
    for n, t in np.argwhere((mask != 0) & (mask != 1))[:1].tolist():
        raise AlignmentError(f"mask_nt holds {mask[n, t]} at completion {n}, token {t}; only 0 and 1 are allowed.")
    return mask.astype(np.bool_)


def _check_shape(values_nt: Tensor, shape: tuple[int, ...], name: str) -> None:
    if tuple(values_nt.shape) != shape:
        raise AlignmentError(f"{name} has shape {tuple(values_nt.shape)} and ids_nt {shape}; give one value per token.")


def _text(data: bytes, cut: Pieces, present: Sequence[bool], keys: Mapping[str, Sequence[str]]) -> BlockText:
    """Return the text of a completion, block by block."""
    pieces: dict[int, list[bytes]] = {}
    for k, start, stop in zip(cut.blocks, cut.starts, (*cut.starts[1:], len(data)), strict=True):
        pieces.setdefault(k, []).append(data[start:stop])
    text: dict[str, dict[str, str | None] | None] = dict.fromkeys(keys)
    for k, (name, block_keys) in enumerate(keys.items()):
        if present[k]:
            text[name] = inside = dict[str, str | None]()
            for key in block_keys:
                inner = cut.contents.get((k, key))
                stretch = data[inner[0] : inner[1]] if isinstance(inner, tuple) else inner
                inside[key] = None if stretch is None else stretch.decode("utf-8", "replace")
            inside[""] = b"".join(pieces[k]).decode("utf-8", "replace")
    # Every block is one piece, in the order of the layout.
    if len(pieces) == len(cut.blocks) and sorted(pieces) == [*cut.blocks]:
        return text
    return PiecewiseText(text, data.decode("utf-8", "replace"))


class _Mark(NamedTuple):
    """One tag in the text: its name, whether it closes, and its bytes [start, end)."""

    tag: str
    closes: bool
    start: int
    end: int


def _opened(text: str) -> list[str]:
    """Return the tags that a text opens, without special tokens that look like tags."""
    return [tag for tag in _TAG.findall(text) if tag not in _SPECIAL]


@register("tags", kind="segmenter", says=_opened, asks=lambda mark: [f"<{mark}>"], opens=lambda mark: (f"<{mark}>",))
def tags(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find blocks by tags: `answer` is `<answer>...</answer>`.

    Each part takes, in order, the first opening at or after the match before; a tag that is not found is skipped. A block starts
    at its first matched tag; text before all tags belongs to the first block, as does everything if no tag matches.
    """
    for part in parts:
        if not part.mark or any(character in part.mark for character in "<>/ \t\n"):
            raise LayoutError(
                f"Tag '{part.mark}' of block '{layout.names[part.block]}' must be a bare name, without brackets or spaces."
            )
    return TagParser(layout, parts).find


class TagParser:
    """Reads the completions of one layout by their tags."""

    def __init__(self, layout: Layout, parts: Sequence[Part] | None = None) -> None:
        self._parts = list(layout.parts if parts is None else parts)
        tags = [part.mark for part in self._parts]
        self._key_of = {(part.block, part.mark): part.key for part in self._parts}
        self._before = [_Mark(layout.prefilled, False, 0, 0)] if layout.prefilled in tags else []
        names = b"|".join(re.escape(tag.encode()) for tag in dict.fromkeys(tags))
        self._pattern = re.compile(b"(</?(?:" + names + b")>)" if tags else rb"((?!))")
        self._known = lru_cache(4096)(self._work_out)

    def find(self, sample: Sample) -> Found:
        """Return the tags of a completion as claims, each up to the next, for layouts that use other segmenters too."""
        pieces, starts = self.parse(sample.text)
        places = zip(self._parts, starts, strict=True)
        opened = [(part, at, pieces.contents.get((part.block, part.key))) for part, at in places if at is not None]
        return Found([Claim(part, at, None, inner) for part, at, inner in opened], pieces.fault)

    def parse(self, text: bytes) -> tuple[Pieces, list[int | None]]:
        """Find the blocks of a text, and the place where each part opens (None if its tag is not found)."""
        stretches = self._pattern.split(text)  # alternately the text between tags and a tag
        edges, tags = [0, *accumulate(map(len, stretches))], tuple(stretches[1::2])
        work_out = self._known if len(tags) <= _REPEATED else self._work_out
        pieces, starts = work_out(tags, edges[1] == 0)
        contents = {key: (edges[opened], edges[closed]) for key, (opened, closed) in pieces.contents.items()}
        placed = Pieces(pieces.blocks, tuple([edges[at] for at in pieces.starts]), pieces.fault, contents)
        return placed, [None if at is None else edges[at] for at in starts]

    def _work_out(self, tags: tuple[bytes, ...], at_start: bool) -> tuple[Pieces, list[int | None]]:
        """Work out a sequence of tags by places: 0 is the first byte, tag i lies at [2i + 1, 2i + 2)."""
        marks = [*self._before]
        for i, tag in enumerate(tags):
            closes = tag.startswith(b"</")
            marks.append(_Mark(tag[1 + closes : -1].decode(), closes, 0 if at_start and not i else 2 * i + 1, 2 * i + 2))
        matched: dict[Part, int] = {}  # each part's first opening after the previous match
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
        missing = {part.mark for part in self._parts if part not in matched and not part.index}
        pieces = Pieces(blocks, starts, int(fault | (Fault.MISSING if missing - misplaced else 0)), contents)
        return pieces, [marks[matched[part]].start if part in matched else None for part in self._parts]

    def _judge(
        self, marks: Sequence[_Mark], matched: Collection[int], blocks: Sequence[int], starts: Sequence[int]
    ) -> tuple[int, set[str], dict[tuple[int, str], tuple[int, int]]]:
        """Return the faults of the marks, the tags outside the layout's order, and the last pair of each tag."""
        fault, opened, seen, misplaced = 0, set[str](), set[tuple[int, str]](), set[str]()
        pending: dict[tuple[int, str], int] = {}
        contents: dict[tuple[int, str], tuple[int, int]] = {}
        for index, mark in enumerate(marks):
            # A prefilled tag has no bytes; it lies in the first block, even if the second block also opens at byte 0.
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
