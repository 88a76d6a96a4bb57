"""Find the blocks of a layout in token ids, exact to the byte."""

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
from spanwise.segment.claims import SEGMENTERS, Claim, Finder, Found, Pieces, Sample, Segmenter, cut, text_end
from spanwise.segment.vocabulary import Vocabulary
from spanwise.types import BlockText, Fault, PiecewiseText, Spans

_OPENING_TAG = re.compile(r"<([^\W\d][\w.-]* ?)>")
#: Blocks are cached for texts with up to this many tags, because longer sequences of tags rarely repeat.
_LONGEST_CACHED = 64
#: Names of special tokens that look like tags, such as `<pad>`.
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
    """Find the blocks of every completion, as tokens and as text.

    A token belongs to the block that holds its first byte; one without bytes at a boundary (an unused id) to the block before. For
    masked tokens, faults and all other rules see docs/segmenters.md.

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
    is_valid_nt = _check_mask(ids_nt, mask_nt)
    ids_array = ids_nt.detach().cpu().numpy()
    logp_array = _check_logp(layout, logp_nt, is_valid_nt)
    cutter = _build_cutter(layout, tuple(SEGMENTERS.find(name) for name in layout.segmenters))
    rows_per_chunk = max(1, _TOKENS_AT_A_TIME // max(ids_array.shape[1], 1))
    column_chunks = []
    block_texts = []
    for first_row in range(0, max(len(ids_array), 1), rows_per_chunk):
        row_slice = slice(first_row, first_row + rows_per_chunk)
        chunk_logp = None if logp_array is None else logp_array[row_slice]
        chunk_columns, chunk_texts = _segment_rows(
            ids_array[row_slice], is_valid_nt[row_slice], chunk_logp, layout, cutter, vocabulary, first_row
        )
        column_chunks.append(chunk_columns)
        block_texts += chunk_texts
    column_arrays = map(np.concatenate, zip(*column_chunks, strict=True))
    *span_columns, length_nk = [torch.from_numpy(array).to(ids_nt.device) for array in column_arrays]
    block_spans = Spans(layout.names, *span_columns)
    vars(block_spans)["length_nk"] = length_nk  # fills the cached property `Spans.length_nk`
    return block_spans, block_texts


#: A function that cuts completions into pieces. All bytes of a piece belong to one block.
_Cutter = Callable[[Sequence[bytes], Iterable[Sample]], list[Pieces]]


@lru_cache(maxsize=64)
def _build_cutter(layout: Layout, segmenters: tuple[Segmenter, ...]) -> _Cutter:
    """Return a function that cuts completions into pieces, each of which belongs to one block."""
    if layout.segmenters == ("tags",):
        # `TagParser` cuts the text itself, because the blocks depend on the order of the tags.
        tag_parser = TagParser(layout)
        return lambda texts, _: [tag_parser.parse(text)[0] for text in texts]
    finders = [segmenter.function(layout.parts_of(segmenter.name), layout=layout) for segmenter in segmenters]
    return lambda _, samples: [cut(layout, [find(sample) for find in finders], len(sample.text)) for sample in samples]


def _segment_rows(
    ids_nt: np.ndarray,
    valid_nt: np.ndarray,
    logp_nt: np.ndarray | None,
    layout: Layout,
    cutter: _Cutter,
    vocabulary: Vocabulary,
    first_row: int,
) -> tuple[tuple[np.ndarray, ...], list[BlockText]]:
    """Find the blocks of some completions. Return the columns of `Spans`, and the blocks' texts."""
    completion_count, token_width = valid_nt.shape
    block_count = len(layout.names)
    row_t, column_t = np.nonzero(valid_nt)
    token_id_t = ids_nt[valid_nt]
    logp_t = np.empty(0) if logp_nt is None else logp_nt[valid_nt]
    try:
        all_bytes, end_t = vocabulary.join(token_id_t)
    except AlignmentError as error:
        bad_token_positions = np.flatnonzero((token_id_t < 0) | (token_id_t >= len(vocabulary)))
        raise AlignmentError(f"Completion {row_t[bad_token_positions[0]] + first_row}: {error}") from None
    # Completion i has the tokens [token_offsets[i], token_offsets[i + 1]). Bytes work the same way.
    token_offsets = np.concatenate(([0], np.cumsum(valid_nt.sum(axis=1))))
    first_byte_t = np.concatenate(([0], end_t))
    byte_offsets = first_byte_t[token_offsets]
    token_spans = pairwise(token_offsets.tolist())
    byte_spans = list(pairwise(byte_offsets.tolist()))
    completion_bytes = [all_bytes[start:stop] for start, stop in byte_spans]
    samples = (
        Sample(text, token_id_t[first:stop], end_t[first:stop] - start, column_t[first:stop], logp_t[first:stop], vocabulary)
        for text, (first, stop), (start, _) in zip(completion_bytes, token_spans, byte_spans, strict=True)
    )
    pieces_n = cutter(completion_bytes, samples)
    # An array with the suffix `_p` has one entry per piece (run of bytes of one block), over all completions.
    row_of_piece_p = np.repeat(np.arange(completion_count), [len(pieces.starts) for pieces in pieces_n])
    block_of_piece_p = np.array([k for pieces in pieces_n for k in pieces.blocks], dtype=np.int64)
    start_in_text_p = np.array([start for pieces in pieces_n for start in pieces.starts], dtype=np.int64)
    first_byte_p = start_in_text_p + byte_offsets[row_of_piece_p]
    # A token belongs to the block of its first byte, so a block that starts inside a token gets only the tokens after it.
    first_token_p = np.searchsorted(end_t, first_byte_p, side="right")
    first_token_p += first_byte_t[first_token_p] != first_byte_p
    first_token_p = np.minimum(first_token_p, token_offsets[row_of_piece_p + 1])
    # A completion's first block starts at the first token, even if that token has no bytes.
    first_token_p[np.flatnonzero(np.diff(row_of_piece_p, prepend=-1))] = token_offsets[:-1]
    token_count_p = np.diff(first_token_p, append=len(end_t))
    byte_count_p = np.diff(first_byte_p, append=byte_offsets[-1])
    block_nt = np.full((completion_count, token_width), -1, dtype=np.int8 if block_count <= 127 else np.int16)
    block_nt[valid_nt] = np.repeat(block_of_piece_p, token_count_p)
    length_nk = np.zeros((completion_count, block_count), dtype=np.int64)
    np.add.at(length_nk, (row_of_piece_p, block_of_piece_p), token_count_p)
    nonempty_indices = np.flatnonzero(token_count_p)
    row_and_block = row_of_piece_p[nonempty_indices], block_of_piece_p[nonempty_indices]
    start_nk = np.full((completion_count, block_count), token_width, dtype=np.int64)
    end_nk = np.zeros((completion_count, block_count), dtype=np.int64)
    np.minimum.at(start_nk, row_and_block, column_t[first_token_p[nonempty_indices]])
    np.maximum.at(end_nk, row_and_block, column_t[(first_token_p + token_count_p)[nonempty_indices] - 1] + 1)
    fault_n = np.array([pieces.fault for pieces in pieces_n], dtype=np.int64)
    fault_n[row_of_piece_p[(byte_count_p > 0) & (length_nk[row_of_piece_p, block_of_piece_p] == 0)]] |= int(Fault.STRADDLED)
    fault_n[np.diff(token_offsets) == 0] = int(Fault.EMPTY)
    has_tokens_nk = length_nk > 0
    completion_rows = zip(completion_bytes, pieces_n, has_tokens_nk.tolist(), strict=True)
    block_texts = [_text(*row, layout.keys) for row in completion_rows]
    return (np.where(has_tokens_nk, start_nk, 0), end_nk, block_nt, fault_n, length_nk), block_texts


def _check_logp(layout: Layout, logp_nt: Tensor | None, valid_nt: np.ndarray) -> np.ndarray | None:
    """Return the log-probabilities as an array, or None if no segmenter reads them. Refuse missing or invalid ones."""
    segmenter = next((name for name in layout.segmenters if SEGMENTERS.find(name).reads_logp), None)
    if segmenter is None:
        return None
    if logp_nt is None:
        raise RecipeError(f"The segmenter '{segmenter}' reads log-probabilities, but you passed none; pass logp_nt.")
    _check_shape(logp_nt, valid_nt.shape, "logp_nt")
    logp_array = logp_nt.detach().float().cpu().numpy()
    for n, t in np.argwhere(np.isnan(logp_array) & valid_nt)[:1].tolist():
        raise AlignmentError(
            f"The log-probability of completion {n} is nan at trainable token {t}, where the segmenter '{segmenter}' needs it. "
            f"Pass the log-probability of every sampled token."
        )
    return logp_array


def _check_mask(ids_nt: Tensor, mask_nt: Tensor) -> Bool[np.ndarray, "n t"]:
    _check_shape(mask_nt, tuple(ids_nt.shape), "mask_nt")
    if mask_nt.is_floating_point() or mask_nt.is_complex():
        raise AlignmentError(
            f"mask_nt has dtype {mask_nt.dtype}, but a mask holds yes or no. Pass a bool tensor or the integers 0 and 1; if you "
            f"passed advantages here, swap the arguments."
        )
    mask_array = mask_nt.detach().cpu().numpy()
    for n, t in np.argwhere((mask_array != 0) & (mask_array != 1))[:1].tolist():
        raise AlignmentError(f"mask_nt holds {mask_array[n, t]} at completion {n}, token {t}; only 0 and 1 are allowed.")
    return mask_array.astype(np.bool_)


def _check_shape(values_nt: Tensor, shape: tuple[int, ...], name: str) -> None:
    if tuple(values_nt.shape) != shape:
        raise AlignmentError(f"{name} has shape {tuple(values_nt.shape)}, but ids_nt has {shape}; give one value per token.")


def _text(completion: bytes, pieces: Pieces, present_k: Sequence[bool], keys: Mapping[str, Sequence[str]]) -> BlockText:
    """Return the text of each block of a completion, and the content of each tag or field in the block."""
    end_byte = text_end(completion)  # contents end before end-of-sequence tokens
    pieces_of_block: dict[int, list[bytes]] = {}
    for block_index, start, stop in zip(pieces.blocks, pieces.starts, (*pieces.starts[1:], len(completion)), strict=True):
        pieces_of_block.setdefault(block_index, []).append(completion[start:stop])
    text_of_block: dict[str, dict[str, str | None] | None] = dict.fromkeys(keys)
    for block_index, (name, block_keys) in enumerate(keys.items()):
        if present_k[block_index]:
            text_of_key = dict[str, str | None]()
            text_of_block[name] = text_of_key
            for key in block_keys:
                content = pieces.contents.get((block_index, key))
                content_bytes = completion[content[0] : min(content[1], end_byte)] if isinstance(content, tuple) else content
                text_of_key[key] = None if content_bytes is None else content_bytes.decode("utf-8", "replace")
            text_of_key[""] = b"".join(pieces_of_block[block_index]).decode("utf-8", "replace")
    # Joined blocks give the whole text only if each block is one piece, in the layout's order.
    if len(pieces_of_block) == len(pieces.blocks) and sorted(pieces_of_block) == [*pieces.blocks]:
        return text_of_block
    return PiecewiseText(text_of_block, completion.decode("utf-8", "replace"))


class _Tag(NamedTuple):
    """One tag in a text, such as `</answer>`: its name, whether it closes, and its bytes [start, end)."""

    name: str
    closes: bool
    start: int
    end: int


def _opening_tags(text: str) -> list[str]:
    """Return the tags that a text opens, without special tokens such as `<pad>`."""
    return [tag for tag in _OPENING_TAG.findall(text) if tag not in _SPECIAL]


@register("tags", kind="segmenter", says=_opening_tags, asks=lambda mark: [f"<{mark}>"], opens=lambda mark: (f"<{mark}>",))
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
    """Finds the tags of one layout in completions."""

    def __init__(self, layout: Layout, parts: Sequence[Part] | None = None) -> None:
        self._parts = list(layout.parts if parts is None else parts)
        tag_names = [part.mark for part in self._parts]
        self._key_of = {(part.block, part.mark): part.key for part in self._parts}
        self._prefilled = [_Tag(layout.prefilled, False, 0, 0)] if layout.prefilled in tag_names else []
        name_pattern = b"|".join(re.escape(name.encode()) for name in dict.fromkeys(tag_names))
        self._pattern = re.compile(b"(</?(?:" + name_pattern + b")>)" if tag_names else rb"((?!))")
        self._parse_tags_cached = lru_cache(4096)(self._parse_tags)

    def find(self, sample: Sample) -> Found:
        """Find the text from each tag to the next."""
        pieces, part_starts = self.parse(sample.text)
        part_claims = [
            Claim(part, start, None, pieces.contents.get((part.block, part.key)))
            for part, start in zip(self._parts, part_starts, strict=True)
            if start is not None
        ]
        return Found(part_claims, pieces.fault)

    def parse(self, text: bytes) -> tuple[Pieces, list[int | None]]:
        """Find the blocks of a text. Also return the byte at which each tag opens, None without the tag."""
        texts_and_tags = self._pattern.split(text)  # tags are at the odd indices
        offsets = [0, *accumulate(map(len, texts_and_tags))]
        tag_texts = tuple(texts_and_tags[1::2])
        parse_tags = self._parse_tags_cached if len(tag_texts) <= _LONGEST_CACHED else self._parse_tags
        starts_with_tag = offsets[1] == 0
        pieces, part_starts = parse_tags(tag_texts, starts_with_tag)
        content_spans = {key: (offsets[start], offsets[stop]) for key, (start, stop) in pieces.contents.items()}
        piece_starts = tuple([offsets[start] for start in pieces.starts])
        byte_pieces = Pieces(pieces.blocks, piece_starts, pieces.fault, content_spans)
        return byte_pieces, [None if start is None else offsets[start] for start in part_starts]

    def _parse_tags(self, tags: tuple[bytes, ...], at_start: bool) -> tuple[Pieces, list[int | None]]:
        """Find blocks from the sequence of tags alone. Positions are indices of `offsets` in `parse`."""
        seen_tags = [*self._prefilled]
        for i, tag in enumerate(tags):
            closes = tag.startswith(b"</")
            seen_tags.append(_Tag(tag[1 + closes : -1].decode(), closes, 0 if at_start and not i else 2 * i + 1, 2 * i + 2))
        opening_names = [None if tag.closes else tag.name for tag in seen_tags]
        index_of_part: dict[Part, int] = {}  # maps each part to the index of its opening tag in `seen_tags`
        next_tag_index = 0
        for part in self._parts:
            if part.mark in opening_names[next_tag_index:]:
                index_of_part[part] = opening_names.index(part.mark, next_tag_index)
                next_tag_index = index_of_part[part] + 1
        start_of_block: dict[int, int] = {}
        for part, index in index_of_part.items():
            start_of_block.setdefault(part.block, seen_tags[index].start)
        if 0 in start_of_block or 0 not in start_of_block.values():
            start_of_block[0] = 0
        blocks, block_starts = zip(*sorted(start_of_block.items()), strict=True)
        matched_tag_indices = set(index_of_part.values())
        tag_fault, misplaced_names, contents = self._check_tags(seen_tags, matched_tag_indices, blocks, block_starts)
        missing_names = {part.mark for part in self._parts if part not in index_of_part and not part.index}
        tag_fault |= Fault.MISSING if missing_names - misplaced_names else 0
        tag_pieces = Pieces(blocks, block_starts, int(tag_fault), contents)
        return tag_pieces, [seen_tags[index_of_part[part]].start if part in index_of_part else None for part in self._parts]

    def _check_tags(
        self, tags: Sequence[_Tag], matched_indices: Collection[int], blocks: Sequence[int], starts: Sequence[int]
    ) -> tuple[int, set[str], dict[tuple[int, str], tuple[int, int]]]:
        """Check the order and nesting of tags. Return faults, names of misplaced tags, and where each part's content is."""
        fault_flags = 0
        open_names = set[str]()
        misplaced_names = set[str]()
        seen_tag_names: set[tuple[int, str]] = set()
        content_start_by_tag: dict[tuple[int, str], int] = {}
        content_spans: dict[tuple[int, str], tuple[int, int]] = {}
        for index, tag in enumerate(tags):
            # A tag at the end of the prompt belongs to the first block.
            block_index = 0 if tag.end == 0 else bisect_right(starts, tag.start) - 1
            block = blocks[block_index]
            block_and_name = block, tag.name
            part_key = self._key_of.get(block_and_name)
            if tag.closes:
                fault_flags |= 0 if tag.name in open_names else Fault.ORDER
                open_names.discard(tag.name)
                if block_and_name in content_start_by_tag and part_key is not None:
                    content_spans[block, part_key] = (content_start_by_tag.pop(block_and_name), tag.start)
                continue
            if block_and_name in seen_tag_names and part_key is not None:
                fault_flags |= Fault.DUPLICATE
            elif index not in matched_indices:
                fault_flags |= Fault.ORDER
                misplaced_names.add(tag.name)
            fault_flags |= Fault.NESTED if open_names - {tag.name} else 0
            seen_tag_names.add(block_and_name)
            open_names.add(tag.name)
            content_start_by_tag[block_and_name] = tag.end
        return fault_flags | (Fault.TRUNCATED if open_names else 0), misplaced_names, content_spans
