"""Call reward functions of users: check arguments and results, name their errors, and warn of a call that takes long.

A reward has TRL's signature, or takes the blocks of each completion.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import math
import os
import random
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import partial
from threading import Thread
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from spanwise.errors import DataError, RecipeError, RewardError, SpanwiseError
from spanwise.objective import Objective
from spanwise.score.reward import Columns, Reward, Texts
from spanwise.score.workers import DEADLINES
from spanwise.types import whole_text

_FROM_TRAINER = ("prompts", "completions", "completion_ids")
#: Seconds after which a warning names a function that has not returned.
SLOW = 60.0
#: Where the frames between us and a user's function lie.
_CALLERS = (os.path.dirname(__file__), os.path.dirname(asyncio.__file__), contextlib.__file__)
#: The parameters of a function with their defaults, and whether it takes any other name as well.
Parameters = tuple[dict[str, Any], bool]
#: Types of immutable values: a list or dict of these alone is copied at once.
_PLAIN = frozenset((str, int, float, bool, bytes, type(None)))


def called(function: partial[Any], *, what: str, text: Texts, advice: str) -> Any:
    """Call a user's function on copies of its arguments; name it if it raises or takes over a minute, and undo its side effects."""
    guard = nullcontext() if _is_ours(function) else process_kept(what, text)
    with guard, named_errors(what, len(text), advice):
        return with_own_copies(function)()


def _is_ours(function: partial[Any]) -> bool:
    return f"{getattr(function.func, '__module__', '')}.".startswith("spanwise.")


def with_own_copies(function: partial[Any]) -> partial[Any]:
    """Return a call of a user's function on copies of its arguments; a call of ours as it is."""
    if _is_ours(function):
        return function
    return partial(function.func, *own_copy(function.args), **own_copy(function.keywords))


@contextmanager
def named_errors(what: str, size: int, advice: str) -> Iterator[None]:
    """Name the function that raises in the block, or warn of it if the block takes over a minute."""
    slow = f"{what} has been running for {SLOW:g} s on {size} completions. Nothing stops it; set a timeout on what it waits for."
    with DEADLINES.over(SLOW, lambda: Thread(target=warnings.warn, args=(slow, UserWarning), daemon=True).start()):
        try:
            yield
        except SpanwiseError:
            raise
        except (Exception, SystemExit) as error:  # SystemExit of a reward would look like the end of the run
            none = " A block or a tag that a completion lacks is None." if "'NoneType'" in f"{error}" else ""
            raise RewardError(f"{what} raised {type(error).__name__}: {error}. {advice}{none}{place_of(error)}") from error


def own_copy(value: Any) -> Any:
    """Copy lists, tuples, dicts, sets, tensors, arrays and data classes, and those inside them; return anything else unchanged."""
    if type(value) in (list, tuple):
        return type(value)(value if _PLAIN.issuperset(map(type, value)) else map(own_copy, value))
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, (np.ndarray, set)):
        return value.copy()
    if isinstance(value, dict):
        copied = copy.copy(value)
        if not _PLAIN.issuperset(map(type, value.values())):
            copied.update((key, own_copy(item)) for key, item in value.items())
        return copied
    if is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        copied = copy.copy(value)
        vars(copied).update(own_copy(vars(value)))
        return copied
    return value


def _folder() -> str:
    return os.getcwd() if os.path.isdir(".") else "gone"


#: The settings that a function must not change: the name, and the functions that read and restore it.
_SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...] = (
    ("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("whether torch computes gradients", torch.is_grad_enabled, torch.set_grad_enabled),
    ("torch's seed", torch.initial_seed, torch.default_generator.manual_seed),
    ("the working directory", _folder, os.chdir),
)
#: Counts calls with the same random state of the training, on the same texts.
_calls: Counter[int] = Counter()


@contextmanager
def process_kept(what: str, text: Texts) -> Iterator[None]:
    """Undo a function's change of default dtype, gradients, a seed or the working directory, and warn of it."""
    python, legacy, state = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    # Each call draws from random streams of its own, seeded by the first texts that it judges. Whether it draws or seeds, the
    # random state of the training does not change, and a resumed run draws the same numbers.
    call = crc32("".join([what, *map(whole_text, text[:8])]).encode(errors="replace"), hash(python[1]) & 0xFFFFFFFF)
    _calls[call] += 1
    seed = crc32(f"{_calls[call]}".encode(), call)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    settings = [read() for _, read, _ in _SETTINGS]
    try:
        yield
    finally:
        changed: list[str] = []
        for (name, read, put), before in zip(_SETTINGS, settings, strict=True):
            if (now := read()) != before:
                changed.append(f"{name} ({now})")
                put(before)
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        torch.set_rng_state(state)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        if changed:
            warnings.warn(
                f"{what} changed {', '.join(changed)} for the whole process; it is put back after each call. Leave that to your "
                f"script, or use a generator of your own (random.Random, torch.Generator).",
                UserWarning,
                stacklevel=2,
            )


def listed_values(result: Any, size: int, *, what: str, noun: str) -> Sequence[Any]:
    """Return a function's result as a list if it holds one value for each completion."""
    if isinstance(result, (Tensor, np.ndarray)):
        if isinstance(result, Tensor) and result.is_meta:
            raise RewardError(
                f"{what} returned a tensor on the device meta, which holds no {noun}s; return a list of {size}."
            )
        if len(result.shape) > 1:
            raise RewardError(
                f"{what} returned an array of the shape {tuple(result.shape)}; return one {noun} per completion, an array of the "
                f"shape ({size},)."
            )
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        raise RewardError(f"{what} returned {type(result).__name__}; return a list of {size} {noun}s.")
    if len(result) != size:
        raise RewardError(f"{what} returned {len(result)} {noun}s for {size} completions.")
    return result


def place_of(error: BaseException) -> str:
    """Say in which line of its own file the function failed; empty for a function without a file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_CALLERS)]
    own_frames = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" It happened in {own_frames[-1].filename}, line {own_frames[-1].lineno}." if own_frames else ""


#: What to do about a function that raised.
_ADVICE = "Return None for a completion that has no reward."


def call_reward(objective: Objective, text: Texts, columns: Columns) -> Reward:
    """Call a user's reward function with the arguments that its parameters name, and check its result."""
    what, function = _reward_call(objective, text, columns)
    return _checked(called(function, what=what, text=text, advice=_ADVICE), objective, len(text))


async def await_reward(objective: Objective, text: Texts, columns: Columns) -> Reward:
    """Await a user's `async def` reward function in the same way; what it changes for the process is not undone here."""
    what, function = _reward_call(objective, text, columns)
    with named_errors(what, len(text), _ADVICE):
        result = await with_own_copies(function)()
    return _checked(result, objective, len(text))


def _reward_call(objective: Objective, text: Texts, columns: Columns) -> tuple[str, partial[Any]]:
    """Return the function's name in a sentence, and its call with the arguments that its parameters name."""
    parameters = parameters_of(objective.reward, objective.name)
    # A function without a parameter `blocks` is a TRL reward function: `f(prompts, completions, completion_ids, **columns)`.
    offered = {**columns, **({"blocks": list(text)} if "blocks" in parameters[0] else {}), **objective.options}
    arguments, missing = arguments_for(parameters, offered)
    if missing is not None:
        raise _missing(missing, offered, objective.name)
    function = partial(objective.reward, **arguments)  # pyright: ignore[reportArgumentType] - not the name of one
    return reward_function(objective), function


def takes(objective: Objective, option: str) -> bool:
    """Return whether a reward function has a parameter for an option."""
    named, takes_all = parameters_of(objective.reward, objective.name)
    return takes_all or option in named


def reward_function(objective: Objective) -> str:
    """Name the reward function of an objective in a sentence."""
    return f"Objective '{objective.name}': its reward function"


def arguments_for(parameters: Parameters, offered: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return the offered arguments that a function takes, and the first parameter that it needs and nothing fills."""
    named, takes_all = parameters
    needed = (name for name, default in named.items() if default is inspect.Parameter.empty and name not in offered)
    return {name: value for name, value in offered.items() if takes_all or name in named}, next(needed, None)


def _checked(result: Any, objective: Objective, size: int) -> Reward:
    """Return a function's result as a reward; refuse a result that holds no number or None for each completion."""
    if isinstance(result, Reward):
        return result
    values: list[float | None] = []
    for n, value in enumerate(listed_values(result, size, what=reward_function(objective), noun="number")):
        number = None if value is None else as_number(value)
        if number is not None and not math.isfinite(number):
            raise RewardError(
                f"Objective '{objective.name}' gives completion {n} of {size} the reward {value!r}; return a finite number, or "
                f"None for no reward."
            )
        values.append(number)
    return Reward.of(values)


def as_number(value: Any) -> float:
    """Return a number as a float; NaN for text, an array of several, 10**400."""
    try:
        return math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan


def check_reward_function(objective: Objective, more: Collection[str] = ()) -> None:
    """Refuse a reward function that cannot be called by name, or that has no parameter for an option; `more` are not for it."""
    named, takes_all = parameters_of(objective.reward, objective.name)
    lost = next((option for option in objective.options if option not in {*named, *more} and not takes_all), None)
    if lost is not None:
        raise RecipeError(
            f"Objective '{objective.name}' has the option '{lost}', but its reward function has no such parameter; it has "
            f"{', '.join(named) or 'none'}."
        )


def parameters_of(function: Any, name: str) -> Parameters:
    """Return the parameters of the reward function of an objective called `name`; refuse one that cannot be called by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"Objective '{name}': the parameters of {function!r} cannot be read; wrap it in a function."
        ) from error
    nameless = next((parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_ONLY), None)
    if nameless is not None:
        raise RecipeError(
            f"Objective '{name}': its reward function takes '{nameless}' by position only, and everything is passed by name; "
            f"leave the '/' out of its parameters."
        )
    named = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    return named, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _missing(parameter: str, known: Mapping[str, Any], name: str) -> RewardError | DataError:
    if parameter in _FROM_TRAINER:
        return RewardError(
            f"Objective '{name}' has a reward function in TRL's signature and there are no '{parameter}' to call it with; "
            f"pass {{'{parameter}': ...}} among the columns, or write it as f(blocks, **columns)."
        )
    names = sorted(set(known) - {"blocks"})
    near = get_close_matches(parameter, ["blocks", *names], n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return DataError(
        f"Objective '{name}' needs the column '{parameter}'; the dataset has {', '.join(names) or 'no columns'}.{hint} A reward "
        f"function is called with what its parameters name: columns, and 'blocks' for the blocks of every completion."
    )
