"""`check_reward`: the properties that every reward (a function from completion text to a number) must have."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from spanwise.errors import RecipeError
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.score.reward import Reward
from spanwise.score.score import score_one, written_out
from spanwise.testing.batches import Draw
from spanwise.testing.search import Suite
from spanwise.types import BlockText, Status

#: Maps each property of rewards to its meaning.
REWARD_PROPERTIES: Mapping[str, str] = {
    "result": "each completion gets one finite number or one status, whatever its text",
    "pure": "the inputs stay unchanged, and a second call gives the same numbers",
    "absent": "a completion without the rewarded blocks gets no reward (not 0) and does not change other rewards",
    "permutation": "another order of the completions only reorders the result",
    "split": "a completion alone gets the same reward as in a batch",
    "threads": "the main thread, a worker thread, an event loop and another process give the same numbers",
}
#: Texts that policies write in place of an answer or a confidence.
HOSTILE = (
    "", " ", "4", "0.7", "70%", "-0.1", "nan", "inf", "1e999", "high", "0,7", "\u0660.\u0667", "\\boxed{4}", "\\frac{1}{0}",
    "x" * 50, "<answer>", "</answer>", "日本🙂", "\x00", "1" * 400,
)  # fmt: skip


@dataclass(frozen=True)
class DrawnCompletions:
    """The arguments of one call of a reward. Blocks, dataset row and earlier rewards by completion."""

    rows: Sequence[tuple[Any, ...]]

    def __len__(self) -> int:
        """The number of completions."""
        return len(self.rows)

    def inputs(self) -> dict[str, Any]:
        """Return the reward's arguments by name, as copies."""
        block_texts, column_rows, scored_rows = zip(*copy.deepcopy(self.rows), strict=True)
        return {"text": list(block_texts), "columns": _by_name(column_rows), "scored": _by_name(scored_rows)}

    def take(self, index: Sequence[int]) -> DrawnCompletions:
        """Return the completions with these indices, in the given order."""
        return DrawnCompletions([self.rows[row] for row in index])


def _by_name(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turn a list of rows with the same keys into one list per key."""
    return {name: [row[name] for row in rows] for name in rows[0]}


def check_reward(
    reward: str | Callable[..., Any],
    *,
    pays: str | Sequence[str] = ("solution",),
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
    """Check that a reward has all properties of rewards (`REWARD_PROPERTIES`).

    Args:
        reward: its registered name, or the function.
        pays: the blocks that the reward pays, as in `Objective`.
        layout: blocks and tags of the completions; None: solution with `answer`, confidence with `confidence`.
        columns: dataset column -> values to draw from.
        scored: objective scored before -> values to draw from; None is an absent reward.
        given: of the objective.
        options: of the reward.
        contents: what tags may hold, beside `HOSTILE`.
        exceptions: property -> why it does not have it (a reward that ranks a group has no "split").
        properties, examples: as in `check_estimator`.
        processes: whether "threads" starts a process, which costs seconds; the reward must then be importable, and a script that
            calls this needs `if __name__ == "__main__":`.

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
    layout = layout or Layout({"solution": ["answer"], "confidence": ["confidence"]})
    (objective,) = written_out([Objective(reward, pays=pays, given=given, options=options)], layout)
    contents = (*contents, *HOSTILE)
    column_tables = (columns or {}, scored or {})
    reward_suite = _Reward(
        who=f"Reward '{objective.name}'",
        function=partial(score_completions, objective),
        sentences=REWARD_PROPERTIES,
        objective=objective,
        processes=processes,
    )
    random_strategy = _draw_completions(layout, contents, *column_tables)
    exhaustive_strategy = st.just(_list_completions(layout, contents, *column_tables))

    def strategy_of(name: str) -> SearchStrategy[DrawnCompletions]:
        return exhaustive_strategy if name == "threads" else random_strategy

    reward_suite.check(strategy_of, asked=properties, exceptions=exceptions, examples=examples)


def _build_block(tags: tuple[str, ...], contents: Sequence[str | None]) -> dict[str, str | None]:
    content_of_tag = dict(zip(tags, contents, strict=True))
    block_text = "".join(f"<{tag}>{content}</{tag}>" for tag, content in content_of_tag.items() if content is not None)
    return {**content_of_tag, "": block_text}


def _draw_completions(
    layout: Layout, contents: Sequence[str], *tables: Mapping[str, Sequence[Any]]
) -> SearchStrategy[DrawnCompletions]:
    """Build a hypothesis strategy for one to five completions. Their blocks have any contents or are missing."""
    content_strategy = st.one_of(st.sampled_from([*contents, None]), st.text(max_size=5))
    block_draws = {}
    for name, tags in layout.keys.items():
        block_strategy = st.tuples(*[content_strategy] * len(tags)).map(partial(_build_block, tags))
        block_draws[name] = st.one_of(block_strategy, block_strategy, st.none())
    column_strategies = [{name: st.sampled_from(list(values)) for name, values in table.items()} for table in tables]
    row_draws = map(st.fixed_dictionaries, column_strategies)
    return st.lists(st.tuples(st.fixed_dictionaries(block_draws), *row_draws), min_size=1, max_size=5).map(DrawnCompletions)


def _list_completions(layout: Layout, contents: Sequence[str], *tables: Mapping[str, Sequence[Any]]) -> DrawnCompletions:
    """Pair every text with every dataset row. A pair must get the same reward in every thread and process."""
    row_count = max((len(values) for table in tables for values in table.values()), default=1)
    table_rows = [
        [{name: values[i % len(values)] for name, values in table.items()} for table in tables] for i in range(row_count)
    ]
    completion_rows = [
        ({name: _build_block(tags, [content] * len(tags)) for name, tags in layout.keys.items()}, *row)
        for content, row in product(contents, table_rows)
    ]
    return DrawnCompletions(completion_rows)


def score_completions(
    objective: Objective, *, text: Sequence[BlockText], columns: dict[str, Any], scored: dict[str, Any]
) -> list[tuple[float, str]]:
    """Score completions. Return pairs (reward, status) of plain values, which processes can exchange."""
    earlier_rewards = {name: Reward.of(values) for name, values in scored.items()}
    reward = score_one(objective, text, columns=columns, scored=earlier_rewards)
    status_names = [Status(code).name for code in reward.status_n.tolist()]
    return list(zip(reward.value_n.tolist(), status_names, strict=True))


@dataclass(kw_only=True)
class _Reward(Suite):
    """The checks of an objective's reward. If `processes` is true, another process computes the reward, too."""

    objective: Objective
    processes: bool
    crashes = "breaks 'result': it raises"

    def result(self, batch: DrawnCompletions, _: Draw) -> None:
        self.run(batch)

    def absent(self, batch: DrawnCompletions, _: Draw) -> None:
        has_paid_block_n = [any(blocks[name] is not None for name in self.objective.pays) for blocks, *_ in batch.rows]
        for n, (has_block, value_and_status) in enumerate(zip(has_paid_block_n, self.run(batch)[""], strict=True)):
            if not has_block and value_and_status[1] != Status.ABSENT.name:
                self.fail(
                    batch,
                    f"Completion {n} lacks all rewarded blocks. Its status must be ABSENT, but it gets {value_and_status}.",
                )
        self.alone(batch, [n for n, has_block in enumerate(has_paid_block_n) if has_block])

    def threads(self, batch: DrawnCompletions, _: Draw) -> None:
        expected_rewards = self.function(**batch.inputs())

        async def in_a_loop() -> list[tuple[float, str]]:
            return self.function(**batch.inputs())

        with ThreadPoolExecutor(1) as pool:
            result_by_context = {"in a worker thread": pool.submit(self.function, **batch.inputs()).result()}
        result_by_context["in an event loop"] = asyncio.run(in_a_loop())
        if self.processes:
            result_by_context["in another process"] = self._run_in_process(batch)
        for context, result in result_by_context.items():
            for n in range(len(batch)):
                self.same(batch.take([n]), {context: result[n]}, {context: expected_rewards[n]})

    def _run_in_process(self, batch: DrawnCompletions) -> list[tuple[float, str]]:
        try:
            pickle.dumps(self.objective)
        except Exception as error:
            raise RecipeError(
                f"{self.who} cannot be sent to another process ({error}); define it at the top of a module, "
                f"or pass processes=False."
            ) from error
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(self.function, **batch.inputs()).result()
