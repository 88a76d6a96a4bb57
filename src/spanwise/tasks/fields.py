"""The task `fields`: answer K small questions (`QUESTIONS`) about eight digits in one JSON object.

    3_8_1_4_0_7_5_2_=   {"a": 8, "b": 6, "c": 1, "d": 0}

Each field is right or wrong by itself. Field `b` cannot be known: its gold value is drawn once per prompt and is in no prompt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from spanwise.errors import DataError
from spanwise.layout import Layout
from spanwise.tasks.digits import FILLER, EmbeddedProblems, Source

DIGITS = 8
#: The names of JSON fields, in order. Only benchmarks/field_kinds.py has tasks with the field `total`.
LETTERS = "abcdefghijklmnop"
NAMES = (*LETTERS, "total")
FORM = "form"  # the block of all text outside the fields' values
_TABLE = np.array([4, 7, 1, 9, 0, 6, 2, 8, 5, 3])

#: Each field's operation, and the indices of the two prompt digits that it uses. No prompt shows a `hidden` value.
QUESTIONS: tuple[tuple[str, int, int], ...] = (
    ("larger", 0, 1), ("hidden", 0, 0), ("copy", 2, 2), ("smaller", 3, 4),
    ("look-up", 5, 5), ("parity", 7, 7), ("rest", 6, 6), ("larger", 4, 6),
    ("copy", 0, 0), ("look-up", 1, 1), ("smaller", 2, 5), ("parity", 3, 3),
    ("rest", 7, 7), ("larger", 5, 7), ("copy", 4, 4), ("look-up", 6, 6),
)  # fmt: skip


@dataclass(frozen=True)
class FieldProblems(EmbeddedProblems):
    """The digits in N prompts of the task `fields`, and the N values of a hidden field, which no prompt shows."""

    digit_nd: Int[np.ndarray, "n d"]  # The digits in each prompt.
    hidden_n: Int[np.ndarray, " n"]  # The value of the JSON field `b`, which no prompt shows.

    @property
    def prompts(self) -> list[str]:
        """The prompt texts: eight digits and then `=`. A filler after each digit keeps all equally far from their fields."""
        return [f"{''.join(f'{digit}{FILLER}' for digit in digits)}=" for digits in self.digit_nd.tolist()]


@dataclass(frozen=True)
class FieldsNoise:
    """How often the fields in training texts are right, and how often they copy a digit from the wrong place."""

    # the probability that each field is right if the prompt tells its value; with more fields, the list starts again
    right: tuple[float, ...]
    # the probability that a field has a digit from another place in the prompt instead of its right value
    astray: float = 0.4


FIELDS_NOISE: dict[str, FieldsNoise] = {
    "fields_early": FieldsNoise(right=(0.9,)),
    "fields": FieldsNoise(right=(0.3, 0.2, 0.4, 0.2)),
}


def draw_digits(size: int, rng: np.random.Generator, *, below: int | np.ndarray = 10) -> FieldProblems:
    """Draw problems of random digits below a limit. `below` has one limit, or one for each place."""
    return FieldProblems(rng.integers(0, below, (size, DIGITS)), rng.integers(0, 10, size))


def value_of(problems: FieldProblems, operation: str, first: int, second: int) -> Int[np.ndarray, " n"]:
    """Compute the right value of one field, such as the larger of two digits, for N problems."""
    left_digit_n, right_digit_n = problems.digit_nd[:, first], problems.digit_nd[:, second]
    return {
        "hidden": problems.hidden_n,
        "copy": left_digit_n,
        "larger": np.maximum(left_digit_n, right_digit_n),
        "smaller": np.minimum(left_digit_n, right_digit_n),
        "parity": left_digit_n % 2,
        "rest": left_digit_n % 3,
        "look-up": _TABLE[left_digit_n],
    }[operation]


@dataclass(frozen=True)
class Fields:
    """The settings of the task `fields`: how many fields a JSON object has, and of what kind they are.

    Args:
        count: K, the number of fields, 1 to 16.

    Raises:
        DataError: another number.

    Example:
        >>> Fields(3).names, Fields(3).knowable
        (('a', 'b', 'c'), ('a', 'c'))
    """

    count: int = 8
    kind: ClassVar[str] = "independent"
    counts: ClassVar[tuple[int, int]] = (1, len(QUESTIONS))
    source: ClassVar[Source[FieldProblems]] = Source(draw_digits, 20_263)

    def __post_init__(self) -> None:
        min_field_count, max_field_count = self.counts
        if not min_field_count <= self.count <= max_field_count:
            raise DataError(
                f"You asked for {self.count} fields, but a task of kind '{self.kind}' has {min_field_count} to {max_field_count}."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The keys of a JSON object of the task, in order."""
        return tuple(LETTERS[: self.count])

    @property
    def knowable(self) -> tuple[str, ...]:
        """The names of the fields whose values follow from the prompt."""
        return tuple(name for name, (operation, *_) in zip(self.names, QUESTIONS, strict=False) if operation != "hidden")

    @property
    def layout(self) -> Layout:
        """Return the layout: a block for each field's value, and `form` for all other tokens."""
        return Layout({FORM: [], **{name: [name] for name in self.names}}, segmenter="json")

    @property
    def longest(self) -> int:
        """The length of a completion in tokens: a key and a value per field, a brace and the end token."""
        return 2 * self.count + 2

    def values(self, problems: FieldProblems, slips: tuple[np.ndarray, np.ndarray] | None = None) -> Int[np.ndarray, "n k"]:
        """Compute the value of every field of N objects. `slips` has (which values to replace, by what), both (N, K)."""
        value_nk = np.stack([value_of(problems, *question) for question in QUESTIONS[: self.count]], axis=1)
        return value_nk if slips is None else np.where(*slips, value_nk)

    def answers(self, problems: FieldProblems) -> list[str]:
        """Return the right JSON object of each problem as text. Values that no prompt shows are included."""
        return self.objects(self.values(problems))

    def traces(self, problems: FieldProblems, noise: FieldsNoise, *, rng: np.random.Generator) -> list[str]:
        """Write completions for the warm start: correct JSON, with values that are often wrong."""
        is_slip_nk, replacement_nk = self.slips(len(problems), noise, rng)
        is_astray_nk = rng.random(is_slip_nk.shape) < noise.astray
        copied_place_k = (np.arange(self.count) + DIGITS // 2) % DIGITS
        copied_digit_nk = problems.digit_nd[:, copied_place_k]
        replacement_nk = np.where(is_astray_nk, copied_digit_nk, replacement_nk)
        return self.objects(self.values(problems, (is_slip_nk | is_astray_nk, replacement_nk)))

    def slips(self, size: int, noise: FieldsNoise, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw at random which values in training completions to replace, and the digits to put there."""
        right_share_k = [
            noise.right[k % len(noise.right)] if name in self.knowable else 0.0 for k, name in enumerate(self.names)
        ]
        return rng.random((size, self.count)) >= np.array(right_share_k), rng.integers(0, 10, (size, self.count))

    def objects(self, values_nk: Int[np.ndarray, "n k"]) -> list[str]:
        """Write the fields' values as JSON objects, as in the dataset's column `answer`."""
        return [json.dumps(dict(zip(self.names, field_values, strict=True))) for field_values in values_nk.tolist()]


def field_words() -> list[str]:
    """Return the tokenizer's words other than digits: each key of the JSON object with its punctuation, and `}`."""
    return [f'{{"{NAMES[0]}": ', *(f', "{name}": ' for name in NAMES[1:]), "}"]
