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
#: Sentences behind the text of a section, each under a condition.
NOTES: Mapping[str, str] = _WRITTEN["notes"]
#: The names of evaluation figures and of ways of voting.
FIGURES: Mapping[str, str] = _WRITTEN["figures"]
WAYS: Mapping[str, str] = _WRITTEN["ways"]
#: How credit and a token's share go together, and what GRPO calls an advantage.
SHARING: str = _WRITTEN["sharing"]
#: Term -> its meaning.
GLOSSARY: Mapping[str, str] = _WRITTEN["glossary"]

_TERMS = {term.lower(): term for term in GLOSSARY if term not in _WRITTEN["everyday"]}
#: Matches the longest term first, also in the plural; a name with a dash or a dot around it is another word.
_WORDS = "|".join(re.escape(term) for term in sorted(_TERMS, key=len, reverse=True))
_PATTERN = re.compile(rf"(?<![\w./-])(?P<term>{_WORDS})s?(?![\w/-])", re.IGNORECASE)


class Terms:
    """The glossary terms that one page has used so far."""

    def __init__(self) -> None:
        self.met: dict[str, str] = {}  # term -> sentence, of the terms used so far, in the order of the glossary

    def marked(self, text: str) -> Markup:
        """Wrap the first mention of each term in an element that explains it."""
        used_terms: set[str] = set()

        def element(match: re.Match[str]) -> str:
            term = _TERMS[match["term"].lower()]
            if term in used_terms:
                return match[0]
            used_terms.add(term)
            return Markup('<span class="term" tabindex="0" data-says="{}">{}</span>').format(GLOSSARY[term], match[0])

        html = _PATTERN.sub(element, str(escape(text)))
        self.met = {term: meaning for term, meaning in GLOSSARY.items() if term in used_terms or term in self.met}
        return Markup(html)
