"""`segment`: token ids in, the blocks their tags make out, exact to the byte."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from spanwise.errors import AlignmentError
from spanwise.layout import Layout
from spanwise.registry import register
from spanwise.segment.parse import Parsed, TagParser
from spanwise.segment.vocabulary import Vocabulary
from spanwise.types import BlockText, Fault, Spans


@register("tags", kind="segmenter")
def segment(
    ids_nt: Int[Tensor, "n t"], mask_nt: Shaped[Tensor, ...], *, layout: Layout, vocabulary: Vocabulary
) -> tuple[Spans, list[BlockText]]:
    """Find the blocks of every completion, in tokens and as text.

    Block k is the trainable tokens whose first byte lies in [start of its first matched tag, start of the next block); see
    `spanwise.segment.parse.parse` for which tag matches. A token that straddles a boundary thus belongs to the block before
    it, and so does a token without bytes at a boundary (an unused id). A block that is left without tokens is absent.
    Masked tokens count as deleted: their ids are never read, a tag may span them, and spans keep the original coordinates.

    Args:
        ids_nt: (N, T) sampled token ids; any value where the mask is 0.
        mask_nt: (N, T) bool or 0/1 integers: the trainable tokens (no prompt, padding or tool output).
        layout: the blocks and their tags.
        vocabulary: the bytes of every token id.

    Returns:
        Spans on the device of `ids_nt`: `start_nk` is the first trainable token of a block, `end_nk` 1 + its last one (masked
        tokens may lie between), both 0 where the block is absent; `block_nt` int8 (int16 above 127 blocks). And per
        completion the text: block -> None if absent, else tag -> what its last complete pair in the block holds, not
        stripped, or None; "" -> the block's whole text, cut at exact bytes. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        AlignmentError: the shapes differ, the mask holds anything but 0 and 1, or a trainable id is not in the vocabulary.

    Example:
        >>> vocabulary = Vocabulary((b"So ", b"<a>", b"4", b"</a", b"><", b"c>", b"0.9", b"</c>"))
        >>> ids = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, -100]])
        >>> layout = Layout({"solution": ["a"], "confidence": ["c"]})
        >>> spans, text = segment(ids, ids >= 0, layout=layout, vocabulary=vocabulary)
        >>> spans.block_nt.tolist(), spans.start_nk.tolist(), spans.end_nk.tolist()
        ([[0, 0, 0, 0, 0, 1, 1, 1, -1]], [[0, 5]], [[5, 8]])
        >>> text[0]
        {'solution': {'a': '4', '': 'So <a>4</a>'}, 'confidence': {'c': '0.9', '': '<c>0.9</c>'}}
    """
    valid_nt = _valid(ids_nt, mask_nt)
    ids = ids_nt.detach().cpu().numpy()
    count, (n, t) = len(layout.blocks), ids.shape
    found = _Found(
        start=np.zeros((n, count), dtype=np.int64),
        end=np.zeros((n, count), dtype=np.int64),
        block=np.full((n, t), -1, dtype=np.int8 if count <= 127 else np.int16),
        fault=np.zeros(n, dtype=np.int64),
        length=np.zeros((n, count), dtype=np.int64),
    )
    texts: list[BlockText] = []
    parser = TagParser(layout)
    rows = max(1, _TOKENS_AT_A_TIME // max(t, 1))
    for first in range(0, n, rows):
        texts += _segment_rows(slice(first, min(first + rows, n)), ids, valid_nt, parser, vocabulary, found)
    found.block[~valid_nt] = -1
    *columns, length_nk = (torch.from_numpy(column).to(ids_nt.device) for column in found)
    spans = Spans(layout.names, *columns)
    vars(spans)["length_nk"] = length_nk  # a cached property, and known here already
    return spans, texts


_TOKENS_AT_A_TIME = 1_000_000


class _Found(NamedTuple):
    start: np.ndarray
    end: np.ndarray
    block: np.ndarray
    fault: np.ndarray
    length: np.ndarray


def _segment_rows(
    rows: slice, ids: np.ndarray, valid_nt: np.ndarray, parser: TagParser, vocabulary: Vocabulary, found: _Found
) -> list[BlockText]:
    """Segment some completions, with one pass over their tokens and one search for all of their block boundaries."""
    valid = valid_nt[rows]
    row_of, column_of = np.nonzero(valid)
    data, ends = _join(vocabulary, ids[rows][valid], row_of + rows.start)
    token_edge = np.concatenate(([0], np.cumsum(valid.sum(axis=1))))
    byte_edge = np.concatenate(([0], ends))[token_edge].tolist()
    parsed = [parser.parse(data, *edges) for edges in pairwise(byte_edge)]
    inner = np.array([byte for one in parsed for byte in one.starts[1:]], dtype=np.int64)
    boundary = iter(_first_tokens(inner, ends).tolist())
    texts: list[BlockText] = []
    for offset, (one, (first, last)) in enumerate(zip(parsed, pairwise(token_edge.tolist()), strict=True)):
        i = rows.start + offset
        found.fault[i] = one.fault if first < last else Fault.EMPTY
        edges = [first, *(next(boundary) for _ in one.starts[1:]), last]
        present = set()
        for k, (begin, stop) in zip(one.blocks, pairwise(edges), strict=True):
            if begin < stop:
                present.add(k)
                start, end = int(column_of[begin]), int(column_of[stop - 1]) + 1
                found.start[i, k], found.end[i, k], found.length[i, k] = start, end, stop - begin
                found.block[i, start:end] = k
        texts.append(_text(data, one, present, byte_edge[offset + 1], parser.layout))
    return texts


def _join(vocabulary: Vocabulary, ids: np.ndarray, completion: np.ndarray) -> tuple[bytes, np.ndarray]:
    try:
        return vocabulary.join(ids)
    except AlignmentError as error:
        wrong = np.flatnonzero((ids < 0) | (ids >= len(vocabulary)))
        raise AlignmentError(f"Completion {completion[wrong[0]]}: {error}") from None


def _valid(ids_nt: Tensor, mask_nt: Tensor) -> Bool[np.ndarray, "n t"]:
    if ids_nt.shape != mask_nt.shape:
        raise AlignmentError(
            f"ids_nt has shape {tuple(ids_nt.shape)} and mask_nt {tuple(mask_nt.shape)}; give one mask value per token."
        )
    if mask_nt.is_floating_point() or mask_nt.is_complex():
        raise AlignmentError(
            f"mask_nt is {mask_nt.dtype}: a mask says yes or no. Pass a bool tensor or integers 0 and 1; if these are "
            f"advantages, the arguments are swapped."
        )
    mask = mask_nt.detach().cpu().numpy()
    if mask.dtype != np.bool_:
        wrong = np.argwhere((mask != 0) & (mask != 1))
        if wrong.size:
            n, t = wrong[0].tolist()
            raise AlignmentError(f"mask_nt holds {mask[n, t]} at completion {n}, token {t}; only 0 and 1 are allowed.")
    return mask.astype(np.bool_)


def _first_tokens(inner: Int[np.ndarray, " b"], ends: Int[np.ndarray, " t"]) -> Int[np.ndarray, " b"]:
    """The first token of the blocks that start at the bytes `inner`; a boundary inside token j starts its block at j + 1."""
    holder = np.searchsorted(ends, inner, side="right")
    starts_here = np.where(holder == 0, 0, ends[holder - 1]) == inner if len(ends) else inner == 0
    return holder + ~starts_here


def _text(data: bytes, parsed: Parsed, present: set[int], end: int, layout: Layout) -> BlockText:
    limits = dict(zip(parsed.blocks, pairwise((*parsed.starts, end)), strict=True))

    text: dict[str, dict[str, str | None] | None] = {}
    for k, (name, tags) in enumerate(layout.blocks):
        text[name] = None
        if k in present:
            cuts = {tag: parsed.contents.get((k, tag)) for tag in tags} | {"": limits[k]}
            text[name] = {
                tag: None if cut is None else data[cut[0] : cut[1]].decode(errors="replace") for tag, cut in cuts.items()
            }
    return text
