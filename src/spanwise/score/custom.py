"""Rewards given as callables: TRL's signature, or ours with the blocks of each completion."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from spanwise.errors import DataError, RecipeError, RewardError
from spanwise.score.calls import called
from spanwise.score.reward import Reward
from spanwise.types import BlockText

_FROM_TRAINER = ("prompts", "completions", "completion_ids")
_EITHER, _BY_NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def call_reward(
    function: Callable[..., Any],
    text: Sequence[BlockText],
    *,
    name: str,
    columns: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
) -> Reward:
    """Call a user's reward function with what its parameters ask for, and check what comes back.

    A function with a parameter `blocks` gets the blocks of every completion, `f(blocks, **columns)`; any other one is taken for a
    TRL reward function, `f(prompts, completions, completion_ids, **columns)`. Everything is passed by name; columns that the
    function has no parameter for are left out unless it takes `**kwargs`. It returns one number or None (no reward) per
    completion, as a list, tuple, array or tensor, or a `Reward`.
    """
    arguments = _arguments(function, {**columns, "blocks": list(text)}, dict(options or {}), name)
    result = called(
        partial(function, **arguments),
        what=f"Objective '{name}': its reward function",
        size=len(text),
        advice="Return None for a completion that has no reward.",
    )
    if isinstance(result, Reward):
        _check_length(len(result.value_n), len(text), name)
        return result
    return Reward.of(_numbers(result, len(text), name))


def check_reward_function(function: Callable[..., Any], options: Mapping[str, Any], name: str) -> None:
    """Refuse a reward function that cannot be called by name, or that would not hear an option."""
    parameters = parameters_of(function, name)
    named = [parameter.name for parameter in parameters if parameter.kind in (_EITHER, _BY_NAME)]
    nameless = next(
        (parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.POSITIONAL_ONLY), None
    )
    if nameless is not None:
        raise RecipeError(
            f"Objective '{name}': its reward function takes '{nameless}' by position only, and everything is passed by name; "
            f"leave the '/' out of its parameters."
        )
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        lost = next((option for option in options if option not in named), None)
        if lost is not None:
            raise RecipeError(
                f"Objective '{name}' has the option '{lost}', but its reward function has no such parameter; it has "
                f"{', '.join(named) or 'none'}."
            )


def parameters_of(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    """The parameters of a reward function."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"Objective '{name}': the parameters of {function!r} cannot be read; wrap it in a function."
        ) from error


def _arguments(function: Callable[..., Any], given: dict[str, Any], options: dict[str, Any], name: str) -> dict[str, Any]:
    parameters = parameters_of(function, name)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {
        parameter.name: parameter
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    if "blocks" not in named:
        given.pop("blocks")
    given |= options
    for parameter in named.values():
        if parameter.name not in given and parameter.default is parameter.empty:
            raise _missing(parameter.name, given, name)
    return {key: value for key, value in given.items() if takes_all or key in named}


def _missing(parameter: str, known: Mapping[str, Any], name: str) -> RewardError | DataError:
    if parameter in _FROM_TRAINER:
        return RewardError(
            f"Objective '{name}' has a reward function in TRL's signature and there are no '{parameter}' to call it with; "
            f"pass {{'{parameter}': ...}} among the columns, or write it as f(blocks, **columns)."
        )
    there = sorted(set(known) - {"blocks"})
    near = get_close_matches(parameter, ["blocks", *there], n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return DataError(
        f"Objective '{name}' needs the column '{parameter}'; the dataset has {', '.join(there) or 'no columns'}.{hint} A reward "
        f"function is called with what its parameters name: columns, and 'blocks' for the blocks of every completion."
    )


def _numbers(result: Any, size: int, name: str) -> list[float | None]:
    if isinstance(result, (Tensor, np.ndarray)):
        if len(result.shape) > 1:
            raise RewardError(
                f"Objective '{name}': its reward function returned an array of the shape {tuple(result.shape)}; return one number "
                f"per completion, an array of the shape ({size},)."
            )
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        raise RewardError(
            f"Objective '{name}': its reward function returned {type(result).__name__}; return a list of {size} numbers."
        )
    _check_length(len(result), size, name)
    values: list[float | None] = []
    for n, value in enumerate(result):
        try:
            number = None if value is None else math.nan if isinstance(value, (str, bytes)) else float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):  # an array of several, a tensor of several, 10**400
            number = math.nan
        if number is not None and not math.isfinite(number):
            raise RewardError(
                f"Objective '{name}' gives completion {n} of {size} the reward {value!r}; "
                f"return a finite number, or None for no reward."
            )
        values.append(number)
    return values


def _check_length(got: int, size: int, name: str) -> None:
    if got != size:
        raise RewardError(f"Objective '{name}': its reward function returned {got} rewards for {size} completions.")
