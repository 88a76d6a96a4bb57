"""Draw the problems of the embedded tasks, and keep 512 of each task for evaluation. Write training texts of digit chains.

A prompt such as `7+3*4~2___=` is a start digit, k = 1..6 steps (an operator and an operand 1..9) and fillers up to six. Steps are
taken from left to right, modulo 10. `~` is a smudged operator: `+` with probability 0.7 and `-` with 0.3, drawn once per prompt,
so that no model can know every answer. Of two attempts, the first has to be a guess, as two layers cannot take many steps at once.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Generic, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int

from spanwise.errors import DataError
from spanwise.layout import Layout
from spanwise.types import ByCompletion, join_rows

FILLER = "_"
HELD_OUT = 512

AnyProblems = TypeVar("AnyProblems", bound="EmbeddedProblems")


class EmbeddedProblems(ByCompletion):
    """N problems of an embedded (built-in) task. Each subclass is a dataclass whose fields are arrays of N rows."""

    def __len__(self) -> int:
        """The number of problems."""
        return len(next(iter(vars(self).values())))

    @property
    def prompts(self) -> list[str]:
        """The prompt of each problem."""
        raise NotImplementedError


@dataclass(frozen=True)
class Source(Generic[AnyProblems]):
    """A source of problems: a function that draws them, and an evaluation seed."""

    draw_any: Callable[[int, np.random.Generator], AnyProblems]
    held_out_seed: int

    def draw(
        self, size: int, *, rng: np.random.Generator, exclude: Set[str] = frozenset(), unique: bool = False
    ) -> AnyProblems:
        """Draw `size` random problems, none with a prompt in `exclude`. With `unique` no prompt is drawn twice."""
        if size < 1:
            raise DataError(f"Cannot draw {size} problems; ask for at least 1.")
        excluded_prompts = set(exclude)
        problem_chunks = list[AnyProblems]()
        missing_problem_count = size
        while missing_problem_count:
            candidate_problems = self.draw_any(missing_problem_count, rng)
            new_indices: list[int] = []
            for row_index, prompt in enumerate(candidate_problems.prompts):
                if prompt not in excluded_prompts:
                    new_indices.append(row_index)
                    excluded_prompts.update([prompt] if unique else [])
            problem_chunks.append(candidate_problems.take(np.array(new_indices, dtype=np.int64)))
            missing_problem_count -= len(new_indices)
        return join_rows(problem_chunks)

    def training(self, size: int, *, rng: np.random.Generator) -> AnyProblems:
        """Draw random problems for training. Evaluation prompts are excluded."""
        return self.draw(size, rng=rng, exclude=self.held_out_prompts)

    def held_out(self, size: int = HELD_OUT) -> AnyProblems:
        """Return the first `size` of the task's 512 different evaluation problems. Raise a DataError for more."""
        if not 1 <= size <= HELD_OUT:
            raise DataError(f"This task has {HELD_OUT} evaluation prompts and you asked for {size}. Choose 1 to {HELD_OUT}.")
        problems = self.draw(HELD_OUT, rng=np.random.default_rng(self.held_out_seed), unique=True)
        return problems.take(np.arange(size))

    @cached_property
    def held_out_prompts(self) -> frozenset[str]:
        """The texts of all evaluation prompts, which every training set excludes."""
        return frozenset(self.held_out().prompts)


OPERATORS = "+-*~"
OPERATOR_SHARE = (0.35, 0.25, 0.25, 0.15)
SMUDGE_IS_PLUS = 0.7
STEPS = 6
_RISKY = "*~"

#: The two blocks of a completion of the task `digits`, a chain of operations modulo 10.
DIGITS_LAYOUT = Layout({"solution": ["reasoning", "answer"], "confidence": ["analysis", "confidence"]})


@dataclass(frozen=True)
class Problems(EmbeddedProblems):
    """N digit chains (a digit and up to six operations modulo 10) as arrays. Steps from `length_n` on are fillers."""

    start_n: Int[np.ndarray, " n"]  # The digit with which each problem begins.
    length_n: Int[np.ndarray, " n"]  # The number of operations in each problem.
    operator_ns: Int[np.ndarray, "n s"]  # The operator of each step, as an index into `OPERATORS`.
    operand_ns: Int[np.ndarray, "n s"]
    plus_n: Bool[np.ndarray, " n"] | Bool[np.ndarray, "n s"]  # whether an unreadable operator `~` is a plus (else minus)

    @property
    def items(self) -> list[list[str]]:
        """The steps of each problem as text, such as `["+3", "*4"]`."""
        rows = zip(self.operator_ns.tolist(), self.operand_ns.tolist(), self.length_n.tolist(), strict=True)
        return [[f"{OPERATORS[op]}{d}" for op, d in zip(ops[:k], operands[:k], strict=True)] for ops, operands, k in rows]

    @property
    def prompts(self) -> list[str]:
        """The prompt texts, such as `7+3*4~2___=`, with fillers and the final `=`."""
        starts_and_steps = zip(self.start_n.tolist(), self.items, strict=True)
        return [f"{start_digit}{''.join(steps)}{FILLER * (STEPS - len(steps))}=" for start_digit, steps in starts_and_steps]

    @property
    def answers(self) -> list[str]:
        """The true answers, one digit each. A smudged operator `~` counts as the plus or minus drawn for it."""
        is_slip_ns = np.zeros(self.operator_ns.shape, dtype=bool)
        return [str(digit) for digit in run_chain(self, is_slip_ns, self.operand_ns)[:, -1].tolist()]


@dataclass(frozen=True)
class TraceNoise:
    """How often training completions of the task `digits` err or refuse, and how confident they are."""

    slip: tuple[float, float, float, float]  # For each of `OPERATORS`, the probability that a step's result is random.
    refusal: float  # The probability of a refusal: `<reasoning></reasoning><answer>?</answer>`.
    # The confidences that a refusal may state. If empty, refusals state confidences like all other answers.
    refusal_confidence: tuple[float, ...] = ()
    power: float = 0.5  # The stated confidence is (probability of success)**power + noise.
    spread: float = 0.25  # The standard deviation of the noise in the stated confidence.


NOISE: dict[str, TraceNoise] = {
    "easy": TraceNoise(slip=(0.03, 0.08, 0.20, 0.05), refusal=0.05),
    "hard": TraceNoise(slip=(0.15, 0.25, 0.45, 0.20), refusal=0.10, refusal_confidence=(0.0, 0.1, 0.2)),
}


def apply_step(digit: int, step: str) -> int:
    """Apply a step such as `+3` to a digit, modulo 10."""
    operand = int(step[1])
    return {"+": digit + operand, "-": digit - operand, "*": digit * operand}[step[0]] % 10


def run_chain(
    problems: Problems, slip_ns: Bool[np.ndarray, "n s"], slipped_ns: Int[np.ndarray, "n s"]
) -> Int[np.ndarray, "n s"]:
    """Return the result digit of every step of N problems. Where `slip_ns` is true, take the result from `slipped_ns`."""
    digit_n = problems.start_n
    digits_after_step: list[np.ndarray] = []
    is_plus_ns = np.broadcast_to(problems.plus_n.reshape(len(problems), -1), problems.operator_ns.shape)
    for step_index in range(problems.operator_ns.shape[1]):
        operator_n, operand_n = problems.operator_ns[:, step_index], problems.operand_ns[:, step_index]
        sign_n = np.where(is_plus_ns[:, step_index], 1, -1)
        digits_by_operator = (digit_n + operand_n, digit_n - operand_n, digit_n * operand_n, digit_n + sign_n * operand_n)
        true_digit_n = np.choose(operator_n, digits_by_operator) % 10
        next_digit_n = np.where(slip_ns[:, step_index], slipped_ns[:, step_index], true_digit_n)
        digit_n = np.where(step_index < problems.length_n, next_digit_n, digit_n)
        digits_after_step.append(digit_n)
    return np.stack(digits_after_step, axis=1)


def slipping_chain(problems: Problems, slip: tuple[float, ...], rng: np.random.Generator) -> Int[np.ndarray, "n s"]:
    """Return the result digit of every step, with random errors. `slip` has each operator's probability of an error."""
    chain_shape = problems.operator_ns.shape
    is_slip_ns = rng.random(chain_shape) < np.array(slip)[problems.operator_ns]
    return run_chain(problems, is_slip_ns, rng.integers(0, 10, chain_shape))


def success_probability(problems: Problems, noise: TraceNoise) -> Float[np.ndarray, " n"]:
    """Return the probability that all steps of a problem are right with the error rates in `noise`."""
    right_reading_share = SMUDGE_IS_PLUS**2 + (1 - SMUDGE_IS_PLUS) ** 2
    wrong_share_o = 0.9 * np.array(noise.slip)  # a random digit is right in one of ten cases
    right_share_o = (1 - wrong_share_o) * np.array([1, 1, 1, right_reading_share])
    is_step_ns = np.arange(STEPS) < problems.length_n[:, None]
    return np.where(is_step_ns, right_share_o[problems.operator_ns], 1.0).prod(axis=1)


def noisy_traces(problems: Problems, noise: TraceNoise, *, rng: np.random.Generator) -> list[str]:
    """Write completions for the warm start, with random errors in their reasoning."""
    problem_count = len(problems)
    digit_ns = slipping_chain(problems, noise.slip, rng)
    is_refusal_n = rng.random(problem_count) < noise.refusal
    success_probability_n = success_probability(problems, noise)
    confidence_n = success_probability_n**noise.power + rng.normal(0, noise.spread, problem_count)
    if noise.refusal_confidence:
        confidence_n = np.where(is_refusal_n, rng.choice(noise.refusal_confidence, problem_count), confidence_n)
    rows = zip(problems.items, digit_ns.tolist(), is_refusal_n.tolist(), confidence_n.clip(0, 1).tolist(), strict=True)
    traces = []
    for steps, digits, refuses, confidence in rows:
        reasoning = "" if refuses else "".join(map(str, digits[: len(steps)]))
        risky_text = "".join(step for step in steps if step[0] in _RISKY)
        traces.append(
            f"<reasoning>{reasoning}</reasoning><answer>{reasoning[-1:] or '?'}</answer>"
            f"<analysis>{risky_text}</analysis><confidence>{confidence:.1f}</confidence>"
        )
    return traces


def is_refusal(answer: str | None) -> bool:
    """Return whether an answer is a refusal. Every answer but a single digit counts as one."""
    return answer is None or not (len(answer) == 1 and answer in "0123456789")


def draw_chains(
    size: int,
    rng: np.random.Generator,
    *,
    kind: type[Problems] = Problems,
    lengths: tuple[int, int] = (1, STEPS),
    operator_share: tuple[float, ...] = OPERATOR_SHARE,
    plus: float = SMUDGE_IS_PLUS,
    each_step: bool = False,
) -> Problems:
    """Draw random calculations (digit chains) of several steps. A smudged operator `~` is a random plus or minus."""
    fewest_steps, most_steps = lengths
    chain_shape = (size, most_steps)
    return kind(
        start_n=rng.integers(0, 10, size),
        length_n=rng.integers(fewest_steps, most_steps + 1, size),
        operator_ns=rng.choice(len(OPERATORS), chain_shape, p=operator_share),
        operand_ns=rng.integers(1, 10, chain_shape),
        plus_n=rng.random(chain_shape if each_step else size) < plus,
    )


DIGITS = Source(draw_chains, 20_260)


TWICE_LAYOUT = Layout({"first": ["answer"], "second": ["reasoning", "answer"]})


@dataclass(frozen=True)
class TwiceNoise:
    """The error rates of texts with two attempts: an answer, a reflection, and a second answer."""

    # for each of `OPERATORS`, the probability that a step of the reasoning has a random digit as result
    slip: tuple[float, float, float, float]
    repeat: float  # The share of completions without reasoning, whose second answer repeats the first.
    refusal: float = 0.02  # The share of first answers that are `?`, a refusal.
    # With probability glance**(steps - 1), the first of a completion's two answers is right, else a random digit.
    glance: float = 0.8


TWICE_NOISE: dict[str, TwiceNoise] = {
    "twice_early": TwiceNoise(slip=(0.0, 0.0, 0.0, 0.0), repeat=0.2),
    "twice": TwiceNoise(slip=(0.15, 0.25, 0.45, 0.20), repeat=0.85),
}


def twice_traces(problems: Problems, noise: TwiceNoise, *, rng: np.random.Generator) -> list[str]:
    """Write completions for the warm start: an answer, a reflection and a second answer."""
    problem_count = len(problems)
    digit_ns = slipping_chain(problems, noise.slip, rng)
    is_repeat_n = rng.random(problem_count) < noise.repeat
    is_first_right_n = rng.random(problem_count) < noise.glance ** (problems.length_n - 1)
    random_digit_n = rng.integers(0, 10, problem_count).astype(str)
    answer_n = np.where(is_first_right_n, np.array(problems.answers), random_digit_n)
    answer_n = np.where(rng.random(problem_count) < noise.refusal, "?", answer_n)
    traces = []
    trace_rows = zip(answer_n.tolist(), digit_ns.tolist(), problems.length_n.tolist(), is_repeat_n.tolist(), strict=True)
    for first_answer, digits, length, is_repeat in trace_rows:
        reasoning = "" if is_repeat else "".join(map(str, digits[:length]))
        second_answer = reasoning[-1:] or first_answer
        traces.append(f"<answer>{first_answer}</answer><reasoning>{reasoning}</reasoning><answer>{second_answer}</answer>")
    return traces


FEWEST_STEPS, MOST_STEPS = 4, 8
LONG_SHARE = (0.44, 0.30, 0.06, 0.20)
LONG_PLUS = 0.95  # The probability that `~`, an unreadable operator, stands for a plus.
#: A completion of the task `digits_long` has at most eight lines of 14 tokens, and six other tokens.
LONGEST = MOST_STEPS * 14 + 6
LONG_POSITIONS = 160  # how many tokens the model can process: a prompt and the longest completion

LONG_LAYOUT = Layout({"solution": ["reasoning", "answer"]})


@dataclass(frozen=True)
class LongProblems(Problems):
    """N problems of the task `digits_long`. Each has eight numbered places: 4 to 8 hold a step, the others a filler.

        70+31~42*23-64_5_6_7_=<reasoning>0.+3_7+3=0_1.~4?-4_0-4=6_2.*2_6*2_6*2=2_3.-6_2-6=6_</reasoning><answer>6</answer>

        0.+3_7+3=0_           number of the step, the step copied, the value so far and the step, the new value
        0.~3+3_7+3=0_         a smudged operator is copied, then read as a plus,
        0.~3?-3_7-3=4_        or, with a question mark, as a minus
        0.+3_7+3_7+3=0_       a careful line writes value and step twice, and slips less often

    A smudge is a plus 19 times in 20, drawn for each place (`plus_n` is (N, 8)).
    """

    @property
    def prompts(self) -> list[str]:
        """The prompt of each chain: its first digit, its numbered steps and fillers, and `=`."""
        filled_steps = [steps + [FILLER] * (MOST_STEPS - len(steps)) for steps in self.items]
        chains = zip(self.start_n.tolist(), filled_steps, strict=True)
        return [f"{start}{''.join(f'{index}{step}' for index, step in enumerate(steps))}=" for start, steps in chains]


@dataclass(frozen=True)
class LongNoise:
    """How often lines of a long digit chain are wrong, or write their calculation twice."""

    slip: tuple[float, float, float]  # For `+`, `-` and `*`, the probability that a step's result is a random digit.
    careful: float = 0.3  # The share of lines that write their calculation twice and err less often.
    relief: float = 0.2  # Multiplies the error rates `slip` in lines that write their calculation twice.
    plus: float = 0.5  # The probability that a smudged operator `~` is read as a plus.


TABLES_NOISE = LongNoise(slip=(0.0, 0.0, 0.0))
LONG_NOISE: dict[str, LongNoise] = {
    "long_early": LongNoise(slip=(0.0, 0.0, 0.0)),
    "long": LongNoise(slip=(0.04, 0.06, 0.15)),
}


def long_traces(problems: LongProblems, noise: LongNoise, *, rng: np.random.Generator) -> list[str]:
    """Write training completions for the task `digits_long`: a line per step, then the last digit."""
    traces = []
    for digit, steps in zip(problems.start_n.tolist(), problems.items, strict=True):
        reasoning = ""
        for index, smudged_step in enumerate(steps):
            interpreted_step = smudged_step.replace("~", "+" if rng.random() < noise.plus else "-")
            calculation = f"{digit}{interpreted_step}"
            is_careful = rng.random() < noise.careful
            slip_rate = noise.slip[OPERATORS.index(interpreted_step[0])]
            is_slip = rng.random() < slip_rate * (noise.relief if is_careful else 1)
            digit = int(rng.integers(0, 10)) if is_slip else apply_step(digit, interpreted_step)
            reading = "" if smudged_step == interpreted_step else interpreted_step.replace("-", "?-")
            reasoning += f"{index}.{smudged_step}{reading}_{calculation}{f'_{calculation}' if is_careful else ''}={digit}_"
        traces.append(f"<reasoning>{reasoning}</reasoning><answer>{digit}</answer>")
    return traces


def tables(size: int, *, rng: np.random.Generator) -> list[tuple[str, str]]:
    """Draw exercises in arithmetic modulo 10, such as `7+3=0_0*4=0_`. What follows the first `=` is the completion."""
    steps_per_exercise = int(rng.choice((1, 2, 4, 8)))
    start_digits = rng.integers(0, 10, size // steps_per_exercise).tolist()
    step_codes = rng.integers(0, 27, (size // steps_per_exercise, steps_per_exercise)).tolist()
    starts_and_ends = []
    for digit, codes in zip(start_digits, step_codes, strict=True):
        exercise_text = ""
        for step in (f"{OPERATORS[code // 9]}{code % 9 + 1}" for code in codes):
            exercise_text += f"{digit}{step}="
            digit = apply_step(digit, step)
            exercise_text += f"{digit}_"
        starts_and_ends.append((exercise_text[:4], exercise_text[4:]))
    return starts_and_ends


_draw_long = partial(draw_chains, kind=LongProblems, operator_share=LONG_SHARE, plus=LONG_PLUS, each_step=True)
LONG = Source(partial(_draw_long, lengths=(FEWEST_STEPS, MOST_STEPS)), 20_262)
