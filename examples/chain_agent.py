"""The digit chain asked step by step: a small environment of several turns, with a reward for every turn and an outcome.

    7+3=  <answer>0</answer>  *4=  <answer>0</answer>  -2=  <answer>8</answer>

The agent is shown the start digit and the first step of a hidden chain and replies with a digit. The environment never says
whether that is right: it shows the next step, which goes on from the digit that the agent said. Steps are taken modulo 10. So a
slip in one turn spoils the outcome, and says nothing against the other turns. A reply that is anything else than one digit in its
tags is wrong and ends the episode: were a digit with something behind it good enough, nothing would pull such a habit back.

Nothing here needs torch: any trainer that can hold a conversation can play it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from spanwise.errors import DataError
from spanwise.layout import Layout
from spanwise.tasks.digits import apply_step

#: The one block of a turn.
AGENT_LAYOUT = Layout({"turn": ["answer"]})
_PROMPT = re.compile(r"(\d)((?:[-+*][1-9])+)=")
_DIGIT = re.compile(r"<answer>(\d)</answer>")


@dataclass(frozen=True)
class Chain:
    """A hidden chain."""

    start: int
    steps: tuple[str, ...]

    @staticmethod
    def of(prompt: str) -> Chain:
        """The chain that a prompt names."""
        match = _PROMPT.fullmatch(prompt)
        if match is None:
            raise DataError(f"{prompt!r} is no digit chain; write a digit, steps such as +3 or *4, and '=': '7+3*4='.")
        return Chain(int(match[1]), tuple(re.findall(r"..", match[2])))

    @property
    def prompt(self) -> str:
        """The whole chain as a text, by which datasets name it; the agent sees one step at a time."""
        return f"{self.start}{''.join(self.steps)}="

    @property
    def digits(self) -> tuple[int, ...]:
        """The right digit after every step; the last one is the answer."""
        digits, digit = [], self.start
        for step in self.steps:
            digit = apply_step(digit, step)
            digits.append(digit)
        return tuple(digits)


class Episode:
    """One conversation about a chain: `opening` first, then `reply` until it returns None.

    Attributes:
        chain: the hidden chain.
        digits: the digit of each reply so far; None for a reply without a digit in its tags.
        anchors: the state that every turn so far started from, the turn's number and the digit it goes on from. Turns of one
            prompt with the same anchor are asked the same question.
        turn_rewards: 1 for every turn so far that is right, given the digit it went on from, else 0.

    Example:
        The second reply is wrong, the third right for what was said before, and the outcome is wrong.

        >>> episode = Episode("7+3*4-2=")
        >>> episode.opening, episode.anchor
        ('7+3=', '0:7')
        >>> [episode.reply(f"<answer>{digit}</answer>") for digit in (0, 5, 3)]
        ['*4=', '-2=', None]
        >>> episode.turn_rewards, episode.anchors, episode.solved
        ([1.0, 0.0, 1.0], ['0:7', '1:0', '2:5'], False)
    """

    def __init__(self, prompt: str) -> None:
        self.chain = Chain.of(prompt)
        self.digits: list[int | None] = []
        self.anchors: list[str] = []
        self.turn_rewards: list[float] = []

    @property
    def opening(self) -> str:
        """What the agent sees first."""
        return f"{self.chain.start}{self.chain.steps[0]}="

    @property
    def anchor(self) -> str:
        """The state of the turn that is due."""
        return f"{len(self.digits)}:{self.digits[-1] if self.digits else self.chain.start}"

    @property
    def turn_reward(self) -> float:
        """The reward of the last turn."""
        return self.turn_rewards[-1]

    @property
    def done(self) -> bool:
        """Whether all steps are taken, or a reply was no digit in its tags."""
        return len(self.digits) == len(self.chain.steps) or (bool(self.digits) and self.digits[-1] is None)

    @property
    def solved(self) -> bool:
        """The outcome: all steps are taken and the last digit is that of the chain."""
        return len(self.digits) == len(self.chain.steps) and self.digits[-1] == self.chain.digits[-1]

    @property
    def turns(self) -> list[dict[str, Any]]:
        """What trainers are told of every turn: its `anchor`, whether it is `right`, and whether the episode is `solved`."""
        pairs = zip(self.anchors, self.turn_rewards, strict=True)
        return [{"anchor": anchor, "right": right, "solved": float(self.solved)} for anchor, right in pairs]

    def reply(self, text: str) -> str | None:
        """Take the agent's turn and answer with the next step; None where the episode is over."""
        if self.done:
            raise DataError(f"The episode of '{self.chain.prompt}' is over after {len(self.digits)} turns.")
        turn = len(self.digits)
        before = self.digits[-1] if turn else self.chain.start
        assert before is not None, "a reply that is no digit ends the episode"
        match = _DIGIT.fullmatch(text.strip())
        digit = int(match[1]) if match else None
        self.anchors.append(self.anchor)
        self.turn_rewards.append(float(digit == apply_step(before, self.chain.steps[turn])))
        self.digits.append(digit)
        return None if self.done else f"{self.chain.steps[turn + 1]}="


def right(right: Iterable[float]) -> list[float]:
    """The reward of a turn, for an objective with `scope="turn"`: what `Episode.turns` says."""
    return list(right)


def solved(solved: Iterable[float]) -> list[float]:
    """The outcome of the episode, for an objective of the rollout: what `Episode.turns` says."""
    return list(solved)
