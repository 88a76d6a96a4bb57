"""The words of the reports: the sections' questions and the glossary (`static/words.yaml`), whose terms are marked in the text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import yaml
from markupsafe import Markup, escape

_WRITTEN = yaml.safe_load(files("spanwise.report").joinpath("static", "words.yaml").read_text(encoding="utf-8"))
#: Title of a section -> the question that it `asks`, its `text`, and maybe its `charts` of training batches.
SECTIONS: Mapping[str, Mapping[str, Any]] = _WRITTEN["sections"]
#: What is said behind the text of a section, where there is reason to.
NOTES: Mapping[str, str] = _WRITTEN["notes"]
#: Figures of an evaluation, and ways of voting: how they are called.
FIGURES: Mapping[str, str] = _WRITTEN["figures"]
WAYS: Mapping[str, str] = _WRITTEN["ways"]
#: Term -> what it means.
GLOSSARY: Mapping[str, str] = _WRITTEN["glossary"]

_TERMS = {term.lower(): term for term in GLOSSARY if term not in _WRITTEN["everyday"]}
#: The longest term first; a plural is the term too. A name with a dash or a dot around it is another word.
_WORDS = "|".join(re.escape(term) for term in sorted(_TERMS, key=len, reverse=True))
_PATTERN = re.compile(rf"(?<![\w./-])(?P<term>{_WORDS})s?(?![\w/-])", re.IGNORECASE)


class Terms:
    """The glossary terms that one page has used so far.

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
        self.met: dict[str, str] = {}

    def marked(self, text: str) -> Markup:
        """Wrap the first mention of each term in an element that explains it."""
        here: set[str] = set()

        def element(match: re.Match[str]) -> str:
            term = _TERMS[match["term"].lower()]
            if term in here:
                return match[0]
            here.add(term)
            return Markup('<span class="term" tabindex="0" data-says="{}">{}</span>').format(GLOSSARY[term], match[0])

        html = _PATTERN.sub(element, str(escape(text)))
        self.met = {term: says for term, says in GLOSSARY.items() if term in here or term in self.met}
        return Markup(html)
