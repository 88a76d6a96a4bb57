"""`check_segmenter`: the properties of whatever turns token ids into spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from spanwise.segment.vocabulary import Vocabulary
from spanwise.testing.batches import DrawnBatch, batches_of, read_inputs
from spanwise.testing.search import ConformanceError, Suite, show
from spanwise.types import BlockText, Fault, Spans

#: What is checked of a segmenter, and what each check means.
SEGMENTER_PROPERTIES: Mapping[str, str] = {
    "partition": "every trainable token belongs to exactly one block, no other token to any, and the intervals say the same",
    "contiguous": "the intervals of two blocks do not overlap",
    "text": "the texts of the blocks, one after the other where blocks are contiguous, are the bytes of the trainable tokens",
    "pure": "its inputs stay as they are and a second call gives the same spans",
    "permutation": "another order of the completions only reorders the result",
    "split": "a completion alone is segmented as in a batch",
    "masking": "masked tokens, wherever they stand, change nothing at the others",
    "poison": "what stands at a masked token (an impossible id, NaN, 1e9) is never read",
    "padding": "padding on the left and on the right give the same spans",
}
_NOISE = ("4", " ", "So ", ".", "0.9", "é", "日本", "🙂", "<", ">", "</", "< a>", "\n\n", "<<")


def small_vocabulary(tags: Sequence[str] = ("answer", "confidence"), *, signs: Sequence[str] = ()) -> Vocabulary:
    """A vocabulary for tests: all bytes, whole tags and other signs, and pieces that straddle one of these or cut a character.

    >>> b"></" in small_vocabulary().pieces
    True
    """
    whole = [f"<{end}{tag}>".encode() for tag in tags for end in ("", "/")] + [sign.encode() for sign in signs]
    straddling = [piece for tag in whole for piece in (tag + b"4", b"." + tag[:3], tag[-2:] + b"<")]
    parts = [b"So ", b"></", b"><", b">\n\n<", b"0.9", "日".encode() + b"\xe6", *whole, *straddling]
    return Vocabulary((*(bytes([byte]) for byte in range(256)), *dict.fromkeys(parts), b""))


def texts(
    tags: Sequence[str] = ("answer", "confidence"), *, most: int = 8, signs: Sequence[str] = ()
) -> SearchStrategy[str]:
    """Strategy: completions as a policy may write them: tags and other signs in any order, whole and broken, between noise.

    Example:
        >>> from hypothesis import find
        >>> find(texts(), lambda text: "</answer>" in text)
        '</answer>'
    """
    written = [f"<{end}{tag}>" for tag in tags for end in ("", "/")] + list(signs)
    return st.lists(st.sampled_from([*written, *written, *_NOISE]), max_size=most).map("".join)


def token_rows(
    vocabulary: Vocabulary, tags: Sequence[str] = ("answer", "confidence"), *, signs: Sequence[str] = ()
) -> SearchStrategy[tuple[int, ...]]:
    """Strategy: token ids of a text of `texts(tags)` as a policy may sample them, cut into any pieces of the vocabulary.

    Example:
        >>> from hypothesis import given
        >>> @given(token_rows(Vocabulary((b"<answer>", b"</answer>", b"4"))))
        ... def every_id_is_known(ids):
        ...     assert set(ids) <= {0, 1, 2}
    """
    cut = cutter(vocabulary)
    drawn = st.tuples(texts(tags, signs=signs), st.lists(st.integers(0, 6), min_size=1, max_size=5))
    return drawn.map(lambda pair: cut(pair[0].encode(), pair[1]))


def cutter(vocabulary: Vocabulary) -> Callable[[bytes, Sequence[int]], tuple[int, ...]]:
    """A function of some bytes and choices that cuts the bytes into pieces of the vocabulary.

    Choice 0 takes the longest piece that fits, 1 the next one, and so on, in turn; bytes that no piece starts with are left out.
    """
    by_first: dict[int, list[int]] = {}
    for index in sorted(range(len(vocabulary)), key=lambda i: -len(vocabulary.pieces[i])):
        if vocabulary.pieces[index]:
            by_first.setdefault(vocabulary.pieces[index][0], []).append(index)

    def cut(data: bytes, choices: Sequence[int]) -> tuple[int, ...]:
        ids: list[int] = []
        at = 0
        while at < len(data):
            fitting = [i for i in by_first.get(data[at], ()) if data.startswith(vocabulary.pieces[i], at)]
            if not fitting:  # the vocabulary has no piece for this byte
                at += 1
                continue
            ids.append(fitting[min(choices[len(ids) % len(choices)], len(fitting) - 1)])
            at += len(vocabulary.pieces[ids[-1]])
        return tuple(ids)

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
    """Check a segmenter `(ids_nt, mask_nt, ...) -> Spans` or `-> (Spans, texts)` against `SEGMENTER_PROPERTIES`.

    Args:
        segmenter: called by name; fix what it needs beside tensors with `functools.partial`. Further tensors without a default
            (`logp_nt`) are made up from their names.
        vocabulary: the bytes of every token id; None: `small_vocabulary(tags, signs=signs)`.
        tags: the tags that completions are made of.
        signs: what else they are made of, for segmenters that look for something else.
        exceptions: property -> why it does not have it.
        properties: check these only.
        inputs: name of an input -> strategy of one entry.
        examples: how many examples each property sees.

    Raises:
        ConformanceError: a property does not hold; with the smallest example found.

    Example:
        >>> from functools import partial
        >>> from spanwise.layout import Layout
        >>> from spanwise.segment import find_blocks
        >>> layout = Layout({"solution": ["answer"], "confidence": ["confidence"]})
        >>> check_segmenter(partial(find_blocks, layout=layout, vocabulary=small_vocabulary()), examples=5)
    """
    words = vocabulary or small_vocabulary(tags, signs=signs)
    plain = batches_of(read_inputs(segmenter, entries=inputs), most=3, ids=token_rows(words, tags, signs=signs))
    name = getattr(getattr(segmenter, "func", segmenter), "__name__", "segmenter")
    suite = _Segmenter(f"Segmenter '{name}'", segmenter, SEGMENTER_PROPERTIES, words)
    suite.check(plain, {}, asked=properties, exceptions=exceptions, examples=examples)


@dataclass(frozen=True)
class _Segmenter(Suite):
    """A segmenter, and the bytes of its tokens."""

    vocabulary: Vocabulary
    by_token: ClassVar[Mapping[str, float]] = {"block_nt": -1}
    by_row = ("fault_n", "text")

    def result_of(self, inputs: dict[str, Any]) -> tuple[Spans, Sequence[BlockText] | None]:
        """Its spans, and its texts if it says them."""
        result = self.function(**inputs)
        spans, text = result if isinstance(result, tuple) else (result, None)
        if not isinstance(spans, Spans):
            raise ConformanceError(f"{self.who} returns {type(spans).__name__}; return Spans, or Spans and texts.")
        return spans, text

    def columns(self, result: Any) -> dict[str, Any]:
        """The tensors of its spans, and its texts."""
        if isinstance(result, dict):
            return result
        spans, text = result
        block_nt, start_nk, end_nk = spans.block_nt.long(), spans.start_nk, spans.end_nk
        text = [None] * len(block_nt) if text is None else list(text)
        return {"block_nt": block_nt, "start_nk": start_nk, "end_nk": end_nk, "fault_n": spans.fault_n, "text": text}

    def shown(self, example: DrawnBatch) -> str:
        """The pieces of its tokens, and all that it is given."""
        pieces = [[self.vocabulary.pieces[i] for i in row] for row in example.rows["ids_nt"]]
        return f"as pieces: {pieces}; {show(example.inputs())}"

    def partition(self, batch: DrawnBatch) -> None:
        spans, _ = self.run(batch)
        block_nt, masked_nt = spans.block_nt, batch.place_nt < 0
        if block_nt.shape != masked_nt.shape:
            self.fail("partition", batch, f"block_nt is {tuple(block_nt.shape)}, the mask {tuple(masked_nt.shape)}.")
        if bool((block_nt[masked_nt] != -1).any()):
            self.fail("partition", batch, f"A masked token has a block: {show(block_nt)}.")
        owned = block_nt[~masked_nt]
        if bool(((owned < 0) | (owned >= len(spans.names))).any()):
            self.fail("partition", batch, f"A trainable token has none of the {len(spans.names)} blocks: {show(block_nt)}.")
        expected = Spans.of_blocks(spans.names, block_nt)
        there_nk = expected.present_nk
        right_nk = (spans.start_nk == expected.start_nk) & (spans.end_nk == expected.end_nk)
        if not bool((right_nk | (~there_nk & (spans.start_nk == spans.end_nk))).all()):
            intervals = f"from {show(spans.start_nk)} to {show(spans.end_nk)}"
            self.fail(
                "partition", batch, f"The intervals of the blocks go {intervals}, and their tokens say {show(block_nt)}."
            )

    def contiguous(self, batch: DrawnBatch) -> None:
        spans, _ = self.run(batch)
        for row in range(len(batch)):
            if _overlap(spans, row):
                used = list(zip(spans.start_nk[row].tolist(), spans.end_nk[row].tolist(), strict=True))
                self.fail("contiguous", batch, f"Blocks of completion {row} overlap: {used}.")

    def text(self, batch: DrawnBatch) -> None:
        spans, blocks = self.run(batch)
        if blocks is None:
            return
        for row, ids in enumerate(batch.rows["ids_nt"]):
            data = b"".join(self.vocabulary.pieces[i] for i in ids).decode(errors="replace")
            order = spans.start_nk[row].argsort(stable=True).tolist()
            texts_of_row = [blocks[row][spans.names[k]] for k in order]
            there = spans.present_nk[row, order].tolist()
            if [block is not None for block in texts_of_row] != there:
                self.fail("text", batch, f"Completion {row} has text {texts_of_row} for blocks that are there: {there}.")
            joined = "".join(str(block[""]) for block in texts_of_row if block is not None)
            straddled = int(spans.fault_n[row]) & Fault.STRADDLED  # the bytes of a block without a token are in no text
            if not straddled and not _same_text(joined, data, ordered=not _overlap(spans, row)):
                self.fail("text", batch, f"The blocks of completion {row} hold {joined!r}, its tokens {data!r}.")


def _overlap(spans: Spans, row: int) -> bool:
    """Whether the intervals of two blocks of a completion share a token."""
    every = zip(spans.start_nk[row].tolist(), spans.end_nk[row].tolist(), strict=True)
    used = sorted(span for span in every if span[0] < span[1])
    return any(before[1] > after[0] for before, after in pairwise(used))


def _same_text(joined: str, data: str, *, ordered: bool) -> bool:
    """Whether two texts hold the same; a character that blocks share became U+FFFD in each, so then the others are compared."""
    if "\ufffd" in joined:
        joined, data = (text.encode("ascii", "ignore").decode() for text in (joined, data))
    return joined == data if ordered else sorted(joined) == sorted(data)
