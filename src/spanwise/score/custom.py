"""Rewards given as callables: TRL's signature, or ours with the blocks of each completion."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from spanwise.errors import DataError, RewardError
from spanwise.score.reward import Reward
from spanwise.types import BlockText

_FROM_TRAINER = ("prompts", "completions", "completion_ids")


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

    Args:
        function: the reward function.
        text: the blocks of each completion.
        name: the objective, for messages.
        columns: the dataset's columns; `prompts`, `completions` and `completion_ids` too where the trainer has them.
        options: further keyword arguments; they go before columns of the same name.

    Raises:
        RewardError: the function raises, or returns the wrong number of values, or a value that is no finite number.
        DataError: the function needs a column that is not there.

    Example:
        >>> def length(blocks, target):
        ...     return [-abs(len(b["solution"][""]) - t) for b, t in zip(blocks, target)]
        >>> call_reward(length, [{"solution": {"": "abc"}}], name="length", columns={"target": [5], "id": [1]}).value_n
        tensor([-2.], dtype=torch.float64)
    """
    arguments = _arguments(function, {**columns, "blocks": list(text)}, dict(options or {}), name)
    try:
        result = function(**arguments)
    except Exception as error:
        raise RewardError(
            f"Objective '{name}': its reward function raised {type(error).__name__}: {error}. "
            f"Return None for a completion that has no reward."
        ) from error
    if isinstance(result, Reward):
        _check_length(len(result.value_n), len(text), name)
        return result
    return Reward.of(_numbers(result, len(text), name))


def _arguments(function: Callable[..., Any], known: dict[str, Any], options: dict[str, Any], name: str) -> dict[str, Any]:
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"Objective '{name}': its reward function is async; give a plain function that waits for it.")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"Objective '{name}': the parameters of {function!r} cannot be read; wrap it in a function."
        ) from error
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {
        parameter.name: parameter
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    if "blocks" not in named:
        known.pop("blocks")
    known |= options
    for parameter in named.values():
        if parameter.name not in known and parameter.default is parameter.empty:
            raise _missing(parameter.name, known, name)
    return {key: value for key, value in known.items() if takes_all or key in named}


def _missing(parameter: str, known: Mapping[str, Any], name: str) -> RewardError | DataError:
    if parameter in _FROM_TRAINER:
        return RewardError(
            f"Objective '{name}' has a reward function in TRL's signature and there are no '{parameter}' to call it with; "
            f"pass {{'{parameter}': ...}} among the columns, or write it as f(blocks, **columns)."
        )
    there = sorted(set(known) - {"blocks"})
    return DataError(
        f"Objective '{name}' needs the column '{parameter}'; the dataset has {', '.join(there) or 'no columns'}."
    )


def _numbers(result: Any, size: int, name: str) -> list[float | None]:
    if isinstance(result, (Tensor, np.ndarray)):
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        raise RewardError(
            f"Objective '{name}': its reward function returned {type(result).__name__}; return a list of {size} numbers."
        )
    _check_length(len(result), size, name)
    values: list[float | None] = []
    for n, value in enumerate(result):
        try:
            number = None if value is None else float(value)
        except (TypeError, ValueError):
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
