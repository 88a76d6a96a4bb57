"""Two attempts at the smudged digit chain: an answer at once, then a reflection that has room for the steps, and a second answer.

    7+3*4~2___=<answer>5</answer><reasoning>088</reasoning><answer>8</answer>

The first attempt is one digit without any working. A transformer of two layers cannot take many steps at once, so beyond the
first step its answer is a guess, and a vote over guesses is a guess too. The reflection may write a digit per step, which the
same model can learn, or nothing. The warm start has the habit of an untrained model: most of its reflections are empty and repeat
the first answer, and those that write the steps out slip so often that the second attempt starts about as accurate as the first.
Nothing but the reward says that writing them out pays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanwise.layout import Layout
from spanwise.tasks.digits import Problems, slipping_chain

#: The two attempts. The first has no tag for reasoning: it has no room for any.
TWICE_LAYOUT = Layout({"first": ["answer"], "second": ["reasoning", "answer"]})


@dataclass(frozen=True)
class TwiceNoise:
    """What the traces of a warm start with two attempts are like."""

    slip: tuple[float, float, float, float]  # a digit of the reflection becomes a random one, by operator
    repeat: float  # share of reflections that are empty and give the first answer again
    refusal: float = 0.02  # share of first answers that are `?`
    glance: float = 0.8  # a first answer takes one more step right: glance**(k - 1) of k steps; the others are random digits


TWICE_NOISE: dict[str, TwiceNoise] = {
    "twice_early": TwiceNoise(slip=(0.0, 0.0, 0.0, 0.0), repeat=0.2),
    "twice": TwiceNoise(slip=(0.15, 0.25, 0.45, 0.20), repeat=0.85),
}


def twice_traces(problems: Problems, noise: TwiceNoise, *, rng: np.random.Generator) -> list[str]:
    """The completions the warm start imitates: a first answer, a reflection that is empty or has slips, a second answer."""
    size = len(problems)
    digit_ns = slipping_chain(problems, noise.slip, rng)
    repeat_n = rng.random(size) < noise.repeat
    seen_n = rng.random(size) < noise.glance ** (problems.length_n - 1)
    first_n = np.where(seen_n, np.array(problems.answers), rng.integers(0, 10, size).astype(str))
    first_n = np.where(rng.random(size) < noise.refusal, "?", first_n)
    traces = []
    rows = zip(first_n.tolist(), digit_ns.tolist(), problems.length_n.tolist(), repeat_n.tolist(), strict=True)
    for first, digits, length, repeat in rows:
        reasoning, second = ("", first) if repeat else ("".join(map(str, digits[:length])), str(digits[length - 1]))
        traces.append(f"<answer>{first}</answer><reasoning>{reasoning}</reasoning><answer>{second}</answer>")
    return traces
