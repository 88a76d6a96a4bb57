"""Completions as no sane policy would write them, as token ids of three families of tokenizers.

A completion is a soup of fragments, a well-formed text whose tags hold something hostile, random ids, or a giant. Every fragment is
cut into pieces of the vocabulary in several ways, so that tags straddle tokens and characters are cut.
"""

import random
from dataclasses import dataclass

import numpy as np
from linear import SHAPES

from spanwise import Layout, Vocabulary
from spanwise.testing.segmenters import cutter
from tokenizers_small import byte_level, sentencepiece, word_level

MANY = {"solution": ["answer"], **{f"b{n}": [f"t{n % 40}"] for n in range(128)}, "confidence": ["confidence"]}
LAYOUTS = {
    "two blocks": Layout({"solution": ["answer"], "confidence": ["confidence"]}),
    "four tags": Layout({"solution": ["reasoning", "answer"], "confidence": ["analysis", "confidence"]}),
    "prefilled": Layout({"solution": ["reasoning", "answer"], "confidence": ["confidence"]}, prefilled="reasoning"),
    "two attempts": Layout({"first": ["answer"], "second": ["reasoning", "answer"], "confidence": ["confidence"]}),
    "130 blocks": Layout(MANY),
    "no tags": Layout({"completion": []}),
}
NAMES = ["reasoning", "answer", "analysis", "confidence", "t0", "t1", "t39"]
SIGNS = [f"<{end}{name}>" for name in NAMES for end in ("", "/")]
LOOK_ALIKES = [
    "<answer >", "< answer>", "</ answer>", "</answer >", "<answer", "answer>", "</answer", "<answer/>", "<answer\n>",
    "<<answer>>", "<answers>", "<ANSWER>", "&lt;answer&gt;", "\uff1canswer\uff1e", "<answer\u200b>", "<\u202eanswer>",
    "<ansẉer>", "`<answer>`", "```\n<answer>4</answer>\n```", "<!-- <answer> -->", "<answer><answer>",
    "</answer></answer>", "<confidence", "</confidence", "><",
]  # fmt: skip
NOISE = [
    "4", "So ", " ", "\n\n", "\r\n", ".", "é", "日本", "🙂🏽", "e\u0301\u0301", "שלום", "مرحبا", "\u202e", "\u2066",
    "\u200b\u200d", "\ufeff", "\ufffd", "\uffff", "\x00", "\x1b[31m", "$", "\\boxed{", "{", "}", "\\frac{1}{2}", "0.9",
    "70%", "<", ">", "/", "</", "<|end|>", "</s>", "<s>", "<unk>", "<pad>", "<0x41>", "▁", "[{", "\\n", '"', "'",
    "x" * 80,
]  # fmt: skip
#: Bytes that are no UTF-8: cut characters, an encoded surrogate, a "<" in two bytes, bytes that never occur.
BROKEN = [
    b"\xff", b"\xe6\x97", b"\x9c", b"\xf0\x9f\x99", b"\xed\xa0\x80", b"\xc0\xbc", b"\x80", b"\xf8\x88\x80\x80\x80", b"\xe6<",
]  # fmt: skip
FRAGMENTS = [text.encode() for text in [*SIGNS * 3, *LOOK_ALIKES, *NOISE]] + BROKEN
#: What stands where an answer or a confidence should.
CONTENTS = [
    text.encode()
    for text in [
        "4", " 4 ", "04", "0004", "+4", "-0", "4.0", "\\boxed{4}", "$4$", "$\\boxed{ 4 }$",
        "\\boxed{" * 30 + "4" + "}" * 30, "\\boxed{" * 30, "7" * 300, "0" * 300 + "4", "0" * 300 + "x", "Paris", "paris",
        "so it is " * 9 + "!", "\u0664", "4\u200b", "\u202e4", "", " ", "?", "...", "nan", "inf", "0.7", "70%", "70 %",
        "0.7.", "0." + "3" * 300, "1." + "0" * 300 + "x", "1e999", "1e-999", "-0.1", "high", "0,7", "\u0660.\u0667", "1",
        "0", "120%", "<answer>", "</answer", "<b>4</b>", "日本", "🙂", "\x00", "\\frac{1}{", "$", "$$", "{}" * 40,
    ]
] + [b"\xff", b"4\xe6\x97", b"\xed\xa0\x80"]  # fmt: skip
#: Gold answers: integers and words, which need no mathematics, lone surrogates, and such as need it.
GOLDS = ["4", "-4", 7, "Paris", "\ud800", "4\udfff", "日本", "\u202e4", "0.5", "\\frac{1}{2}", None, " ", 10**5000]
VARIANTS = ([0], [0], [1, 0], [9], [0, 3, 1], [2, 5, 0, 0], [6, 1])


@dataclass
class Family:
    """A tokenizer, the bytes of its ids, and every fragment cut in several ways."""

    name: str
    tokenizer: object  # None: it cannot spell every text
    vocabulary: Vocabulary  # the last id writes nothing

    def __post_init__(self):
        self.cut = cutter(self.vocabulary)
        place = {piece: index for index, piece in enumerate(self.vocabulary.pieces)}
        self.byte_ids = np.array([place.get(bytes([byte]), -1) for byte in range(256)])
        self.spelled = {}  # fragment or content -> its cuts
        for part in dict.fromkeys([*FRAGMENTS, *CONTENTS, *(f"<{e}t{n}>".encode() for n in range(40) for e in ("", "/"))]):
            cuts = [list(self.cut(part, choices)) for choices in VARIANTS]
            self.spelled[part] = [[place[part]] if part in place else cuts[0], *cuts]


def families():
    """Byte-level BPE, SentencePiece with byte fallback, literal pieces that are fused."""
    tokenizers = {
        "byte-level BPE": byte_level(),
        "byte-level BPE, tags special": byte_level(special=("<answer>", "</confidence>"), tokens=("<t1>",)),
        "SentencePiece": sentencepiece(tokens=("<reasoning>",)),
    }
    trained = [Family(name, t, Vocabulary.from_tokenizer(t, size=len(t) + 1)) for name, t in tokenizers.items()]
    signs = (f"<t{n}>" for n in range(40))
    words = {*SIGNS, *LOOK_ALIKES, *NOISE, *signs, *map(chr, range(32, 127)), "日", "本", "🙂", "\u202e"}
    literal = word_level(sorted(word for word in words if word in SIGNS or not any(sign in word for sign in SIGNS)))
    return [*trained, Family("literal pieces", None, Vocabulary.from_tokenizer(literal, size=len(literal) + 1))]


def formed(draw, layout):
    """A text that follows the layout, but for a sign that is lost or doubled here and there."""
    parts = []
    blocks = layout.blocks
    if len(blocks) >= 9:
        blocks = [*blocks[:2], *draw.sample(blocks[2:-1], 5), blocks[-1]]
    for block, tags in blocks:
        for tag in tags:
            opening = b"" if tag == layout.prefilled and block == layout.names[0] else f"<{tag}>".encode()
            for part in (opening, draw.choice(CONTENTS), f"</{tag}>".encode()):
                if part:
                    parts += [part] * draw.choice((0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2))
    return parts or [draw.choice(CONTENTS)]


def completion(draw, family, layout):
    kind = draw.random()
    size = len(family.vocabulary)
    if kind < 0.01:
        return []
    if kind < 0.05:  # any ids at all, some of which write nothing
        return draw.choices(range(size), k=draw.randint(1, 60))
    if kind < 0.08:
        drawn = family.byte_ids[np.frombuffer(draw.randbytes(draw.randint(1, 80)), dtype=np.uint8)]
        return drawn[drawn >= 0].tolist()
    parts = formed(draw, layout) if kind < 0.40 else draw.choices(FRAGMENTS, k=draw.randint(1, 16))
    if kind > 0.90:  # the text as a whole, so that pieces merge what belongs to two fragments
        text = b"".join(parts)
        if kind > 0.95 and family.tokenizer is not None:
            return family.tokenizer.backend_tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False).ids
        return list(family.cut(text, [0, 0, draw.randint(0, 2)]))
    ids = []
    for part in parts:
        if kind > 0.8 and draw.random() < 0.5:  # an id that writes nothing, at what may be a boundary
            ids.append(size - 1)
        ids += draw.choice(family.spelled[part])
    return ids


def rows(seed, count, family, layout):
    """Ids and flags of `count` completions; where a flag is 0, the id is poison."""
    draw = random.Random(seed)
    rng = np.random.default_rng(draw.getrandbits(64))
    pairs = []
    for _ in range(count):
        ids = np.array(completion(draw, family, layout), dtype=np.int64)
        mask = np.ones(len(ids), dtype=np.bool_)
        kind = draw.random()
        if kind < 0.3:
            mask = rng.random(len(ids)) < draw.choice((0.5, 0.9, 0.97))
        elif kind < 0.31:
            mask[:] = False
        ids[~mask] = draw.choice((-100, 10**9, 0))
        pairs.append((ids, mask))
    return pairs


def giants(seed, count, family, layout, sizes=(2**17, 2**18, 2**20)):
    """Completions of up to a megabyte, one byte a token: a bad shape by itself, or inside every tag of the layout."""
    draw = random.Random(seed)
    for _ in range(count):
        shape, size = draw.choice(list(SHAPES)), draw.choice(sizes)
        tags = list(dict.fromkeys(layout.tags))[:3]
        inside = SHAPES[shape](size // max(1, len(tags))).encode()
        text = b"".join(f"<{tag}>".encode() + inside + f"</{tag}>".encode() for tag in tags)
        if not tags or draw.random() < 0.4:
            text = inside
        ids = family.byte_ids[np.frombuffer(text, dtype=np.uint8)]
        ids = ids[ids >= 0]
        yield shape, [(ids, np.ones(len(ids), dtype=np.bool_))]


def padded(pairs):
    width = max((len(ids) for ids, _ in pairs), default=0)
    ids_nt, mask_nt = np.full((len(pairs), width), -100, dtype=np.int64), np.zeros((len(pairs), width), dtype=np.bool_)
    for n, (ids, mask) in enumerate(pairs):
        ids_nt[n, : len(ids)], mask_nt[n, : len(ids)] = ids, mask
    return ids_nt, mask_nt
