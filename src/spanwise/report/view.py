"""What the token view is given: completions, methods, and what is known of how each credits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spanwise.rollouts.rows import TokenRow


@dataclass(frozen=True)
class Rule:
    """What is known of how a method credits.

    Attributes:
        kind: what it credits: "block", "completion", "token", "step"; "" is not known.
        about: a sentence on it.
        pays: block -> the objectives that pay it.
        baselines: objective -> what its baseline is the mean of, in words.
        weights: objective -> weight.
        missing: objective -> what stands for a reward that is left out; None: nothing.
        verdict: the objective that a score of the completion's own is mixed with; "": there is none.

    Example:
        >>> rule = Rule("block", baselines={"brier": "same prompt, same correct"}, missing={"brier": -1.0})
        >>> rule.baselines["brier"], rule.missing["brier"]
        ('same prompt, same correct', -1.0)
    """

    kind: str = ""
    about: str = ""
    pays: Mapping[str, Sequence[str]] = field(default_factory=dict)
    baselines: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, float | None] = field(default_factory=dict)
    verdict: str = ""


@dataclass(frozen=True)
class TokenView:
    """What the token view shows.

    Attributes:
        methods: names, in order; every completion has advantages under each of them.
        completions: in order.
        outcome: the objective whose reward of 1 or 0 says right or wrong; None: nothing says it.
        segments: what opens a segment, in words; "": there are none.
        rules: method -> how it credits, as far as that is known.
        own: the method of the user's recipe, which stands on the right; None: the second one.
        total: completions that there are, of which these are some; None: these are all.

    Example:
        >>> row = TokenRow("1+1=", ["2"], {"grpo": [0.5]}, {"answer": [(0, 1)]}, {"correct": 1.0}, {"correct": "ok"}, "")
        >>> len(TokenView(("grpo",), [row]).completions)
        1
    """

    methods: tuple[str, ...]
    completions: Sequence[TokenRow]
    outcome: str | None = None
    segments: str = ""
    rules: Mapping[str, Rule] = field(default_factory=dict)
    own: str | None = None
    total: int | None = None

    @property
    def pair(self) -> tuple[str, str]:
        """What stands on the left and on the right at first: grpo, where there is one, and the user's own method."""
        left = "grpo" if "grpo" in self.methods else self.methods[0]
        right = self.own if self.own in self.methods and self.own is not None else next(iter(self.methods[1:]), left)
        if left == right:
            left = next((name for name in self.methods if name != right), right)
        return left, right
