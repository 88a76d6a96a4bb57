"""`find_blocks`: token ids in, the blocks of a layout out, exact to the byte."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from spanwise.errors import AlignmentError, RecipeError
from spanwise.layout import Layout
from spanwise.segment.claims import Chunk, Pieces, Sample, cut
from spanwise.segment.parse import TagParser
from spanwise.segment.registry import SEGMENTERS
from spanwise.segment.vocabulary import Vocabulary
from spanwise.types import BlockText, Fault, PiecewiseText, Spans

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
    `spanwise.segment.parse.TagParser`. A token belongs to the block that holds its first byte. A token that straddles a boundary
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
    count, (n, t) = len(layout.names), ids.shape
    found = _Found(
        start=np.zeros((n, count), dtype=np.int64),
        end=np.zeros((n, count), dtype=np.int64),
        block=np.full((n, t), -1, dtype=np.int8 if count <= 127 else np.int16),
        fault=np.zeros(n, dtype=np.int64),
        length=np.zeros((n, count), dtype=np.int64),
    )
    texts: list[BlockText] = []
    cutter = _cutter(layout)
    rows = max(1, _TOKENS_AT_A_TIME // max(t, 1))
    for first in range(0, n, rows):
        texts += _segment_rows(slice(first, min(first + rows, n)), ids, valid_nt, logp, layout, cutter, vocabulary, found)
    *columns, length_nk = (torch.from_numpy(column).to(ids_nt.device) for column in found)
    spans = Spans(layout.names, *columns)
    vars(spans)["length_nk"] = length_nk  # a cached property, and known here already
    return spans, texts


def _cutter(layout: Layout) -> Callable[[Sample], Pieces]:
    """What cuts a completion into the pieces of a layout."""
    if layout.segmenters == ("tags",):
        parser = TagParser(layout)  # it knows more of its own order than claims can say
        return lambda sample: parser.parse(sample.text)
    finders = [SEGMENTERS.find(name).function(layout.parts_of(name), layout=layout) for name in layout.segmenters]
    return lambda sample: cut(layout, [find(sample) for find in finders], len(sample.text))


class _Found(NamedTuple):
    start: np.ndarray
    end: np.ndarray
    block: np.ndarray
    fault: np.ndarray
    length: np.ndarray


def _segment_rows(
    rows: slice,
    ids: np.ndarray,
    valid_nt: np.ndarray,
    logp: np.ndarray | None,
    layout: Layout,
    cutter: Callable[[Sample], Pieces],
    vocabulary: Vocabulary,
    found: _Found,
) -> list[BlockText]:
    """Segment some completions, with one pass over their tokens and one search for all of their boundaries."""
    valid = valid_nt[rows]
    row_of, column_of = np.nonzero(valid)
    own = ids[rows][valid]
    data, ends = _join(vocabulary, own, row_of + rows.start)
    chunk = Chunk(data, own, ends, column_of, None if logp is None else logp[rows][valid], vocabulary)
    token_edge = np.concatenate(([0], np.cumsum(valid.sum(axis=1))))
    byte_edge = np.concatenate(([0], ends))[token_edge]
    edges = list(zip(pairwise(token_edge.tolist()), pairwise(byte_edge.tolist()), strict=True))
    pieces = [cutter(Sample(chunk, *tokens, *held)) for tokens, held in edges]
    length = _write(found, rows, pieces, valid, column_of, ends, token_edge, byte_edge)
    plan = [(name, [(key, (k, key)) for key in keys]) for k, (name, keys) in enumerate(layout.keys.items())]
    spoken = zip(edges, pieces, (length > 0).tolist(), strict=True)
    return [_text(data[held[0] : held[1]], one, present, plan) for (_, held), one, present in spoken]


def _write(
    found: _Found,
    rows: slice,
    made: list[Pieces],
    valid: np.ndarray,
    column_of: np.ndarray,
    ends: np.ndarray,
    token_edge: np.ndarray,
    byte_edge: np.ndarray,
) -> np.ndarray:
    """Write the pieces of some completions, all at once; how many tokens each of their blocks has.

    The tokens and bytes of completion i lie between the edges i and i + 1.
    """
    n, count = len(made), found.start.shape[1]
    row = np.repeat(np.arange(n), [len(one.starts) for one in made])
    block = np.array([k for one in made for k in one.blocks], dtype=np.int64)
    byte = np.array([byte for one in made for byte in one.starts], dtype=np.int64) + byte_edge[row]
    begin = np.minimum(_first_tokens(byte, ends), token_edge[row + 1])
    first = np.flatnonzero(np.diff(row, prepend=-1))
    begin[first] = token_edge[:-1]  # tokens without bytes before byte 0 among them
    tokens, size = np.diff(begin, append=len(ends)), np.diff(byte, append=byte_edge[-1])
    found.block[rows][valid] = np.repeat(block, tokens)
    length = np.bincount(row * count + block, weights=tokens, minlength=n * count).astype(np.int64).reshape(n, count)
    found.length[rows] = length
    there = np.flatnonzero(tokens)
    at = row[there], block[there]  # a block may come several times, and numpy does not say which assignment is the last
    np.maximum.at(found.end[rows], at, column_of[begin[there] + tokens[there] - 1] + 1)
    start = np.full((n, count), found.block.shape[1], dtype=np.int64)
    np.minimum.at(start, at, column_of[begin[there]])
    found.start[rows] = np.where(length > 0, start, 0)
    fault = np.array([one.fault for one in made], dtype=np.int64)
    fault[row[(size > 0) & (length[row, block] == 0)]] |= int(Fault.STRADDLED)
    found.fault[rows] = np.where(np.diff(token_edge) == 0, int(Fault.EMPTY), fault)
    return length


def _join(vocabulary: Vocabulary, ids: np.ndarray, completion: np.ndarray) -> tuple[bytes, np.ndarray]:
    try:
        return vocabulary.join(ids)
    except AlignmentError as error:
        wrong = np.flatnonzero((ids < 0) | (ids >= len(vocabulary)))
        raise AlignmentError(f"Completion {completion[wrong[0]]}: {error}") from None


def _logp(layout: Layout, logp_nt: Tensor | None, valid_nt: np.ndarray) -> np.ndarray | None:
    """The log-probabilities, where a segmenter of the layout asks for them."""
    asking = next((name for name in layout.segmenters if SEGMENTERS.find(name).reads_logp), None)
    if asking is None:
        return None
    if logp_nt is None:
        raise RecipeError(f"The segmenter '{asking}' cuts by log-probabilities (logp_nt), which are not there.")
    if logp_nt.shape != valid_nt.shape:
        raise AlignmentError(
            f"logp_nt has shape {tuple(logp_nt.shape)} and ids_nt {valid_nt.shape}; give one value per token."
        )
    logp = logp_nt.detach().float().cpu().numpy()
    unknown = np.argwhere(np.isnan(logp) & valid_nt)
    if unknown.size:
        n, t = unknown[0].tolist()
        raise AlignmentError(
            f"The log-probability of completion {n} is nan at trainable token {t}, and the segmenter '{asking}' cuts by it; give "
            f"that of every sampled token."
        )
    return logp


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


def _text(
    data: bytes, one: Pieces, present: list[bool], plan: list[tuple[str, list[tuple[str, tuple[int, str]]]]]
) -> BlockText:
    """What a completion says, block by block; `plan`: of each block its name, and its keys as they are and in `contents`."""
    source = data.decode() if data.isascii() else data  # each byte a character: cutting needs no decoding
    pieces: list[list[str | bytes]] = [[] for _ in plan]
    for k, start, stop in zip(one.blocks, one.starts, (*one.starts[1:], len(data)), strict=True):
        pieces[k].append(source[start:stop])
    text: dict[str, dict[str, str | None] | None] = {}
    for k, (name, keys) in enumerate(plan):
        text[name] = None
        if present[k]:
            contents: dict[str, str | None] = {}
            for key, place in keys:
                at = one.contents.get(place)
                contents[key] = None if at is None else _spelled(at if isinstance(at, bytes) else source[at[0] : at[1]])
            whole = pieces[k]
            contents[""] = _spelled(whole[0] if len(whole) == 1 else source[:0].join(whole))  # pyright: ignore[reportArgumentType]
            text[name] = contents
    in_order = all(before < after for before, after in pairwise(one.blocks))
    return text if in_order else PiecewiseText(text, data.decode(errors="replace"))


def _spelled(held: str | bytes) -> str:
    return held if isinstance(held, str) else held.decode("utf-8", "replace")
