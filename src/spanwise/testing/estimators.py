"""`check_estimator`: the properties that every estimator must have, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from spanwise.credit.registry import PROPERTIES, Kind, Method
from spanwise.credit.registry import method as find
from spanwise.credit.spread import spread
from spanwise.errors import RecipeError
from spanwise.testing.batches import NAN, DrawnBatch, Input, batches_of, left_padded, moved_tokens, read_inputs, reordered
from spanwise.testing.search import ConformanceError, check_properties, differs, show, unchanged
from spanwise.types import Credit, Spans

_LEVELS = (0.7, 1 / 3, 0.1, 0.806, -0.123456789, 1.0, 0.0)  # numbers whose sums do not come out even
_SAYS = {**PROPERTIES, "oracle": "it equals the slow oracle", "one block": "one block is the method for completions"}
_ALWAYS = ("result", "pure", "precision", "permutation", "split")
_REWARDED = ("absent", "shift", "constant", "conservation")
_MASKED = ("masking", "poison", "padding")
#: What a method credits -> the properties that are checked of it.
BY_KIND: Mapping[str, tuple[str, ...]] = {
    "completion": (*_ALWAYS, *_REWARDED),
    "block": (*_ALWAYS, *_REWARDED),
    "token": (*_ALWAYS, *_MASKED),
    "step": (*_ALWAYS, "constant"),
    "refinement": (*_ALWAYS, *_MASKED),
}


def check_estimator(
    method: Method | str | Callable[..., Any],
    *,
    kind: Kind | None = None,
    exceptions: Mapping[str, str] | None = None,
    properties: Sequence[str] | None = None,
    inputs: Mapping[str, SearchStrategy[Any]] | None = None,
    optional: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    oracle: Callable[..., Tensor] | None = None,
    sequence: Callable[..., Tensor] | None = None,
    examples: int = 30,
) -> None:
    """Check an estimator against every property that applies to its kind, see `spanwise.credit.registry.PROPERTIES`.

    Inputs are made up from the names of its parameters without a default (`reward_n`, `group_n`, `value_nt`, ...).

    Args:
        method: a registered method, its name, or a plain function.
        kind: what the rewards of a plain function are indexed by; None: read from its first parameter.
        exceptions: of a plain function, property -> why it does not have it. A registered method brings its own.
        properties: check these only.
        inputs: name of an input -> strategy of one entry, for inputs the suite does not know or that need other values.
        optional: parameters with a default that are made up as well.
        options: keyword options of every call.
        oracle: a slow second implementation with the same signature; results must agree.
        sequence: for kind "block", the method for whole completions that it must equal when there is one block.
        examples: how many examples each property sees.

    Raises:
        ConformanceError: a property does not hold; with the smallest example found, what came out and what should have.
        RecipeError: an input the suite cannot make up, an unknown property.

    Example:
        >>> check_estimator("grpo", examples=5)
        >>> def raw(reward_n, group_n):
        ...     return reward_n.double().nan_to_num()
        >>> check_estimator(raw, properties=["constant"])
        Traceback (most recent call last):
        spanwise.testing.search.ConformanceError: Method 'raw' breaks 'constant': ...
    """
    if isinstance(method, str):
        method = find(method)
    if isinstance(method, Method):
        tested = method
    else:
        name = getattr(method, "__name__", "estimator")
        kind = kind or _kind(name, read_inputs(method, optional=optional, entries=inputs))
        tested = Method(name, method, kind, "", None, dict(exceptions or {}))
    spec = read_inputs(tested.estimator, optional=optional, entries=_entries(tested, inputs))
    suite = _Suite(tested, spec, dict(options or {}), oracle, sequence)
    applicable = (*BY_KIND[tested.kind], *(["oracle"] if oracle else []), *(["one block"] if sequence else []))
    declared = {name: why for name, why in tested.exceptions.items() if name in applicable}
    check_properties(suite, suite.strategy, applicable, asked=properties, exceptions=declared, examples=examples)


def _kind(name: str, spec: Sequence[Input]) -> Kind:
    first = spec[0].axes
    kinds: dict[str, Kind] = {"n": "completion", "nm": "completion", "nk": "block", "nt": "token", "s": "step"}
    if first not in kinds:
        raise RecipeError(f"The first input of '{name}' has the indices '{first}'; say what it credits with kind=.")
    return kinds[first]


def _entries(method: Method, inputs: Mapping[str, SearchStrategy[Any]] | None) -> dict[str, SearchStrategy[Any]]:
    entries = dict(inputs or {})
    if "negative" in method.exceptions:
        for name in ("reward_n", "reward_nk", "reward_nm", "reward_nt", "reward_s"):
            entries.setdefault(name, st.sampled_from([0.0, 0.125, 0.5, 1.0, 2.0]))
    return entries


@dataclass(frozen=True)
class _Suite:
    """A method, the inputs it needs, and what it is compared with; each property of `PROPERTIES` as a check of one example."""

    method: Method
    spec: tuple[Input, ...]
    options: dict[str, Any]
    slow: Callable[..., Tensor] | None
    sequence: Callable[..., Tensor] | None

    @property
    def rewards(self) -> list[str]:
        """The inputs that are rewards of whole rows."""
        return [entry.name for entry in self.spec if entry.is_reward and not entry.by_token]

    def strategy(self, name: str) -> SearchStrategy[Any]:
        """What the check of property `name` takes."""
        absent = self.method.kind in ("completion", "block") and "absent" not in self.method.exceptions
        plain = batches_of(self.spec, absent=absent and name not in ("shift", "precision"))
        if name == "permutation":
            return reordered(plain)
        if name in ("masking", "poison"):
            return moved_tokens(plain)
        if name == "shift":
            return st.tuples(plain, st.lists(st.sampled_from([0.0, 1.0, -3.5, 0.125, 8.0]), min_size=8, max_size=8))
        if name == "constant" and self.method.kind != "step":
            outcomes = any(entry.stem == "correct" for entry in self.spec)
            levels = (0.0, 1.0, None) if outcomes else (*_LEVELS, None)
            return st.tuples(plain, st.lists(st.sampled_from(levels), min_size=8, max_size=8))
        return plain

    def run(self, batch: DrawnBatch, *, fill: float = 0.0) -> Tensor:
        """The advantages of a batch."""
        return self.call(batch.inputs(fill=fill))

    def call(self, inputs: dict[str, Any], function: Callable[..., Any] | None = None) -> Tensor:
        """Call the estimator; a crash is a finding too."""
        try:
            result = (function or self.method.estimator)(**inputs, **self.options)
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

    def result(self, batch: DrawnBatch) -> None:
        result = self.run(batch)
        rows = batch.inputs()[self.spec[0].name]
        shape = rows.shape if self.method.kind == "block" else rows.shape[:1]
        if self.method.kind in ("token", "refinement"):
            shape = batch.place_nt.shape
        if result.shape != shape:
            self.fail("result", batch, f"the shape {tuple(shape)}", result)
        if result.dtype != torch.float64:
            self.fail("result", batch, f"torch.float64 (the rewards are float64), not {result.dtype}", result)
        if not bool(result.isfinite().all()):
            self.fail("result", batch, "finite numbers", result)

    def pure(self, batch: DrawnBatch) -> None:
        inputs = batch.inputs()
        before = {name: value.clone() if isinstance(value, Tensor) else list(value) for name, value in inputs.items()}
        first = self.call(inputs).clone()
        for name, value in inputs.items():
            if not unchanged(value, before[name]):
                self.fail("pure", batch, f"'{name}' to stay as it was", first)
        self.same("pure", batch, self.call(inputs), first, tolerance=0.0)

    def precision(self, batch: DrawnBatch) -> None:
        inputs = batch.inputs()
        single = {
            name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in inputs.items()
        }
        result = self.call(single)
        by_token = self.method.kind in ("token", "refinement")
        if result.dtype != (torch.float32 if by_token else torch.float64):
            expected = "float32, as the rewards" if by_token else "float64 whatever the rewards are"
            self.fail("precision", batch, f"{expected}, not {result.dtype}", result)
        tolerance = 1e-4 if by_token else 1e-9
        self.same("precision", batch, result.double(), self.call(inputs), tolerance=tolerance)

    def absent(self, batch: DrawnBatch) -> None:
        gone = torch.zeros(len(batch.group_n), dtype=torch.bool)
        for name in self.rewards:
            gone |= (
                batch.rows[name].isnan().flatten(1).any(dim=1) if batch.rows[name].dim() > 1 else batch.rows[name].isnan()
            )
        result = self.run(batch)
        if bool((result[gone] != 0).any()):
            self.fail("absent", batch, "exactly 0 where the reward is NaN", result)
        if bool((~gone).any()):
            alone = self.run(batch.take((~gone).nonzero().flatten()))
            expected = torch.zeros_like(result)
            expected[~gone] = alone
            self.same("absent", batch, result, expected)

    def permutation(self, example: tuple[DrawnBatch, list[int]]) -> None:
        batch, order = example
        moved = batch.relabelled().take(order)
        self.same("permutation", moved, self.run(moved), self.run(batch)[order])

    def shift(self, example: tuple[DrawnBatch, list[float]]) -> None:
        batch, shifts = example
        by_group = torch.tensor(shifts, dtype=torch.float64)[batch.group_n % len(shifts)]
        moved = batch.put({name: _by_row(batch.rows[name], by_group, add=True) for name in self.rewards})
        self.same("shift", moved, self.run(moved), self.run(batch))

    def constant(self, example: Any) -> None:
        """Some groups are constant, the others as they come; in steps, whose trajectories differ in length, nothing is earned."""
        if self.method.kind == "step":
            batch = example.put({name: torch.zeros_like(example.rows[name]) for name in self.rewards})
            level_n = torch.zeros(len(batch.group_n), dtype=torch.float64)
        else:
            batch, levels = example
            signed = [
                NAN if level is None else abs(level) if "negative" in self.method.exceptions else level for level in levels
            ]
            level_n = torch.tensor(signed, dtype=torch.float64)[batch.group_n % len(levels)]
            names = [entry.name for entry in self.spec if entry.is_reward or entry.stem in ("confidence", "report")]
            batch = batch.put({name: _by_row(batch.rows[name], level_n, add=False) for name in names})
        for dtype in (torch.float64, torch.float32):
            inputs = batch.inputs()
            rewards = {name: inputs[name].to(dtype) for name in self.rewards}
            result = self.call({**inputs, **rewards})
            if bool((result[~level_n.isnan()] != 0).any()):
                self.fail("constant", batch, f"exactly 0 in rows {(~level_n.isnan()).nonzero().flatten().tolist()}", result)
        if self.method.kind != "step":
            self._alone(example[0])

    def _alone(self, batch: DrawnBatch) -> None:
        """Every row a group of one."""
        names = [entry.name for entry in self.spec if entry.stem == "group"]
        if not names:
            return
        single = batch.put({name: torch.arange(len(batch.group_n)) for name in names})
        result = self.run(single)
        if bool((result != 0).any()):
            self.fail("constant", single, "exactly 0 in a group of one", result)

    def split(self, batch: DrawnBatch) -> None:
        whole = self.run(batch)
        pieces = torch.empty_like(whole)
        for group in batch.group_n.unique():
            here = (batch.group_n == group).nonzero().flatten()
            pieces[here] = self.run(batch.take(here))
        self.same("split", batch, whole, pieces)

    def masking(self, example: tuple[DrawnBatch, Tensor]) -> None:
        self._moved("masking", example[0], example[1], fill=0.0)

    def poison(self, example: tuple[DrawnBatch, Tensor]) -> None:
        batch = replace(example[0], place_nt=example[1])
        for fill in (NAN, 1e9):
            self.same("poison", batch, self.run(batch, fill=fill), self.run(batch), fill=fill)

    def padding(self, batch: DrawnBatch) -> None:
        self._moved("padding", batch, left_padded(batch), fill=0.0)

    def _moved(self, name: str, batch: DrawnBatch, place_nt: Tensor, *, fill: float) -> None:
        """The same trainable tokens at other places: the same numbers there, exactly 0 at masked ones."""
        plain, moved = self.run(batch), replace(batch, place_nt=place_nt)
        result = self.run(moved, fill=fill)
        if bool((result[place_nt < 0] != 0).any()):
            self.fail(name, moved, "exactly 0 at masked tokens", result, fill)
        expected = torch.zeros_like(result)
        for row in range(len(place_nt)):
            here = place_nt[row] >= 0
            expected[row, here] = plain[row, batch.place_nt[row] >= 0][place_nt[row, here]]
        self.same(name, moved, result, expected, fill=fill)

    def conservation(self, batch: DrawnBatch) -> None:
        result = self.run(batch)
        block_nk = result if result.dim() == 2 else result[:, None]
        n, k = block_nk.shape
        # Block j of completion i has (i + j) % 3 tokens, with a masked token after each block.
        length = [[(i + j) % 3 for j in range(k)] for i in range(n)]
        block_nt = torch.full((n, 3 * k), -1)
        start_nk, end_nk = torch.zeros(n, k, dtype=torch.long), torch.zeros(n, k, dtype=torch.long)
        for i, j in ((i, j) for i in range(n) for j in range(k) if length[i][j]):
            start_nk[i, j], end_nk[i, j] = 3 * j, 3 * j + length[i][j]
            block_nt[i, 3 * j : 3 * j + length[i][j]] = j
        spans = Spans(tuple(f"block {j}" for j in range(k)), start_nk, end_nk, block_nt, torch.zeros(n, dtype=torch.long))
        nothing = torch.zeros(k, dtype=torch.long)
        present_nk = spans.present_nk
        credit = Credit(torch.where(present_nk, block_nk, 0.0), torch.zeros(n, dtype=torch.float64), nothing, nothing)
        adv_nt = spread(credit, spans, dtype=torch.float64)
        sums = torch.stack([torch.where(block_nt == j, adv_nt, 0.0).sum(dim=1) for j in range(k)], dim=1)
        self.same("conservation", batch, sums, credit.block_nk)
        if bool((adv_nt[block_nt < 0] != 0).any()):
            self.fail("conservation", batch, "exactly 0 outside every block", adv_nt)

    def oracle(self, batch: DrawnBatch) -> None:
        self.same("oracle", batch, self.run(batch), self.call(batch.inputs(), self.slow).double())

    def one_block(self, batch: DrawnBatch) -> None:
        assert self.sequence is not None
        inputs = {name: value[:, :1] if name.endswith("_nk") else value for name, value in batch.inputs().items()}
        by_row = {name.removesuffix("k"): value[:, 0] if name.endswith("_nk") else value for name, value in inputs.items()}
        expected = self.sequence(**by_row)
        self.same("one block", batch, self.call(inputs)[:, 0], expected)


def _by_row(value: Tensor, by_row: Tensor, *, add: bool) -> Tensor:
    """Add a number to each row, or put it there unless it is NaN; absent entries stay absent."""
    wide = by_row.to(value.dtype).reshape(-1, *(1 for _ in value.shape[1:])).expand_as(value)
    return value + wide if add else torch.where(value.isnan() | wide.isnan(), value, wide)
