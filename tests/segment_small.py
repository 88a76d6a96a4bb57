"""Completions written out token by token or as text, and what a layout finds in them."""

import torch

from spanwise import Fault, Layout
from spanwise.segment import SEGMENTERS, Sample, Vocabulary, find_blocks


def segment(layout, pieces, *, added=(), masked=(), **layout_options):
    """Return owners, texts and fault of a completion whose tokens are these pieces; tokens at the places `masked` are masked.

    `added` are the pieces that the tokenizer has beside its vocabulary.
    """
    written = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
    vocabulary_pieces = list(dict.fromkeys([*written, *(piece.encode() for piece in added)]))
    vocabulary = Vocabulary(tuple(vocabulary_pieces), frozenset(vocabulary_pieces.index(piece.encode()) for piece in added))
    ids = torch.tensor([[vocabulary_pieces.index(piece) for piece in written]])
    mask = torch.tensor([[place not in masked for place in range(len(pieces))]])
    layout = layout if isinstance(layout, Layout) else Layout(layout, **layout_options)
    spans, texts = find_blocks(ids, mask, layout=layout, vocabulary=vocabulary)
    owners = [None if k < 0 else layout.names[k] for k in spans.block_nt[0].tolist()]
    return owners, texts[0], Fault(int(spans.fault_n))


def claims_in(layout, text):
    """Return (claim, claimed text, content) of each claim of a layout with one segmenter, and the faults."""
    data = text if isinstance(text, bytes) else text.encode()
    (name,) = layout.segmenters
    claims, fault = SEGMENTERS.find(name).function(layout.parts, layout=layout)(Sample.of(data))
    triples = []
    for claim in sorted(claims, key=lambda claim: claim.start):
        inner = data[slice(*claim.inner)] if isinstance(claim.inner, tuple) else claim.inner
        content = None if inner is None else inner.decode(errors="replace")
        triples.append((claim, data[claim.start : claim.stop].decode(errors="replace"), content))
    return triples, Fault(fault)


def text_of(text, block, key=None):
    """Return the text of a block's part, by default of its only part."""
    keys = [name for name in text[block] if name]
    return text[block][keys[0] if key is None else key]
