"""How the suite looks for counter-examples, and how it words what it found."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import HypothesisDeprecationWarning, Unsatisfiable
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from spanwise.errors import RecipeError, SpanwiseError, unknown

# How fast an estimator is, and how large its inputs are, is not what is checked here.
_NOT_OURS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example, HealthCheck.filter_too_much)


class ConformanceError(SpanwiseError, AssertionError):
    """A property does not hold; the message names the property, who breaks it, the smallest example and what was expected.

    Example:
        >>> issubclass(ConformanceError, AssertionError)  # pytest shows it as a failed assertion
        True
    """


def search(check: Callable[[Any], None], strategy: SearchStrategy[Any], *, examples: int) -> None:
    """Run `check` on examples; of the failing ones the smallest that hypothesis can find raises.

    The examples are the same in every run.
    """

    def run(example: Any) -> None:
        check(example)

    configured = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        print_blob=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=_NOT_OURS,
    )
    try:
        with warnings.catch_warnings():
            # Run-time type checkers look at a random item of each container; that is no choice of the strategies.
            warnings.filterwarnings(
                "ignore", "Do not use the `random` module inside strategies", HypothesisDeprecationWarning
            )
            configured(given(strategy)(run))()
    except ConformanceError as error:
        raise ConformanceError(str(error)) from error.__cause__  # without the pages of the search
    except Unsatisfiable as error:
        raise RecipeError("No example could be built from the given inputs; loosen their strategies.") from error


def check_properties(
    suite: Any,
    strategy: Callable[[str], SearchStrategy[Any]],
    known: Sequence[str],
    *,
    asked: Sequence[str] | None,
    exceptions: Mapping[str, str] | None,
    examples: int,
) -> None:
    """Search for what breaks the properties asked for, or all known ones, without the exceptions; each is a method of the suite."""
    for name in (*(asked or ()), *(exceptions or ())):
        if name not in known:
            raise RecipeError(unknown("property", name, known))
    for name in asked or known:
        if name not in (exceptions or ()):
            search(getattr(suite, name.replace(" ", "_")), strategy(name), examples=examples)


def show(value: Any) -> str:
    """A short, exact text of an input or a result."""
    if isinstance(value, Tensor):
        return str(value.tolist())
    if isinstance(value, dict):
        return ", ".join(f"{name}={show(inner)}" for name, inner in value.items())
    return repr(value)


def differs(actual: Tensor, expected: Tensor, *, tolerance: float) -> Tensor:
    """Where two results differ by more than `tolerance`, relative to the largest number expected; NaN differs from all."""
    scale = max(1.0, float(expected.abs().nan_to_num(nan=0.0, posinf=0.0).max()) if expected.numel() else 1.0)
    return ~((actual - expected).abs() <= tolerance * scale)


def unchanged(value: Any, before: Any) -> bool:
    """Whether two inputs are the same, NaN where NaN was."""
    if not isinstance(before, Tensor):
        return value == before
    return bool(((value == before) | ((value != value) & (before != before))).all())
