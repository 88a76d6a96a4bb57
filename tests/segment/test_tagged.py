"""Literal cases: the tokens of every completion are written out, spans and texts are worked out by hand."""

from dataclasses import replace

import pytest
import torch

from spanwise.errors import AlignmentError
from spanwise.layout import Layout
from spanwise.segment import Vocabulary, find_blocks, place
from spanwise.types import Fault
from tokenizers_small import byte_level, sentencepiece, word_level

torch.set_num_threads(1)
TAGS = tuple(f"<{end}{name}>" for name in ("reasoning", "answer", "analysis", "confidence") for end in ("", "/"))
BYTES = Vocabulary.from_tokenizer(byte_level(), size=400)
SPECIAL = Vocabulary.from_tokenizer(byte_level(special=TAGS))
PIECES = Vocabulary.from_tokenizer(sentencepiece())
FOUR = Layout({"solution": ["reasoning", "answer"], "confidence": ["analysis", "confidence"]})
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
    "clean": (TWO, ["So ", A, "4", NO_A, C, "0.9", NO_C, END], [(0, 4), (4, 8)], 0),
    "bracket merged with the text after it": (TWO, ["<answer", ">4", NO_A, C, "0.9", NO_C], [(0, 3), (3, 6)], 0),
    "boundary inside '><'": (TWO, [A, "4", "</", "answer", "><", "confidence", ">4", NO_C], [(0, 5), (5, 8)], 0),
    "boundary inside '>\\n\\n<'": (
        TWO,
        ["So", " <", "answer", ">4", ".</", "answer", ">\n\n<", "confidence", ">", "4", NO_C],
        [(0, 7), (7, 11)],
        0,
    ),
    "boundary after a character cut in two": (
        TWO,
        [A, b"\xe6\x97\xa5\xe6", b"\x9c", b"\xac", NO_A, C, "4", NO_C],
        [(0, 5), (5, 8)],
        0,
    ),
    "boundary inside a token that ends a character": (
        TWO,
        [A, "4", NO_A, b"\xc3\xa9<", "confidence", ">4", NO_C, END],
        [(0, 4), (4, 8)],
        0,
    ),
    "token without bytes at the boundary": (TWO, [A, "4", NO_A, "", C, "4", NO_C, ""], [(0, 4), (4, 8)], 0),
    "token without bytes at the start": (TWO, ["", C, "4", NO_C], [(0, 0), (0, 4)], Fault.MISSING),
    "second block at byte 0": (TWO, [C, "4", NO_C], [(0, 0), (0, 3)], Fault.MISSING),
    "text, then the second block": (TWO, ["So", C, "4", NO_C], [(0, 1), (1, 4)], Fault.MISSING),
    "no tag at all": (TWO, ["So", "4", END], [(0, 3), (0, 0)], Fault.MISSING),
    "look-alikes": (TWO, ["<answer", "s>", "<", " ", "answer", ">", "<answer", " >", "4"], [(0, 11), (0, 0)], Fault.MISSING),
    "duplicate": (TWO, [A, "4", NO_A, A, "4", NO_A, C, "4", NO_C], [(0, 6), (6, 9)], Fault.DUPLICATE),
    "answer again in the second block": (TWO, [A, "4", NO_A, C, "4", NO_C, A, "4", NO_A], [(0, 3), (3, 9)], Fault.ORDER),
    "blocks in the wrong order": (TWO, [C, "4", NO_C, A, "4", NO_A], [(0, 6), (0, 0)], Fault.ORDER),
    "stray closing tag": (TWO, [NO_A, A, "4", NO_A, C, "4", NO_C], [(0, 4), (4, 7)], Fault.ORDER),
    "nested": (TWO, [A, "4", C, "4", NO_C, NO_A], [(0, 2), (2, 6)], Fault.NESTED),
    "never closed": (TWO, [A, "4", NO_A, C, "4"], [(0, 3), (3, 5)], Fault.TRUNCATED),
    "cut in a closing tag": (TWO, [A, "4", NO_A, C, "4", "</", "c"], [(0, 3), (3, 7)], Fault.TRUNCATED),
    "cut in an opening tag": (TWO, [A, "4", NO_A, "<", "c"], [(0, 5), (0, 0)], Fault.MISSING),
    "last tag inside the last token": (
        Layout({"solution": ["answer"], "x": ["x"]}),
        [A, "4", "</", "answer", "><", "x", ">"],
        [(0, 5), (5, 7)],
        Fault.TRUNCATED,
    ),
    "two attempts": (ATTEMPTS, [A, "4", NO_A, A, "4", NO_A, C, "4", NO_C], [(0, 3), (3, 6), (6, 9)], 0),
    "one attempt of two": (ATTEMPTS, [A, "4", NO_A, C, "4", NO_C], [(0, 3), (0, 0), (3, 6)], Fault.MISSING),
    "three attempts of two": (
        ATTEMPTS,
        [A, "4", NO_A, A, "4", NO_A, A, "4", NO_A],
        [(0, 3), (3, 9), (0, 0)],
        Fault.DUPLICATE | Fault.MISSING,
    ),
    "prefilled": (OPEN, ["So", "</", "reasoning>", A, "4", NO_A, C, "4", NO_C], [(0, 6), (6, 9)], 0),
    "prefilled and opened again": (
        OPEN,
        ["<", "reasoning>", "So", "</", "reasoning>", A, "4", NO_A, C, "4", NO_C],
        [(0, 8), (8, 11)],
        Fault.DUPLICATE,
    ),
    "prefilled and never closed": (
        OPEN,
        ["So", A, "4", NO_A, C, "4", NO_C],
        [(0, 4), (4, 7)],
        Fault.NESTED | Fault.TRUNCATED,
    ),
    "prefilled and nothing in it": (OPEN, [C, "4", NO_C], [(0, 0), (0, 3)], Fault.NESTED | Fault.TRUNCATED | Fault.MISSING),
    "prefilled, nothing in it but a token without bytes": (
        OPEN,
        ["", C, "4", NO_C],
        [(0, 1), (1, 4)],
        Fault.NESTED | Fault.TRUNCATED | Fault.MISSING,
    ),
    "prefilled, left at once for the next block's own opening": (
        Layout({"first": ["answer"], "second": ["answer"]}, prefilled="answer"),
        [A, "4", NO_A],
        [(0, 0), (0, 3)],
        0,
    ),
    "tags of one block in the wrong order": (
        FOUR,
        [A, "4", NO_A, "<", "reasoning>", "So", "</", "reasoning>", C, "4", NO_C],
        [(0, 8), (8, 11)],
        Fault.ORDER | Fault.MISSING,
    ),
    "the second tag opens the block": (FOUR, [A, "4", NO_A, C, "4", NO_C], [(0, 3), (3, 6)], Fault.MISSING),
    "no tags in the layout": (Layout({"all": []}), ["So", A, END], [(0, 3)], 0),
}


@pytest.mark.parametrize("case", CASES)
def test_first_and_last_token_of_every_span(case):
    layout, pieces, expected, fault = CASES[case]
    spans, _ = run(*pieces, layout=layout)
    assert intervals(spans) == expected
    assert Fault(int(spans.fault_n)) == Fault(fault)
    owners = [next(k for k, (a, b) in enumerate(expected) if a <= t < b) for t in range(spans.block_nt.shape[1])]
    assert spans.block_nt.tolist() == [owners]


def test_text_is_cut_at_bytes_and_not_at_tokens():
    _, text = run(A, "4", "</", "answer", "><", "confidence", ">4", NO_C, END)
    assert text == {
        "solution": {"answer": "4", "": "<answer>4</answer>"},
        "confidence": {"confidence": "4", "": "<confidence>4</confidence><|end|>"},
    }


@pytest.mark.parametrize(
    ("pieces", "held"),
    [
        ([A, " ", "4", " ", NO_A], " 4 "),  # not stripped
        ([A, NO_A], ""),
        ([A, "4", NO_A, A, "So", NO_A], "So"),  # the last pair
        ([A, "4", NO_A, A, "So"], "4"),  # the last complete pair
        ([A, "4", A, "So", NO_A], "So"),  # the nearest opening tag
        ([A, "4", NO_A, "So", NO_A], "4"),  # a stray closing tag ends no pair
        ([A, "4"], None),
        ([A, "4", C, "So", NO_C, NO_A], None),  # closes outside its block
        ([A, b"\xe6\x97", NO_A], "�"),
        ([A, b"\xe6\x97\xa5\xe6", b"\x9c\xac", NO_A], "日本"),
    ],
)
def test_what_a_tag_holds(pieces, held):
    assert run(*pieces)[1]["solution"]["answer"] == held


def test_each_block_reads_its_own_pair_of_a_tag_that_two_blocks_use():
    _, text = run(A, "4", NO_A, A, "So", NO_A, layout=ATTEMPTS)
    assert (text["first"]["answer"], text["second"]["answer"], text["confidence"]) == ("4", "So", None)


def test_a_prefilled_pair_starts_at_byte_0():
    _, text = run("So", "</", "reasoning>", A, "4", NO_A, layout=OPEN)
    assert text["solution"] == {"reasoning": "So", "answer": "4", "": "So</reasoning><answer>4</answer>"}


def test_a_block_without_a_token_of_its_own_is_absent():
    vocabulary = Vocabulary((b"<a>1</a><b>2</b>", b"<c>", b"3</c>"))
    ids = torch.tensor([[0, 1, 2]])
    layout = Layout({"a": ["a"], "b": ["b"], "c": ["c"]})
    spans, texts = find_blocks(ids, torch.ones_like(ids), layout=layout, vocabulary=vocabulary)
    assert intervals(spans) == [(0, 1), (0, 0), (1, 3)]
    assert spans.present_nk.tolist() == [[True, False, True]]
    assert texts[0]["b"] is None
    assert texts[0]["a"] == {"a": "1", "": "<a>1</a>"}


def test_tags_may_be_special_tokens():
    pieces = ["<reasoning>", "So", "</reasoning>", A, "4", NO_A, "<analysis>", "</analysis>", C, "0.9", NO_C, END]
    spans, text = run(*pieces, layout=FOUR, vocabulary=SPECIAL)
    assert ids_of(*pieces, vocabulary=SPECIAL).shape == (1, 12)
    assert intervals(spans) == [(0, 6), (6, 12)]
    assert text["confidence"] == {
        "analysis": "",
        "confidence": "0.9",
        "": "<analysis></analysis><confidence>0.9</confidence><|end|>",
    }


def test_sentencepiece_tokens_straddle_as_well():
    pieces = [" ", A, b"\xf0", b"\x9f", b"\x99", b"\x82", "</", "answer", "><", "confidence", ">4", NO_C, "</s>"]
    spans, text = run(*pieces, vocabulary=PIECES)
    assert intervals(spans) == [(0, 9), (9, 13)]
    assert text["solution"] == {"answer": "🙂", "": " <answer>🙂</answer>"}


def test_word_level_tokens():
    words = ["<answer>", "</answer>", "7", "refuse"]
    vocabulary = Vocabulary.from_tokenizer(word_level(words))
    spans, text = run("<answer>", "7", "</answer>", layout=Layout({"all": ["answer"]}), vocabulary=vocabulary)
    assert intervals(spans) == [(0, 3)]
    assert text["all"]["answer"] == "7"


@pytest.mark.parametrize("poison", [None, -100, 10**9])
def test_masked_tokens_are_deleted_and_never_read(poison):
    # Tokens 4 to 6 are a tool's output that opens the second block, repeats an answer and closes nothing.
    ids = ids_of("So", A, "4", NO_A, C, A, "<answer", C, "0.9", NO_C)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 1, 1, 1]])
    ids[mask == 0] = poison if poison is not None else ids[mask == 0]
    spans, texts = find_blocks(ids, mask, layout=TWO, vocabulary=BYTES)
    assert intervals(spans) == [(0, 4), (7, 10)]
    assert spans.block_nt.tolist() == [[0, 0, 0, 0, -1, -1, -1, 1, 1, 1]]
    assert texts[0]["solution"] == {"answer": "4", "": "So<answer>4</answer>"}
    assert int(spans.fault_n) == 0


def test_a_tag_may_be_cut_by_masked_tokens_and_spans_start_at_trainable_ones():
    ids = ids_of(A, "4", NO_A, "So", "<", "So", "confidence", ">4", "So", NO_C, "So")
    mask = ids != ids[0, 3]
    spans, texts = find_blocks(ids, mask, layout=TWO, vocabulary=BYTES)
    assert intervals(spans) == [(0, 3), (4, 10)]
    assert spans.block_nt.tolist() == [[0, 0, 0, -1, 1, -1, 1, 1, -1, 1, -1]]
    assert texts[0]["confidence"]["confidence"] == "4"


def test_a_row_without_trainable_tokens_is_empty():
    ids = torch.full((2, 3), -100)
    ids[1] = ids_of("So", "4", END)
    mask = ids >= 0
    spans, texts = find_blocks(ids, mask, layout=TWO, vocabulary=BYTES)
    assert spans.fault_n.tolist() == [Fault.EMPTY, Fault.MISSING]
    assert spans.block_nt.tolist() == [[-1, -1, -1], [0, 0, 0]]
    assert spans.end_nk.tolist() == [[0, 0], [3, 0]]
    assert texts[0] == {"solution": None, "confidence": None}


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_completions_and_no_tokens(shape):
    ids = torch.zeros(shape, dtype=torch.int64)
    spans, texts = find_blocks(ids, torch.ones(shape, dtype=torch.bool), layout=TWO, vocabulary=BYTES)
    assert spans.block_nt.shape == shape
    assert spans.start_nk.shape == (shape[0], 2)
    assert len(texts) == shape[0]


def test_more_than_127_blocks_still_have_a_number():
    names = [f"b{n}" for n in range(130)]
    vocabulary = Vocabulary(tuple(f"<{name}></{name}>".encode() for name in names))
    ids = torch.arange(130)[None]
    spans, _ = find_blocks(ids, torch.ones_like(ids), layout=Layout({name: [name] for name in names}), vocabulary=vocabulary)
    assert spans.block_nt.tolist() == [list(range(130))]
    assert run("So")[0].block_nt.dtype == torch.int8


def test_what_does_not_fit_is_refused_with_its_numbers():
    ids = torch.tensor([[0, 1], [1, 999]])
    with pytest.raises(AlignmentError, match=r"Completion 1: Token id 999 .* 400 ids"):
        find_blocks(ids, torch.ones_like(ids), layout=TWO, vocabulary=BYTES)
    with pytest.raises(AlignmentError, match=r"mask_nt has shape \(2, 3\) and ids_nt \(2, 2\)"):
        find_blocks(ids, torch.ones(2, 3, dtype=torch.bool), layout=TWO, vocabulary=BYTES)
    with pytest.raises(AlignmentError, match=r"mask_nt is torch[.]float32"):
        find_blocks(ids, torch.ones(2, 2), layout=TWO, vocabulary=BYTES)
    with pytest.raises(AlignmentError, match="holds 2 at completion 0, token 1"):
        find_blocks(ids, torch.tensor([[1, 2], [0, 1]]), layout=TWO, vocabulary=BYTES)


def test_lengths_come_with_the_spans():
    # `find_blocks` knows the lengths and hands them over; they must be those of the tokens.
    vocabulary = Vocabulary((b"<a>", b"x", b"</a>", b"<c>", b"</c>"))
    ids = torch.tensor([[0, 1, 1, 2, 3, 1, 4], [0, 1, 2, 3, 4, 9, 9], [9, 9, 9, 9, 9, 9, 9]])
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
    spans, _ = find_blocks(ids, mask, layout=Layout({"solution": ["a"], "confidence": ["c"]}), vocabulary=vocabulary)
    assert spans.length_nk.tolist() == [[3, 3], [3, 2], [0, 0]]
    assert replace(spans).length_nk.tolist() == spans.length_nk.tolist()  # counted anew


# A vocabulary of five tokens, read in chunks

VOCABULARY = Vocabulary((b"x", b"<a>", b"</a>", b"<c>", b"</c>"))
LAYOUT = Layout({"one": ["a"], "two": ["c"]})
ROWS = torch.tensor([[0, 1, 0, 2], [1, 2, 3, 4], [3, 4, 0, 0], [0, 0, 0, 0], [0, 1, 2, 3]])


@pytest.mark.parametrize("at_a_time", [1, 4, 8, 9, 20, 1000])
def test_completions_are_read_in_chunks(monkeypatch, at_a_time):
    whole, texts = find_blocks(ROWS, ROWS >= 0, layout=LAYOUT, vocabulary=VOCABULARY)
    monkeypatch.setattr(place, "_TOKENS_AT_A_TIME", at_a_time)
    spans, chunked = find_blocks(ROWS, ROWS >= 0, layout=LAYOUT, vocabulary=VOCABULARY)
    assert chunked == texts
    assert len(texts) == 5
    for name in ("block_nt", "start_nk", "end_nk", "fault_n"):
        assert torch.equal(getattr(spans, name), getattr(whole, name))
        assert getattr(spans, name).dtype == (torch.int8 if name == "block_nt" else torch.int64)
    wrong = ROWS.clone()
    wrong[3, 1] = 5  # the first id that is not there
    with pytest.raises(AlignmentError, match="Completion 3: Token id 5 is not in the vocabulary, which has 5 ids"):
        find_blocks(wrong, wrong >= 0, layout=LAYOUT, vocabulary=VOCABULARY)


@pytest.mark.parametrize(("blocks", "dtype"), [(127, torch.int8), (128, torch.int16)])
def test_numbers_of_blocks_fit(blocks, dtype):
    layout = Layout({f"b{k}": [f"t{k}"] for k in range(blocks)})
    spans, _ = find_blocks(torch.tensor([[0]]), torch.tensor([[1]]), layout=layout, vocabulary=VOCABULARY)
    assert spans.block_nt.dtype == dtype
