"""A JSON object of K fields, each a small question about the eight digits of the prompt.

    3_8_1_4_0_7_5_2_=   {"a": 8, "b": 6, "c": 1, "d": 0}

A completion has as many parts as there are fields, and each is right or wrong for itself, so one number for all of them says little
about any. There are three kinds:

- `independent`: field k asks its own question (`QUESTIONS`): a digit copied, the larger of two, parity, a look-up. Field `b` cannot
  be known: its gold value is drawn once per prompt, and nothing in the prompt says it.
- `chain`: v_0 is the first digit, v_k = v_(k-1) + d_k modulo 10; digits are taken in turn, so that d_8 is d_0 again. The digits
  behind the first are 0 to 4: a table of all hundred sums at every field takes the tiny model ten times as long to learn.
- `total`: `a` is the first digit, `b`, `c`, ... the rests of the next ones divided by 3, and the last field, `total`, is their sum
  modulo 10, which the model adds up from what it has written.

The warm start has learned the form and every rule, and mostly does not follow the rules: see `FieldsNoise`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from jaxtyping import Int

from spanwise.errors import DataError
from spanwise.layout import Layout
from spanwise.tasks.digits import FILLER, HELD_OUT, EmbeddedProblems, draw_until, first_of

Kind = Literal["independent", "chain", "total"]
DIGITS = 8
#: The names of fields, in order, and of the last one of kind `total`.
LETTERS = "abcdefghijklmnop"
TOTAL = "total"
#: The block of what no field claims.
FORM = "form"
#: The place of the field that cannot be known (kind `independent`).
UNKNOWABLE = 1
_HELD_OUT_SEED = 20_263
_TABLE = np.array([4, 7, 1, 9, 0, 6, 2, 8, 5, 3])

#: What field k asks: an operation and the places of its digits; `hidden` is the one that cannot be known.
QUESTIONS: tuple[tuple[str, int, int], ...] = (
    ("larger", 0, 1),
    ("hidden", 0, 0),
    ("copy", 2, 2),
    ("smaller", 3, 4),
    ("look-up", 5, 5),
    ("parity", 7, 7),
    ("rest", 6, 6),
    ("larger", 4, 6),
    ("copy", 0, 0),
    ("look-up", 1, 1),
    ("smaller", 2, 5),
    ("parity", 3, 3),
    ("rest", 7, 7),
    ("larger", 5, 7),
    ("copy", 4, 4),
    ("look-up", 6, 6),
)
#: What the fields before `total` ask.
_ADDED = (("copy", 0, 0), *(("rest", place, place) for place in range(1, DIGITS)))


@dataclass(frozen=True)
class Fields:
    """Which objects are asked for.

    Args:
        kind: how the values come about, see the module.
        count: K, the number of fields, 1 to 16; of kind `total` 2 to 9.

    Raises:
        DataError: another number.

    Example:
        >>> Fields("total", 3).names, Fields("independent", 3).knowable
        (('a', 'b', 'total'), ('a', 'c'))
    """

    kind: Kind = "independent"
    count: int = 8

    def __post_init__(self) -> None:
        fewest, most = (2, len(_ADDED) + 1) if self.kind == "total" else (1, len(QUESTIONS))
        if not fewest <= self.count <= most:
            raise DataError(f"{self.count} fields were asked for; those of kind '{self.kind}' are {fewest} to {most}.")

    @property
    def names(self) -> tuple[str, ...]:
        """The keys of the object, in order."""
        return (*LETTERS[: self.count - 1], TOTAL if self.kind == "total" else LETTERS[self.count - 1])

    @property
    def knowable(self) -> tuple[str, ...]:
        """The fields whose values the prompt says."""
        hidden = self.kind == "independent"
        return tuple(name for k, name in enumerate(self.names) if not (hidden and k == UNKNOWABLE))

    @property
    def layout(self) -> Layout:
        """A block for each field's value, and one for the form: keys, punctuation, the end."""
        return Layout({FORM: [], **{name: [name] for name in self.names}}, segmenter="json")

    @property
    def longest(self) -> int:
        """Tokens of a completion: a key and a value for each field, the closing brace, the end."""
        return 2 * self.count + 2


@dataclass(frozen=True)
class FieldProblems(EmbeddedProblems):
    """N prompts as arrays."""

    digit_nd: Int[np.ndarray, "n d"]  # what the prompt shows
    hidden_n: Int[np.ndarray, " n"]  # the value that nobody is told

    @property
    def prompts(self) -> list[str]:
        """The prompt texts: the digits with a gap behind each, so that d_k stands as far before field k for every k; then `=`."""
        return [f"{''.join(f'{digit}{FILLER}' for digit in digits)}=" for digits in self.digit_nd.tolist()]


@dataclass(frozen=True)
class FieldsNoise:
    """How often a value of a warm-start trace follows its rule."""

    right: tuple[float, ...]  # the probability, for fields 0, 1, 2, ... in turn; otherwise a random digit
    # How often field k of kind `independent` copies the digit four places after d_k instead: so each field has another thing to
    # unlearn. Were wrong values only random, one dial, how sure the model is, would mend all fields at once.
    astray: float = 0.4


FIELDS_NOISE: dict[str, FieldsNoise] = {
    "fields_early": FieldsNoise(right=(0.9,)),
    "fields": FieldsNoise(right=(0.3, 0.2, 0.4, 0.2)),
}


def draw_field_problems(
    size: int, kind: Kind, *, rng: np.random.Generator, exclude: frozenset[str] = frozenset(), unique: bool = False
) -> FieldProblems:
    """Draw random digits; for the arguments and what is refused see `draw_problems`."""
    return draw_until(size, lambda missing: _draw_any(missing, kind, rng), exclude=exclude, unique=unique)


def held_out_field_problems(kind: Kind, size: int = HELD_OUT) -> FieldProblems:
    """The first `size` of the 512 evaluation problems, all different; no warm start and no training set contains their prompts.

    Raises:
        DataError: `size` is not in 1..512.

    Example:
        >>> len(set(held_out_field_problems("chain").prompts))
        512
    """
    return first_of(draw_field_problems(HELD_OUT, kind, rng=np.random.default_rng(_HELD_OUT_SEED), unique=True), size)


@cache
def held_out_field_prompts(kind: Kind) -> frozenset[str]:
    """The texts of all evaluation prompts of a kind, to be excluded from everything that is trained on."""
    return frozenset(held_out_field_problems(kind).prompts)


def values_of(
    problems: FieldProblems,
    fields: Fields,
    *,
    slip_nk: np.ndarray | None = None,
    slipped_nk: np.ndarray | None = None,
) -> Int[np.ndarray, "n k"]:
    """The value of every field; where one depends on earlier ones, on what is written there."""
    columns = list[np.ndarray]()
    for k in range(fields.count):
        value_n = _value(problems, fields, k, columns)
        columns.append(
            value_n if slip_nk is None or slipped_nk is None else np.where(slip_nk[:, k], slipped_nk[:, k], value_n)
        )
    return np.stack(columns, axis=1)


def objects(values_nk: Int[np.ndarray, "n k"], fields: Fields) -> list[str]:
    """Values as the JSON texts that completions and the column `answer` hold."""
    return [json.dumps(dict(zip(fields.names, values, strict=True))) for values in values_nk.tolist()]


def field_answers(problems: FieldProblems, fields: Fields) -> list[str]:
    """The gold objects; they know what is hidden."""
    return objects(values_of(problems, fields), fields)


def field_traces(problems: FieldProblems, noise: FieldsNoise, *, fields: Fields, rng: np.random.Generator) -> list[str]:
    """The completions the warm start imitates: the form without a fault, values that often do not follow their rule."""
    shape = len(problems), fields.count
    right_k = np.array([noise.right[k % len(noise.right)] for k in range(fields.count)])
    for k, name in enumerate(fields.names):
        right_k[k] = right_k[k] if name in fields.knowable else 0.0
    slip_nk, slipped_nk = rng.random(shape) >= right_k, rng.integers(0, 10, shape)
    if fields.kind == "independent":
        astray_nk = rng.random(shape) < noise.astray
        copied_nk = problems.digit_nd[:, (np.arange(fields.count) + DIGITS // 2) % DIGITS]
        slip_nk, slipped_nk = slip_nk | astray_nk, np.where(astray_nk, copied_nk, slipped_nk)
    return objects(values_of(problems, fields, slip_nk=slip_nk, slipped_nk=slipped_nk), fields)


def field_words() -> list[str]:
    """What the tokenizer has beside digits: the keys with their punctuation, the closing brace."""
    names = (*LETTERS, TOTAL)
    return [f'{{"{LETTERS[0]}": ', *(f', "{name}": ' for name in names[1:]), "}"]


def _value(problems: FieldProblems, fields: Fields, k: int, earlier: Sequence[np.ndarray]) -> np.ndarray:
    digit_nd = problems.digit_nd
    if fields.kind == "chain":
        return digit_nd[:, 0] if k == 0 else (earlier[k - 1] + digit_nd[:, k % DIGITS]) % 10
    if fields.kind == "total" and k == fields.count - 1:
        return np.sum(earlier, axis=0) % 10
    operation, first, second = (_ADDED if fields.kind == "total" else QUESTIONS)[k]
    if operation == "hidden":
        return problems.hidden_n
    left_n, right_n = digit_nd[:, first], digit_nd[:, second]
    answers: Mapping[str, np.ndarray] = {
        "copy": left_n,
        "larger": np.maximum(left_n, right_n),
        "smaller": np.minimum(left_n, right_n),
        "parity": left_n % 2,
        "rest": left_n % 3,
        "look-up": _TABLE[left_n],
    }
    return answers[operation]


def _draw_any(size: int, kind: Kind, rng: np.random.Generator) -> FieldProblems:
    largest_d = np.array([9] + [4 if kind == "chain" else 9] * (DIGITS - 1))
    return FieldProblems(rng.integers(0, largest_d + 1, (size, DIGITS)), rng.integers(0, 10, size))
