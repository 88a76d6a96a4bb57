"""`check_segmenter`: the properties that every segmenter (a function from token ids to spans) must have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from spanwise.segment.vocabulary import Vocabulary
from spanwise.testing.batches import Draw, DrawnBatch, batches_of, read_inputs
from spanwise.testing.search import ConformanceError, Suite, show
from spanwise.types import Fault, Spans

#: Maps each property of segmenters to its meaning.
SEGMENTER_PROPERTIES: Mapping[str, str] = {
    "partition": "every trainable token is in one block, and no other token is in any block; the interval of a "
    "block, from start_nk to end_nk, runs from its first to its last token",
    "contiguous": "the intervals of two blocks do not overlap",
    "text": "the blocks' texts join to the text of the trainable tokens; blocks that overlap or lie in pieces may change its order",
    "pure": "the inputs stay unchanged, and a second call gives the same spans",
    "permutation": "another order of the completions only reorders the result",
    "split": "a completion gets the same spans alone as in a batch",
    "masking": "masked tokens, wherever they stand, change nothing at other tokens",
    "poison": "the values at masked tokens (an impossible id, NaN, 1e9) are never read",
    "padding": "padding on the left gives the same spans as padding on the right",
    "seen": "if there are several blocks, at least one example has a token in a block other than the first",
}
_NOISE = ("4", " ", "So ", ".", "0.9", "é", "日本", "🙂", "<", ">", "</", "< a>", "\n\n", "<<")


def small_vocabulary(tags: Sequence[str] = ("answer", "confidence"), *, signs: Sequence[str] = ()) -> Vocabulary:
    """Build a test vocabulary. It has all bytes, tags and `signs`, and tokens that cut them or a character.

    >>> b"></" in small_vocabulary().pieces
    True
    """
    tokens = [b"So ", b"></", b"><", b">\n\n<", b"0.9", "日".encode() + b"\xe6"]
    whole_tokens = [text.encode() for text in _tags_and_signs(tags, signs)]
    tokens += whole_tokens
    for token in whole_tokens:
        tokens += [token + b"4", b"." + token[:3], token[-2:] + b"<"]
    return Vocabulary((*(bytes([byte]) for byte in range(256)), *dict.fromkeys(tokens), b""))


def _tags_and_signs(tags: Sequence[str], signs: Sequence[str]) -> list[str]:
    """Return the opening and closing tags, such as `<answer>` and `</answer>`, and then the marks in `signs`."""
    return [f"<{slash}{tag}>" for tag in tags for slash in ("", "/")] + list(signs)


def texts(
    tags: Sequence[str] = ("answer", "confidence"), *, most: int = 8, signs: Sequence[str] = ()
) -> SearchStrategy[str]:
    """Build a hypothesis strategy for a policy's completions. Tags and signs, whole and broken, and noise.

    Example:
        >>> from hypothesis import find
        >>> find(texts(), lambda text: "</answer>" in text)
        '</answer>'
    """
    tag_texts = _tags_and_signs(tags, signs)
    return st.lists(st.sampled_from([*tag_texts, *tag_texts, *_NOISE]), max_size=most).map("".join)


def token_rows(
    vocabulary: Vocabulary, tags: Sequence[str] = ("answer", "confidence"), *, signs: Sequence[str] = ()
) -> SearchStrategy[tuple[int, ...]]:
    """Build a hypothesis strategy for rows of token ids. They spell a text of `texts(tags)` in any tokens that fit.

    Example:
        >>> from hypothesis import given
        >>> @given(token_rows(Vocabulary((b"<answer>", b"</answer>", b"4"))))
        ... def every_id_is_known(ids):
        ...     assert set(ids) <= {0, 1, 2}
    """
    cut_into_tokens = cutter(vocabulary)
    token_choices = st.lists(st.integers(0, 6), min_size=1, max_size=5)
    return st.builds(lambda text, choices: cut_into_tokens(text.encode(), choices), texts(tags, signs=signs), token_choices)


def cutter(vocabulary: Vocabulary) -> Callable[[bytes, Sequence[int]], tuple[int, ...]]:
    """Return a function that cuts bytes into token ids. Its `choices` pick among the tokens that fit (0: the longest)."""
    ids_by_first_byte: dict[int, list[int]] = {}
    for token_id in sorted(range(len(vocabulary)), key=lambda i: -len(vocabulary.pieces[i])):
        if vocabulary.pieces[token_id]:
            ids_by_first_byte.setdefault(vocabulary.pieces[token_id][0], []).append(token_id)

    def cut(data: bytes, choices: Sequence[int]) -> tuple[int, ...]:
        token_ids: list[int] = []
        byte_index = 0
        while byte_index < len(data):
            ids_with_first_byte = ids_by_first_byte.get(data[byte_index], ())
            fitting_ids = [i for i in ids_with_first_byte if data.startswith(vocabulary.pieces[i], byte_index)]
            if not fitting_ids:  # no token of the vocabulary fits at this byte, so the byte is left out
                byte_index += 1
                continue
            token_ids.append(fitting_ids[min(choices[len(token_ids) % len(choices)], len(fitting_ids) - 1)])
            byte_index += len(vocabulary.pieces[token_ids[-1]])
        return tuple(token_ids)

    return cut


def check_segmenter(
    segmenter: Callable[..., Any],
    *,
    vocabulary: Vocabulary | None = None,
    tags: Sequence[str] = ("answer", "confidence"),
    signs: Sequence[str] = (),
    exceptions: Mapping[str, str] | None = None,
    properties: Sequence[str] | None = None,
    inputs: Mapping[str, SearchStrategy[Any]] | None = None,
    examples: int = 60,
) -> None:
    """Check a segmenter against `SEGMENTER_PROPERTIES`. It is `(ids_nt, mask_nt, ...) -> Spans` (and texts).

    Args:
        segmenter: called by name; fix what it needs beside tensors with `functools.partial`. Further tensors without a default
            (`logp_nt`) are made up from their names.
        vocabulary: the bytes of every token id; None: `small_vocabulary(tags, signs=signs)`.
        tags: the tags that completions are made of.
        signs: what else they are made of, for segmenters that look for something else.
        exceptions, properties, inputs, examples: as in `check_estimator`.

    Raises:
        ConformanceError: a property does not hold; with the smallest example found.

    Example:
        >>> from functools import partial
        >>> from spanwise.layout import Layout
        >>> from spanwise.segment import find_blocks
        >>> layout = Layout({"solution": ["answer"], "confidence": ["confidence"]})
        >>> check_segmenter(partial(find_blocks, layout=layout, vocabulary=small_vocabulary()), examples=5)
    """
    vocabulary = vocabulary or small_vocabulary(tags, signs=signs)
    strategy = batches_of(read_inputs(segmenter, entries=inputs), most=3, ids=token_rows(vocabulary, tags, signs=signs))
    inner_function = getattr(segmenter, "func", segmenter)
    suite_name = f"Segmenter '{getattr(inner_function, '__name__', 'segmenter')}'"
    segmenter_suite = _Segmenter(
        who=suite_name,
        function=segmenter,
        sentences=SEGMENTER_PROPERTIES,
        vocabulary=vocabulary,
        lies_in_pieces="contiguous" in (exceptions or {}),
    )
    segmenter_suite.check(lambda _: strategy, asked=properties, exceptions=exceptions, examples=examples)


@dataclass(kw_only=True)
class _Segmenter(Suite):
    """A segmenter under test, the vocabulary of its tokens, and whether a block may lie in several pieces."""

    vocabulary: Vocabulary
    lies_in_pieces: bool
    by_token: ClassVar[Mapping[str, float]] = {"block_nt": -1}
    by_row = ("fault_n", "text")
    facts_to_show: ClassVar[Mapping[str, frozenset[Any]]] = {"seen": frozenset((True,))}

    def columns(self, result: Any) -> dict[str, Any]:
        """Return the tensors of a segmenter's spans, and the texts if it returns texts."""
        spans, returned_texts = result if isinstance(result, tuple) else (result, None)
        if not isinstance(spans, Spans):
            raise ConformanceError(f"{self.who} returns {type(spans).__name__}; return Spans, or Spans and texts.")
        row_count = len(spans.block_nt)
        span_columns = {name: getattr(spans, name) for name in ("start_nk", "end_nk", "fault_n")}
        text_by_row = [None] * row_count if returned_texts is None else list(returned_texts)
        return {**span_columns, "block_nt": spans.block_nt.long(), "text": text_by_row, "names": [spans.names] * row_count}

    def show_example(self, example: DrawnBatch) -> str:
        """Return an example as text: the bytes of its tokens, and all arguments."""
        return f"as pieces: {self.spelled(example)}; {show(example.inputs())}"

    def spelled(self, batch: DrawnBatch) -> list[list[bytes]]:
        """Return the bytes of each trainable token of each completion."""
        ids_and_masks = zip(batch.inputs()["ids_nt"], batch.place_nt >= 0, strict=True)
        return [[self.vocabulary.pieces[i] for i in ids_t[mask_t].tolist()] for ids_t, mask_t in ids_and_masks]

    def partition(self, batch: DrawnBatch, _: Draw) -> None:
        result_columns = self.run(batch)
        block_nt, start_nk, end_nk = result_columns["block_nt"], result_columns["start_nk"], result_columns["end_nk"]
        is_masked_nt = batch.place_nt < 0
        if block_nt.shape != is_masked_nt.shape:
            self.fail(batch, f"block_nt has shape {tuple(block_nt.shape)}, but the mask has {tuple(is_masked_nt.shape)}.")
        if bool((block_nt[is_masked_nt] != -1).any()):
            self.fail(batch, f"A masked token has a block: {show(block_nt)}.")
        trainable_block_u = block_nt[~is_masked_nt]
        block_names = result_columns["names"][0]
        if bool(((trainable_block_u < 0) | (trainable_block_u >= len(block_names))).any()):
            self.fail(batch, f"A trainable token has none of the {len(block_names)} blocks: {show(block_nt)}.")
        expected_spans = Spans.of_blocks(block_names, block_nt)
        is_right_nk = (start_nk == expected_spans.start_nk) & (end_nk == expected_spans.end_nk)
        if not bool((is_right_nk | (~expected_spans.present_nk & (start_nk == end_nk))).all()):
            interval_text = f"start_nk {show(start_nk)} and end_nk {show(end_nk)}"
            self.fail(batch, f"The intervals {interval_text} do not enclose the tokens of each block: {show(block_nt)}.")

    def seen(self, batch: DrawnBatch, _: Draw) -> None:
        result_columns = self.run(batch)
        self.has_shown({len(result_columns["names"][0]) < 2 or bool((result_columns["block_nt"] > 0).any())})

    def contiguous(self, batch: DrawnBatch, _: Draw) -> None:
        result_columns = self.run(batch)
        for row, spans in enumerate(_intervals(result_columns)):
            if _overlap(spans):
                self.fail(batch, f"Blocks of completion {row} overlap: {spans}.")

    def text(self, batch: DrawnBatch, _: Draw) -> None:
        result_columns = self.run(batch)
        completion_rows = zip(self.spelled(batch), result_columns["text"], _intervals(result_columns), strict=True)
        for n, (pieces, blocks, spans) in enumerate(completion_rows):
            if blocks is None:
                continue
            token_text = b"".join(pieces).decode(errors="replace")
            block_order = sorted(range(len(spans)), key=lambda k: spans[k][0])
            block_texts = [blocks[result_columns["names"][n][k]] for k in block_order]
            has_token = [spans[k][0] < spans[k][1] for k in block_order]
            if [block is not None for block in block_texts] != has_token:
                self.fail(
                    batch,
                    "A block with tokens must have a text, and a block without tokens must have none. The blocks of completion "
                    f"{n} have the texts {block_texts}. Their flags for having tokens are {has_token}.",
                )
            # A block's whole text is under the key "".
            joined_text = "".join(str(block[""]) for block in block_texts if block is not None)
            # A block inside one token (STRADDLED) has no token of its own, and so no text.
            is_straddled = int(result_columns["fault_n"][n]) & Fault.STRADDLED
            is_ordered = not (self.lies_in_pieces or _overlap(spans))
            if not is_straddled and not _same_text(joined_text, token_text, ordered=is_ordered):
                self.fail(batch, f"In completion {n}, blocks spell {joined_text!r}, but the tokens spell {token_text!r}.")


def _intervals(result: Mapping[str, Any]) -> list[list[tuple[int, int]]]:
    """Return where each block of each completion starts and ends."""
    start_end_pairs = zip(result["start_nk"].tolist(), result["end_nk"].tolist(), strict=True)
    return [list(zip(start_k, end_k, strict=True)) for start_k, end_k in start_end_pairs]


def _overlap(spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether any two blocks of a completion overlap."""
    spans_with_tokens = sorted(span for span in spans if span[0] < span[1])
    return any(earlier_span[1] > later_span[0] for earlier_span, later_span in pairwise(spans_with_tokens))


def _same_text(joined: str, token_text: str, *, ordered: bool) -> bool:
    """Return whether texts are equal, apart from characters that the edge of a block cut (U+FFFD)."""
    if "\ufffd" in joined:
        joined = joined.encode("ascii", "ignore").decode()
        token_text = token_text.encode("ascii", "ignore").decode()
    return joined == token_text if ordered else sorted(joined) == sorted(token_text)
