"""Every other segmenter on hostile completions: soups of what it looks for, cut, masked and poisoned as `hostile.rows` does it."""

import random
from functools import cache

import numpy as np
import torch
from checks import deletion, partition
from hostile import BROKEN, NOISE, Family, padded

from json_oracle import slow_json
from oracles import owners_of_tokens
from segmenter_oracles import ORACLES, Case, claimed
from spanwise import Layout, Vocabulary
from spanwise.segment import SEGMENTERS, find_blocks
from spanwise.types import Fault, whole_text
from tokenizers_small import byte_level

#: The signs of all families of chat models, and what stands between them.
CHAT = [
    *["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"] * 2, "[THINK]", "[/THINK]", "[TOOL_CALLS]", "</s>",
    "<minimax:tool_call>", "</minimax:tool_call>", "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁call▁begin\uff5c>",
    "<\uff5ctool▁call▁end\uff5c>", "<\uff5ctool▁calls▁end\uff5c>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|python_tag|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "assistant", "<|start|>", "<|channel|>",
    "<|message|>", "<|end|>", "<|return|>", "analysis", " to=f ", "final", "\n", " ", "4",
    "<|start|>assistant<|channel|>analysis<|message|>", "<|channel|>final<|message|>",
]  # fmt: skip
#: Name -> layouts, and what its completions are made of beside noise.
SOUPS = {
    "json": (
        [
            Layout(["a", "items[*].price"], segmenter="json", most=2),
            Layout({"a": "json:a.a", "rest": [], "x": "json:items[*]"}),
        ],
        ["{", "}", "[", "]", ",", ":", '"', "\\", '"a":', '"items": [', '{"price": 3},', '{"a": 1}', '"é\\n"',
         "null", '{"a": [1]}'],
    ),
    "code": (
        [
            Layout({"f[*]": "code:python.function", "c": "code:fence", "rest": []}, most=2),
            Layout({"s": "code:python.statement[*]", "d": "code:python.docstring[*]"}),
        ],
        ["```python\n", "```\n", "~~~\n", "def f(x):\n    return x\n", "class A:\n", "    ", "x = (", '"""', "'", "@d\n",
         "\\\n", "async "],
    ),
    "markdown": (
        [Layout(["section[*]"], segmenter="markdown", most=3), Layout({"p": "markdown:Plan", "a": "markdown:Answer", "rest": []})],
        ["# Plan\n", "## Answer\n", "\n# ", "\n#", "```\n", "~~~", "    # Plan\n", "###### Plan ######\n", "\r\n"],
    ),
    "delimiters": (
        [
            Layout({"t": "delimiters:<answer>...</answer>", "r": "delimiters:Answer:...", "rest": []}),
            Layout({"t[*]": "delimiters:[[...]]"}, most=2),
        ],
        ["<answer>", "</answer>", "Answer:", "[[", "]]", "[", "]"],
    ),
    "channels": (
        [
            Layout(["reasoning", "tool_call[*]", "answer"], segmenter="channels", most=2),
            Layout(["reasoning", "tool_call", "answer"], segmenter="channels", prefilled="reasoning"),
            Layout({"r[*]": "channels:reasoning[*]", "a": "channels:answer", "rest": []}, most=2),
        ],
        CHAT,
    ),
    "regex": (
        [
            Layout({"n": r"regex:[0-9]+", "w": r"regex:a=(?P<value>\w*)", "rest": []}),
            Layout({"n[*]": r"regex:(?s)<.*?>"}, most=2),
        ],
        ["12", "a=b", "a=", "<", ">", "0.9"],
    ),
    **{
        name: ([Layout({"u[*]": f"{name}:"}, most=3), Layout({"u[*]": f"{name}:", "rest": []}, most=2)], words)
        for name, words in {
            "lines": ["\n", "\r\n", " \n", "x", "\n  x", "\x0c"],
            "paragraphs": ["\n\n", "\n \n", "\n", "x", "\n  x", "\x0c"],
            "sentences": [". ", "Dr. ", "! A", "? \"", "…", "。", "\n\n", "1. x", "\n", ".", "No", "\n     12", "     "],
            "steps": ["\n1.", "**", "#", " ", "9", "STEP 1", "\nStep 2 ", "\n**Step 3**", "\n2) ", "\n## Step 4", "    1. "],
        }.items()
    },
    "fixed": ([Layout({"u[*]": "fixed:3"}, most=3), Layout({"u[*]": "fixed:2", "rest": []}, most=2)], ["x"]),
    "cuts": ([Layout({"u[*]": "cuts:2"}, most=3), Layout({"u[*]": "cuts:3@0.3", "rest": []}, most=2)], ["x"]),
    "low_probability": (
        [Layout({"u[*]": "low_probability:0.2"}, most=3), Layout({"u[*]": "low_probability:0.6", "rest": []}, most=2)],
        ["x"],
    ),
    "turns": ([Layout({"u[*]": "turns:"}, most=3), Layout({"u[*]": "turns:", "rest": []}, most=2)], ["x"]),
    "mixed": (
        [Layout({"t": "answer", "a": "json:a", "s[*]": "markdown:section", "rest": []}, most=2)],
        ["<answer>", "</answer>", '{"a": 1}', '{"a":', "\n# A\n", "# B"],
    ),
}  # fmt: skip


def read_by(families, name):
    """The families of tokenizers for a segmenter: three, and for what looks for signs one that has tokens of its own for them."""
    chosen = [families[0], families[2], families[3]]
    return [*chosen, _with_signs()] if name in ("channels", "delimiters") else chosen


@cache
def _with_signs():
    signs = [word for word in dict.fromkeys([*CHAT, "<answer>", "]]"]) if word[:1] in "<[]" and word.count(">") < 2]
    tokenizer = byte_level(special=tuple(signs[::2]), tokens=tuple(signs[1::2]))
    return Family("byte-level BPE, signs added", tokenizer, Vocabulary.from_tokenizer(tokenizer, size=len(tokenizer) + 1))


def rows(seed, count, family, words):
    """Ids and flags of `count` completions of these words; where a flag is 0, the id is poison."""
    draw = random.Random(seed)
    rng = np.random.default_rng(draw.getrandbits(64))
    parts = [word.encode() for word in [*words * 6, *NOISE]] + BROKEN
    spelled = [[list(family.cut(part, choices)) for choices in ([0], [9], [1, 0])] for part in parts]
    pairs = []
    for _ in range(count):
        ids = [i for cuts in draw.choices(spelled, k=draw.randint(0, 16)) for i in draw.choice(cuts)]
        if draw.random() < 0.1:
            ids.insert(draw.randint(0, len(ids)), len(family.vocabulary) - 1)  # an id that writes nothing
        ids = np.array(ids, dtype=np.int64)
        mask = rng.random(len(ids)) < 0.9 if draw.random() < 0.3 else np.ones(len(ids), dtype=np.bool_)
        ids[~mask] = draw.choice((-100, 10**9, 0))
        pairs.append((ids, mask))
    return pairs


def check(layout, family, pairs, *, sample=4):
    """Segment a batch: tokens and texts are a partition, masked tokens are as deleted, JSON is where the oracle sees it."""
    ids_nt, mask_nt = map(torch.from_numpy, padded(pairs))
    vocabulary = family.vocabulary
    options = {"layout": layout, "vocabulary": vocabulary}
    logp = any(SEGMENTERS.find(name).reads_logp for name in layout.segmenters)

    def run(ids, mask):
        extra = {"logp_nt": -(torch.where(mask, ids, 0) % 7).double() / 3} if logp else {}
        return find_blocks(ids, mask, **options, **extra)

    spans, texts = run(ids_nt, mask_nt)
    block = spans.block_nt
    partition(spans, mask_nt.numpy(), in_order=False)
    for n, (ids, mask) in enumerate(pairs):
        block_t = block[n, : len(mask)].tolist()
        data = b"".join(map(vocabulary.pieces.__getitem__, ids[mask].tolist()))
        fault = Fault(int(spans.fault_n[n]))
        assert (fault == Fault.EMPTY) == (not mask.any())
        for name, length in zip(layout.names, spans.length_nk[n].tolist(), strict=True):
            assert (texts[n][name] is None) == (not length), data
        if not fault & (Fault.STRADDLED | Fault.EMPTY):
            expected = data.decode(errors="replace")
            for joined in (whole_text(texts[n]), "".join(block[""] for block in texts[n].values() if block is not None)):
                if "\ufffd" not in joined + expected:  # a block in pieces may join halves of characters
                    assert sorted(joined) == sorted(expected), data
        if n < sample and layout.segmenters != ("turns",):  # to which masked tokens are not as if deleted
            deletion(run, (ids, mask), spans, texts, n)
        if data and (layout.segmenters[0] in ORACLES or layout.segmenters == ("json",)):
            case = Case(
                layout, [vocabulary.pieces[i] for i in ids[mask].tolist()], [i in vocabulary.added for i in ids[mask].tolist()],
                frozenset(vocabulary.pieces[index] for index in vocabulary.added), (-(ids[mask] % 7) / 3).tolist(),
                np.flatnonzero(mask).tolist(),
            )  # fmt: skip
            by_oracle(case, block_t, texts[n], fault)
    return int(mask_nt.sum()), int((spans.fault_n != 0).sum())


def by_oracle(case, block_t, text, fault):
    """Compare byte by byte: a byte is of its innermost claim; without a rest, of the last claim begun, or of the first."""
    layout, data = case.layout, case.data
    name = layout.segmenters[0]
    claims, wrong = slow_json(data, layout) if name == "json" else claimed(case, name)
    first = claims[0][0].block if claims else 0
    owner = [first if layout.rest is None else layout.rest] * len(data)
    for part, start, stop, _ in claims:
        for at in range(start, len(data) if layout.rest is None else stop):
            owner[at] = part.block
    owners = owners_of_tokens(case.tokens, owner)
    assert [k for k in block_t if k >= 0] == owners, (case.tokens, owners)
    claimed_parts = {part for part, *_ in claims}
    wrong |= Fault.MISSING if any(part not in claimed_parts for part in layout.parts if not part.index) else 0
    wrong |= Fault.STRADDLED if set(owner) - set(owners) else 0
    assert fault == Fault(wrong), (case.tokens, fault, Fault(wrong))
    for part in layout.parts:
        texts = [inner for claimed, _, _, inner in claims if claimed is part and inner is not None]
        if text[layout.names[part.block]] is not None:
            expected = texts[-1].decode(errors="replace") if texts else None
            assert text[layout.names[part.block]][part.key] == expected, (case.tokens, expected)
