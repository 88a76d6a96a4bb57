"""The long digit chain: completions of some seventy tokens, in which a few decisions open segments of tokens that follow from them.

    70+31~42*23-64_5_6_7_=<reasoning>0.+3_7+3=0_1.~4?-4_0-4=6_2.*2_6*2_6*2=2_3.-6_2-6=6_</reasoning><answer>6</answer>

A prompt is a start digit and eight numbered places: 4 to 8 steps (an operator and an operand 1..9), then fillers. Steps are taken
from left to right, modulo 10. A line of the completion takes one of them:

    0.+3_7+3=0_           its number, the step copied, the value so far and the step, the new value
    0.~3+3_7+3=0_         a smudged operator is copied, then read as a plus,
    0.~3?-3_7-3=4_        or, with a question mark, as a minus
    0.+3_7+3_7+3=0_       with care: value and step are written twice, and slips are rarer

What a line decides is how a smudged operator is read, whether care is taken, and which digit comes out. Everything else follows
from what stands before it. In truth a smudge is a plus 19 times in 20, each for itself, and the warm start reads it either way
like a coin. So the chance to be right changes at a few places, and the only reward comes at the end. A reading is a token that a
critic can see; a slip is one only to a critic that can calculate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from spanwise.layout import Layout
from spanwise.tasks.digits import OPERATORS, Problems, draw_chains, taken
from spanwise.tasks.problems import FILLER, Source

FEWEST, MOST = 4, 8
OPERATOR_SHARE = (0.44, 0.30, 0.06, 0.20)
#: How often a smudged operator is a plus.
PLUS = 0.95
#: Tokens of the longest completion of this form: eight lines, all smudges read as minuses with care, then tags, answer and end.
LONGEST = MOST * 14 + 6
#: Room for a prompt and the longest completion.
LONG_POSITIONS = 160

#: The one block of a completion.
LONG_LAYOUT = Layout({"solution": ["reasoning", "answer"]})


@dataclass(frozen=True)
class LongProblems(Problems):
    """N problems of eight places each, of which 4 to 8 hold a step; see `Problems`. `plus_n` (N, 8) speaks of each place."""

    @property
    def prompts(self) -> list[str]:
        """The prompt texts: the start digit, the numbered steps and fillers, and `=`."""
        filled = [items + [FILLER] * (MOST - len(items)) for items in self.items]
        pairs = zip(self.start_n.tolist(), filled, strict=True)
        return [f"{start}{''.join(f'{place}{step}' for place, step in enumerate(steps))}=" for start, steps in pairs]


@dataclass(frozen=True)
class LongNoise:
    """What the traces of a warm start on the long chain are like."""

    slip: tuple[float, float, float]  # a new value becomes a random digit, for `+`, `-` and `*`
    careful: float = 0.3  # share of lines that are taken with care
    relief: float = 0.2  # slips with care, as a share of the others
    plus: float = 0.5  # how often a smudge is read as a plus


LONG_NOISE: dict[str, LongNoise] = {
    "long_tables": LongNoise(slip=(0.0, 0.0, 0.0)),
    "long_early": LongNoise(slip=(0.0, 0.0, 0.0)),
    "long": LongNoise(slip=(0.04, 0.06, 0.15)),
}


def long_traces(problems: LongProblems, noise: LongNoise, *, rng: np.random.Generator) -> list[str]:
    """The completions the warm start imitates: a line for every step, and the last line's digit as the answer."""
    rows = zip(problems.start_n.tolist(), problems.items, strict=True)
    return [_trace(start, items, noise, rng) for start, items in rows]


def tables(size: int, *, rng: np.random.Generator) -> list[tuple[str, str]]:
    """Exercises without lines: a prompt of a digit, a step and `=`, and the digit it leads to, from which the next step goes on."""
    length = int(rng.choice((1, 2, 4, 8)))
    digits, steps = rng.integers(0, 10, size // length).tolist(), rng.integers(0, 27, (size // length, length)).tolist()
    named = [[f"{OPERATORS[step // 9]}{step % 9 + 1}" for step in row] for row in steps]
    rows = [_exercises(digit, row) for digit, row in zip(digits, named, strict=True)]
    return [(row[:4], row[4:]) for row in rows]


def _exercises(value: int, steps: list[str]) -> str:
    written = ""
    for step in steps:
        written += f"{value}{step}="
        value = taken(value, step)
        written += f"{value}_"
    return written


def _trace(start: int, steps: list[str], noise: LongNoise, rng: np.random.Generator) -> str:
    value, lines = start, list[str]()
    for place, shown in enumerate(steps):
        step = shown.replace("~", "+" if rng.random() < noise.plus else "-")
        asked, slip, careful = f"{value}{step}", noise.slip[OPERATORS.index(step[0])], rng.random() < noise.careful
        slipped = rng.random() < slip * (noise.relief if careful else 1)
        value = int(rng.integers(0, 10)) if slipped else taken(value, step)
        read = "" if shown == step else step.replace("-", "?-")
        lines.append(f"{place}.{shown}{read}_{asked}{f'_{asked}' if careful else ''}={value}_")
    return f"<reasoning>{''.join(lines)}</reasoning><answer>{value}</answer>"


LONG = Source(
    partial(
        draw_chains, kind=LongProblems, lengths=(FEWEST, MOST), operator_share=OPERATOR_SHARE, plus=PLUS, each_step=True
    ),
    20_262,
)
