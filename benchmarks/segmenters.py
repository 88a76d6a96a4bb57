"""Speed of every segmenter, one core: token ids to blocks and texts, on text like a model's.

    python benchmarks/segmenters.py [--tokens 1000000] [--repeats 3] [--only json,steps]

For completions of about 500 and of about 2000 tokens it prints millions of tokens per second, how many times longer that takes
than joining the bytes of the tokens (no segmenter can do less) and than `tags`, and the exponent with which time grows when
completions are twice as long (1: linear).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np
import torch

from spanwise import Layout, Vocabulary
from spanwise.segment import find_blocks

WORDS = [
    "the", "sum", "of", "two", "and", "three", "is", "so", "we", "add", "them", "then", "it", "holds", "for", "all", "n", "hence",
    "by", "step", "this", "price", "item",
]  # fmt: skip
#: Signs that a chat tokenizer has as tokens.
SIGNS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>")
Writer = Callable[[np.random.Generator, int], str]


def prose(rng: np.random.Generator, words: int) -> str:
    """Sentences of about twelve words, lines of about two sentences."""
    parts = []
    for start in range(0, max(words, 1), 12):
        sentence = " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), min(12, max(words - start, 1))))
        parts.append(sentence.capitalize() + (".\n" if start % 24 else ". "))
    return "".join(parts)


def tagged(rng: np.random.Generator, words: int) -> str:
    """Four tags of the paper's layout."""
    quarter = words // 4
    names = ("reasoning", "answer", "analysis", "confidence")
    return "".join(f"<{name}>{prose(rng, quarter)}</{name}>\n" for name in names)


def chat(rng: np.random.Generator, words: int) -> str:
    """Reasoning, two calls, an answer."""
    half = words // 2
    calls = "".join(f"<tool_call>{prose(rng, 20)}</tool_call>\n" for _ in range(2))
    return f"<think>{prose(rng, half)}</think>\n\n{calls}{prose(rng, half - 40)}<|im_end|>"


def listed(rng: np.random.Generator, words: int) -> str:
    """A numbered step of about forty words at a time."""
    return "".join(f"{n + 1}. {prose(rng, 40)}\n" for n in range(max(words // 40, 1)))


def fields(rng: np.random.Generator, words: int) -> str:
    """An object with a name, a list of items of about ten tokens each, and a note."""
    items = ", ".join(f'{{"name": "{WORDS[n % 20]}", "price": {n}.5}}' for n in range(max(words // 25, 1)))
    return f'Sure.\n{{"name": "{prose(rng, 10).strip()!r}", "items": [{items}], "note": "{" ".join(WORDS[:10])}"}}'


def coded(rng: np.random.Generator, words: int) -> str:
    """A sentence, and a fence of functions of about thirty words each."""
    functions = "".join(
        f"def step{n}(price, item):\n    sum = price + item\n    for n in item:\n        sum = sum + n\n    return sum\n\n"
        for n in range(max(words // 30, 1))
    )
    return f"{prose(rng, 12)}\n```python\n{functions}```\n{prose(rng, 12)}"


def headed(rng: np.random.Generator, words: int) -> str:
    """A section of about sixty words at a time."""
    return "".join(f"## Step {n}\n{prose(rng, 60)}\n" for n in range(max(words // 60, 1)))


def cases() -> dict[str, tuple[Layout, Writer]]:
    """Layouts with a realistic number of parts, and what writes their completions."""
    four = {"solution": ["reasoning", "answer"], "confidence": ["analysis", "confidence"]}
    pairs = {"thinking": "delimiters:<think>...</think>", "call[*]": "delimiters:<tool_call>...</tool_call>", "rest": []}
    patterns = {"price[*]": "regex:price (?P<value>[a-z]+)", "rest": []}
    return {
        "tags": (Layout(four), tagged),
        "json": (Layout(["name", "items[*].price", "note"], segmenter="json", most=16), fields),
        "code": (Layout({"function[*]": "python.function", "rest": []}, segmenter="code", most=64), coded),
        "fences": (Layout({"code": "fence", "rest": []}, segmenter="code"), coded),
        "markdown": (Layout({"section[*]": "section"}, segmenter="markdown", most=64), headed),
        "delimiters": (Layout(pairs, most=4), chat),
        "channels": (Layout(["reasoning", "tool_call[*]", "answer"], segmenter="channels", most=4), chat),
        "regex": (Layout(patterns, most=32), prose),
        "lines": (Layout(["line[*]"], segmenter="lines", most=128), prose),
        "paragraphs": (Layout(["paragraph[*]"], segmenter="paragraphs", most=128), listed),
        "sentences": (Layout(["sentence[*]"], segmenter="sentences", most=256), prose),
        "steps": (Layout(["step[*]"], segmenter="steps", most=64), listed),
        "fixed": (Layout({"chunk[*]": "fixed:32"}, most=64), prose),
        "cuts": (Layout({"segment[*]": "cuts:5"}, most=64), prose),
        "low_probability": (Layout({"segment[*]": "low_probability:0.2"}, most=128), prose),
        "turns": (Layout(["turn[*]"], segmenter="turns", most=8), prose),
    }


class Batch:
    """Completions of about as many tokens, most of them a word or a piece of punctuation."""

    def __init__(self, write: Writer, tokens: int, total: int) -> None:
        rng = np.random.default_rng(0)
        pieces = [bytes([byte]) for byte in range(256)] + [" " + word for word in WORDS] + list(SIGNS)
        written = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
        added = frozenset(n for n, piece in enumerate(pieces) if piece in SIGNS)
        self.vocabulary = Vocabulary(tuple(written), added)
        by_size = sorted((piece, n) for n, piece in enumerate(written) if len(piece) > 1)
        rows = []
        for _ in range(max(total // tokens, 1)):
            rows.append(_encoded(write(rng, tokens).encode(), by_size))
        width = max(map(len, rows))
        self.ids_nt = torch.zeros(len(rows), width, dtype=torch.int64)
        self.mask_nt = torch.zeros(len(rows), width, dtype=torch.bool)
        for n, row in enumerate(rows):
            self.ids_nt[n, : len(row)] = torch.tensor(row)
            self.mask_nt[n, : len(row)] = True
        for place in (0.3, 0.6, 0.8):  # tool output
            at = int(place * width)
            self.mask_nt[:, at : at + 4] = False
        self.logp_nt = torch.from_numpy(-(rng.exponential(0.35, self.ids_nt.shape) ** 2)).float()
        self.tokens = int(self.mask_nt.sum())

    def floor(self) -> None:
        """Join the bytes of all tokens, in the portions in which `find_blocks` does."""
        self.vocabulary.join(self.ids_nt[self.mask_nt].numpy())


def _encoded(text: bytes, pieces: list[tuple[bytes, int]]) -> list[int]:
    by_first: dict[int, list[tuple[bytes, int]]] = {}
    for piece, n in reversed(pieces):
        by_first.setdefault(piece[0], []).append((piece, n))
    ids, at = [], 0
    while at < len(text):
        piece, n = next(
            ((p, n) for p, n in by_first.get(text[at], ()) if text.startswith(p, at)), (text[at : at + 1], text[at])
        )
        ids.append(n)
        at += len(piece)
    return ids


def seconds(run: Callable[[], object], repeats: int) -> float:
    """The fastest of some runs, in processor time."""
    best = math.inf
    for _ in range(repeats):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {name: case for name, case in cases().items() if not options.only or name in options.only.split(",")}
    per_token: dict[tuple[str, int], float] = {}
    print(
        f"{'segmenter':16s} {'tokens':>6s} {'M tokens/s':>10s} {'x floor':>8s} {'x tags':>7s} {'blocks':>7s} {'growth':>7s}"
    )
    batches: dict[tuple[Writer, int], Batch] = {}
    for name, (layout, write) in chosen.items():
        for size in (500, 1000, 2000):
            if (write, size) not in batches:
                batches[write, size] = Batch(write, size, options.tokens)
            batch = batches[write, size]
            covered = 0.0

            def run(layout: Layout = layout, batch: Batch = batch) -> None:
                nonlocal covered
                spans, _ = find_blocks(
                    batch.ids_nt, batch.mask_nt, layout=layout, vocabulary=batch.vocabulary, logp_nt=batch.logp_nt
                )
                covered = float(spans.present_nk.sum()) / len(batch.ids_nt)

            per_token[name, size] = seconds(run, options.repeats) / batch.tokens
            if size == 1000:
                continue
            floor = seconds(batch.floor, options.repeats) / batch.tokens
            tags = per_token.get(("tags", size))
            beside = f"{per_token[name, size] / tags:7.1f}" if tags else f"{'-':>7s}"
            grown = "" if size == 500 else f"{1 + math.log2(per_token[name, 2000] / per_token[name, 1000]):7.2f}"
            print(
                f"{name:16s} {size:6d} {1e-6 / per_token[name, size]:10.1f} {per_token[name, size] / floor:8.1f} {beside} "
                f"{covered:7.1f} {grown}",
                flush=True,
            )


if __name__ == "__main__":
    main()
