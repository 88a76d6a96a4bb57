"""verifiers' rubric functions `f(prompt, completion, answer, state, ...)`, and its `Rubric`: functions with weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from spanwise.score.foreign.convention import Convention, Item


def _arguments(item: Item) -> dict[str, Any]:
    prompt = item.first("prompt", "prompts", default="")
    completion = item.text if isinstance(prompt, str) else [{"role": "assistant", "content": item.text}]
    state = {**item.row, "prompt": prompt, "completion": completion, "info": item.first("info", default={})}
    return {"answer": "", "task": None, **state, "state": state}


#: The names by which a function of the whole batch gives itself away.
_OF_BATCH = frozenset(("blocks", "prompts", "completions", "completion_ids"))
CONVENTION = Convention(lambda _, names: names.isdisjoint(_OF_BATCH) and bool(names & {"completion", "state"}), _arguments)


def rubric_functions(rubric: Any) -> list[tuple[Callable[..., Any], float]]:
    """Return the functions of a `Rubric` with their weights; each knows the rubric's parser and other objects."""
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
