"""The words of the reports, each in one plain sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


def explained(terms: Iterable[str] | None = None) -> dict[str, str]:
    """The sentences of some terms, in the order of the glossary; None: of all.

    >>> list(explained(["group", "block"]))
    ['block', 'group']
    """
    wanted = set(GLOSSARY) if terms is None else set(terms)
    return {term: meaning for term, meaning in GLOSSARY.items() if term in wanted}
