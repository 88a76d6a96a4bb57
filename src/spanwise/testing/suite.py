"""One estimator under test: what it is called with, and how a finding is worded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from spanwise.credit.registry import PROPERTIES, Method
from spanwise.testing.batches import DrawnBatch, Input, batches_of, rearranged
from spanwise.testing.search import ConformanceError, differs, show

LEVELS = (0.7, 1 / 3, 0.1, 0.806, -0.123456789, 1.0, 0.0)  # numbers whose sums do not come out even
_SAYS = {**PROPERTIES, "oracle": "it equals the slow oracle", "one block": "one block is the method for completions"}


@dataclass(frozen=True)
class Suite:
    """A method, the inputs it needs, and what it is compared with.

    Attributes:
        method: under test.
        spec: its inputs.
        options: of every call.
        oracle, sequence: see `check_estimator`.
    """

    method: Method
    spec: tuple[Input, ...]
    options: dict[str, Any]
    oracle: Callable[..., Tensor] | None
    sequence: Callable[..., Tensor] | None

    @property
    def rewards(self) -> list[str]:
        """The inputs that are rewards of whole rows."""
        return [entry.name for entry in self.spec if entry.is_reward and not entry.by_token]

    def examples(self, name: str) -> SearchStrategy[Any]:
        """What the check of property `name` takes."""
        absent = self.method.kind in ("completion", "block") and "absent" not in self.method.exceptions
        plain = batches_of(self.spec, absent=absent and name not in ("shift", "precision"))
        if name == "permutation":
            return plain.flatmap(lambda b: st.tuples(st.just(b), st.permutations(range(len(b.group_n)))))
        if name in ("masking", "poison"):
            return plain.flatmap(lambda b: st.tuples(st.just(b), rearranged(b)))
        if name == "shift":
            return st.tuples(plain, st.lists(st.sampled_from([0.0, 1.0, -3.5, 0.125, 8.0]), min_size=8, max_size=8))
        if name == "constant" and self.method.kind != "step":
            outcomes = any(entry.stem == "correct" for entry in self.spec)
            levels = (0.0, 1.0, None) if outcomes else (*LEVELS, None)
            return st.tuples(plain, st.lists(st.sampled_from(levels), min_size=8, max_size=8))
        return plain

    def run(self, batch: DrawnBatch, *, fill: float = 0.0, function: Callable[..., Any] | None = None) -> Tensor:
        """The advantages of a batch."""
        return self.call(batch.inputs(fill=fill), function or self.method.estimator)

    def call(self, inputs: dict[str, Any], function: Callable[..., Any]) -> Tensor:
        """Call the estimator; a crash is a finding too."""
        try:
            result = function(**inputs, **self.options)
        except Exception as error:
            text = " ".join(str(error).split())
            raise ConformanceError(
                f"Method '{self.method.name}' raises {type(error).__name__}: {text[:300]} Inputs: {show(inputs)}."
            ) from error
        if not isinstance(result, Tensor) and isinstance(result, tuple) and result and isinstance(result[0], Tensor):
            result = result[0]  # a NamedTuple whose first field is the advantage
        if not isinstance(result, Tensor):
            raise ConformanceError(f"Method '{self.method.name}' returns {type(result).__name__}, not a tensor.")
        return result

    def fail(self, name: str, batch: DrawnBatch, expected: str, actual: Tensor, fill: float = 0.0) -> None:
        """Raise the sentence."""
        raise ConformanceError(
            f"Method '{self.method.name}' breaks '{name}': {_SAYS[name]}. Smallest example: {show(batch.inputs(fill=fill))}. "
            f"Got {show(actual)}, expected {expected}."
        )

    def same(
        self, name: str, batch: DrawnBatch, actual: Tensor, expected: Tensor, *, tolerance: float = 1e-9, fill: float = 0.0
    ) -> None:
        """Fail if two results differ."""
        if actual.shape != expected.shape or bool(differs(actual, expected, tolerance=tolerance).any()):
            self.fail(name, batch, show(expected), actual, fill)
