"""`check_reward`: the properties of whatever turns text into a number."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from typing import Any, NoReturn

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from spanwise.errors import RecipeError
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.score.reward import Reward
from spanwise.score.score import score_one
from spanwise.testing.batches import Draw
from spanwise.testing.search import ConformanceError, check_properties
from spanwise.types import BlockText, Status

#: What is checked of a reward, and what each check means.
REWARD_PROPERTIES: Mapping[str, str] = {
    "result": "one finite number or one status per completion, whatever the text",
    "pure": "its inputs stay as they are and a second call gives the same numbers",
    "absent": "a completion without the paid blocks is absent, not zero, and changes nothing for the others",
    "permutation": "another order of the completions only reorders the result",
    "split": "a completion alone gets what it gets in a batch",
    "threads": "main thread, worker thread, event loop and another process give the same numbers",
}
#: What policies write where an answer or a confidence should stand.
HOSTILE = (
    "", " ", "4", "0.7", "70%", "-0.1", "nan", "inf", "1e999", "high", "0,7", "\u0660.\u0667", "\\boxed{4}", "\\frac{1}{0}",
    "x" * 50, "<answer>", "</answer>", "日本🙂", "\x00", "1" * 400,
)  # fmt: skip


@dataclass(frozen=True)
class DrawnCompletions:
    """What a reward is called with.

    Attributes:
        text: the blocks of each completion.
        columns: dataset columns, one row per completion.
        scored: the objectives scored before: name -> values, None for no reward.
    """

    text: tuple[BlockText, ...]
    columns: Mapping[str, tuple[Any, ...]]
    scored: Mapping[str, tuple[float | None, ...]]

    def take(self, index: Sequence[int]) -> DrawnCompletions:
        """These completions, in this order."""
        columns = {name: tuple(values[i] for i in index) for name, values in self.columns.items()}
        scored = {name: tuple(values[i] for i in index) for name, values in self.scored.items()}
        return DrawnCompletions(tuple(self.text[i] for i in index), columns, scored)


def check_reward(
    reward: str | Callable[..., Any],
    *,
    pays: Sequence[str] = ("solution",),
    layout: Layout | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
    scored: Mapping[str, Sequence[float | None]] | None = None,
    given: str | None = None,
    options: Mapping[str, Any] | None = None,
    contents: Sequence[str] = (),
    exceptions: Mapping[str, str] | None = None,
    properties: Sequence[str] | None = None,
    processes: bool = True,
    examples: int = 40,
) -> None:
    """Check a reward, registered or a callable as recipes take it, against `REWARD_PROPERTIES`.

    Args:
        reward: its registered name, or the function.
        pays: the blocks it is to pay.
        layout: blocks and tags of the completions; None: solution with `answer`, confidence with `confidence`.
        columns: dataset column -> values to draw from.
        scored: objective scored before -> values to draw from; None is an absent reward.
        given: of the objective.
        options: of the reward.
        contents: what tags may hold, beside `HOSTILE`.
        exceptions: property -> why it does not have it (a reward that ranks a group has no "split").
        properties: check these only.
        processes: whether "threads" starts a process, which costs seconds; the reward must then be importable, and a script that
            calls this needs `if __name__ == "__main__":`.
        examples: how many examples each property sees.

    Raises:
        ConformanceError: a property does not hold; with the smallest example found.
        RecipeError: the reward cannot be sent to another process.

    Example:
        >>> check_reward("format", processes=False, examples=5)
        >>> def length(blocks):
        ...     return [len(block["solution"]["answer"]) for block in blocks]
        >>> check_reward(length, processes=False)
        Traceback (most recent call last):
        spanwise.testing.search.ConformanceError: Reward 'length' breaks 'result': ...
    """
    objective = Objective(reward, pays=tuple(pays), given=given, options=dict(options or {}))
    layout = layout or Layout({"solution": ["answer"], "confidence": ["confidence"]})
    inside = (*contents, *HOSTILE)
    drawn = layout, inside, dict(columns or {}), dict(scored or {})
    plain = _completions(*drawn)
    order = plain.flatmap(lambda c: st.tuples(st.just(c), st.permutations(range(len(c.text)))))
    strategies = {"permutation": order, "threads": st.just(_every(*drawn))}
    check_properties(
        _Suite(objective, layout, processes),
        lambda name: strategies.get(name, plain),
        tuple(REWARD_PROPERTIES),
        asked=properties,
        exceptions=exceptions,
        examples=examples,
    )


def _block(tags: tuple[str, ...], contents: Sequence[str | None]) -> dict[str, str | None]:
    by_tag = dict(zip(tags, contents, strict=True))
    return {**by_tag, "": "".join(f"<{tag}>{text}</{tag}>" for tag, text in by_tag.items() if text is not None)}


@st.composite
def _completions(
    draw: Draw, layout: Layout, contents: Sequence[str], columns: dict[str, Any], scored: dict[str, Any]
) -> DrawnCompletions:
    n = draw(st.integers(1, 5))
    inside: SearchStrategy[str | None] = st.one_of(st.sampled_from([*contents, None]), st.text(max_size=5))
    text = []
    for _ in range(n):
        there = {name: draw(st.sampled_from([True, True, False])) for name in layout.names}
        text.append(
            {name: _block(tags, [draw(inside) for _ in tags]) if there[name] else None for name, tags in layout.keys.items()}
        )
    drawn = [
        {name: tuple(draw(st.sampled_from(list(values))) for _ in range(n)) for name, values in source.items()}
        for source in (columns, scored)
    ]
    return DrawnCompletions(tuple(text), *drawn)


def _every(layout: Layout, contents: Sequence[str], columns: dict[str, Any], scored: dict[str, Any]) -> DrawnCompletions:
    """Every content with every row of the columns, to compare places where the reward runs."""
    rows = max([len(values) for values in (*columns.values(), *scored.values())], default=1)
    pairs = list(product(contents, range(rows)))
    text = tuple({name: _block(tags, [content] * len(tags)) for name, tags in layout.keys.items()} for content, _ in pairs)
    drawn = [{name: tuple(v[i % len(v)] for _, i in pairs) for name, v in source.items()} for source in (columns, scored)]
    return DrawnCompletions(text, *drawn)


def score_completions(objective: Objective, completions: DrawnCompletions) -> tuple[list[float], list[int]]:
    """Values and statuses as plain lists, which travel between processes."""
    scored = {name: Reward.of(values) for name, values in completions.scored.items()}
    columns = {name: list(values) for name, values in completions.columns.items()}
    reward = score_one(objective, list(completions.text), columns=columns, scored=scored)
    return reward.value_n.tolist(), reward.status_n.tolist()


@dataclass(frozen=True)
class _Suite:
    objective: Objective
    layout: Layout
    processes: bool

    def call(self, completions: DrawnCompletions) -> list[tuple[float, str]]:
        try:
            return _pairs(*score_completions(self.objective, completions))
        except Exception as error:
            self.fail("result", completions, f"It raises {type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def fail(self, name: str, completions: DrawnCompletions, detail: str) -> NoReturn:
        given = "; ".join(str(value) for value in (list(completions.text), completions.columns, completions.scored) if value)
        raise ConformanceError(
            f"Reward '{self.objective.name}' breaks '{name}': {REWARD_PROPERTIES[name]}. {detail} Smallest example: {given}."
        )

    def same(self, name: str, completions: DrawnCompletions, got: list[Any], expected: list[Any]) -> None:
        if repr(got) != repr(expected):  # NaN equals NaN here
            self.fail(name, completions, f"Got {got}, expected {expected}.")

    def result(self, completions: DrawnCompletions) -> None:
        self.call(completions)

    def pure(self, completions: DrawnCompletions) -> None:
        before = copy.deepcopy(completions)
        first = self.call(completions)
        if completions != before:
            self.fail("pure", before, f"It changed its inputs to {completions}.")
        self.same("pure", before, self.call(completions), first)

    def absent(self, completions: DrawnCompletions) -> None:
        there = [any(block[name] is not None for name in self.objective.pays) for block in completions.text]
        result = self.call(completions)
        for n, present in enumerate(there):
            if not present and result[n][1] != Status.ABSENT.name:
                self.fail("absent", completions, f"Completion {n} has none of the paid blocks and gets {result[n]}.")
        kept = [n for n, present in enumerate(there) if present]
        if kept:
            self.same("absent", completions, [result[n] for n in kept], self.call(completions.take(kept)))

    def permutation(self, example: tuple[DrawnCompletions, list[int]]) -> None:
        completions, order = example
        result = self.call(completions)
        self.same("permutation", completions, self.call(completions.take(order)), [result[n] for n in order])

    def split(self, completions: DrawnCompletions) -> None:
        alone = [self.call(completions.take([n]))[0] for n in range(len(completions.text))]
        self.same("split", completions, self.call(completions), alone)

    def threads(self, completions: DrawnCompletions) -> None:
        expected = score_completions(self.objective, completions)

        async def in_a_loop() -> tuple[list[float], list[int]]:
            return score_completions(self.objective, completions)

        with ThreadPoolExecutor(1) as pool:
            places = {"a worker thread": pool.submit(score_completions, self.objective, completions).result()}
        places["an event loop"] = asyncio.run(in_a_loop())
        if self.processes:
            places["another process"] = self._elsewhere(completions)
        for place, result in places.items():
            for n, (one, other) in enumerate(zip(_pairs(*result), _pairs(*expected), strict=True)):
                self.same("threads", completions.take([n]), [place, one], [place, other])

    def _elsewhere(self, completions: DrawnCompletions) -> tuple[list[float], list[int]]:
        try:
            pickle.dumps(self.objective)
        except Exception as error:
            raise RecipeError(
                f"Reward '{self.objective.name}' cannot be sent to another process ({error}); define it at the top of a module, "
                f"or pass processes=False."
            ) from error
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(score_completions, self.objective, completions).result()


def _pairs(values: Sequence[float], status: Sequence[int]) -> list[tuple[float, str]]:
    return [(value, Status(code).name) for value, code in zip(values, status, strict=True)]
