"""Outcomes: facts that the text before a block shows, such as whether the answer is right.

Completions with equal outcomes are compared. An outcome is the reward of an earlier objective, or a function `(text, *, columns)`
that returns one bool, number, string or None (unknown) per completion. It must not depend on the blocks that the objective pays,
or the comparison would cancel their credit.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from numbers import Real
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spanwise.errors import RecipeError, RewardError
from spanwise.objective import Objective, function_name
from spanwise.registry import Registry, imported, register
from spanwise.score.custom import called, listed_values
from spanwise.score.reward import NAN, Columns, Texts, built_in

#: The most different values that an outcome may have in a batch.
MOST_VALUES = 16
#: The lowest code (number) of a string outcome. float64 holds every code exactly.
_STRING_CODES = 2**52


@dataclass(frozen=True)
class Outcome:
    """An outcome function that a recipe can name. `spanwise.registry.register(name, kind="outcome")` makes one.

    Attributes:
        name: as in recipes.
        function: `(text, *, columns) -> Sequence[bool | int | float | str | None]`, of all blocks and the dataset's columns.
        kind: "outcome".

    Example:
        >>> OUTCOMES.find("complete").name
        'complete'
    """

    name: str
    function: Callable[..., Any]
    kind: str = "outcome"


#: The outcomes that a recipe can name, besides the rewards of its objectives.
OUTCOMES: Registry[Outcome] = Registry("outcome", kinds=("outcome",), group="spanwise.outcomes", entry=Outcome)


@register("complete", kind="outcome")
def complete(text: Texts, *, columns: Columns) -> list[bool | None]:
    """Return whether all tags of each completion's first block have content. Return None without that block.

    It tells "no answer" from "a wrong answer": `given: [correct, complete]`.

    >>> complete([{"solution": {"": "", "answer": "4"}}, {"solution": {"": "", "answer": None}}, {"solution": None}], columns={})
    [True, False, None]
    """
    return [
        None if block is None else all((content or "").strip() for tag, content in block.items() if tag)
        for block in (next(iter(blocks.values()), None) for blocks in text)
    ]


def find_outcome(entry: str | Callable[..., Any]) -> Callable[..., Any]:
    """Find an outcome function by its name or by "module:function". A function is returned as it is."""
    if isinstance(entry, str) and ":" not in entry:
        return OUTCOMES.find(entry).function
    outcome_name = entry if isinstance(entry, str) else function_name(entry)
    outcome_function = imported(entry, what="The outcome") if isinstance(entry, str) else entry
    if not callable(outcome_function):
        raise RecipeError(f"The outcome '{outcome_name}' is {outcome_function!r}. Name a function.")
    try:
        inspect.signature(outcome_function).bind([], columns={})
    except TypeError as error:
        raise RecipeError(
            f"The outcome '{outcome_name}' cannot be called as f(text, columns=columns): {error}. Write it as "
            f"def f(text, *, columns)."
        ) from error
    except ValueError:  # Python cannot read the parameters of some functions written in C
        pass
    return outcome_function


def read_outcomes(
    objectives: Sequence[Objective], text: Texts, *, columns: Columns
) -> tuple[tuple[str, ...], Float[Tensor, "n o"]]:
    """Call each outcome function in the objectives' option `given` once, and return the outcomes' names and numbers."""
    functions: dict[str, Callable[..., Any]] = {}
    earlier_objectives: set[str] = set()
    for objective in objectives:
        for entry, name in zip(objective.given, objective.outcomes, strict=True):
            if name not in earlier_objectives:
                function = find_outcome(entry)
                if functions.setdefault(name, function) != function:  # each access to a bound method gives a new object
                    raise RecipeError(f"Two outcome functions are called '{name}'. Register one of them under another name.")
        earlier_objectives.add(objective.name)
    codes_by_outcome = [_outcome_codes(function, text, columns, name) for name, function in functions.items()]
    return tuple(functions), torch.tensor(codes_by_outcome, dtype=torch.float64).reshape(len(functions), len(text)).T


def check_discrete(values: Collection[float], name: str) -> None:
    """Refuse an outcome with more than 16 values in a batch."""
    if len(values) > MOST_VALUES:
        raise RecipeError(
            f"The outcome '{name}' took {len(values)} different values in one batch, and at most {MOST_VALUES} are "
            "allowed. Use a reward that is 0 or 1, such as 'correct', as the outcome. Or set baseline: group."
        )


def judge_of(objective: Objective) -> str | None:
    """If a reward judges stated confidences, return the objective that says what is right, such as `correct`; else None.

    That is its option (`of`), else the only reward that it is given, else `correct` if it is given that or no reward at all.
    """
    built_in_reward = built_in(objective)
    if built_in_reward is None or built_in_reward.judged_by is None:
        return None
    judge_option = built_in_reward.judged_by
    chosen_judge_name = objective.options.get(judge_option)
    default_judge = built_in_reward.options[judge_option] or "correct"
    reward_names = [name for name in objective.given if isinstance(name, str) and ":" not in name and name not in OUTCOMES]
    if chosen_judge_name is None and len(reward_names) == 1:
        return reward_names[0]
    if chosen_judge_name is None and reward_names and default_judge not in reward_names:
        raise RecipeError(
            f"Objective '{objective.name}' has several outcomes in the option 'given': {' and '.join(reward_names)}. Name "
            f"the outcome that the reward is computed from: 'options: {{{judge_option}: {reward_names[0]}}}'."
        )
    return chosen_judge_name or default_judge


def judged_column(objective: Objective) -> int | None:
    """Return the index in `objective.given` of the outcome that decides the objective's reward. Return None without one.

    A reward function of your own that fills in `by_outcome` is judged by the only outcome that it is given.
    """
    judge_name = judge_of(objective)
    if judge_name is None:
        return 0 if len(objective.given) == 1 else None
    return objective.outcomes.index(judge_name) if judge_name in objective.outcomes else None


def _outcome_codes(function: Callable[..., Any], text: Texts, columns: Columns, name: str) -> list[float]:
    outcome_label = f"Outcome '{name}': its function"
    advice = "Return None for a completion whose outcome is unknown."
    returned_values = called(partial(function, text, columns=columns), subject=outcome_label, text=text, advice=advice)
    outcome_codes: list[float] = []
    for n, value in enumerate(listed_values(returned_values, len(text), subject=outcome_label, noun="value")):
        outcome_code = _code_of(value)
        if outcome_code is None:
            raise RewardError(
                f"Outcome '{name}' of completion {n} is {value!r}. Return a bool, a finite number below 2**52, a string, or None "
                f"if the outcome is unknown."
            )
        outcome_codes.append(outcome_code)
    check_discrete({outcome_code for outcome_code in outcome_codes if not math.isnan(outcome_code)}, name)
    return outcome_codes


def _code_of(value: Any) -> float | None:
    """Encode an outcome as a number that is the same in every process: NaN if it is unknown, None if it is invalid."""
    if value is None:
        return NAN
    if isinstance(value, str):
        value_digest = blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return float(_STRING_CODES + (int.from_bytes(value_digest, "big") >> 12))
    outcome_number = float(value) if isinstance(value, (Real, np.bool_)) else math.nan
    return outcome_number if abs(outcome_number) < _STRING_CODES else None
