"""inspect_ai's scorers: `async score(state, target) -> Score`, or the decorated function that makes one."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from spanwise.score.foreign.convention import Convention, Item


def _is_factory(function: Any) -> bool:
    return getattr(getattr(function, "__registry_info__", None), "type", "") == "scorer"


def _fits(function: Any, parameters: frozenset[str]) -> bool:
    return _is_factory(function) or parameters == {"state", "target"}


@lru_cache(maxsize=64)
def _scorer(function: Any) -> Any:
    return function if set(inspect.signature(function).parameters) == {"state", "target"} else function()


def _arguments(item: Item) -> dict[str, Any]:
    from inspect_ai.model import ModelOutput  # pyright: ignore[reportMissingImports] - loaded only for its own scorers
    from inspect_ai.scorer import Target  # pyright: ignore[reportMissingImports]
    from inspect_ai.solver import TaskState  # pyright: ignore[reportMissingImports]

    target, prompt = item.first("target", "answer", "ground_truth", default=""), item.first("prompt", "prompts", default="")
    question = prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
    output = ModelOutput.from_content("policy", item.text)
    state = TaskState("policy", 0, 0, question, [output.message], output=output, metadata=dict(item.row))
    return {"state": state, "target": Target(target if isinstance(target, list) else str(target))}


def _read(score: Any) -> tuple[Any, str | None]:
    from inspect_ai.scorer import value_to_float  # pyright: ignore[reportMissingImports]

    if score is None:
        return None, None
    as_float = value_to_float()
    value = score.value
    number = {key: as_float(part) for key, part in value.items()} if isinstance(value, dict) else as_float(value)
    return number, score.explanation


CONVENTION = Convention(_fits, _arguments, _read, prepare=_scorer)
