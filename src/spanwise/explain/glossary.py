"""The words of the reports, each in one plain sentence: marked where they stand, and listed at the end for paper and no script."""

from __future__ import annotations

import re
from collections.abc import Mapping

from markupsafe import Markup, escape

#: Term -> what it means. Terms are in lower case where a sentence would have them so.
GLOSSARY: Mapping[str, str] = {
    "block": "A named part of a completion, such as its solution or its confidence.",
    "objective": "One reward, the blocks that it pays, and the baseline that it is compared with.",
    "baseline": "What a reward is compared with; credit is what the reward has above or below it.",
    "given": "The outcomes that a baseline may know, so that only completions with the same outcome are compared.",
    "outcome": "A fact about what was written before a block, such as whether the answer is right.",
    "stratum": "The completions that are compared with each other: those that share what the baseline is given.",
    "group": "The completions that were sampled for one prompt.",
    "credit": "What a block of a completion is praised or blamed with: above 0 it becomes more likely, below 0 less.",
    "advantage": "The number that a trainer multiplies a token's log-probability ratio with.",
    "spread": "The step that turns the credit of a block into an advantage for each of its tokens.",
    "stop credit": "What leaving out every block that an objective pays is credited with; the last token carries it.",
    "step": "One step of training, with all the completions that were generated in it.",
    "turn": "One reply of a model within a conversation, or one action of an agent.",
    "trajectory": "All turns of one conversation or episode, which has one vote however many turns it takes.",
    "refusal rate": "The share of completions that say they do not know instead of answering.",
    "ECE": "Expected calibration error: how far stated confidence and accuracy lie apart, on average over bins of confidence.",
    "Brier": "The mean squared distance between a stated confidence and what came true, 1 or 0; lower is better.",
    "AUROC": "How often a right answer states more confidence than a wrong one; 0.5 is chance and 1 is perfect.",
    "interval": "The range that holds the true value in 95 of 100 repetitions, as far as the samples tell.",
    "paired difference": "The mean of the differences seed by seed, which is steadier than the difference of two means.",
    "no signal": "Nothing in the completion gets any credit, so it teaches nothing in this step.",
    "singleton": "A completion that has nobody to be compared with; its credit is exactly 0.",
    "fidelity": "How close estimated credit comes to credit that was measured by sampling again many times.",
    "token share": "The part of a block's credit that one of its tokens carries; a mean over the block divides by its tokens.",
}
#: Terms that are also everyday words, or names of arms and baselines: where they are meant, a sentence says so.
EVERYDAY = ("given", "outcome", "group", "step", "turn", "spread")

_TERMS = {term.lower(): term for term in GLOSSARY if term not in EVERYDAY}
#: The longest term first; a plural is the term too. A name with a dash or a dot around it is another word.
_WORDS = "|".join(re.escape(term) for term in sorted(_TERMS, key=len, reverse=True))
_PATTERN = re.compile(rf"(?<![\w./-])(?P<term>{_WORDS})s?(?![\w/-])", re.IGNORECASE)


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
        self.met: dict[str, str] = {}

    def marked(self, text: str) -> Markup:
        """Text with the first mention of each term in it as an element that says what it is."""
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
