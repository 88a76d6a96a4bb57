"""The pages are read by people: sentences are short, and short on average."""

import re
from itertools import chain

import pytest

from pages import PAGES, page_id

LONGEST, MEAN = 35, 16

FENCE = re.compile(r"^(```+|~~~+).*?^\1", re.MULTILINE | re.DOTALL)
#: A line of a table, a heading, an image, HTML, a directive.
NOT_PROSE = re.compile(r"\s*(\||#|!\[|<|:::)")
#: Between paragraphs, and before an item of a list.
APART = re.compile(r"\n\s*(?:[-*]|\d+\.)\s|\n\s*\n")
ENDS = re.compile(r"(?<=[.!?:])\s+(?=[A-Z\[*(`])")


def sentences(page):
    """Yield the sentences of a page; code counts as one word, and a link is its text."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if not NOT_PROSE.match(line)]
    for paragraph in APART.split("\n" + "\n".join(lines)):
        flat = re.sub(r"`[^`]*`", "`code`", " ".join(paragraph.split()))
        flat = re.sub(r"\]\([^)]*\)", "]", flat)
        yield from (sentence for sentence in ENDS.split(flat) if len(sentence.split()) > 2)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_no_sentence_is_long(page):
    long = [sentence for sentence in sentences(page) if len(sentence.split()) > LONGEST]
    assert not long, "\n".join(f"{len(sentence.split())} words: {sentence}" for sentence in long)


def test_sentences_are_short_on_average():
    counts_of_page = {page: [len(sentence.split()) for sentence in sentences(page)] for page in PAGES}
    counts = list(chain.from_iterable(counts_of_page.values()))
    means = {page_id(page): sum(counts) / max(len(counts), 1) for page, counts in counts_of_page.items()}
    worst = ", ".join(f"{name} {mean:.1f}" for name, mean in sorted(means.items(), key=lambda item: -item[1])[:5])
    assert sum(counts) / len(counts) < MEAN, f"{sum(counts) / len(counts):.1f} words a sentence; the longest: {worst}"
