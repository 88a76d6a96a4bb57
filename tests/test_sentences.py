"""The pages are read by people: sentences are short, and short on average."""

import re

import pytest

from pages import PAGES, page_id

LONGEST, MEAN = 35, 16

FENCE = re.compile(r"^(```+|~~~+).*?^\1", re.MULTILINE | re.DOTALL)
#: A line of a table, a heading, an image, HTML, a directive.
NOT_PROSE = re.compile(r"\s*(\||#|!\[|<|:::)")
#: Between paragraphs, and before an item of a list.
APART = re.compile(r"\n\s*(?:[-*]|\d+\.)\s|\n\s*\n")
ENDS = re.compile(r"(?<=[.!?:])\s+(?=[A-Z\[*(`])")


def sentences(text):
    """Yield the sentences of a page; code counts as one word, and a link is its text."""
    lines = [line for line in FENCE.sub("", text).splitlines() if not NOT_PROSE.match(line)]
    for paragraph in APART.split("\n" + "\n".join(lines)):
        flat = re.sub(r"`[^`]*`", "`code`", " ".join(paragraph.split()))
        flat = re.sub(r"\]\([^)]*\)", "]", flat)
        yield from (sentence for sentence in ENDS.split(flat) if len(sentence.split()) > 2)


def lengths(page):
    return [len(sentence.split()) for sentence in sentences(page.read_text(encoding="utf-8"))]


def test_what_a_sentence_is():
    page = """# A heading is none

One two three. Four five
six: (seven eight nine). `a b c` is *one* word.

- an item [of a list](a/long/target.md) here
- another one here

| a | table |
```python
code = "is. None of it."
```
![An image](image.png)
"""
    assert [len(sentence.split()) for sentence in sentences(page)] == [3, 3, 3, 4, 6, 3]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_no_sentence_is_long(page):
    long = [sentence for sentence in sentences(page.read_text(encoding="utf-8")) if len(sentence.split()) > LONGEST]
    assert not long, "\n".join(f"{len(sentence.split())} words: {sentence}" for sentence in long)


def test_sentences_are_short_on_average():
    counts = [length for page in PAGES for length in lengths(page)]
    means = {page.name: sum(lengths(page)) / max(len(lengths(page)), 1) for page in PAGES}
    worst = ", ".join(f"{name} {mean:.1f}" for name, mean in sorted(means.items(), key=lambda item: -item[1])[:5])
    assert sum(counts) / len(counts) < MEAN, f"{sum(counts) / len(counts):.1f} words a sentence; the longest: {worst}"
