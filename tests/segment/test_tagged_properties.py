"""`find_blocks` against a slow oracle that reads byte by byte, and what must not change anything."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles import owners_of_tokens, slow_segment
from spanwise.layout import Layout
from spanwise.segment import Vocabulary, find_blocks
from spanwise.types import Fault
from tokenizers_small import byte_level, sentencepiece

torch.set_num_threads(1)
TOKENIZERS = [byte_level(), byte_level(special=("<a>", "</confidence>")), sentencepiece()]
VOCABULARIES = [Vocabulary.from_tokenizer(tokenizer, size=len(tokenizer) + 1) for tokenizer in TOKENIZERS]
LAYOUTS = [
    Layout({"one": ["answer"], "two": ["confidence"]}),
    Layout({"one": ["a", "answer"], "two": ["x", "confidence"]}),
    Layout({"one": ["a", "answer"], "two": ["confidence"], "three": ["answer"]}, prefilled="a"),
    Layout({"one": ["answer"], "two": ["answer", "x"]}, prefilled="answer"),
    Layout({"all": []}),
]
NAMES = ["a", "answer", "x", "confidence"]
TAGS = [f"<{end}{name}>" for name in NAMES for end in ("", "/")]
NOISE = ["4", " ", "So ", ".", "é", "日本", "🙂", "<", ">", "</", "<answers>", "< a>", "<a ", "\n\n"]
fast = settings(deadline=None, max_examples=250)


@st.composite
def completions(draw):
    """Token ids as a policy might sample them: any cut of any mixture of tags and noise, here and there an unused id."""
    which = draw(st.integers(0, len(TOKENIZERS) - 1))
    text = "".join(draw(st.lists(st.sampled_from(TAGS * 2 + NOISE), max_size=12)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    backend = TOKENIZERS[which].backend_tokenizer
    ids = []
    for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
        ids += backend.encode(text[a:b], add_special_tokens=False).ids
        ids += [len(VOCABULARIES[which]) - 1] * draw(st.integers(0, 1))
    return VOCABULARIES[which], ids, draw(st.sampled_from(LAYOUTS))


def run(ids, mask, layout, vocabulary):
    ids_nt, mask_nt = (torch.tensor(rows).reshape(len(rows), -1) for rows in (ids, mask))
    return find_blocks(ids_nt, mask_nt, layout=layout, vocabulary=vocabulary)


@fast
@given(completions())
def test_agrees_with_the_byte_by_byte_oracle(completion):
    vocabulary, ids, layout = completion
    if not ids:
        return
    tokens = [vocabulary.pieces[i] for i in ids]
    data = b"".join(tokens)
    owner, pieces, fault, held = slow_segment(data, layout)
    owners = owners_of_tokens(tokens, owner)
    spans, texts = run([ids], [[1] * len(ids)], layout, vocabulary)
    prefilled_start = layout.prefilled and owner[:1] not in ([], [0]) and not tokens[0]
    if not prefilled_start:  # a prefilled block holds the tokens without bytes before byte 0; a literal case has it
        assert spans.block_nt[0].tolist() == owners
        for k, (name, tags) in enumerate(layout.blocks):
            mine = [t for t, o in enumerate(owners) if o == k]
            assert [int(spans.start_nk[0, k]), int(spans.end_nk[0, k])] == ([mine[0], mine[-1] + 1] if mine else [0, 0])
            expected = {tag: held[k, tag] for tag in tags} | {"": pieces[k].decode(errors="replace")}
            assert texts[0][name] == (expected if mine else None)
    assert Fault(int(spans.fault_n)) == fault


@fast
@given(completions())
def test_partition(completion):
    vocabulary, ids, layout = completion
    if not ids:
        return
    spans, texts = run([ids], [[True] * len(ids)], layout, vocabulary)
    inside = [t for a, b in zip(spans.start_nk[0].tolist(), spans.end_nk[0].tolist(), strict=True) for t in range(a, b)]
    assert sorted(inside) == list(range(len(ids)))
    assert int(spans.length_nk.sum()) == len(ids)
    data = b"".join(vocabulary.pieces[i] for i in ids)
    if sum(block is None for block in texts[0].values()) == 0:
        assert "".join(block[""] for block in texts[0].values()) == data.decode(errors="replace")


@fast
@given(completions(), st.data())
def test_inserting_masked_tokens_anywhere_changes_nothing_at_trainable_ones(completion, data):
    vocabulary, ids, layout = completion
    poison = st.sampled_from([-100, 10**9, *([ids[0]] if ids else []), *range(0, len(vocabulary), 7)])
    mixed = [(token, True) for token in ids]
    for _ in range(data.draw(st.integers(1, 6))):
        mixed.insert(data.draw(st.integers(0, len(mixed))), (data.draw(poison), False))
    mask = [keep for _, keep in mixed]
    spans, texts = run([[token for token, _ in mixed]], [mask], layout, vocabulary)
    block = spans.block_nt[0].tolist()
    assert [b for b, keep in zip(block, mask, strict=True) if not keep] == [-1] * (len(mixed) - len(ids))
    if not ids:
        assert int(spans.fault_n) == Fault.EMPTY
        return
    alone, alone_texts = run([ids], [[True] * len(ids)], layout, vocabulary)
    assert [b for b, keep in zip(block, mask, strict=True) if keep] == alone.block_nt[0].tolist()
    assert texts == alone_texts
    assert spans.fault_n.tolist() == alone.fault_n.tolist()
    where = [t for t, keep in enumerate(mask) if keep]
    for k in range(len(layout.names)):
        a, b = int(alone.start_nk[0, k]), int(alone.end_nk[0, k])
        moved = [where[a], where[b - 1] + 1] if b > a else [0, 0]
        assert [int(spans.start_nk[0, k]), int(spans.end_nk[0, k])] == moved


@fast
@given(st.lists(completions(), min_size=1, max_size=4), st.randoms())
def test_padding_side_and_order_of_completions_do_not_matter(drawn, random):
    vocabulary, _, layout = drawn[0]
    rows = [ids for v, ids, _ in drawn if v is vocabulary]
    width = max(map(len, rows)) + 2
    right = [ids + [-100] * (width - len(ids)) for ids in rows]
    left = [[10**9] * (width - len(ids)) + ids for ids in rows]
    is_right = [[t < len(ids) for t in range(width)] for ids in rows]
    is_left = [[t >= width - len(ids) for t in range(width)] for ids in rows]
    a, a_texts = run(right, is_right, layout, vocabulary)
    b, b_texts = run(left, is_left, layout, vocabulary)
    shift = torch.tensor([[width - len(ids)] for ids in rows])
    assert torch.equal(torch.where(a.present_nk, a.start_nk + shift, 0), b.start_nk)
    assert torch.equal(torch.where(a.present_nk, a.end_nk + shift, 0), b.end_nk)
    for n, ids in enumerate(rows):
        assert a.block_nt[n, : len(ids)].tolist() == b.block_nt[n, width - len(ids) :].tolist()
    assert a_texts == b_texts
    order = list(range(len(rows)))
    random.shuffle(order)
    c, c_texts = run([right[n] for n in order], [is_right[n] for n in order], layout, vocabulary)
    for name in ("start_nk", "end_nk", "block_nt", "fault_n"):
        assert torch.equal(getattr(c, name), getattr(a, name)[order])
    assert c_texts == [a_texts[n] for n in order]
