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
