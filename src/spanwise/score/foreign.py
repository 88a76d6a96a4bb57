"""Reward functions as other libraries write them, each for one completion: verl's, inspect_ai's and verifiers'."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any

from spanwise.errors import DataError, RewardError, unknown

#: Where verl, SkyRL and files keep the right answer.
_GOLD = ("ground_truth", "reward_model.ground_truth", "reward_spec.ground_truth", "answer")
#: The names by which a function of the whole batch gives itself away.
_OF_BATCH = frozenset(("blocks", "prompts", "completions", "completion_ids"))


@dataclass(frozen=True)
class Item:
    """One completion, for a function that rewards one at a time: the text it sees, and its cells of the dataset."""

    text: str
    row: Mapping[str, Any]

    def first(self, *names: str, default: Any = None) -> Any:
        """Return the cell of the first of these columns that the dataset has."""
        return next((self.row[name] for name in names if name in self.row), default)


@dataclass(frozen=True)
class Convention:
    """How a library calls a reward function for one completion.

    Attributes:
        fits: whether a function, with the names of its parameters, is written for this library.
        arguments: what the function is offered; it gets those that its parameters name.
        read: result -> (number or None, note); a dict of numbers in place of the number is read by the objective's `key`.
        prepare: function -> what is called.
        key: the key of a dict that holds the reward where the objective names none.
    """

    fits: Callable[[Any, frozenset[str]], bool]
    arguments: Callable[[Item], dict[str, Any]]
    read: Callable[[Any], tuple[Any, str | None]] = lambda result: (result, None)
    prepare: Callable[[Any], Callable[..., Any]] = lambda function: function
    key: str | None = None

    def number(self, result: Any, key: str | None, who: str) -> tuple[Any, str | None]:
        """Return the number of one result, and a note on it; `key` names the entry of a dict."""
        value, note = self.read(result)
        if isinstance(value, Mapping):
            key = key or self.key
            if key is None or key not in value:
                raise RewardError(f"{who} returned a dict; set key. {unknown('key', key or '', map(str, value))}")
            return value[key], note
        if key is not None and value is not None:
            raise RewardError(f"{who} returned {value!r:.60} and no dict, so that key: {key} names nothing; leave it out.")
        return value, note


def _verl_arguments(item: Item) -> dict[str, Any]:
    """Return what `compute_score(data_source, solution_str, ground_truth, extra_info)` is offered."""
    spec = item.first("reward_model", "reward_spec")
    if isinstance(spec, dict) and "ground_truth" in spec:
        gold = spec["ground_truth"]
    elif any(name in item.row for name in _GOLD):
        gold = item.first(*_GOLD)
    else:
        raise DataError(
            f"A function in verl's signature needs the right answer, and the dataset has no column {', '.join(_GOLD)} or "
            f"reward_model with a ground_truth; its columns are {', '.join(sorted(item.row)) or 'none'}."
        )
    asked = {"data_source": item.first("data_source"), "solution_str": item.text, "ground_truth": gold}
    return {**item.row, **asked, "extra_info": item.first("extra_info", default={})}


def _is_scorer(function: Any, parameters: frozenset[str]) -> bool:
    """Return whether a function is `async score(state, target) -> Score`, or inspect_ai's factory of one."""
    is_factory = getattr(getattr(function, "__registry_info__", None), "type", "") == "scorer"
    return is_factory or parameters == {"state", "target"}


@lru_cache(maxsize=64)
def _scorer(function: Any) -> Any:
    return function if set(inspect.signature(function).parameters) == {"state", "target"} else function()


def _scorer_arguments(item: Item) -> dict[str, Any]:
    from inspect_ai.model import ModelOutput  # pyright: ignore[reportMissingImports] - loaded only for its own scorers
    from inspect_ai.scorer import Target  # pyright: ignore[reportMissingImports]
    from inspect_ai.solver import TaskState  # pyright: ignore[reportMissingImports]

    target, prompt = item.first("target", "answer", "ground_truth", default=""), item.first("prompt", "prompts", default="")
    question = prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
    output = ModelOutput.from_content("policy", item.text)
    state = TaskState("policy", 0, 0, question, [output.message], output=output, metadata=dict(item.row))
    return {"state": state, "target": Target(target if isinstance(target, list) else str(target))}


def _read_score(score: Any) -> tuple[Any, str | None]:
    from inspect_ai.scorer import value_to_float  # pyright: ignore[reportMissingImports]

    if score is None:
        return None, None
    as_float, value = value_to_float(), score.value
    number = {key: as_float(part) for key, part in value.items()} if isinstance(value, dict) else as_float(value)
    return number, score.explanation


def _is_of_rubric(_: Any, parameters: frozenset[str]) -> bool:
    """Return whether a function is one of verifiers' rubrics, `f(prompt, completion, answer, state, ...)`."""
    return parameters.isdisjoint(_OF_BATCH) and not parameters.isdisjoint(("completion", "state"))


def _rubric_arguments(item: Item) -> dict[str, Any]:
    prompt = item.first("prompt", "prompts", default="")
    completion = item.text if isinstance(prompt, str) else [{"role": "assistant", "content": item.text}]
    state = {**item.row, "prompt": prompt, "completion": completion, "info": item.first("info", default={})}
    return {"answer": "", "task": None, **state, "state": state}


#: verl's, inspect_ai's and verifiers', told apart by their parameters in this order.
_CONVENTIONS = (
    Convention(lambda _, parameters: "solution_str" in parameters, _verl_arguments, key="score"),
    Convention(_is_scorer, _scorer_arguments, _read_score, prepare=_scorer),
    Convention(_is_of_rubric, _rubric_arguments),
)


def convention_of(function: Any, parameters: frozenset[str]) -> Convention | None:
    """Return how a function for one completion is called; None for a function of the whole batch."""
    return next((convention for convention in _CONVENTIONS if convention.fits(function, parameters)), None)


def rubric_functions(rubric: Any) -> list[tuple[Callable[..., Any], float]]:
    """Return the functions of verifiers' `Rubric` with their weights; each knows the rubric's parser and other objects."""
    objects = getattr(rubric, "class_objects", {})
    return [
        (_with_objects(function, objects), weight) for function, weight in zip(rubric.funcs, rubric.weights, strict=True)
    ]


def _with_objects(function: Callable[..., Any], objects: dict[str, Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)
    named = {name: objects[name] for name in signature.parameters if name in objects}

    @wraps(function)
    def reward(**arguments: Any) -> Any:
        return function(**named, **arguments)

    others = [parameter for name, parameter in signature.parameters.items() if name not in named]
    vars(reward)["__signature__"] = signature.replace(parameters=others)
    return reward if named else function
