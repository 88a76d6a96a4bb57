"""The long digit chain: completions of a hundred tokens, in which a few decisions open segments of tokens that follow from them.

    70+31*42~2...9_=<reasoning>0.+3_7+3=0_1.*4_0*4_0*4=0_2.+2_0+2=5?0+2=2_...</reasoning><answer>2</answer>

A prompt is a start digit and ten numbered places: 7 to 10 steps (an operator and an operand 1..9), then fillers. Steps are taken
from left to right, modulo 10. A line of the completion takes one of them:

    0.+3_7+3=0_           its number, the step copied, the value so far and the step, the new value
    0.+3_7+3_7+3=0_       with care: value and step are written twice, and slips are rarer
    0.+3_7+3=9?7+3=0_     looked at again: the new value is withdrawn and found anew, with care

What a line decides is how a smudged operator `~` is read (see `digits`), whether care is taken, which digit comes out, and whether
it is looked at again. Everything else follows from what stands before it. A slip is not the end as long as it can be looked at
again; once its line is closed, the chain goes on from a wrong digit. So the chance to be right changes at many places, each change
can be read in what was written, and the only reward comes at the end.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from spanwise.layout import Layout
from spanwise.tasks.agent import taken
from spanwise.tasks.digits import FILLER, HELD_OUT, OPERATORS, SMUDGE_IS_PLUS, Problems, draw_until, first_of

LongPart = Literal["long_tables", "long_early", "long"]
FEWEST, MOST = 7, 10
OPERATOR_SHARE = (0.40, 0.30, 0.26, 0.04)
#: Tokens of the longest completion of this form: ten lines with care, looked at again, then tags, answer and end.
LONGEST = MOST * 17 + 6
#: Room for a prompt and the longest completion.
LONG_POSITIONS = 256
_HELD_OUT_SEED = 20_262

#: The one block of a completion.
LONG_LAYOUT = Layout({"solution": ["reasoning", "answer"]})


@dataclass(frozen=True)
class LongProblems(Problems):
    """N problems of ten places each, of which 7 to 10 hold a step; see `Problems`.

    Example:
        >>> columns = ([7], [3], [[0, 2, 3] + [0] * 7], [[3, 4, 2] + [1] * 7], [False])
        >>> three = LongProblems(*map(np.array, columns))
        >>> three.prompts, three.answers
        (['70+31*42~23_4_5_6_7_8_9_='], ['8'])
    """

    @property
    def prompts(self) -> list[str]:
        """The prompt texts: the start digit, the numbered steps and fillers, and `=`."""
        filled = [items + [FILLER] * (MOST - len(items)) for items in self.items]
        pairs = zip(self.start_n.tolist(), filled, strict=True)
        return [f"{start}{''.join(f'{place}{step}' for place, step in enumerate(steps))}=" for start, steps in pairs]


@dataclass(frozen=True)
class LongNoise:
    """What the traces of a warm start on the long chain are like.

    Args:
        slip: probability that a new value is replaced by a random digit, for `+`, `-` and `*`.
        careful: share of lines that are taken with care.
        relief: slips with care, and of values that are found anew, as a share of the others.
        again_wrong, again_right: probability that a wrong, a right value is looked at again.
    """

    slip: tuple[float, float, float]
    careful: float = 0.3
    relief: float = 0.2
    again_wrong: float = 0.4
    again_right: float = 0.1


LONG_NOISE: dict[LongPart, LongNoise] = {
    "long_tables": LongNoise(slip=(0.0, 0.0, 0.0)),
    "long_early": LongNoise(slip=(0.10, 0.10, 0.10), again_wrong=0.9, again_right=0.02),
    "long": LongNoise(slip=(0.12, 0.18, 0.30)),
}


def draw_long_problems(
    size: int, *, rng: np.random.Generator, exclude: Set[str] = frozenset(), unique: bool = False
) -> LongProblems:
    """Draw random problems: 7 to 10 steps, operators by `OPERATOR_SHARE`, everything else uniform.

    Args:
        size, rng, exclude, unique: see `draw_problems`.

    Raises:
        DataError: `size` is below 1.

    Example:
        >>> problems = draw_long_problems(3, rng=np.random.default_rng(0))
        >>> [prompt.count("_") + k for prompt, k in zip(problems.prompts, problems.length_n.tolist())]
        [10, 10, 10]
    """
    return draw_until(size, lambda missing: _draw_any(missing, rng), exclude=exclude, unique=unique)


def held_out_long_problems(size: int = HELD_OUT) -> LongProblems:
    """The first `size` of the 512 evaluation problems, all different; no warm start and no training set contains their prompts.

    Raises:
        DataError: `size` is not in 1..512.

    Example:
        >>> len(set(held_out_long_problems().prompts))
        512
    """
    return first_of(draw_long_problems(HELD_OUT, rng=np.random.default_rng(_HELD_OUT_SEED), unique=True), size)


@cache
def held_out_long_prompts() -> frozenset[str]:
    """The texts of all evaluation prompts, to be excluded from everything that is trained on."""
    return frozenset(held_out_long_problems().prompts)


def long_traces(problems: LongProblems, noise: LongNoise, *, rng: np.random.Generator) -> list[str]:
    """The completions the warm start imitates: a line for every step, and the last line's digit as the answer.

    All smudged operators of a trace are read alike, as `+` with probability 0.7. The end-of-sequence token is not part of the text.

    Args:
        problems: N problems.
        noise: slips, care, second looks.
        rng: the source of randomness; the same state gives the same traces.

    Example:
        >>> one = LongProblems(*map(np.array, ([7], [2], [[0, 2] + [0] * 8], [[3, 4] + [1] * 8], [True])))
        >>> exact = LongNoise(slip=(0.0, 0.0, 0.0), careful=0.0, again_right=0.0)
        >>> long_traces(one, exact, rng=np.random.default_rng(0))[0]
        '<reasoning>0.+3_7+3=0_1.*4_0*4=0_</reasoning><answer>0</answer>'
    """
    read_n = np.where(rng.random(len(problems)) < SMUDGE_IS_PLUS, "+", "-").tolist()
    rows = zip(problems.start_n.tolist(), problems.items, read_n, strict=True)
    return [_trace(start, [item.replace("~", read) for item in items], noise, rng) for start, items, read in rows]


def tables(size: int, *, rng: np.random.Generator) -> list[tuple[str, str]]:
    """Exercises without lines: a prompt of a digit, a step and `=`, and the digit it leads to, from which the next step goes on.

    Args:
        size: exercises in all, 8 or more; as rows of one, two, four or eight each. Single ones are learned within a minute, and the
            longer rows teach to look only at what stands right before.
        rng: the source of randomness; the same state gives the same exercises.

    Example:
        >>> tables(8, rng=np.random.default_rng(0))
        [('6-5=', '1_1+8=9_9+9=8_8+2=0_0+3=3_3+1=4_4+5=9_9*4=6_')]
    """
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


def _draw_any(size: int, rng: np.random.Generator) -> LongProblems:
    return LongProblems(
        start_n=rng.integers(0, 10, size),
        length_n=rng.integers(FEWEST, MOST + 1, size),
        operator_ns=rng.choice(len(OPERATORS), (size, MOST), p=OPERATOR_SHARE),
        operand_ns=rng.integers(1, 10, (size, MOST)),
        plus_n=rng.random(size) < SMUDGE_IS_PLUS,
    )


def _trace(start: int, steps: list[str], noise: LongNoise, rng: np.random.Generator) -> str:
    value, lines = start, list[str]()
    for place, step in enumerate(steps):
        asked, right, slip = f"{value}{step}", taken(value, step), noise.slip[OPERATORS.index(step[0])]
        careful = rng.random() < noise.careful
        value = _said(right, slip * (noise.relief if careful else 1), rng)
        line = f"{place}.{step}_{asked}{f'_{asked}' if careful else ''}={value}"
        if rng.random() < (noise.again_right if value == right else noise.again_wrong):
            value = _said(right, slip * noise.relief, rng)
            line += f"?{asked}={value}"
        lines.append(f"{line}_")
    return f"<reasoning>{''.join(lines)}</reasoning><answer>{value}</answer>"


def _said(right: int, slip: float, rng: np.random.Generator) -> int:
    return int(rng.integers(0, 10)) if rng.random() < slip else right
