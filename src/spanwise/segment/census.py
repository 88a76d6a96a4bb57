"""`census`: which tags completions really open, beside those that a layout asks for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

_TAG = re.compile(r"<([A-Za-z_][\w.-]*)>")
#: Special tokens of tokenizers that look like tags.
_SPECIAL = frozenset(("bos", "eos", "mask", "pad", "s", "unk"))


@dataclass(frozen=True)
class Census:
    """In how many completions each tag opens.

    Attributes:
        size: completions that were looked at.
        wanted: tag of the layout -> completions that open it, in the layout's order.
        others: any other tag -> completions that open it, the most frequent first; special tokens (`<eos>`) are none.
    """

    size: int
    wanted: Mapping[str, int]
    others: Mapping[str, int]

    @property
    def lacking(self) -> tuple[str, ...]:
        """The tags of the layout that fewer than one completion in a hundred opens."""
        return tuple(tag for tag, held in self.wanted.items() if held * 100 < self.size)

    @property
    def sentence(self) -> str:
        """What is lacking and what is there instead; empty if nothing is lacking.

        >>> census(["<plan>go</plan>"] * 3, ["answer", "plan"]).sentence
        '<answer> is in 0 of 3 completions; they do contain <plan> (3).'
        """
        if not self.lacking:
            return ""
        lack = " and ".join(f"<{tag}> is in {self.wanted[tag]}" for tag in self.lacking)
        known = {tag: held for tag, held in self.wanted.items() if tag not in self.lacking}
        seen = list({**known, **self.others}.items())
        there = ", ".join(f"<{tag:.40}> ({held})" for tag, held in seen[:6]) + (", ..." if len(seen) > 6 else "")
        return f"{lack} of {self.size} completions; " + (
            f"they do contain {there}." if seen else "they contain no tags at all."
        )


def census(texts: Iterable[str], tags: Collection[str], *, prefilled: str | None = None) -> Census:
    """Count the completions that open each tag.

    Args:
        texts: what was sampled.
        tags: those that a layout asks for.
        prefilled: the tag that prompts opened already: every completion has it.

    Example:
        >>> found = census(["<answer>4</answer>", "<plan>add<answer>5"], ["answer", "confidence"])
        >>> dict(found.wanted), dict(found.others), found.lacking
        ({'answer': 2, 'confidence': 0}, {'plan': 1}, ('confidence',))
    """
    size, seen = 0, Counter[str]()
    for text in texts:
        size += 1
        seen.update(set(_TAG.findall(text)))
    if prefilled is not None:
        seen[prefilled] = size
    wanted = {tag: seen[tag] for tag in dict.fromkeys(tags)}
    others = sorted((-held, tag) for tag, held in seen.items() if tag not in wanted and tag not in _SPECIAL)
    return Census(size, wanted, {tag: -held for held, tag in others})
