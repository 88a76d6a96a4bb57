"""`find_blocks` by hand and in chunks; `tests/fuzz` holds it against a slow oracle that reads byte by byte."""

import pytest
import torch

from segment_small import segment
from spanwise.errors import AlignmentError
from spanwise.layout import Layout
from spanwise.segment import SEGMENTERS, Sample, Vocabulary, find_blocks, place
from spanwise.types import Fault
from tokenizers_small import byte_level

BYTES = Vocabulary.from_tokenizer(byte_level(), size=400)
TWO = Layout({"solution": ["answer"], "confidence": ["confidence"]})
OPEN = Layout({"solution": ["reasoning", "answer"], "confidence": ["confidence"]}, prefilled="reasoning")
ATTEMPTS = Layout({"first": ["answer"], "second": ["answer"], "confidence": ["confidence"]})
A, NO_A, C, NO_C, END = "<answer>", "</answer>", "<confidence>", "</confidence>", "<|end|>"


def ids_of(*pieces, vocabulary=BYTES):
    """The ids of these pieces, one token each; a piece that is no token is spelled byte by byte, "" is an unused id."""
    ids = []
    for piece in pieces:
        piece = piece if isinstance(piece, bytes) else piece.encode()
        whole = piece in vocabulary.pieces
        ids += [vocabulary.pieces.index(part) for part in ([piece] if whole else [bytes([byte]) for byte in piece])]
    return torch.tensor([ids])


def run(*pieces, layout=TWO, vocabulary=BYTES):
    ids = ids_of(*pieces, vocabulary=vocabulary)
    spans, texts = find_blocks(ids, torch.ones_like(ids), layout=layout, vocabulary=vocabulary)
    return spans, texts[0]


def intervals(spans):
    return list(zip(spans.start_nk[0].tolist(), spans.end_nk[0].tolist(), strict=True))


CASES = {
    "token without bytes at the boundary": (TWO, [A, "4", NO_A, "", C, "4", NO_C, ""], [(0, 4), (4, 8)], 0),
    "three attempts of two": (
        ATTEMPTS, [A, "4", NO_A, A, "4", NO_A, A, "4", NO_A], [(0, 3), (3, 9), (0, 0)], Fault.DUPLICATE | Fault.MISSING,
    ),
    "prefilled, nothing in it but a token without bytes": (
        OPEN, ["", C, "4", NO_C], [(0, 1), (1, 4)], Fault.NESTED | Fault.TRUNCATED | Fault.MISSING,
    ),
    "prefilled, left at once for the next block's own opening": (
        Layout({"first": ["answer"], "second": ["answer"]}, prefilled="answer"), [A, "4", NO_A], [(0, 0), (0, 3)], 0,
    ),
    "no tags in the layout": (Layout({"all": []}), ["So", A, END], [(0, 3)], 0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_first_and_last_token_of_every_span(case):
    layout, pieces, expected, fault = CASES[case]
    spans, _ = run(*pieces, layout=layout)
    assert intervals(spans) == expected
    assert Fault(int(spans.fault_n)) == Fault(fault)
    owners = [next(k for k, (a, b) in enumerate(expected) if a <= t < b) for t in range(spans.block_nt.shape[1])]
    assert spans.block_nt.tolist() == [owners]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_completions_and_no_tokens(shape):
    ids = torch.zeros(shape, dtype=torch.int64)
    spans, texts = find_blocks(ids, torch.ones(shape, dtype=torch.bool), layout=TWO, vocabulary=BYTES)
    assert spans.block_nt.shape == shape
    assert spans.start_nk.shape == (shape[0], 2)
    assert len(texts) == shape[0]


def test_what_does_not_fit_is_refused_with_its_numbers():
    ids = torch.tensor([[0, 1], [1, 999]])
    for mask, sentence in (
        (torch.ones_like(ids), r"Completion 1: .* 999 .* 400"),
        (torch.ones(2, 3).bool(), r"\(2, 3\)"),
        (torch.ones(2, 2), "float32"),
        (torch.tensor([[1, 2], [0, 1]]), "2 at completion 0, token 1"),
    ):
        with pytest.raises(AlignmentError, match=sentence):
            find_blocks(ids, mask, layout=TWO, vocabulary=BYTES)


VOCABULARY = Vocabulary((b"x", b"<a>", b"</a>", b"<c>", b"</c>"))
LAYOUT = Layout({"one": ["a"], "two": ["c"]})
ROWS = torch.tensor([[0, 1, 0, 2], [1, 2, 3, 4], [3, 4, 0, 0], [0, 0, 0, 0], [0, 1, 2, 3]])


@pytest.mark.parametrize("at_a_time", [1, 8, 9])
def test_completions_are_read_in_chunks(monkeypatch, at_a_time):
    at_once, texts = find_blocks(ROWS, ROWS >= 0, layout=LAYOUT, vocabulary=VOCABULARY)
    monkeypatch.setattr(place, "_TOKENS_AT_A_TIME", at_a_time)
    spans, chunked = find_blocks(ROWS, ROWS >= 0, layout=LAYOUT, vocabulary=VOCABULARY)
    assert chunked == texts
    assert len(texts) == 5
    for name in ("block_nt", "start_nk", "end_nk", "fault_n"):
        assert torch.equal(getattr(spans, name), getattr(at_once, name))
        assert getattr(spans, name).dtype == (torch.int8 if name == "block_nt" else torch.int64)
    wrong = ROWS.clone()
    wrong[3, 1] = 5  # the first id that is not there
    with pytest.raises(AlignmentError, match="Completion 3"):
        find_blocks(wrong, wrong >= 0, layout=LAYOUT, vocabulary=VOCABULARY)


@pytest.mark.parametrize(("blocks", "dtype"), [(127, torch.int8), (128, torch.int16)])
def test_numbers_of_blocks_fit(blocks, dtype):
    layout = Layout({f"b{k}": [f"t{k}"] for k in range(blocks)})
    spans, _ = find_blocks(torch.tensor([[0]]), torch.tensor([[1]]), layout=layout, vocabulary=VOCABULARY)
    assert spans.block_nt.dtype == dtype


def test_a_segmenter_of_ones_own_may_look_for_tags():
    layout = Layout({"a": ["x"], "b": ["y"]}, segmenter="regex")  # the parts are of another segmenter
    find = SEGMENTERS.find("tags").function(layout.parts, layout=layout)
    assert [(claim.part.block, claim.start) for claim in find(Sample.of(b"<x>1</x><y>1</y>")).claims] == [(0, 0), (1, 8)]


@pytest.mark.parametrize("sign", ["<|im_end|>", "</s>", "<\uff5cend\u2581of\u2581sentence\uff5c>"])
@pytest.mark.parametrize(
    ("said", "mark", "expected"),
    [
        ("## Answer\nRome", "markdown:Answer", "Rome"),
        ("Answer: Rome", "delimiters:Answer: ...", "Rome"),
        ("Answer: Rome", "regex:Answer: (.*)", "Rome"),
        ("Rome\n", "lines:", "Rome"),
        ("```python\nx = 1\n```", "code:fence", "x = 1\n"),
        ("x = 1\n", "code:python.statement", "x = 1"),
    ],
)
def test_no_part_says_the_token_that_ends_a_turn(said, mark, expected, sign):
    owners, text, fault = segment({"answer": mark}, [said, sign], added=[sign])
    assert next(part for key, part in text["answer"].items() if key) == expected
    assert text["answer"][""] == said + sign
    assert owners == ["answer", "answer"]
    assert fault == 0
