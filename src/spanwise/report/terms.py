"""Words of a page that the glossary explains: marked where they stand, and listed at its end for paper and for no script."""

from __future__ import annotations

import re
from functools import cache

from markupsafe import Markup, escape

from spanwise.report.glossary import GLOSSARY

#: Terms that are also everyday words, or names of arms and baselines: where they are meant, a sentence says so.
EVERYDAY = ("given", "outcome", "group", "step", "turn", "spread")


class Terms:
    """The terms of one page, as they are met.

    Attributes:
        met: term -> sentence, of those that were marked so far, in the order of the glossary.

    Example:
        >>> terms = Terms()
        >>> print(terms.marked("a < b"), str(terms.marked("The ECE is small.")).count("data-says"))
        a &lt; b 1
        >>> list(terms.met)
        ['ECE']
    """

    def __init__(self) -> None:
        self._met: set[str] = set()

    @property
    def met(self) -> dict[str, str]:
        """The terms that stand on the page."""
        return {term: said for term, said in GLOSSARY.items() if term in self._met}

    def marked(self, text: str) -> Markup:
        """Text with the first mention of each term in it as an element that says what it is."""
        here: set[str] = set()
        parts, end = [], 0
        for match in _pattern().finditer(text):
            term = _by_lower()[match["term"].lower()]
            if term in here:
                continue
            here.add(term)
            parts += [escape(text[end : match.start()]), _element(match[0], GLOSSARY[term])]
            end = match.end()
        self._met |= here
        return Markup("").join([*parts, escape(text[end:])])


def _element(word: str, said: str) -> Markup:
    return Markup('<span class="term" tabindex="0" data-says="{}">{}</span>').format(said, word)


@cache
def _by_lower() -> dict[str, str]:
    return {term.lower(): term for term in GLOSSARY if term not in EVERYDAY}


@cache
def _pattern() -> re.Pattern[str]:
    """The longest term first; a plural is the term too. A name with a dash or a dot around it is another word."""
    words = "|".join(re.escape(term) for term in sorted(_by_lower().values(), key=len, reverse=True))
    return re.compile(rf"(?<![\w./-])(?P<term>{words})s?(?![\w/-])", re.IGNORECASE)
