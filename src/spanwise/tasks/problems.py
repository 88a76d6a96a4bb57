"""Problems of the embedded tasks: drawn at random, and 512 of them kept for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
from jaxtyping import Int

from spanwise.errors import DataError

FILLER = "_"
HELD_OUT = 512

AnyProblems = TypeVar("AnyProblems", bound="EmbeddedProblems")


class EmbeddedProblems:
    """N problems of an embedded task: a dataclass whose fields are arrays of N rows each."""

    def __len__(self) -> int:
        """The number of problems."""
        return len(next(iter(vars(self).values())))

    def take(self: AnyProblems, rows: Int[np.ndarray, " m"]) -> AnyProblems:
        """The problems of some rows, in that order."""
        return type(self)(*(column[rows] for column in vars(self).values()))

    @property
    def prompts(self) -> list[str]:
        """The prompt texts."""
        raise NotImplementedError


@dataclass(frozen=True)
class Source(Generic[AnyProblems]):
    """Where the problems of a task come from: a function that draws them, and the seed of those kept for evaluation."""

    draw_any: Callable[[int, np.random.Generator], AnyProblems]
    held_out_seed: int

    def draw(
        self, size: int, *, rng: np.random.Generator, exclude: Set[str] = frozenset(), unique: bool = False
    ) -> AnyProblems:
        """Draw random problems, none of the prompts `exclude`, and with `unique` none twice."""
        if size < 1:
            raise DataError(f"Cannot draw {size} problems; ask for at least 1.")
        seen, parts, missing = set(exclude), list[AnyProblems](), size
        while missing:
            drawn, rows = self.draw_any(missing, rng), list[int]()
            for row, prompt in enumerate(drawn.prompts):
                if prompt not in seen:
                    rows.append(row)
                    seen.update([prompt] if unique else [])
            parts.append(drawn.take(np.array(rows, dtype=np.int64)))
            missing -= len(rows)
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return type(parts[0])(*(np.concatenate(column) for column in columns))

    def training(self, size: int, *, rng: np.random.Generator) -> AnyProblems:
        """Draw random problems that no evaluation asks."""
        return self.draw(size, rng=rng, exclude=self.held_out_prompts)

    def held_out(self, size: int = HELD_OUT) -> AnyProblems:
        """The first `size` of the 512 evaluation problems, all different; a DataError if there are not so many."""
        if not 1 <= size <= HELD_OUT:
            raise DataError(f"This task holds {HELD_OUT} evaluation prompts; {size} were asked for. Choose 1 to {HELD_OUT}.")
        problems = self.draw(HELD_OUT, rng=np.random.default_rng(self.held_out_seed), unique=True)
        return problems.take(np.arange(size))

    @cached_property
    def held_out_prompts(self) -> frozenset[str]:
        """The texts of all evaluation prompts, to be excluded from everything that is trained on."""
        return frozenset(self.held_out().prompts)
