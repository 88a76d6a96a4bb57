"""Call reward functions that score one completion at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence, Sized
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from spanwise.errors import DataError, RecipeError, RewardError, SpanwiseError, check_known, check_number, refuse, unknown
from spanwise.objective import Objective, is_async
from spanwise.score.custom import arguments_for, finite_number, label_of_function, own_copy, parameters_of, place_of
from spanwise.score.event_loop import once_per_loop
from spanwise.score.foreign import Convention, convention_of
from spanwise.score.reward import Columns, Reward, Texts
from spanwise.segment.claims import without_end
from spanwise.types import BlockText, Status, present, whole_text

#: The options that say how an objective's function is called. All others go to the function.
CALL_OPTIONS: Mapping[str, Any] = {"sees": "whole", "block": None, "timeout": 600.0, "max_concurrent": 64}
_K = TypeVar("_K")
_T = TypeVar("_T")
#: How many reward workers score rollouts, one rollout per call. With 0, the training processes score whole batches.
REWARD_WORKERS: ContextVar[int] = ContextVar("reward_workers", default=0)


def requests_per_process(max_concurrent: int) -> int:
    """Return how many requests this process may have in flight. A training's processes share `max_concurrent`."""
    return max(1, -(-max_concurrent // (REWARD_WORKERS.get() or int(os.environ.get("WORLD_SIZE", "1")))))


@dataclass(frozen=True)
class CallResult:
    """The result or the error of one call of a reward function."""

    value: Any = None
    status: Status = Status.OK
    error: BaseException | None = None
    note: str | None = None


async def await_calls(
    calls: Mapping[_K, Callable[[], Awaitable[Any]]], receiver: object, max_concurrent: int, timeout: float
) -> dict[_K, CallResult]:
    """Await all calls of one function or server, each for at most `timeout` seconds."""
    # One semaphore limits the requests of all batches together.
    semaphore = once_per_loop((receiver, max_concurrent), partial(asyncio.Semaphore, max_concurrent))

    async def await_call(call: Callable[[], Awaitable[Any]]) -> CallResult:
        async with semaphore:
            try:
                return CallResult(await asyncio.wait_for(call(), timeout))
            except SpanwiseError:
                raise
            except TimeoutError as error:
                return CallResult(status=Status.TIMEOUT, error=error)
            except Exception as error:
                return CallResult(status=Status.ERROR, error=error)

    return dict(zip(calls, await together([await_call(call) for call in calls.values()]), strict=True))


async def together(coroutines: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Await all coroutines at once. After an error or Ctrl-C, cancel the others."""
    running_tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*running_tasks)
    finally:
        for task in running_tasks:
            task.cancel()


def completion_text(blocks: BlockText) -> str:
    """Return a completion's text without end-of-sequence tokens, as other libraries decode it."""
    return without_end(whole_text(blocks))


def part_text(blocks: BlockText, names: Sequence[str]) -> str:
    """Return the text of the named blocks, with end-of-sequence tokens removed."""
    return without_end("".join((blocks[name] or {})[""] or "" for name in present(blocks, names)))


def rows_of(columns: Columns, size: int) -> list[dict[str, Any]]:
    """Return the dataset row of each completion as a dict of its cells."""
    cells_by_column = {
        name: list(cells)  # pyright: ignore[reportArgumentType] - a column with a length is iterable, too
        for name, cells in columns.items()
        if isinstance(cells, Sized) and not isinstance(cells, (str, Mapping, set)) and len(cells) == size
    }
    return [{name: cells[n] for name, cells in cells_by_column.items()} for n in range(size)]


def calling_convention(objective: Objective) -> Convention | None:
    """Return how an objective's function is called per completion. Return None if it is built in or takes a whole batch."""
    if isinstance(objective.reward, str):
        return None
    return convention_of(objective.reward, frozenset(parameters_of(objective.reward, objective.name)[0]))


def check_call(objective: Objective, convention: Convention | None, blocks: Collection[str]) -> None:
    """Refuse impossible options of a reward function, such as `timeout` for a function that is not async."""
    subject = f"Objective '{objective.name}'"
    options = objective.options
    default_by_name, takes_any_keyword = parameters_of(objective.reward, objective.name)
    unknown_options = [name for name in options if name not in {*default_by_name, *(CALL_OPTIONS if convention else ())}]
    if unknown_options and not takes_any_keyword:
        raise RecipeError(
            f"{subject} has the option '{unknown_options[0]}', but its reward function has no such parameter. Its parameters are: "
            f"{', '.join(default_by_name) or 'none'}."
        )
    if convention is None:
        unused_names = [name for name in CALL_OPTIONS if name not in ("block", *default_by_name)]
        for name, setting in {"key": objective.key, **{name: options.get(name) for name in unused_names}}.items():
            if setting is not None:
                raise RecipeError(
                    f"{subject} has {name}: {setting}. Only a function that scores one completion, such as verl's compute_score, "
                    f"can use {name}. The objective's function returns a list for the whole batch. Leave {name} out."
                )
        return
    sees_setting, block = options.get("sees", "whole"), options.get("block")
    check_known(f"setting of 'sees' in objective '{objective.name}' called", sees_setting, ("whole", "part"))
    if block is not None and sees_setting == "part":
        refuse({f"{subject} reads block '{block}'. {unknown('block', block, blocks)}": block not in blocks})
    elif block is not None and "block" not in default_by_name:
        raise RecipeError(
            f"{subject} has block: {block}, but its function sees the whole completion. Set sees: part, or give the function a "
            f"parameter 'block'."
        )
    for name, unit in (("timeout", " (seconds)"), ("max_concurrent", "")):
        if name not in options:
            continue
        check_number(f"{subject}: {name}{unit}", options[name], above=0.0, whole=name == "max_concurrent")
        if not is_async(convention.prepare(objective.reward)) and name not in default_by_name:
            raise RecipeError(
                f"{subject} has {name}: {options[name]!r}, but its function is not async. Without async, one completion is scored "
                f"after another, and no call can be stopped. Leave {name} out, or write `async def`."
            )


def item_calls(objective: Objective, convention: Convention, text: Texts, columns: Columns) -> dict[int, Callable[[], Any]]:
    """Build a call of the reward function for each completion that has one of the objective's blocks."""
    item_function = convention.prepare(objective.reward)
    parameters = parameters_of(item_function, objective.name)
    call_option_names = CALL_OPTIONS.keys() - parameters[0].keys()
    function_options = {name: value for name, value in objective.options.items() if name not in call_option_names}
    shows_only_part = objective.options.get("sees") == "part"
    sees_messages = convention.takes_messages and not shows_only_part and objective.scope != "turn"
    shown_names = [objective.options["block"]] if shows_only_part and objective.options.get("block") else objective.pays
    call_by_index: dict[int, Callable[[], Any]] = {}
    for n, (blocks, row) in enumerate(zip(text, rows_of(columns, len(text)), strict=True)):
        if not (block_names := present(blocks, objective.pays) and present(blocks, shown_names)):
            continue
        text_or_messages: Any = part_text(blocks, block_names) if shows_only_part else completion_text(blocks)
        if sees_messages and isinstance(row.get("completions"), list):
            text_or_messages = row["completions"]
        arguments, missing_column = arguments_for(parameters, convention.arguments(text_or_messages, row) | function_options)
        if missing_column is not None:
            raise DataError(f"Objective '{objective.name}': {unknown('column', missing_column, row)}")
        call_by_index[n] = partial(item_function, **own_copy(arguments))
    return call_by_index


def call_items(calls: Mapping[int, Callable[[], Any]]) -> dict[int, CallResult]:
    """Run a plain (not async) reward function on one completion after another."""
    result_by_index: dict[int, CallResult] = {}
    for n, call in calls.items():
        try:
            result_by_index[n] = CallResult(call())
        except SpanwiseError:
            raise
        except (Exception, SystemExit) as error:
            result_by_index[n] = CallResult(status=Status.ERROR, error=error)
    return result_by_index


async def await_items(objective: Objective, calls: Mapping[int, Callable[[], Any]]) -> dict[int, CallResult]:
    """Await an async reward function for many completions at once."""
    limits = {**CALL_OPTIONS, **objective.options}
    return await await_calls(calls, id(objective.reward), requests_per_process(limits["max_concurrent"]), limits["timeout"])


def as_reward(objective: Objective, convention: Convention, results: Mapping[int, CallResult], size: int) -> Reward:
    """Turn the results of a function's calls into rewards of completions. Raise RewardError if every call failed."""
    function_label = label_of_function(objective)
    result_by_index = dict(results)
    refuse_if_all_failed(results, function_label, with_place=True)
    for n, result in results.items():
        if result.error is None:
            reward_value, reward_note = convention.number(result.value, objective.key, function_label)
            reward = finite_number(reward_value, objective, n, size)
            result_by_index[n] = CallResult(reward, Status.ABSENT if reward is None else Status.OK, note=reward_note)
    return reward_of(result_by_index, size)


def reward_of(numbers: Mapping[int, CallResult], size: int, *, measured: Sequence[Sequence[float]] | None = None) -> Reward:
    """Build a `Reward` from the results of single completions. A completion without a result in `numbers` is ABSENT."""
    result_n = [numbers.get(n, CallResult(status=Status.ABSENT)) for n in range(size)]
    return Reward.of(
        [result.value for result in result_n],
        status=[result.status for result in result_n],
        notes=[result.note if result.error is None else _failure(result) for result in result_n],
        measured=measured,
    )


def _failure(result: CallResult) -> str:
    """Say why a call of a reward function failed."""
    if result.status == Status.TIMEOUT:
        return "no answer in time"
    error_type = type(result.error)
    error_prefix = "" if error_type.__module__.startswith("spanwise.") else f"{error_type.__name__}: "
    return f"{error_prefix}{result.error}"[:300]


def refuse_if_all_failed(
    results: Mapping[Any, CallResult], subject: str, *, noun: str = "completions", with_place: bool = False
) -> None:
    """Raise RewardError if all of at least two calls for a batch failed, because then the reward function is at fault."""
    failed_results = [result for result in results.values() if result.error is not None]
    if len(failed_results) == len(results) > 1 and not REWARD_WORKERS.get():  # a worker sees only one rollout
        first_failure = failed_results[0]
        error_place = place_of(first_failure.error) if with_place and first_failure.error is not None else ""
        raise RewardError(
            f"{subject} failed for all {len(results)} {noun}. The first error is: {_failure(first_failure)}.{error_place}"
        ) from first_failure.error
