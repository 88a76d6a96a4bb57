"""`Suite` finds the smallest example that breaks a property of a function, and describes it in a sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from spanwise.errors import RecipeError, SpanwiseError, check_known
from spanwise.testing.batches import NAN, Draw, DrawnBatch, left_padded, placed, rearranged, take

#: The smallest number of examples for a property for which `facts_to_show` names cases, such as a negative result.
_LEAST_EXAMPLES = 60


class ConformanceError(SpanwiseError, AssertionError):
    """A function lacks a required property. The message names the two, the smallest example and the expected result.

    Example:
        >>> issubclass(ConformanceError, AssertionError)  # pytest shows it as a failed assertion
        True
    """


@dataclass(kw_only=True)
class Suite:
    """A function under test, with its checks. Each property is checked by the method of the same name."""

    who: str
    function: Callable[..., Any]
    sentences: Mapping[str, str]
    name: str = ""  # The name of the property that is checked.
    facts_shown: set[Any] = field(default_factory=set)  # The cases that the property's examples have covered so far.
    #: Maps a property to the cases that its examples must cover, such as a negative result.
    facts_to_show: ClassVar[Mapping[str, frozenset[Any]]] = {}
    #: Maps each result column with one number per token to the number that masked tokens must have in it.
    by_token: ClassVar[Mapping[str, float]] = {}
    #: The result columns that must not change when masked tokens are inserted and other tokens move along the row.
    by_row: ClassVar[tuple[str, ...]] = ()
    crashes: ClassVar[str] = "raises"

    def columns(self, result: Any) -> dict[str, Any]:
        """Return the columns of the tested function's result, by name. Columns have one entry per row."""
        return {"": result}

    def separate_rows(self, batch: Any) -> list[list[int]]:
        """Split the rows into sets whose results must not depend on each other."""
        return [[row] for row in range(len(batch))]

    def show_example(self, example: Any) -> str:
        """Return an example as text, for the message of a failed property."""
        return show(example.inputs())

    def check(
        self,
        strategy_of: Callable[[str], SearchStrategy[Any]],
        *,
        asked: Sequence[str] | None,
        exceptions: Mapping[str, str] | None,
        examples: int,
    ) -> None:
        """Check all properties, or those in `asked`, except those in `exceptions`. Report the smallest failing example."""
        for property_name in (*(asked or ()), *(exceptions or ())):
            check_known("property", property_name, self.sentences)
        for name in asked or self.sentences:
            if name not in (exceptions or ()):
                self.name = name
                self.facts_shown = set()
                required_facts = self.facts_to_show.get(name, frozenset())
                example_count = max(examples, _LEAST_EXAMPLES) if required_facts else examples
                _search(getattr(self, name.replace(" ", "_")), strategy_of(name), examples=example_count)
                if not required_facts <= self.facts_shown:
                    raise ConformanceError(
                        f"{self.who} breaks '{name}': {self.sentences[name]}. {example_count} examples do not show that."
                    )

    def has_shown(self, facts: set[Any]) -> None:
        """Note the cases that an example covers. End the search if that is all that must be shown."""
        self.facts_shown |= facts
        if self.facts_to_show[self.name] <= self.facts_shown:
            raise _AllShown

    def call(self, inputs: dict[str, Any], function: Callable[..., Any] | None = None) -> dict[str, Any]:
        """Call `function` (None: the function under test) with `inputs`. Raise a ConformanceError if the call fails."""
        try:
            return self.columns((function or self.function)(**inputs))
        except ConformanceError:
            raise
        except Exception as error:
            error_message = " ".join(str(error).split())
            raise ConformanceError(
                f"{self.who} {self.crashes} {type(error).__name__}: {error_message[:300]} The inputs were {show(inputs)}."
            ) from error

    def run(self, batch: Any) -> dict[str, Any]:
        """Call the function under test with a batch."""
        return self.call(batch.inputs())

    def fail(self, example: Any, detail: str) -> NoReturn:
        """Raise a ConformanceError that names the broken property, the smallest example and a detail."""
        failure_sentence = f"{self.who} breaks '{self.name}': {self.sentences[self.name]}."
        raise ConformanceError(f"{failure_sentence} The smallest example is {self.show_example(example)}. {detail}")

    def same(self, example: Any, result: dict[str, Any], expected: dict[str, Any], *, tolerance: float = 1e-9) -> None:
        """Fail the property if a result differs from the expected result."""
        for column, expected_value in expected.items():
            if differ(result[column], expected_value, tolerance=tolerance):
                column_prefix = f"{column} " if column else ""
                self.fail(example, f"Got {column_prefix}{show(result[column])}, expected {show(expected_value)}.")

    def alone(self, batch: Any, rows: list[int]) -> None:
        """Check that some rows get the same result without the rest of the batch."""
        if rows:
            self.same(batch, take(self.run(batch), rows), self.run(batch.take(rows)))

    def pure(self, batch: Any, _: Draw) -> None:
        """Check that a second call returns the same result, and that calls do not change their inputs."""
        batch_inputs = batch.inputs()
        inputs_before = copy.deepcopy(batch_inputs)
        first_result = copy.deepcopy(self.call(batch_inputs))
        for name, value_before in inputs_before.items():
            if show(batch_inputs[name]) != show(value_before):
                self.fail(batch, f"The call changed its input '{name}' to {show(batch_inputs[name])}.")
        self.same(batch, self.call(batch_inputs), first_result, tolerance=0.0)

    def permutation(self, batch: Any, draw: Draw) -> None:
        """Check that another order of the rows only reorders the result."""
        row_order = draw(st.permutations(range(len(batch))))
        reordered_batch = batch.take(row_order)
        self.same(reordered_batch, self.run(reordered_batch), take(self.run(batch), row_order))

    def split(self, batch: Any, _: Draw) -> None:
        """Check that a group alone, or a completion alone, gets the same result as in its batch."""
        for rows in self.separate_rows(batch):
            self.alone(batch, rows)

    def masking(self, batch: DrawnBatch, draw: Draw) -> None:
        """Check that masked tokens before, between and after the trainable ones do not change the result."""
        self._check_moved_tokens(batch, rearranged(batch, draw))

    def padding(self, batch: DrawnBatch, _: Draw) -> None:
        """Check that padding on the left changes no number of the result."""
        self._check_moved_tokens(batch, left_padded(batch))

    def poison(self, batch: DrawnBatch, draw: Draw) -> None:
        """Check that the values at masked tokens (NaN, 1e9) change no number of the result."""
        rearranged_batch = replace(batch, place_nt=rearranged(batch, draw))
        for fill_value in (NAN, 1e9):
            poisoned_batch = replace(rearranged_batch, fill=fill_value)
            self.same(poisoned_batch, self.run(poisoned_batch), self.run(rearranged_batch))

    def _check_moved_tokens(self, batch: DrawnBatch, place_nt: Tensor) -> None:
        """Check that the result for a trainable token stays the same if the token moves to another column."""
        moved_batch = replace(batch, place_nt=place_nt)
        result_before = self.run(batch)
        reference = {column: result_before[column] for column in self.by_row}
        reference |= {column: placed(result_before[column], place_nt, filler) for column, filler in self.by_token.items()}
        result_after = self.run(moved_batch)
        self.same(moved_batch, result_after, reference)
        for column, filler in self.by_token.items():
            if bool((result_after[column][place_nt < 0] != filler).any()):
                self.fail(moved_batch, f"The result {show(result_after[column])} must be {filler:g} at masked tokens.")


class _AllShown(BaseException):
    """Ends a search once its examples have covered all cases. To hypothesis an `Exception` would be a failing example."""


#: Shrinking makes a failing example small, and takes most of the time of a failing check.
PHASES = (Phase.generate, Phase.shrink)


def _search(check: Callable[[Any, Draw], None], strategy: SearchStrategy[Any], *, examples: int) -> None:
    """Run `check` on examples that are the same in every run. Raise for the smallest failing example of hypothesis."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        print_blob=False,
        phases=PHASES,
        suppress_health_check=list(HealthCheck),  # type: ignore[arg-type] - slow functions and large inputs break no property
    )
    @given(strategy, st.data())
    def run(example: Any, data: st.DataObject) -> None:
        check(example, data.draw)

    try:
        run()
    except _AllShown:
        return
    except ConformanceError as error:
        raise ConformanceError(str(error)) from error.__cause__  # hide hypothesis's long output
    except Unsatisfiable as error:
        raise RecipeError("The strategies in inputs= can draw no example. Let the strategies draw more values.") from error


def show(value: Any) -> str:
    """Return an input or a result as a short text for error messages. Its numbers are not rounded."""
    if isinstance(value, Tensor):
        return str(value.tolist())
    if isinstance(value, dict):
        return ", ".join(f"{name}={show(inner_value)}" for name, inner_value in value.items())
    return repr(value)


def differ(actual: Any, expected: Any, *, tolerance: float) -> bool:
    """Return whether two results differ. `tolerance` is a share of the largest expected number; NaN always differs."""
    if not isinstance(expected, Tensor):
        return repr(actual) != repr(expected)
    magnitudes = expected.abs().nan_to_num(nan=0.0, posinf=0.0).flatten().tolist()
    return actual.shape != expected.shape or not ((actual - expected).abs() <= tolerance * max([1.0, *magnitudes])).all()
