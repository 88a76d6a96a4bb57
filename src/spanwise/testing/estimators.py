"""`check_estimator`: the properties that every advantage estimator must have, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from spanwise.credit.registry import PROPERTIES, Kind, Method
from spanwise.credit.registry import method as find
from spanwise.credit.spread import spread
from spanwise.errors import RecipeError
from spanwise.testing.batches import LABELS, NAN, Draw, DrawnBatch, Input, batches_of, read_inputs, take
from spanwise.testing.search import ConformanceError, Suite, show
from spanwise.types import Credit, Spans

_IDS = ("group", "trajectory", "stratum", "anchor", "state")
_LEVELS = (0.7, 1 / 3, 0.1, 0.806, -0.123456789, 1.0, 0.0)  # float32 rounds most sums of these rewards
_REWARD_NAMES = ("reward_n", "reward_nk", "reward_nm", "reward_nt", "reward_s")
_NOT_NEGATIVE = st.sampled_from([0.0, 0.125, 0.5, 1.0, 2.0])
_ONE_BLOCK = "the credit of a single block equals what the function 'sequence' gives to whole completions"
_SAYS = {**PROPERTIES, "oracle": "the result equals that of the function 'oracle'", "one block": _ONE_BLOCK}
#: Maps the axes in the name of an estimator's first input, such as `nk` in `reward_nk`, to what the estimator credits.
_KIND_OF_AXES: dict[str, Kind] = {"n": "completion", "nm": "completion", "nk": "block", "nt": "token", "s": "step"}
_ALWAYS = ("result", "pure", "precision", "permutation", "split")
_REWARDED = ("absent", "shift", "constant", "conservation")
_PAID = ("monotone", "signs")
_MASKED = ("masking", "poison", "padding")
#: Maps each kind of method to the properties to check. A kind is what the method credits, or "refinement".
BY_KIND: Mapping[str, tuple[str, ...]] = {
    "completion": (*_ALWAYS, *_REWARDED, *_PAID),
    "block": (*_ALWAYS, *_REWARDED, *_PAID),
    "token": (*_ALWAYS, *_MASKED, *_PAID),
    "step": (*_ALWAYS, "constant", *_PAID),
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
    """Check an estimator against all properties of its kind. See `spanwise.credit.registry.PROPERTIES`.

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
    if not isinstance(method, Method):
        name = getattr(method, "__name__", "estimator")
        if kind is None:
            first_axes = read_inputs(method, optional=optional, entries=inputs)[0].axes
            if first_axes not in _KIND_OF_AXES:
                raise RecipeError(
                    f"The name of the first input of '{name}' ends in '{first_axes}', but only {', '.join(_KIND_OF_AXES)} tell "
                    "what a method credits. Pass the kind of the method, for example kind='token'."
                )
            kind = _KIND_OF_AXES[first_axes]
        method = Method(name, method, kind, "", None, dict(exceptions or {}))
    reward_strategies = dict.fromkeys(_REWARD_NAMES, _NOT_NEGATIVE) if "negative" in method.exceptions else {}
    input_specs = read_inputs(method.estimator, optional=optional, entries={**reward_strategies, **(inputs or {})})
    checked_properties = (*BY_KIND[method.kind], *(["oracle"] if oracle else []), *(["one block"] if sequence else []))
    sentence_of_property = {name: _SAYS[name] for name in checked_properties}
    applicable_exceptions = {name: reason for name, reason in method.exceptions.items() if name in checked_properties}
    estimator_suite = _Estimator(
        who=f"Method '{method.name}'",
        function=partial(method.estimator, **(options or {})),
        sentences=sentence_of_property,
        method=method,
        spec=input_specs,
        slow=oracle and partial(oracle, **(options or {})),
        sequence=sequence,
    )

    def strategy_of(name: str) -> SearchStrategy[DrawnBatch]:
        needs_all_rewards = name in ("precision", "shift", "monotone", "signs") or "absent" in method.exceptions
        return batches_of(input_specs, absent=not needs_all_rewards and method.kind in ("completion", "block"))

    estimator_suite.check(strategy_of, asked=properties, exceptions=applicable_exceptions, examples=examples)


@dataclass(kw_only=True)
class _Estimator(Suite):
    """An advantage estimator under test, its inputs, and functions that must give the same results."""

    method: Method
    spec: tuple[Input, ...]
    slow: Callable[..., Tensor] | None
    sequence: Callable[..., Tensor] | None
    by_token: ClassVar[Mapping[str, float]] = {"": 0.0}
    facts_to_show: ClassVar[Mapping[str, frozenset[Any]]] = {"signs": frozenset((-1, 1))}

    @property
    def of_tokens(self) -> bool:
        """Whether the estimator returns a number for every token."""
        return self.method.kind in ("token", "refinement")

    @property
    def rewards(self) -> list[str]:
        """The names of the inputs that are rewards of whole rows, not of tokens."""
        return [entry.name for entry in self.spec if entry.is_reward and not entry.by_token]

    def advantages(self, batch: DrawnBatch) -> Tensor:
        """Return the estimator's advantages for a batch."""
        return self.run(batch)[""]

    def separate_rows(self, batch: DrawnBatch) -> list[list[int]]:
        """Return the row numbers of each group."""
        return [_row_indices(batch.group_n == group) for group in batch.group_n.unique()]

    def columns(self, result: Any) -> dict[str, Tensor]:
        """Return an estimator's advantages as one column, whose name is empty."""
        if isinstance(result, tuple) and result and isinstance(result[0], Tensor):
            result = result[0]  # the result is a NamedTuple whose first field is the advantage
        if not isinstance(result, Tensor):
            raise ConformanceError(f"{self.who} returns {type(result).__name__}, not a tensor.")
        return {"": result}

    def refuse(self, batch: DrawnBatch, result: Tensor, sentence: str) -> None:
        """Raise an error about the checked property. It shows the result and says what it must be."""
        self.fail(batch, f"The method returned {show(result)}. {sentence}")

    def result(self, batch: DrawnBatch, _: Draw) -> None:
        advantages = self.advantages(batch)
        reward_shape = batch.inputs()[self.spec[0].name].shape
        row_shape = reward_shape if self.method.kind == "block" else reward_shape[:1]
        expected_shape = batch.place_nt.shape if self.of_tokens else row_shape
        if advantages.shape != expected_shape:
            self.refuse(batch, advantages, f"Advantages must have the shape {tuple(expected_shape)}.")
        if advantages.dtype != torch.float64:
            self.refuse(
                batch, advantages, f"Advantages must have the rewards' dtype, torch.float64, not {advantages.dtype}."
            )
        if not bool(advantages.isfinite().all()):
            self.refuse(batch, advantages, "All advantages must be finite.")

    def precision(self, batch: DrawnBatch, _: Draw) -> None:
        float64_inputs = batch.inputs()
        float32_inputs = {k: v.float() for k, v in float64_inputs.items() if isinstance(v, Tensor) and v.is_floating_point()}
        advantages = self.call({**float64_inputs, **float32_inputs})[""]
        result_dtype, tolerance = (torch.float32, 1e-4) if self.of_tokens else (torch.float64, 1e-9)
        if advantages.dtype != result_dtype:
            self.refuse(batch, advantages, f"Float32 rewards need advantages of {result_dtype}, not {advantages.dtype}.")
        self.same(batch, {"": advantages.double()}, self.call(float64_inputs), tolerance=tolerance)

    def absent(self, batch: DrawnBatch, _: Draw) -> None:
        is_absent_n = torch.zeros(len(batch), dtype=torch.bool)
        for name in self.rewards:
            is_absent_n |= batch.rows[name].reshape(len(batch), -1).isnan().any(dim=1)
        advantages = self.advantages(batch)
        if bool((advantages[is_absent_n] != 0).any()):
            self.refuse(batch, advantages, "Advantages must be exactly 0 where the reward is NaN.")
        self.alone(batch, _row_indices(~is_absent_n))

    def permutation(self, batch: DrawnBatch, draw: Draw) -> None:
        """Check that another order of the rows only reorders the result. Groups get new ids too."""
        # Give the steps new numbers in sorted order, so that the steps of a trajectory keep their order.
        new_ids_of_stem = {**dict.fromkeys(_IDS, LABELS), "step": sorted(LABELS)}
        id_inputs = [
            entry for entry in self.spec if entry.stem in new_ids_of_stem and isinstance(batch.rows.get(entry.name), Tensor)
        ]
        row_order = draw(st.permutations(range(len(batch))))
        new_ids_of_input = {
            entry.name: torch.tensor(new_ids_of_stem[entry.stem])[batch.rows[entry.name].unique(return_inverse=True)[1]]
            for entry in id_inputs
        }
        reordered_batch = batch.put(new_ids_of_input).take(row_order)
        self.same(reordered_batch, self.run(reordered_batch), take(self.run(batch), row_order))

    def shift(self, batch: DrawnBatch, draw: Draw) -> None:
        shift_n = _draw_by_group(batch, draw, (0.0, 1.0, -3.5, 0.125, 8.0))
        shifted_batch = batch.put({name: batch.rows[name] + _expand(shift_n, batch.rows[name]) for name in self.rewards})
        self.same(shifted_batch, self.run(shifted_batch), self.run(batch))

    def constant(self, batch: DrawnBatch, draw: Draw) -> None:
        """Check that groups with equal rewards get exactly 0."""
        # For turns, test only rewards of 0. The sum of any other equal rewards would depend on the number of turns.
        reward_choices = (0.0, 1.0) if any(entry.stem == "correct" for entry in self.spec) else _LEVELS
        reward_choices = [abs(reward) if "negative" in self.method.exceptions else reward for reward in reward_choices]
        group_reward_n = _draw_by_group(batch, draw, (0.0,) if self.method.kind == "step" else (*reward_choices, NAN))
        constant_inputs = {}
        for name in [entry.name for entry in self.spec if entry.is_reward or entry.stem in ("confidence", "report")]:
            old_values = batch.rows[name]
            constant_values = _expand(group_reward_n, old_values)
            constant_inputs[name] = torch.where(old_values.isnan() | constant_values.isnan(), old_values, constant_values)
        constant_batch = batch.put(constant_inputs)
        is_constant_n = ~group_reward_n.isnan()
        for dtype in (torch.float64, torch.float32):
            batch_inputs = constant_batch.inputs()
            batch_inputs |= {name: batch_inputs[name].to(dtype) for name in self.rewards}
            advantages = self.call(batch_inputs)[""]
            if bool((advantages[is_constant_n] != 0).any()):
                self.refuse(
                    constant_batch, advantages, f"Advantages must be exactly 0 in rows {_row_indices(is_constant_n)}."
                )
        group_input_names = [entry.name for entry in self.spec if entry.stem == "group"]
        if group_input_names and self.method.kind != "step":
            singleton_batch = batch.put(dict.fromkeys(group_input_names, torch.arange(len(batch))))
            advantages = self.advantages(singleton_batch)
            if bool((advantages != 0).any()):
                self.refuse(singleton_batch, advantages, "Advantages must be exactly 0 in a group of one.")

    def conservation(self, batch: DrawnBatch, _: Draw) -> None:
        credit_nk = self.advantages(batch).reshape(len(batch), -1)
        k = credit_nk.shape[1]
        # Block j of completion i has (i + j) % 3 tokens, with a masked token after each block.
        block_t = torch.arange(3 * k) // 3
        place_in_block_t = torch.arange(3 * k) % 3
        token_count_nt = (torch.arange(len(batch))[:, None] + block_t) % 3
        block_nt = torch.where(place_in_block_t < token_count_nt, block_t, -1)
        spans = Spans.of_blocks([f"block {j}" for j in range(k)], block_nt)
        zero_k = torch.zeros(k, dtype=torch.long)
        zero_n = torch.zeros(len(batch), dtype=torch.float64)
        block_credit = Credit(torch.where(spans.present_nk, credit_nk, 0.0), zero_n, zero_k, zero_k)
        advantage_nt = spread(block_credit, spans, dtype=torch.float64)
        advantage_sum_nk = torch.stack([torch.where(block_nt == j, advantage_nt, 0.0).sum(dim=1) for j in range(k)], dim=1)
        self.same(batch, {"": advantage_sum_nk}, {"": block_credit.block_nk})
        if bool((advantage_nt[block_nt < 0] != 0).any()):
            self.refuse(batch, advantage_nt, "Advantages must be exactly 0 outside every block.")

    def monotone(self, batch: DrawnBatch, draw: Draw) -> None:
        """Check that a higher reward never lowers the credit of its row, block, step or last token."""
        reward_names = [entry.name for entry in self.spec if entry.is_reward and entry.stem != "calibration"]
        changed_row = draw(st.integers(0, len(batch) - 1))
        name = draw(st.sampled_from(reward_names))
        increase = draw(_NOT_NEGATIVE)
        reward_values = batch.rows[name]
        reward_index: tuple[int, ...] = (changed_row,)
        if reward_values.ndim > 1:
            column_count = int((batch.place_nt[changed_row] >= 0).sum()) if self.of_tokens else reward_values.shape[1]
            if not column_count:
                return
            column_index = column_count - 1 if self.of_tokens else draw(st.integers(0, column_count - 1))
            reward_index = (changed_row, column_index)
        raised_rewards = reward_values.clone()
        raised_rewards[reward_index] += increase
        raised_batch = batch.put({name: raised_rewards})
        advantages_before, advantages_after = self.advantages(batch), self.advantages(raised_batch)
        credit_index = reward_index[: advantages_after.ndim]
        credit_before = float(advantages_before[credit_index])
        if not bool(advantages_after[credit_index] >= credit_before - 1e-9):
            rise_sentence = (
                f"{name} rose by {increase:g} at {reward_index} and nowhere else. So the advantage at {credit_index} must be at "
                f"least {credit_before}."
            )
            self.refuse(raised_batch, advantages_after, rise_sentence)

    def signs(self, batch: DrawnBatch, _: Draw) -> None:
        advantages = self.advantages(batch)
        self.has_shown({sign for sign in (-1, 1) if bool((sign * advantages > 0).any())})

    def oracle(self, batch: DrawnBatch, _: Draw) -> None:
        self.same(batch, self.run(batch), {"": self.call(batch.inputs(), self.slow)[""].double()})

    def one_block(self, batch: DrawnBatch, _: Draw) -> None:
        block_inputs = {name: value[:, :1] if name.endswith("_nk") else value for name, value in batch.inputs().items()}
        sequence_inputs = {
            name.removesuffix("k"): value[:, 0] if name.endswith("_nk") else value for name, value in block_inputs.items()
        }
        self.same(batch, {"": self.call(block_inputs)[""][:, 0]}, self.call(sequence_inputs, self.sequence))


def _row_indices(is_chosen_n: Tensor) -> list[int]:
    return is_chosen_n.nonzero().flatten().tolist()


def _draw_by_group(batch: DrawnBatch, draw: Draw, numbers: Sequence[float]) -> Tensor:
    """Draw a number for each group of a batch, and return the numbers by row."""
    number_g = draw(st.lists(st.sampled_from(numbers), min_size=8, max_size=8))
    return torch.tensor(number_g, dtype=torch.float64)[batch.group_n % len(number_g)]


def _expand(number_n: Tensor, like: Tensor) -> Tensor:
    """Expand one number per row to the shape of an input."""
    return number_n.to(like.dtype).reshape(-1, *(1 for _ in like.shape[1:])).expand_as(like)
