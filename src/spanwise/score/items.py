"""Call reward functions that judge one completion at a time, one after another or many at once.

Of one completion whose call fails, the reward is an ERROR or a TIMEOUT; if all calls fail, the run ends.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from spanwise.errors import DataError, RecipeError, RewardError, SpanwiseError, check_known
from spanwise.objective import Objective, is_async, is_number
from spanwise.score.custom import arguments_for, as_number, own_copy, parameters_of, place_of, reward_function
from spanwise.score.event_loop import of_this_loop
from spanwise.score.foreign import Convention, Item, convention_of
from spanwise.score.reward import Columns, Reward, Texts, present
from spanwise.types import BlockText, Status, whole_text

#: Options of an objective that say how its function is called; the function gets all others.
CALL_OPTIONS: Mapping[str, Any] = {"sees": "whole", "block": None, "timeout": 600.0, "max_concurrent": 64}
_END = re.compile(r"<\|[^<>|\n]{1,64}\|>|</s>|<eos>|<end_of_turn>|<\uff5c[^<>\n]{1,64}\uff5c>")
_T = TypeVar("_T")
#: Across how many processes the requests of a run are shared.
_SHARERS: ContextVar[int] = ContextVar("sharers", default=0)


@contextmanager
def shared_by(processes: int) -> Iterator[None]:
    """Let each of several processes send its share of `max_concurrent` requests while the block lasts."""
    token = _SHARERS.set(processes)
    try:
        yield
    finally:
        _SHARERS.reset(token)


def own_share(max_concurrent: int) -> int:
    """Return how many requests this process may have in flight; the processes of a training share the number."""
    sharers = _SHARERS.get() or int(os.environ.get("WORLD_SIZE", "1"))
    return max(1, -(-max_concurrent // sharers))


@dataclass(frozen=True)
class CallResult:
    """What became of one call: a result and a note on it, or why there is none."""

    value: Any = None
    status: Status = Status.OK
    error: BaseException | None = None
    note: str | None = None


def semaphore(key: object, limit: int) -> asyncio.Semaphore:
    """Return the semaphore of this loop for one function or server, which batches in flight at a time share."""
    return of_this_loop().setdefault((key, limit), asyncio.Semaphore(limit))


async def gathered(
    calls: Sequence[Callable[[], Awaitable[Any]]], free: asyncio.Semaphore, timeout: float
) -> list[CallResult]:
    """Await all calls, as many at a time as the semaphore lets through; each has `timeout` seconds once it has begun."""

    async def one(call: Callable[[], Awaitable[Any]]) -> CallResult:
        async with free:
            try:
                return CallResult(await asyncio.wait_for(call(), timeout))
            except SpanwiseError:
                raise
            except TimeoutError as error:
                return CallResult(status=Status.TIMEOUT, error=error)
            except Exception as error:
                return CallResult(status=Status.ERROR, error=error)

    return await together([one(call) for call in calls])


async def together(coroutines: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Await all coroutines at once; after an error, or Ctrl-C, none of them stays in flight."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def without_end(text: str) -> str:
    """Return a text without the tokens that end a sequence: other libraries decode without them.

    >>> without_end("so 4<|im_end|><|endoftext|>"), without_end("a <|b|> c</s>")
    ('so 4', 'a <|b|> c')
    """
    end = len(text)
    while (start := text.rfind("<", 0, end)) >= 0 and _END.fullmatch(text, start, end):
        end = start
    return text[:end]


def completion_text(blocks: BlockText) -> str:
    """Return the text of a completion as other libraries decode it."""
    return without_end(whole_text(blocks))


def part_text(blocks: BlockText, pays: Sequence[str], block: str | None) -> str:
    """Return the text of one block, or of all paid blocks if no block is named."""
    parts = (blocks[name] or {} for name in present(blocks, [block] if block else pays))
    return without_end("".join(part[""] or "" for part in parts))


def rows_of(columns: Columns, size: int) -> list[dict[str, Any]]:
    """Return the cells of each completion by column; other entries are the trainer's and stay out."""
    fitting = {
        name: values
        for name, values in columns.items()
        if hasattr(values, "__getitem__") and not isinstance(values, (str, Mapping)) and _size(values) == size
    }
    return [{name: values[n] for name, values in fitting.items()} for n in range(size)]


def _size(values: Any) -> int | None:
    return len(values) if hasattr(values, "__len__") else None


def item_convention(objective: Objective) -> Convention | None:
    """Return how an objective's function for one completion is called; None for any other reward."""
    if isinstance(objective.reward, str):
        return None
    return convention_of(objective.reward, frozenset(parameters_of(objective.reward, objective.name)[0]))


def check_call(objective: Objective, convention: Convention | None) -> None:
    """Refuse call options that cannot work, and a key where the function returns one number for each completion."""
    options = objective.options
    if convention is None:
        if objective.key is not None:
            raise RecipeError(
                f"Objective '{objective.name}' has key: {objective.key}, but its function returns a list for the whole batch. A "
                f"key goes with a function for one completion, such as verl's compute_score; leave it out."
            )
        return
    check_known(
        f"value of the option 'sees' of objective '{objective.name}'", options.get("sees", "whole"), ("whole", "part")
    )
    for name in ("timeout", "max_concurrent"):
        value = options.get(name, CALL_OPTIONS[name])
        whole = name == "max_concurrent"
        if not is_number(value) or value <= 0 or (whole and not isinstance(value, int)):
            kind = "a whole number" if whole else "a number of seconds"
            raise RecipeError(f"Objective '{objective.name}' has {name}: {value!r}; write {kind} above 0.")
        if name in options and not is_async(convention.prepare(objective.reward)):
            raise RecipeError(
                f"Objective '{objective.name}' has {name}: {value!r}, but its function is not async, so it runs for one completion "
                f"after another and nothing stops it. Leave {name} out, or write `async def`."
            )


def item_calls(objective: Objective, convention: Convention, text: Texts, columns: Columns) -> dict[int, Callable[[], Any]]:
    """Return the call for each completion that has a paid block."""
    function = convention.prepare(objective.reward)
    parameters = parameters_of(function, objective.name)
    further = {name: value for name, value in objective.options.items() if name not in CALL_OPTIONS}
    part = objective.options.get("sees", CALL_OPTIONS["sees"]) == "part"
    calls: dict[int, Callable[[], Any]] = {}
    for n, (blocks, row) in enumerate(zip(text, rows_of(columns, len(text)), strict=True)):
        if present(blocks, objective.pays):
            block = objective.options.get("block")
            seen = part_text(blocks, objective.pays, block) if part else completion_text(blocks)
            arguments, missing = arguments_for(parameters, convention.arguments(Item(seen, row)) | further)
            if missing is not None:
                known = ", ".join(sorted(row)) or "none"
                raise DataError(f"Objective '{objective.name}' needs the column '{missing}'; the dataset has {known}.")
            calls[n] = partial(function, **own_copy(arguments))
    return calls


def call_items(calls: Mapping[int, Callable[[], Any]]) -> dict[int, CallResult]:
    """Call a plain function for one completion after another."""
    results: dict[int, CallResult] = {}
    for n, call in calls.items():
        try:
            results[n] = CallResult(call())
        except SpanwiseError:
            raise
        except (Exception, SystemExit) as error:
            results[n] = CallResult(status=Status.ERROR, error=error)
    return results


async def await_items(objective: Objective, calls: Mapping[int, Callable[[], Any]]) -> dict[int, CallResult]:
    """Await an asynchronous function for many completions at once, within the objective's limits."""
    limits = {**CALL_OPTIONS, **objective.options}
    free = semaphore(id(objective.reward), own_share(limits["max_concurrent"]))
    return dict(zip(calls, await gathered(list(calls.values()), free, limits["timeout"]), strict=True))


def as_reward(objective: Objective, convention: Convention, results: Mapping[int, CallResult], size: int) -> Reward:
    """Return the rewards of all completions from the results of their calls; end the run if every one of several failed."""
    who, numbers = reward_function(objective), dict(results)
    refuse_if_all_failed(results, who)
    for n, result in results.items():
        if result.error is None:
            value, note = convention.number(result.value, objective.key, who)
            number = None if value is None else as_number(value)
            if number is not None and not is_number(number):
                raise RewardError(
                    f"{who} gives completion {n} of {size} the reward {value!r:.60}; return a finite number or None."
                )
            numbers[n] = CallResult(number, Status.ABSENT if number is None else Status.OK, note=note)
    return reward_of(numbers, size)


def reward_of(results: Mapping[int, CallResult], size: int, *, measured: Sequence[Sequence[float]] | None = None) -> Reward:
    """Return the rewards of all completions from the numbers of some of them; the others have none (ABSENT)."""
    absent = CallResult(status=Status.ABSENT)
    by_completion = [results.get(n, absent) for n in range(size)]
    notes = [one.note if one.error is None else failure_of(one) for one in by_completion]
    values, status = [one.value for one in by_completion], [one.status for one in by_completion]
    return Reward.of(values, status=status, notes=notes, measured=measured)


def failure_of(result: CallResult) -> str:
    """Say why a call gave no result."""
    if result.status == Status.TIMEOUT:
        return "no answer in time"
    sort = type(result.error)
    named = "" if sort.__module__.startswith("spanwise.") else f"{sort.__name__}: "
    return f"{named}{result.error}"[:300]


def refuse_if_all_failed(results: Mapping[int, CallResult], who: str) -> None:
    """Raise RewardError if every one of several calls failed: then the fault lies in the function, and not in a completion."""
    first = first_if_all_failed(results)
    if first is not None:
        place = place_of(first.error) if first.error is not None else ""
        raise RewardError(
            f"{who} failed for all {len(results)} completions. The first says: {failure_of(first)}.{place}"
        ) from first.error


def first_if_all_failed(results: Mapping[Any, CallResult]) -> CallResult | None:
    """Return the first failure if every one of several calls failed."""
    failed = [result for result in results.values() if result.error is not None]
    return failed[0] if len(failed) == len(results) > 1 else None
