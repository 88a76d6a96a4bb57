"""`check_estimator`: the properties that every estimator must have, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from spanwise.credit.registry import Kind, Method
from spanwise.credit.registry import method as find
from spanwise.errors import RecipeError
from spanwise.testing.batches import Input, read_inputs
from spanwise.testing.properties import CHECKS
from spanwise.testing.search import chosen_properties, search
from spanwise.testing.suite import Suite

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
        known = method
    else:
        name = getattr(method, "__name__", "estimator")
        kind = kind or _kind(name, read_inputs(method, optional=optional, entries=inputs))
        known = Method(name, method, kind, "", None, dict(exceptions or {}))
    spec = read_inputs(known.estimator, optional=optional, entries=_entries(known, inputs))
    suite = Suite(known, spec, dict(options or {}), oracle, sequence)
    applicable = (*BY_KIND[known.kind], *(["oracle"] if oracle else []), *(["one block"] if sequence else []))
    declared = {name: why for name, why in known.exceptions.items() if name in applicable}
    for name in chosen_properties(None if properties is None else tuple(properties), applicable, declared):
        search(CHECKS[name](suite), suite.examples(name), examples=examples)


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
