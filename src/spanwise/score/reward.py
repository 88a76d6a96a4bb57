"""`Reward`: one objective's rewards of all completions. `REWARDS` registers the rewards that recipes can name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.errors import AlignmentError, DataError, RewardError
from spanwise.objective import Objective
from spanwise.registry import Registry
from spanwise.score.workers import Verdict
from spanwise.segment.claims import without_end
from spanwise.types import BlockText, ByCompletion, Status

NAN = float("nan")
#: The blocks of each completion, by name.
Texts = Sequence[BlockText]
#: The names of the blocks whose tokens get an objective's credit.
Pays = tuple[str, ...]
#: The dataset's columns by name, one row per completion.
Columns = Mapping[str, Any]
#: A function that judges a completion. It gets all blocks, the block with the judged tag, and a cell of the dataset.
Rule = Callable[[BlockText, Mapping[str, "str | None"], Any], "bool | float | tuple[Any, ...] | None"]


@dataclass(frozen=True)
class Reward(ByCompletion):
    """The rewards of N completions under one objective.

    Attributes:
        value_n: float64; a finite number where `status_n` is OK or BROKE, NaN everywhere else.
        status_n: `Status` of each reward.
        by_outcome_n2, stated_n, unused_n, note_n: as in `Scores`, for one objective. None: the reward has nothing of the kind.
        measured_nc: float64; what each reward cost, a column for each of `BuiltIn.measures`. None: nobody measured it.

    Raises:
        AlignmentError: they differ in length.
        RewardError: a value is NaN or infinite with status OK or BROKE, or a number with any other status.

    Example:
        >>> Reward.of([1.0, None]).status_n
        tensor([0, 1])
    """

    value_n: Float[Tensor, " n"]
    status_n: Int[Tensor, " n"]
    by_outcome_n2: Float[Tensor, "n 2"]
    stated_n: Float[Tensor, " n"] | None = None
    unused_n: Float[Tensor, " n"] | None = None
    note_n: np.ndarray | None = None
    measured_nc: Float[Tensor, "n c"] | None = None

    def __post_init__(self) -> None:
        for name, column in vars(self).items():
            if column is not None and len(column) != len(self.value_n):
                raise AlignmentError(f"A reward has {len(self.value_n)} values, but its {name} has {len(column)} entries.")
        has_number_n = (self.status_n == Status.OK) | (self.status_n == Status.BROKE)
        is_invalid_n = torch.where(has_number_n, ~self.value_n.isfinite(), ~self.value_n.isnan())
        if is_invalid_n.any():
            row_index = int(is_invalid_n.nonzero()[0])
            raise RewardError(
                f"The reward of completion {row_index} is {float(self.value_n[row_index])}, but its status is "
                f"{Status(int(self.status_n[row_index])).name}. With the status OK or BROKE (the completion broke its check), a "
                "reward is a finite number. Otherwise it is NaN. Return a finite number, or None for no reward."
            )

    def only_where(self, there_n: Bool[Tensor, " n"]) -> Reward:
        """Mark rewards ABSENT if the completion has no rewarded block (`there_n` is False). Keep the numbers in `unused_n`.

        >>> Reward.of([1.0, -1.0]).only_where(torch.tensor([True, False])).unused_n
        tensor([nan, -1.], dtype=torch.float64)
        """
        stated_number_n = None if self.stated_n is None else self.stated_n.masked_fill(~there_n, NAN)
        unused_value_n = self.value_n.masked_fill(there_n, NAN)
        return replace(remove_rewards(self, ~there_n, Status.ABSENT), stated_n=stated_number_n, unused_n=unused_value_n)

    @staticmethod
    def of(
        values: Sequence[float | int | None],
        *,
        status: Sequence[Status] | None = None,
        by_outcome: Sequence[tuple[float, float] | None] | None = None,
        stated: Sequence[float | None] | None = None,
        notes: Sequence[str | None] | None = None,
        measured: Sequence[Sequence[float]] | None = None,
    ) -> Reward:
        """Build a `Reward` from lists with one entry per completion. None: no reward, as `status` says (default ABSENT).

        Args:
            status: why a value is missing; read where the value is None or the status is BROKE, OK elsewhere.
            by_outcome: (reward had the outcome been 0, had it been 1) or None; all None if not given.
            stated, notes, measured: see `stated_n`, `note_n` and `measured_nc`.

        Raises:
            RewardError: a value is NaN or infinite.

        Example:
            >>> Reward.of([0.5, None], status=[Status.OK, Status.TIMEOUT]).status_n
            tensor([0, 3])
        """
        row_count = len(values)
        statuses = [Status.ABSENT] * row_count if status is None else status
        score_pairs = [None] * row_count if by_outcome is None else by_outcome
        if not row_count == len(statuses) == len(score_pairs):
            raise AlignmentError(
                f"Each row needs one value, one status and one entry of by_outcome; you gave {row_count} values, "
                f"{len(statuses)} statuses and {len(score_pairs)} entries."
            )
        status_codes = [
            int(value_status if value is None or value_status == Status.BROKE else Status.OK)
            for value, value_status in zip(values, statuses, strict=True)
        ]
        return Reward(
            _as_numbers(values),
            torch.tensor(status_codes, dtype=torch.long),
            torch.tensor([(NAN, NAN) if pair is None else pair for pair in score_pairs], dtype=torch.float64).reshape(-1, 2),
            None if stated is None else _as_numbers(stated),
            note_n=None if notes is None else np.array(notes, dtype=object),
            measured_nc=None if measured is None else torch.tensor(measured, dtype=torch.float64).reshape(row_count, -1),
        )


def remove_rewards(reward: Reward, removed_n: Bool[Tensor, " n"], reason: Status) -> Reward:
    """Remove the rewards of some completions, and set their status to `reason`."""
    value_n = reward.value_n.masked_fill(removed_n, NAN)
    status_n = reward.status_n.masked_fill(removed_n, int(reason))
    reward_by_outcome_n2 = reward.by_outcome_n2.masked_fill(removed_n[:, None], NAN)
    return replace(reward, value_n=value_n, status_n=status_n, by_outcome_n2=reward_by_outcome_n2)


#: The rewards of objectives that were scored earlier, by the objective's name.
Scored = Mapping[str, Reward]


def column_of(columns: Columns, name: str, size: int) -> Sequence[Any]:
    """Return a column of the dataset, with one cell per completion."""
    if name not in columns:
        # Trainers also pass values that are no columns of the dataset, so the error lists only values with a length.
        column_names = sorted(key for key, column in columns.items() if hasattr(column, "__len__"))
        raise DataError(f"The dataset has no column '{name}'; its columns are {', '.join(column_names) or 'none'}.")
    if len(columns[name]) != size:
        raise AlignmentError(f"Column '{name}' has {len(columns[name])} rows for {size} completions; give one row to each.")
    return list(columns[name])  # pandas would look up labels instead of positions


def block_with(blocks: BlockText, pays: Sequence[str], tag: str) -> Mapping[str, str | None] | None:
    """Return the first block in `pays` that has a tag, {} if none has it, or None if all blocks in `pays` are missing."""
    paid_blocks = [block for name in pays if (block := blocks.get(name)) is not None]
    first_block = next((block for block in paid_blocks if tag in block), {}) if paid_blocks else None
    return {**first_block, "": without_end(first_block[""] or "")} if first_block and not tag else first_block


def read_tag(blocks: BlockText, pays: Sequence[str], tag: str) -> str | None:
    """Return the content of a tag from the first block in `pays` that holds the tag. Return None if no block does."""
    return (block_with(blocks, pays, tag) or {}).get(tag)


def judged(
    text: Texts,
    pays: Pays,
    tag: str,
    cells: Sequence[Any],
    rule: Rule,
    check: Callable[[list[Any]], list[Verdict]] | None = None,
) -> Reward:
    """Reward each completion by a rule's verdict. A completion without any block in `pays` has no reward (ABSENT)."""
    # `rule` returns a verdict, None if it cannot judge, or a tuple that `check` turns into a verdict.
    verdicts: list[Any] = [Verdict(Status.ABSENT, NAN)] * len(text)
    for n, (blocks, cell) in enumerate(zip(text, cells, strict=True)):
        block = block_with(blocks, pays, tag)
        if block is not None:
            verdicts[n] = rule(blocks, block, cell)
    if check is not None:
        request_indices = [n for n, verdict in enumerate(verdicts) if type(verdict) is tuple]
        for n, verdict in zip(request_indices, check([verdicts[n] for n in request_indices]), strict=True):
            verdicts[n] = verdict
    statuses = [verdict.status if isinstance(verdict, Verdict) else Status.ERROR for verdict in verdicts]
    reward_values = [verdict.value if isinstance(verdict, Verdict) else verdict for verdict in verdicts]
    return Reward.of([None if x is None or math.isnan(x) else float(x) for x in reward_values], status=statuses)


def _as_numbers(values: Sequence[float | int | None]) -> Float[Tensor, " n"]:
    return torch.tensor([NAN if value is None else float(value) for value in values], dtype=torch.float64)


@dataclass(frozen=True)
class BuiltIn:
    """A reward that a recipe can name. `spanwise.registry.register(name, kind="reward", ...)` makes one.

    Attributes:
        name: as in recipes.
        function: `(text, *, pays, columns, scored, **options) -> Reward`; every option has a default.
        kind: "reward".
        tags: the options that name a tag the reward reads in a paid block; checked before training.
        blocks: the options that name a block.
        segmenters: the segmenters whose parts it understands; none: any.
        check: refuses options that cannot work (RecipeError); called before training with all of them.
        ready: refuses options that need a missing package (DataError); called before training, but not for recorded rewards.
        measures: what it counts for each completion (requests, tokens), summed over a batch as `cost/<objective>/<measure>`.
        reads_ids: it reads the token ids of completions, the trainer's column `completion_ids`.
        loads_model: it loads a model of its own, for which the reward workers of verl and SkyRL have no device.
        judged_by: the option that names the objective whose reward is the outcome, see `judge_of`; None if there is none.

    Example:
        >>> from spanwise.registry import register
        >>> @register("doc_example", kind="reward")
        ... def doc_example(text, *, pays, columns, scored, scale=1.0):
        ...     return Reward.of([scale] * len(text))
        >>> REWARDS.pop("doc_example").options
        {'scale': 1.0}
    """

    name: str
    function: Callable[..., Reward]
    kind: str = "reward"
    tags: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    segmenters: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()
    reads_ids: bool = False
    loads_model: bool = False
    judged_by: str | None = None
    check: Callable[[Mapping[str, Any]], object] = lambda options: None
    ready: Callable[[Mapping[str, Any]], object] = lambda options: None

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options that a recipe can set for the reward, with their defaults."""
        function_parameters = inspect.signature(self.function).parameters.items()
        return {name: x.default for name, x in function_parameters if name not in ("text", "pays", "columns", "scored")}


#: Options that change where and how fast a reward's verdict is made, but not the verdict. A resumed run may change them.
FREE_OPTIONS = {"judge": ("base_url", "timeout", "max_concurrent", "retries", "cache"), "correct": ("workers",)}
#: Every reward that a recipe can name.
REWARDS: Registry[BuiltIn] = Registry("reward", kinds=("reward",), group="spanwise.rewards", entry=BuiltIn)


def built_in(objective: Objective) -> BuiltIn | None:
    """Return the built-in reward that an objective names. Return None if it has its own function."""
    return REWARDS.find(objective.reward) if isinstance(objective.reward, str) else None
