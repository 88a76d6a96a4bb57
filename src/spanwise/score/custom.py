"""Call the reward functions that users write. Check arguments and results; warn of slow calls."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from functools import partial
from threading import Thread
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from spanwise.errors import DataError, RecipeError, RewardError, SpanwiseError, unknown
from spanwise.objective import Objective
from spanwise.score.reward import Columns, Reward, Texts
from spanwise.score.workers import DEADLINES
from spanwise.types import whole_text

_FROM_TRAINER = ("prompts", "completions", "completion_ids")
#: A reward function that runs for more than this many seconds causes a warning.
SLOW = 60.0
#: Files that call users' functions. Their frames in a traceback are skipped.
_CALLER_FILES = (os.path.dirname(__file__), os.path.dirname(asyncio.__file__), contextlib.__file__)
#: The parameters of a function with their defaults, and whether it has `**kwargs`.
Parameters = tuple[dict[str, Any], bool]
#: Types of immutable values, which need no copies.
_PLAIN = frozenset((str, int, float, bool, bytes, type(None)))


def called(function: partial[Any], *, subject: str, text: Texts, advice: str) -> Any:
    """Call a user's function on copies of its arguments, and undo its side effects. Name it if it fails or is slow."""
    state_guard = nullcontext() if _is_ours(function) else restore_process(subject, text)
    with state_guard, named_errors(subject, len(text), advice, function):
        return with_own_copies(function)()


def _is_ours(function: partial[Any]) -> bool:
    """Return whether spanwise itself defines the function."""
    return f"{getattr(function.func, '__module__', '')}.".startswith("spanwise.")


def with_own_copies(function: partial[Any]) -> partial[Any]:
    """Give a user's function copies of its arguments. A call of spanwise's own functions stays as it is."""
    if _is_ours(function):
        return function
    return partial(function.func, *own_copy(function.args), **own_copy(function.keywords))


@contextmanager
def named_errors(subject: str, size: int, advice: str, call: partial[Any] | None = None) -> Iterator[None]:
    """Name the user's function in errors that the `with` block raises. Warn if the block takes over a minute."""
    timeout_advice = "" if call is not None and _is_ours(call) else " spanwise does not stop slow functions. Add a timeout."
    slow_warning = f"{subject} has run for {SLOW:g} s on {size} completions.{timeout_advice}"
    with DEADLINES.over(SLOW, lambda: Thread(target=warnings.warn, args=(slow_warning, UserWarning), daemon=True).start()):
        try:
            yield
        except SpanwiseError:
            raise
        except (Exception, SystemExit) as error:  # sys.exit() in a reward function must not end the run
            none_hint = " None stands for a block or a tag that a completion lacks." if "'NoneType'" in f"{error}" else ""
            raise RewardError(
                f"{subject} raised {type(error).__name__}: {error}. {advice}{none_hint}{place_of(error)}"
            ) from error


def own_copy(value: Any) -> Any:
    """Copy a list, dict, tensor or the like, with everything inside it. Return other values unchanged."""
    if type(value) in (list, tuple):
        return type(value)(value if _PLAIN.issuperset(map(type, value)) else map(own_copy, value))
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, (np.ndarray, set)):
        return value.copy()
    if isinstance(value, dict):
        copied_value = copy.copy(value)
        copied_value.update((key, own_copy(entry)) for key, entry in value.items())
        return copied_value
    if is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        copied_value = copy.copy(value)
        vars(copied_value).update(own_copy(vars(value)))
        return copied_value
    return value


#: Process settings that a user's function must not change, with functions to read and restore them.
_SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...] = (
    ("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("whether torch computes gradients", torch.is_grad_enabled, torch.set_grad_enabled),
    ("torch's seed", torch.initial_seed, torch.default_generator.manual_seed),
    ("the working directory", lambda: os.getcwd() if os.path.isdir(".") else "gone", os.chdir),
)
#: Counts the calls with the same function, texts and random state, by a hash of all three.
_calls: Counter[int] = Counter()


@contextmanager
def restore_process(subject: str, text: Texts) -> Iterator[None]:
    """Undo a user's changes to process settings, such as the seed, and warn of them."""
    python_random_state, numpy_random_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    # The seed comes from the texts, because drawing one would change the training's random state.
    seed_text = "".join([subject, *map(whole_text, text[:8])])
    call_hash = crc32(seed_text.encode(errors="replace"), hash(python_random_state[1]) & 0xFFFFFFFF)
    _calls[call_hash] += 1
    call_seed = crc32(str(_calls[call_hash]).encode(), call_hash)
    with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
        random.seed(call_seed)
        np.random.seed(call_seed)  # noqa: NPY002
        torch.default_generator.manual_seed(call_seed)
        old_settings = [read_setting() for _, read_setting, _ in _SETTINGS]
        setting_changes: list[str] = []
        try:
            yield
        finally:
            for (name, read_setting, restore_setting), old_setting in zip(_SETTINGS, old_settings, strict=True):
                if (new_setting := read_setting()) != old_setting:
                    setting_changes.append(f"{name} ({new_setting})")
                    restore_setting(old_setting)
            random.setstate(python_random_state)
            np.random.set_state(numpy_random_state)  # noqa: NPY002
            if setting_changes:
                warnings.warn(
                    f"{subject} changed {', '.join(setting_changes)} for the whole process. spanwise undoes this after each call. "
                    "To keep a setting, set it in your own script. For random numbers, use random.Random or torch.Generator.",
                    stacklevel=2,
                )


def listed_values(result: Any, size: int, *, subject: str, noun: str) -> Sequence[Any]:
    """Return the result of a user's function as a list. Refuse it if its length is not `size`."""
    if isinstance(result, (Tensor, np.ndarray)):
        if isinstance(result, Tensor) and result.is_meta:
            raise RewardError(f"{subject} returned a tensor on the device meta, which has no {noun}s. Return a list.")
        if len(result.shape) > 1:
            raise RewardError(
                f"{subject} returned an array of the shape {tuple(result.shape)}. Return one {noun} per completion: an array of "
                f"the shape ({size},)."
            )
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        raise RewardError(f"{subject} returned {type(result).__name__}. Return a list of {size} {noun}s.")
    if len(result) != size:
        raise RewardError(f"{subject} returned {len(result)} {noun}s for {size} completions. Return one {noun} for each.")
    return result


def place_of(error: BaseException) -> str:
    """Say at which line of a user's file an error arose. Return "" without such a line."""
    all_frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in all_frames if not frame.filename.startswith(_CALLER_FILES)]
    file_frames = [frame for frame in user_frames if frame.filename == user_frames[0].filename]
    return f" The error arose in {file_frames[-1].filename}, line {file_frames[-1].lineno}." if file_frames else ""


def reward_call(objective: Objective, text: Texts, columns: Columns) -> partial[Any]:
    """Bind a user's reward function to the columns, blocks and options that it takes."""
    parameters = parameters_of(objective.reward, objective.name)
    # Without a parameter `blocks`, the function takes the arguments of TRL's reward functions.
    blocks_argument = {"blocks": list(text)} if "blocks" in parameters[0] else {}
    arguments, missing_name = arguments_for(parameters, {**columns, **blocks_argument, **objective.options})
    if missing_name in _FROM_TRAINER:
        raise RewardError(
            f"Objective '{objective.name}' has a reward function in TRL's signature, but there are no '{missing_name}' to call it "
            f"with. Pass {{'{missing_name}': ...}} among the columns, or write the function as f(blocks, **columns)."
        )
    if missing_name is not None:
        raise DataError(
            f"Objective '{objective.name}': {unknown('column', missing_name, {'blocks', *columns, *objective.options})} Each "
            f"parameter of a reward function is the name of a column, or 'blocks' for the blocks of every completion."
        )
    return partial(objective.reward, **arguments)  # pyright: ignore[reportArgumentType] - the reward is a function here


def takes(objective: Objective, option: str) -> bool:
    """Return whether an objective's reward function has a parameter called `option`. `**kwargs` does not count."""
    return option in parameters_of(objective.reward, objective.name)[0]


def label_of_function(objective: Objective) -> str:
    """Return the name of an objective's reward function for error messages."""
    return f"Objective '{objective.name}': its reward function"


def arguments_for(parameters: Parameters, offered: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Select the `offered` arguments that a function takes. Also return the first required parameter that lacks one."""
    default_by_name, takes_any_keyword = parameters
    required_names = (name for name, default in default_by_name.items() if default is inspect.Parameter.empty)
    unfilled_name = next((name for name in required_names if name not in offered), None)
    return {name: value for name, value in offered.items() if takes_any_keyword or name in default_by_name}, unfilled_name


def checked_reward(result: Any, objective: Objective, size: int) -> Reward:
    """Turn the numbers that a reward function returned into a `Reward`."""
    if isinstance(result, Reward):
        return result
    reward_values = listed_values(result, size, subject=label_of_function(objective), noun="number")
    return Reward.of([finite_number(value, objective, n, size) for n, value in enumerate(reward_values)])


def finite_number(value: Any, objective: Objective, n: int, size: int) -> float | None:
    """Return the reward of completion n as a float or None. Refuse a value that is no finite number and not None."""
    reward_number = None if value is None else as_number(value)
    if reward_number is not None and not math.isfinite(reward_number):
        raise RewardError(
            f"Objective '{objective.name}' gives completion {n} of {size} the reward {value!r:.60}. Return a finite number, or "
            f"None for no reward."
        )
    return reward_number


def as_number(value: Any) -> float:
    """Convert a value to a float. Return NaN for text, an array of several numbers, and a number too large for a float."""
    try:
        return math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan


def parameters_of(function: Any, name: str) -> Parameters:
    """Return the parameters of an objective's reward function. Refuse a positional-only parameter."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"Objective '{name}': Python cannot read the parameters of {function!r}. Call it from a function of your own."
        ) from error
    positional_name = next((p.name for p in parameters if p.kind is p.POSITIONAL_ONLY), None)
    if positional_name is not None:
        raise RecipeError(
            f"Objective '{name}': its reward function takes '{positional_name}' only by position, but spanwise passes every "
            f"argument by name. Remove the '/' from its parameters."
        )
    default_by_name = {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return default_by_name, any(p.kind is p.VAR_KEYWORD for p in parameters)
