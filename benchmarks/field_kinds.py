"""Two more kinds of objects than the task `fields` has, in which fields depend on each other.

- `chain`: v_0 is the first digit, v_k = v_(k-1) + d_k modulo 10; digits are taken in turn, so that d_8 is d_0 again. The digits
  behind the first are 0 to 4: a table of all hundred sums at every field takes the tiny model ten times as long to learn.
- `total`: `a` is the first digit, `b`, `c`, ... the rests of the next ones divided by 3, and the last field, `total`, is their sum
  modulo 10, which the model adds up from what it has written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from spanwise.tasks.digits import Source
from spanwise.tasks.fields import DIGITS, LETTERS, FieldProblems, Fields, FieldsNoise, draw_digits

TOTAL = "total"


class _Dependent(Fields):
    """Fields that are all said by the prompt, each from what is written before it, and whose wrong values are random digits."""

    def value(self, problems: FieldProblems, k: int, earlier: Sequence[np.ndarray]) -> np.ndarray:
        """The value of field k; `earlier`: what is written before it."""
        raise NotImplementedError

    def values(self, problems: FieldProblems, slips: tuple[np.ndarray, np.ndarray] | None = None) -> np.ndarray:
        """The value of every field, from what is written before it, slips included."""
        columns: list[np.ndarray] = []
        for k in range(self.count):
            value_n = self.value(problems, k, columns)
            columns.append(value_n if slips is None else np.where(slips[0][:, k], slips[1][:, k], value_n))
        return np.stack(columns, axis=1)

    @property
    def knowable(self) -> tuple[str, ...]:
        """All of them."""
        return self.names

    def traces(self, problems: FieldProblems, noise: FieldsNoise, *, rng: np.random.Generator) -> list[str]:
        """As for other fields, but none copies another digit."""
        return self.objects(self.values(problems, self.slips(len(problems), noise, rng)))


@dataclass(frozen=True)
class Chain(_Dependent):
    """Each field is the one before it plus a digit."""

    kind: ClassVar[str] = "chain"
    source: ClassVar[Source[FieldProblems]] = Source(partial(draw_digits, below=np.array([10, *[5] * (DIGITS - 1)])), 20_263)

    def value(self, problems: FieldProblems, k: int, earlier: Sequence[np.ndarray]) -> np.ndarray:
        """The value of field k, from what is written before it."""
        digit_nd = problems.digit_nd
        return digit_nd[:, 0] if k == 0 else (earlier[k - 1] + digit_nd[:, k % DIGITS]) % 10


@dataclass(frozen=True)
class Total(_Dependent):
    """The last field is the sum of the others."""

    kind: ClassVar[str] = "total"
    counts: ClassVar[tuple[int, int]] = (2, DIGITS + 1)

    @property
    def names(self) -> tuple[str, ...]:
        """Letters, and the total."""
        return (*LETTERS[: self.count - 1], TOTAL)

    def value(self, problems: FieldProblems, k: int, earlier: Sequence[np.ndarray]) -> np.ndarray:
        """The first digit, the rests of the next ones, and the total of what is written before it."""
        if k == self.count - 1:
            return np.sum(earlier, axis=0) % 10
        return problems.digit_nd[:, k] % 3 if k else problems.digit_nd[:, 0]


KINDS = {kind.kind: kind for kind in (Fields, Chain, Total)}
