"""Rewards given as callables: TRL's signature, or ours with the blocks of each completion."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

from spanwise.errors import DataError, RecipeError, RewardError
from spanwise.objective import Objective
from spanwise.score.calls import called, listed_values
from spanwise.score.reward import Columns, Reward, Texts

_FROM_TRAINER = ("prompts", "completions", "completion_ids")


def call_reward(objective: Objective, text: Texts, columns: Columns) -> Reward:
    """Call a user's reward function with what its parameters ask for, and check what comes back.

    A function with a parameter `blocks` gets the blocks of every completion, `f(blocks, **columns)`; any other one is taken for a
    TRL reward function, `f(prompts, completions, completion_ids, **columns)`. Everything is passed by name; columns that the
    function has no parameter for are left out unless it takes `**kwargs`. It returns one number or None (no reward) per
    completion, as a list, tuple, array or tensor, or a `Reward`.
    """
    name, what, size = objective.name, f"Objective '{objective.name}': its reward function", len(text)
    parameters = parameters_of(objective)
    named = {one.name: one.default for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    known = {**columns, **({"blocks": list(text)} if "blocks" in named else {}), **objective.options}
    for parameter, default in named.items():
        if parameter not in known and default is inspect.Parameter.empty:
            raise _missing(parameter, known, name)
    arguments = known if _takes_all(parameters) else {key: value for key, value in known.items() if key in named}
    advice = "Return None for a completion that has no reward."
    function = partial(objective.reward, **arguments)  # pyright: ignore[reportArgumentType] - not the name of one
    result = called(function, what=what, size=size, advice=advice)
    if isinstance(result, Reward):
        if len(result.value_n) != size:
            raise RewardError(f"{what} returned {len(result.value_n)} numbers for {size} completions.")
        return result
    values: list[float | None] = []
    for n, value in enumerate(listed_values(result, size, what=what, noun="number")):
        number = None if value is None else _number(value)
        if number is not None and not math.isfinite(number):
            raise RewardError(
                f"Objective '{name}' gives completion {n} of {size} the reward {value!r}; return a finite number, or None for no "
                f"reward."
            )
        values.append(number)
    return Reward.of(values)


def _number(value: Any) -> float:
    """A number as a float; NaN for what is none: text, an array of several, 10**400."""
    try:
        return math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan


def check_reward_function(objective: Objective) -> None:
    """Refuse a reward function that cannot be called by name, or that would not hear an option."""
    name, parameters = objective.name, parameters_of(objective)
    nameless = next((one.name for one in parameters if one.kind is one.POSITIONAL_ONLY), None)
    if nameless is not None:
        raise RecipeError(
            f"Objective '{name}': its reward function takes '{nameless}' by position only, and everything is passed by name; "
            f"leave the '/' out of its parameters."
        )
    named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    lost = next((option for option in objective.options if option not in named and not _takes_all(parameters)), None)
    if lost is not None:
        raise RecipeError(
            f"Objective '{name}' has the option '{lost}', but its reward function has no such parameter; it has "
            f"{', '.join(named) or 'none'}."
        )


def parameters_of(objective: Objective) -> list[inspect.Parameter]:
    """The parameters of the reward function of an objective."""
    try:
        signature = inspect.signature(objective.reward)  # pyright: ignore[reportArgumentType] - not the name of one
        return list(signature.parameters.values())
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"Objective '{objective.name}': the parameters of {objective.reward!r} cannot be read; wrap it in a function."
        ) from error


def _takes_all(parameters: Sequence[inspect.Parameter]) -> bool:
    return any(one.kind is one.VAR_KEYWORD for one in parameters)


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
