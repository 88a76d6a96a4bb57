"""Load the texts of report pages from `static/words.yaml`, and mark glossary terms in a text."""

import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import yaml
from markupsafe import Markup, escape

_WRITTEN = yaml.safe_load(files("spanwise.report").joinpath("static", "words.yaml").read_text(encoding="utf-8"))
SECTIONS: Mapping[str, Mapping[str, Any]] = _WRITTEN["sections"]  # the texts of each section, by title
NOTES: Mapping[str, str] = _WRITTEN["notes"]
FIGURES: Mapping[str, str] = _WRITTEN["figures"]
WAYS: Mapping[str, str] = _WRITTEN["ways"]
GLOSSARY: Mapping[str, str] = _WRITTEN["glossary"]

_TERMS = {term.lower(): term for term in GLOSSARY if term not in _WRITTEN["everyday"]}
# Longer terms come first, because the first alternative that matches wins.
_ALTERNATIVES = "|".join(re.escape(term) for term in sorted(_TERMS, key=len, reverse=True))
#: Matches a glossary term, also in the plural, but not inside a name.
_PATTERN = re.compile(rf"(?<![\w./-])(?P<term>{_ALTERNATIVES})s?(?![\w/-])", re.IGNORECASE)


class Terms:
    """The glossary terms that a page has used so far, for the list at its end."""

    def __init__(self) -> None:
        self.met: dict[str, str] = {}  # maps each glossary term that the page has used to its meaning

    def marked(self, text: str) -> Markup:
        """Wrap the first mention of each glossary term in an HTML element that explains the term."""
        used_terms: set[str] = set()

        def explain(match: re.Match[str]) -> str:
            term = _TERMS[match["term"].lower()]
            if term in used_terms:
                return match[0]
            used_terms.add(term)
            return Markup('<span class="term" tabindex="0" data-says="{}">{}</span>').format(GLOSSARY[term], match[0])

        marked_html = _PATTERN.sub(explain, str(escape(text)))
        self.met = {term: meaning for term, meaning in GLOSSARY.items() if term in used_terms or term in self.met}
        return Markup(marked_html)
