"""A walk over ten states that is written down line by line: the task, its warm start, and the true value of every prefix.

    5=   #1d(5)(4)(3)(2)(1)6  #2k(5)(4)(3)(2)(1)5  ...  #16b(5)(4)(3)(2)(1)9        (without the spaces)

A line is its number, a move (`a` to `p`), a countdown, and the new state. What a move does depends on the state and is fixed
(`STEP`): of sixteen moves two add 2, three add 1, six add nothing, three take 1 and two take 2. States 0 and 9 are never left.
A walk is right if every state follows from the one before and the last is 9. A line holds one decision, the move. States can slip.

In an even walk every countdown has five tokens. In an uneven one each move has its own, from 1 to 24. The news of a move, its
state, comes behind the countdown. In a told walk an environment writes the states, so that none can be false.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spanwise.tasks import Phase, WarmStartSettings, warm_start
from spanwise.tasks.embedded import Course, Pairs, Stretch, word_tokenizer

MOVES = "abcdefghijklmnop"
LAST, STATES = 9, 10
#: The starts of walks; the prompt is one of them and `=`.
STARTS = (3, 4, 5)
_DELTAS = np.array([2] * 2 + [1] * 3 + [0] * 5 + [-1] * 3 + [-2] * 2 + [0])
#: The state after each move: STEP[state, move].
STEP = np.stack(
    [
        np.full(len(MOVES), state) if state in (0, LAST)
        else np.clip(state + np.random.default_rng([7, state]).permutation(_DELTAS), 0, LAST)
        for state in range(STATES)
    ]
)  # fmt: skip
_LINE = re.compile(r"#(\d+)([a-p])((?:\(\d+\))*)(\d)")


@dataclass(frozen=True)
class Walk:
    """How many lines a walk has, and how long the countdown of each move is."""

    name: str
    lines: int
    countdown_m: tuple[int, ...]
    warm_start: str  # the walk whose warm start it takes
    is_told: bool = False  # whether an environment writes the states (benchmarks/walk_told.py)

    @property
    def longest(self) -> int:
        """Tokens of the longest walk: number, move and state of each line, the longest countdowns, the end."""
        return self.lines * (3 + max(self.countdown_m)) + 1

    @property
    def horizon(self) -> float:
        """The lambda of a token that decays to .95 from one decision to the next, at the mean length of a line."""
        return 0.95 ** (1 / (3 + sum(self.countdown_m) / len(MOVES)))

    def line(self, number: int, move: int, state: int) -> str:
        """Write a line."""
        counted = "".join(f"({left})" for left in range(self.countdown_m[move], 0, -1))
        return f"#{number}{MOVES[move]}{counted}{state}"

    def is_right(self, start: int, text: str) -> bool:
        """Return whether a walk keeps the form, follows the rule and ends at 9."""
        lines, state, at = 0, start, 0
        while match := _LINE.match(text, at):
            number, move, after = int(match[1]), MOVES.index(match[2]), int(match[4])
            if number != lines + 1 or match[0] != self.line(number, move, after) or after != STEP[state, move]:
                return False
            lines, state, at = number, after, match.end()
        return at == len(text) and lines == self.lines and state == LAST


_UNEVEN = (1, 1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 10, 12, 15, 19, 24)
WALKS: Mapping[str, Walk] = {
    "walk": Walk("walk", 16, (5,) * 16, "walk"),
    "walk_long": Walk("walk_long", 32, (5,) * 16, "walk_long"),
    "walk_longest": Walk("walk_longest", 64, (5,) * 16, "walk_longest"),
    "walk_uneven": Walk("walk_uneven", 16, _UNEVEN, "walk_uneven"),
    "walk_uneven_long": Walk("walk_uneven_long", 32, _UNEVEN, "walk_uneven_long"),
    "walk_told": Walk("walk_told", 16, (5,) * 16, "walk", is_told=True),
    "walk_uneven_told": Walk("walk_uneven_told", 16, _UNEVEN, "walk_uneven", is_told=True),
}


def right(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Pay 1 for a right walk, and 0 for any other; the column `answer` names the walk."""
    rows = zip(prompts, completions, answer, strict=True)
    return [float(WALKS[walk].is_right(int(prompt[0]), text)) for prompt, text, walk in rows]


# ---------------------------------------------------------------------------------------------------- warm start


@dataclass(frozen=True)
class WalkNoise:
    """How often the state of a warm-start walk does not follow."""

    slip: float
    walk: str


_PHASE = Phase(steps=250, learning_rate=3e-3, matrix_learning_rate=0.02)
_LONGER = Phase(steps=350, learning_rate=3e-3, matrix_learning_rate=0.02)
_LONGEST = Phase(steps=600, learning_rate=3e-3, matrix_learning_rate=0.02)


@dataclass(frozen=True)
class WalkSettings(WarmStartSettings):
    """The settings of a warm start with its stretch of walks."""

    batch: int = 32
    walk: Phase = _PHASE
    walk_long: Phase = _PHASE
    walk_longest: Phase = _LONGEST
    walk_uneven: Phase = _LONGER
    walk_uneven_long: Phase = _LONGER


def traces(walk: Walk, slip: float, size: int, rng: np.random.Generator) -> Pairs:
    """Write walks with uniform moves, in which a state is a random one with probability `slip`."""
    pairs = []
    for start in rng.choice(STARTS, size).tolist():
        text, state = "", start
        for number in range(1, walk.lines + 1):
            move = int(rng.integers(len(MOVES)))
            state = int(rng.integers(STATES)) if rng.random() < slip else int(STEP[state, move])
            text += walk.line(number, move, state)
        pairs.append((f"{start}=", text))
    return pairs


def build_walk_tokenizer() -> Any:
    """Build the tokenizer: one token for each state, move, number of a line and number of a countdown."""
    numbers = [f"#{number}" for number in range(1, 65)]
    counted = [f"({left})" for left in range(1, 1 + max(_UNEVEN))]
    return word_tokenizer([*"0123456789", *MOVES, "=", *numbers, *counted], r"#\d+|\(\d+\)|.")


def walk_start(walk: Walk, **options: Any) -> Path:
    """Return the folder of the warm-started model: 0.2 million parameters that move at random and seldom slip."""
    noise = WalkNoise(0.01, walk.warm_start)
    stretch = Stretch(walk.warm_start, 21, noise, lambda size, rng: traces(walk, noise.slip, size, rng))
    shape = {"layers": 2, "width": 96, "positions": walk.longest + 8}
    course = Course((stretch,), build_walk_tokenizer, shape=shape, folder="{}")
    return warm_start(course, **{"settings": WalkSettings(), **options})


def write_prompts(walk: Walk, file: Path, count: int) -> Path:
    """Write a dataset of prompts, each start as often as the others, unless it is there."""
    if file.is_file():
        return file
    rows = [{"prompt": f"{STARTS[row % len(STARTS)]}=", "answer": walk.name} for row in range(count)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
