"""Blocks of several segmenters: what a block says is what its tokens say, or a fault says why not."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from json_oracle import slow_json
from oracles import owners_of_tokens
from segment_small import segment, text_of
from segmenter_oracles import Case, claimed
from spanwise.layout import Layout
from spanwise.segment import SEGMENTERS, Sample, Vocabulary, find_blocks
from spanwise.types import Fault

MARKS = [
    "delimiters:<<...>>", "delimiters:[...]", "delimiters:$$...$$", "regex:x[^y]*y", "regex:[0-9]+", "json:price", "lines:",
    "sentences:", "tags:t", "tags:u",
]  # fmt: skip
WORDS = [
    "<<", ">>", "[", "]", "$$", "x", "y", "1", "2", " ", "\n", ". ", "é", '{"price": 1}', '{"price": ', "}", "<t>", "</t>", "<u>",
    "</u>",
]  # fmt: skip


def test_a_claim_that_reaches_out_of_another_one_is_not_there():
    pieces = ["<<", "1 ", "x2", ">>", " 3y", " end"]
    owners, text, fault = segment({"a": "delimiters:<<...>>", "b": "regex:x[^y]*y", "rest": []}, pieces)
    assert owners == ["a"] * 4 + ["rest"] * 2
    assert (text_of(text, "a"), text["b"], fault) == ("1 x2", None, Fault.NESTED | Fault.MISSING)


def test_a_tag_inside_another_match_ends_with_it():
    layout = {"a": "delimiters:[...]", "b": "tags:t", "c": "delimiters:$$...$$", "rest": []}
    owners, _, fault = segment(layout, ["[", "<t>", "2", "</t>", "]", " 3 ", "$$", "4", "$$", " 5"])
    assert owners == ["a", *"bbbb", "rest", *"ccc", "rest"]
    assert fault == Fault.NONE


def slow_claims(case):
    """All claims (part, start, stop, end of what it must hold, what it says), those that begin first and reach furthest first."""
    layout, size, fault, every = case.layout, len(case.data), 0, []
    for name in layout.segmenters:
        if name == "tags":
            tags, wrong = SEGMENTERS.find(name).function(layout.parts_of(name), layout=layout)(Sample.of(case.data))
            starts = sorted(claim.start for claim in tags)
            for claim in tags:
                stop = min([start for start in starts if start > claim.start], default=size)
                every.append((claim.part, claim.start, stop, claim.inner[1] if claim.inner else claim.start, claim.inner))
        else:
            segments, wrong = slow_json(case.data, layout) if name == "json" else claimed(case, name)
            every += [(part, start, stop, stop, content) for part, start, stop, content in segments]
        fault |= wrong
    return sorted(every, key=lambda c: (c[1], c[0].segmenter != "tags", -c[2])), fault


def slow_blocks(case):
    """The block of every byte, what each part says, and the faults, byte by byte."""
    layout, size = case.layout, len(case.data)
    claims, fault = slow_claims(case)
    inside = [[] for _ in range(size)]  # the claims that hold each byte, the outer one first
    kept = []
    for claim in claims:
        part, start, stop, least, _ = claim
        while stop > start and any(other[2] <= stop - 1 for other, _ in inside[start]):
            stop -= 1
        if any(least > other[2] for other, _ in inside[start]):
            fault |= Fault.NESTED
            continue
        kept.append(claim)
        for at in range(start, stop):
            inside[at].append(((part, start, stop), part.block))
    if not {part for part in layout.parts if not part.index} <= {claim[0] for claim in kept}:
        fault |= Fault.MISSING
    owner, before = [], layout.rest if layout.rest is not None else min(kept, key=lambda c: c[1])[0].block if kept else 0
    for at in range(size):
        if layout.rest is None and inside[at]:
            before = inside[at][0][1]  # runs on where nothing else is
        owner.append(inside[at][-1][1] if inside[at] else before)
    return owner, kept, Fault(int(fault))


@st.composite
def cases(draw):
    several = st.lists(st.sampled_from(MARKS), min_size=2, max_size=3, unique=True)
    marks = draw(several.filter(lambda marks: any(not mark.startswith("tags") for mark in marks)))
    blocks = {f"b{place}": mark for place, mark in enumerate(marks)}
    if draw(st.booleans()):
        blocks["rest"] = []
    data = "".join(draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=14))).encode()
    cuts = sorted({0, len(data), *draw(st.lists(st.integers(0, len(data)), max_size=len(data)))})
    if draw(st.booleans()):
        cuts = range(len(data) + 1)  # a token per byte
    tokens = [data[start:stop] for start, stop in zip(cuts, list(cuts)[1:], strict=False)]
    opened = marks[0].partition(":")[2] if marks[0][-5:] == "...>>" and draw(st.booleans()) else None
    return Case(
        Layout(blocks, prefilled=opened), tokens, [False] * len(tokens), set(), [0.0] * len(tokens), list(range(len(tokens)))
    )


@settings(deadline=None, max_examples=250)
@given(cases())
def test_the_text_of_a_block_is_what_its_tokens_say_or_a_fault_says_why_not(case):
    layout, pieces = case.layout, list(dict.fromkeys(case.tokens))
    ids = torch.tensor([[pieces.index(token) for token in case.tokens]])
    spans, texts = find_blocks(ids, torch.ones_like(ids), layout=layout, vocabulary=Vocabulary(tuple(pieces)))
    owner, kept, fault = slow_blocks(case)
    owners = owners_of_tokens(case.tokens, owner)
    assert spans.block_nt[0].tolist() == owners
    straddled = Fault.STRADDLED if set(owner) - set(owners) else 0
    assert Fault(int(spans.fault_n[0])) == fault | straddled
    for block, name in enumerate(layout.names):
        if block not in owners:
            assert texts[0][name] is None
            continue
        content = bytes(byte for byte, k in zip(case.data, owner, strict=True) if k == block)
        assert texts[0][name][""] == content.decode(errors="replace")
        for part in layout.parts:
            claims = [claim for claim in kept if claim[0] is part and claim[4] is not None]
            if part.block == block and claims:
                _, start, stop, _, last = claims[-1]
                expected = case.data[slice(*last)] if isinstance(last, tuple) else last
                assert texts[0][name][part.key] == expected.decode(errors="replace")
                within = {c[0].block for c in kept if start <= c[1] and c[3] <= stop}
                assert set(owner[slice(*last) if isinstance(last, tuple) else slice(start, stop)]) <= within, (
                    "says what others are paid for"
                )
            elif part.block == block:
                assert texts[0][name][part.key] is None
