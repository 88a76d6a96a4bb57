"""Call reward functions that are written for verl, inspect_ai or verifiers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from spanwise.errors import DataError, RewardError, unknown
from spanwise.score.answers import gold_text

#: The columns in which verl, SkyRL and rollout files hold the right answer.
_GOLD = ("ground_truth", "reward_model.ground_truth", "reward_spec.ground_truth", "answer")
#: Maps grades and words in inspect_ai's scores to numbers.
_NUMBER_OF_WORD = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
#: Parameters that only reward functions for a whole batch have.
_OF_BATCH = frozenset(("blocks", "prompts", "completions", "completion_ids"))


@dataclass(frozen=True)
class Convention:
    """How a library calls a reward function for one completion."""

    #: Tells from a function and its parameter names whether it was written for a library, such as verl.
    fits: Callable[[Any, frozenset[str]], bool]
    #: Builds the reward function's arguments, by name, from a completion's text and its row of the dataset.
    arguments: Callable[[Any, Mapping[str, Any]], dict[str, Any]]
    #: Splits a reward function's result into a number and a note. Each may be None.
    read: Callable[[Any], tuple[Any, str | None]] = lambda result: (result, None)
    #: Returns the scorer of a completion: the function itself, or what it returns if it is a factory.
    prepare: Callable[[Any], Callable[..., Any]] = lambda function: function
    #: The default key of the reward in a dict that the function returns.
    key: str | None = None
    #: Whether the function takes the completion's messages, if the trainer has them.
    takes_messages: bool = False

    def number(self, result: Any, key: str | None, subject: str) -> tuple[Any, str | None]:
        """Return the number and the note that a reward function gave as its result. In a dict, `key` names the number."""
        raw_reward, reward_note = self.read(result)
        if isinstance(raw_reward, Mapping):
            key = key or self.key
            if key is None or key not in raw_reward:
                raise RewardError(
                    f"{subject} returned a dict. Set 'key' to a key of this dict. {unknown('key', key or '', map(str, raw_reward))}"
                )
            return raw_reward[key], reward_note
        if key is not None and raw_reward is not None:
            raise RewardError(f"{subject} returned {raw_reward!r:.60} instead of a dict with the key {key}. Remove 'key'.")
        return raw_reward, reward_note


def _first_cell(row: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """Return the cell of the first column in `names` that the row has."""
    return next((row[name] for name in names if name in row), default)


def _verl_arguments(text: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of verl's `compute_score` for one completion."""
    reward_spec = _first_cell(row, "reward_model", "reward_spec")
    gold_source = reward_spec if isinstance(reward_spec, dict) and "ground_truth" in reward_spec else row
    if gold_source.keys().isdisjoint(_GOLD):
        raise DataError(
            f"A function in verl's signature needs the right answer, but no column holds it. Add a column {', '.join(_GOLD)} or "
            f"reward_model with a ground_truth; the columns are {', '.join(sorted(row)) or 'none'}."
        )
    gold_answer = _first_cell(gold_source, *_GOLD)
    row_fields = {"data_source": None, **row, "extra_info": row.get("extra_info") or {}}
    return row_fields | {"solution_str": text, "ground_truth": gold_answer}


def _is_scorer(function: Any, parameters: frozenset[str]) -> bool:
    """Return whether a function is a scorer of inspect_ai, or makes one."""
    return getattr(getattr(function, "__registry_info__", None), "type", "") == "scorer" or parameters == {"state", "target"}


@lru_cache(maxsize=64)
def _scorer(function: Any) -> Any:
    """Return inspect_ai's scorer: the function itself, or what it makes if it is a factory."""
    return function if set(inspect.signature(function).parameters) == {"state", "target"} else function()


def _scorer_arguments(text: str, row: Mapping[str, Any]) -> dict[str, Any]:
    from inspect_ai.model import ModelOutput  # pyright: ignore[reportMissingImports] - imported only for inspect_ai's scorers
    from inspect_ai.scorer import Target  # pyright: ignore[reportMissingImports] - optional package
    from inspect_ai.solver import TaskState  # pyright: ignore[reportMissingImports] - optional package

    gold_cell = _first_cell(row, "target", "answer", *_GOLD)
    is_list = isinstance(gold_cell, list | tuple) or getattr(gold_cell, "ndim", 0)
    gold_answers = [answer for answer in map(gold_text, gold_cell if is_list else [gold_cell]) if answer]
    # Without a gold answer the target is None, because a scorer would find an empty text in every completion.
    prompt_cell = _first_cell(row, "prompt", "prompts", default="")
    question = prompt_cell if isinstance(prompt_cell, str) else "\n".join(str(message["content"]) for message in prompt_cell)
    model_output = ModelOutput.from_content("policy", text)
    task_state = TaskState("policy", 0, 0, question, [model_output.message], output=model_output, metadata=dict(row))
    return {"state": task_state, "target": Target(gold_answers) if gold_answers else None}


def score_number(value: Any) -> Any:
    """Convert a value of inspect_ai's `Score` to a number. Other values stay; inspect_ai counts them as 0.

    >>> score_number("C"), score_number("no"), score_number("0.5"), score_number("unsure")
    (1.0, 0.0, 0.5, 'unsure')
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        return _NUMBER_OF_WORD.get(f"{value}", _NUMBER_OF_WORD.get(f"{value}".lower(), value))


def _read_score(score: Any) -> tuple[Any, str | None]:
    """Return the number (or dict of numbers) and the explanation in inspect_ai's `Score`."""
    if score is None:
        return None, None
    if isinstance(score.value, dict):
        return {score_name: score_number(raw_number) for score_name, raw_number in score.value.items()}, score.explanation
    return score_number(score.value), score.explanation


def completion_after(prompt: Any, text: str) -> Any:
    """Return a completion as TRL gives it to reward functions: a text, or a list of one message if the prompt is a chat."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _rubric_arguments(text_or_messages: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    prompt = _first_cell(row, "prompt", "prompts", default="")
    has_messages = isinstance(text_or_messages, list)
    completion = text_or_messages if has_messages else completion_after(prompt, text_or_messages)
    gold_fields = {} if row.keys().isdisjoint(_GOLD) else {"answer": _first_cell(row, *_GOLD)}
    rollout_state = {**gold_fields, **row, "prompt": prompt, "completion": completion, "info": row.get("info") or {}}
    return {"task": None, **rollout_state, "state": rollout_state}


#: The calling conventions of verl, inspect_ai and verifiers. The first that fits is used.
_CONVENTIONS = (
    Convention(lambda _, parameters: "solution_str" in parameters, _verl_arguments, key="score"),
    Convention(_is_scorer, _scorer_arguments, _read_score, prepare=_scorer),
    Convention(
        lambda _, parameters: parameters.isdisjoint(_OF_BATCH) and not parameters.isdisjoint(("completion", "state")),
        _rubric_arguments,
        takes_messages=True,
    ),
)


def convention_of(function: Any, parameters: frozenset[str]) -> Convention | None:
    """Return the calling convention of a reward function for one completion. Return None if it takes a whole batch."""
    return next((convention for convention in _CONVENTIONS if convention.fits(function, parameters)), None)
