"""`find_blocks` by hand and in chunks; `tests/fuzz` holds it against an oracle that reads byte by byte."""

from dataclasses import dataclass

import pytest
import torch

from segment_small import segment
from spanwise.errors import AlignmentError
from spanwise.layout import Layout
from spanwise.registry import register
from spanwise.segment import SEGMENTERS, Sample, Vocabulary, find_blocks, place
from spanwise.types import Fault

VOCABULARY = Vocabulary((b"x", b"<a>", b"</a>", b"<c>", b"</c>"))
LAYOUT = Layout({"one": ["a"], "two": ["c"]})
ROWS = torch.tensor([[0, 1, 0, 2], [1, 2, 3, 4], [3, 4, 0, 0], [0, 0, 0, 0], [0, 1, 2, 3]])
OPEN = Layout({"one": ["r", "a"], "two": ["c"]}, prefilled="r")
A, C = ["<a>", "4", "</a>"], ["<c>", "4", "</c>"]
CASES = {
    "token without bytes at the boundary": (LAYOUT, [*A, "", *C, ""], ["one"] * 4 + ["two"] * 4, 0),
    "prefilled, nothing in it but a token without bytes": (
        OPEN, ["", *C], ["one"] + ["two"] * 3, Fault.NESTED | Fault.TRUNCATED | Fault.MISSING,
    ),
    "prefilled, left at once for the next block's own opening": (
        Layout({"one": ["a"], "two": ["a"]}, prefilled="a"), A, ["two"] * 3, 0,
    ),
    "prefilled, and the next block opens by its second tag": (
        Layout({"one": ["a"], "two": ["a", "c"]}, prefilled="a"), A[1:] + C,
        ["one"] * 2 + ["two"] * 3, Fault.MISSING,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_block_of_every_token(case):
    layout, pieces, owners, fault = CASES[case]
    seen_owners, _, seen_fault = segment(layout, pieces)
    assert (seen_owners, seen_fault) == (owners, Fault(fault))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_completions_and_no_tokens(shape):
    ids = torch.zeros(shape, dtype=torch.int64)
    spans, texts = find_blocks(ids, torch.ones(shape, dtype=torch.bool), layout=LAYOUT, vocabulary=VOCABULARY)
    assert spans.block_nt.shape == shape
    assert spans.start_nk.shape == (shape[0], 2)
    assert len(texts) == shape[0]


def test_what_does_not_fit_is_refused_with_its_numbers():
    ids = torch.tensor([[0, 1], [1, 999]])
    for mask, sentence in (
        (torch.ones_like(ids), r"Completion 1: .* 999 .* 5 ids"),
        (torch.ones(2, 3).bool(), r"\(2, 3\)"),
        (torch.ones(2, 2), "float32"),
        (torch.tensor([[1, 2], [0, 1]]), "2 at completion 0, token 1"),
    ):
        with pytest.raises(AlignmentError, match=sentence):
            find_blocks(ids, mask, layout=LAYOUT, vocabulary=VOCABULARY)


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
        ("## Answer\nRome", "markdown:Answer", "Rome"), ("Answer: Rome", "delimiters:Answer: ...", "Rome"),
        ("```python\nx = 1\n```", "code:fence", "x = 1\n"), ("x = 1\n", "code:python.statement", "x = 1"),
    ],
)  # fmt: skip
def test_no_part_says_the_token_that_ends_a_turn(said, mark, expected, sign):
    owners, text, fault = segment({"answer": mark}, [said, sign], added=[sign])
    assert next(part for key, part in text["answer"].items() if key) == expected
    assert text["answer"][""] == said + sign
    assert owners == ["answer", "answer"]
    assert fault == 0


def test_a_segmenter_without_a_hash_cuts_as_well():
    """An instance of a plain dataclass has none; a layout's cutter is kept by its segmenters."""

    @dataclass
    class Fields:
        def __call__(self, parts, *, layout):
            return SEGMENTERS.find("json").function(parts, layout=layout)

    register("own_fields", kind="segmenter")(Fields())
    try:
        _, text, _ = segment(["price"], ['{"price": ', "4", "}"], segmenter="own_fields")
    finally:
        SEGMENTERS.pop("own_fields")
    assert text["price"]["price"] == "4"


def test_two_marks_of_a_repeated_block_have_a_text_each():
    pieces = ["<thought>a</thought>", "<action>b</action>", "<thought>c</thought>", "<action>d</action>"]
    _, texts, fault = segment({"step[*]": ["thought", "action"]}, pieces, most=2)
    assert (texts["step[0]"]["thought[0]"], texts["step[0]"]["action[0]"]) == ("a", "b")
    assert (texts["step[1]"]["thought[1]"], texts["step[1]"]["action[1]"], fault) == ("c", "d", 0)
