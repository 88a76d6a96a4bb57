"""`RolloutTable`: what a rollout file holds, whoever wrote it; token rows lie end to end, without padding."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from spanwise.score import Reward
from spanwise.segment import Vocabulary
from spanwise.types import Status


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths, end to end.

    Attributes:
        values: what the rows hold, one after the other.
        offsets: row n is values[offsets[n]:offsets[n + 1]]; one more than there are rows.

    Example:
        >>> rows = Ragged.of([[5, 6], [], [7]])
        >>> rows.padded(0, 3)[0].tolist()
        [[5, 6], [0, 0], [7, 0]]
    """

    values: Shaped[np.ndarray, " v"]
    offsets: Int[np.ndarray, " o"]

    @staticmethod
    def of(rows: Sequence[Sequence[Any]], dtype: Any = np.int32) -> Ragged:
        """Put rows end to end."""
        flat = np.fromiter((value for row in rows for value in row), dtype=dtype)
        return Ragged(flat, np.cumsum([0, *map(len, rows)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int[np.ndarray, " n"]:
        """How long each row is."""
        return np.diff(self.offsets)

    def with_values(self, values: Shaped[np.ndarray, " v"]) -> Ragged:
        """Rows of the same lengths that hold other values."""
        return Ragged(values, self.offsets)

    def slice(self, first: int, last: int) -> Shaped[np.ndarray, " s"]:
        """The values of the rows first..last - 1, end to end."""
        return self.values[self.offsets[first] : self.offsets[last]]

    def rows(self, first: int, last: int) -> Ragged:
        """The rows first..last - 1.

        >>> Ragged.of([[5, 6], [], [7]]).rows(1, 3).offsets.tolist()
        [0, 0, 1]
        """
        return Ragged(self.slice(first, last), self.offsets[first : last + 1] - self.offsets[first])

    def filled(self, first: int, last: int) -> Bool[np.ndarray, "m t"]:
        """Which places of a padded table of the rows first..last - 1 hold a value."""
        lengths = self.lengths[first:last]
        return np.arange(lengths.max(initial=0)) < lengths[:, None]

    def padded(self, first: int, last: int) -> tuple[Shaped[np.ndarray, "m t"], Bool[np.ndarray, "m t"]]:
        """The rows first..last - 1 as a table, 0 at the padding, and which places hold a value."""
        filled = self.filled(first, last)
        table = np.zeros(filled.shape, dtype=self.values.dtype)
        table[filled] = self.slice(first, last)
        return table, filled

    def chunks(self, size: int) -> Iterator[tuple[int, int]]:
        """Runs of rows (first, last) whose padded table has at most `size` places, or a single row.

        >>> list(Ragged.of([[1] * 3, [1], [1] * 4]).chunks(6))
        [(0, 2), (2, 3)]
        """
        lengths, first, widest = self.lengths.tolist(), 0, 0
        for n, length in enumerate(lengths):
            widest = max(widest, length)
            if n > first and widest * (n + 1 - first) > size:
                yield first, n
                first, widest = n, length
        if lengths:
            yield first, len(lengths)


class Cut(NamedTuple):
    """Completions as tokens, and what the user should know about them."""

    tokens: Ragged
    trainable: np.ndarray
    vocabulary: Vocabulary
    note: str


class AsRecorded(NamedTuple):
    """What the trainer that wrote a file says of its completions: an advantage, or the reward that it went by.

    Attributes:
        says: what the numbers are, in words.
        number: of each token, flat as the tokens are; NaN at completions that have none.
        shares: they are shared out over tokens already, so that a plain sum is the objective.
        by_block: of a trainer that credits blocks, block -> its credit in each completion, and `stop`; `number` is their sum then.
    """

    says: str
    number: Float[np.ndarray, " v"]
    shares: bool = False
    by_block: Mapping[str, Float[np.ndarray, " n"]] = MappingProxyType({})


@dataclass(frozen=True)
class RolloutTable:
    """The completions of a rollout file, or of a folder of them.

    Attributes:
        source: who wrote it: "spanwise", "TRL", "verl" or "verifiers".
        path: as the user gave it.
        note: sentences the user should know: where tokens come from, what was left out. May be empty.
        prompts: N prompts as text.
        group_n: the group of each completion: rows of one prompt and step, or of one key where the file has keys.
        step_n: the step of each completion; 0 where the file has none.
        tokens: N rows of token ids, of `vocabulary`.
        trainable: one flag per token of `tokens`: the model sampled it.
        vocabulary: the bytes of every id.
        tokenizer: the folder of the tokenizer that the ids are of, if they are the file's own.
        columns: further columns (answers, ...), N values each.
        rewards: the rewards the file records, by name.
        token_values: what else the file holds per token, flat as `tokens.values`: "value" (one of several: "value/<stream>"),
            "logp".
        keyed: the file itself says which rows are a group, so that a prompt drawn twice in one step is two of them.
        learned_n: False at completions that the trainer left out of the loss.
        folder: the run folder the file lies in, if it is one of spanwise's own.
        as_recorded: the advantages or rewards that its trainer went by, if it says any.
        rollout_n: the rollout of each completion, where some are parts of one (branches, turns) that has one vote.
        self_reward_n: the self-rewarding score of each completion (`Laser`), NaN where it did not end; None: the file has none.

    Example:
        >>> import json, tempfile
        >>> from spanwise.rollouts import read_rollouts
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "1.jsonl").write_text(json.dumps({"input": "2 + 2?", "output": "4", "score": 1.0, "step": 1}))
        ...     table = read_rollouts(folder)
        >>> table.source, list(table.prompts), table.step_n.tolist()
        ('verl', ['2 + 2?'], [1])
    """

    source: str
    path: Path
    note: str
    prompts: Sequence[str]
    group_n: Int[Tensor, " n"]
    step_n: Int[Tensor, " n"]
    tokens: Ragged
    trainable: Bool[np.ndarray, " v"]
    vocabulary: Vocabulary
    tokenizer: Path | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    rewards: Mapping[str, Reward] = field(default_factory=dict)
    token_values: Mapping[str, np.ndarray] = field(default_factory=dict)
    keyed: bool = False
    learned_n: Bool[Tensor, " n"] | None = None
    folder: Path | None = None
    as_recorded: AsRecorded | None = None
    rollout_n: Int[Tensor, " n"] | None = None
    self_reward_n: Float[Tensor, " n"] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def has_ids(self) -> bool:
        """Whether the ids are the file's own; else its texts were cut into pieces or encoded again."""
        return self.tokenizer is not None

    def rows(self, first: int, last: int) -> RolloutTable:
        """The completions first..last - 1 as a table; what lies flat is shared with this one."""
        n, v = slice(first, last), slice(self.tokens.offsets[first], self.tokens.offsets[last])
        by_row = ("prompts", "group_n", "step_n", "learned_n", "rollout_n", "self_reward_n")
        trained = self.as_recorded
        return replace(
            self,
            **{name: None if (values := getattr(self, name)) is None else values[n] for name in by_row},
            tokens=self.tokens.rows(first, last),
            trainable=self.trainable[v],
            columns={name: values[n] for name, values in self.columns.items()},
            rewards={name: reward.take(n) for name, reward in self.rewards.items()},
            token_values={name: values[v] for name, values in self.token_values.items()},
            as_recorded=trained
            and trained._replace(
                number=trained.number[v], by_block={name: credit_n[n] for name, credit_n in trained.by_block.items()}
            ),
        )

    @staticmethod
    def of(
        source: str,
        path: Path,
        cut: Cut,
        *,
        prompts: Sequence[str],
        steps: Sequence[int],
        keys: Sequence[Hashable] | None = None,
        rewards: Mapping[str, Reward],
        notes: Sequence[str] = (),
        **more: Any,
    ) -> RolloutTable:
        """Put together what a reader found.

        Args:
            source, path, prompts, rewards: see the attributes.
            cut: the completions as tokens; its note comes first.
            steps: of each completion.
            keys: what the rows of a group share within a step; None: the prompt.
            notes: further sentences; empty ones are left out.
            more: further attributes.
        """
        return RolloutTable(
            source=source,
            path=path,
            note=" ".join(note for note in (cut.note, *notes) if note),
            prompts=prompts,
            group_n=groups(prompts if keys is None else keys, steps),
            step_n=torch.tensor(steps, dtype=torch.long),
            tokens=cut.tokens,
            trainable=cut.trainable,
            vocabulary=cut.vocabulary,
            rewards=rewards,
            **more,
        )


def groups(keys: Sequence[Hashable], steps: Sequence[int]) -> Int[Tensor, " n"]:
    """Number the groups: rows of one prompt and step.

    >>> groups(["a", "b", "a", "a"], [1, 1, 1, 2])
    tensor([0, 1, 0, 2])
    """
    known: dict[Hashable, int] = {}
    pairs = zip(keys, steps, strict=True)
    return torch.tensor([known.setdefault(pair, len(known)) for pair in pairs], dtype=torch.long)


def finite(value: Any) -> float | None:
    """The value if it is a finite number, else None.

    >>> finite(True), finite(2), finite(float("nan")), finite("2")
    (1.0, 2.0, None, None)
    """
    if not isinstance(value, (bool, int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON knows integers of any size
        return None
    return number if math.isfinite(number) else None


def recorded(columns: Mapping[str, Sequence[Any]]) -> dict[str, Reward]:
    """The columns that are rewards: at least one finite number, and beside numbers only gaps and numbers as text.

    An empty cell (NaN is one) was never scored, or its reward function returned None: UNSCORED; any other that is no finite
    number is an ERROR.
    Either joins no baseline and costs nothing, unlike a reward whose block the completion left out.

    >>> {name: r.status_n.tolist() for name, r in recorded({"acc": [1, None, float("inf")], "why": ["a", 1, 2]}).items()}
    {'acc': [0, 5, 4]}
    """
    found: dict[str, Reward] = {}
    for name, values in columns.items():
        floats = [finite(value) for value in values]
        if any(value is not None for value in floats) and all(map(_could_be, values)):
            empty = [value is None or value != value for value in values]
            found[name] = Reward.of(floats, status=[Status.UNSCORED if gap else Status.ERROR for gap in empty])
    return found


def as_recorded(columns: Mapping[str, Reward], tokens: Ragged) -> AsRecorded | None:
    """The first of `advantage`, `score` and `reward` that a file records, the same at every token of a completion.

    >>> found = as_recorded(recorded({"score": [1.0, None]}), Ragged.of([[5, 6], [7]]))
    >>> found.says, found.number.tolist()
    ("the file's 'score', from which nothing is subtracted", [1.0, 1.0, nan])
    """
    name = next((name for name in ("advantage", "score", "reward") if name in columns), None)
    if name is None:
        return None
    plain = "" if name == "advantage" else ", from which nothing is subtracted"
    return AsRecorded(f"the file's '{name}'{plain}", np.repeat(columns[name].value_n.numpy(), tokens.lengths))


def is_made(name: str) -> bool:
    """Whether a column of a trainer's table holds what it made of rewards, and no reward: its advantage, or credit by block.

    >>> is_made("advantage"), is_made("credit/solution"), is_made("reward")
    (True, True, False)
    """
    return name == "advantage" or name.startswith("credit/")


def as_trained(columns: Mapping[str, Sequence[Any]], rewards: Mapping[str, Reward], tokens: Ragged) -> AsRecorded | None:
    """What the completions of a trainer's table were trained with: its credit by block, its advantage, or a reward.

    Example:
        >>> columns = {"advantage": [0.5, 0.0], "credit/a": [0.5, None], "credit/stop": [0.0, -0.2]}
        >>> sorted(as_trained(columns, {}, Ragged.of([[5], [7]])).by_block)
        ['a', 'stop']
    """
    made = recorded({name: values for name, values in columns.items() if is_made(name)})
    trained = as_recorded({**rewards, **made}, tokens)
    by_block = {name.removeprefix("credit/"): one.value_n.numpy() for name, one in made.items() if name != "advantage"}
    if trained is not None and by_block:
        return trained._replace(says="the file's 'credit/...' of each block", by_block=by_block)
    return trained


def _could_be(value: Any) -> bool:
    """Whether the cell can stand in a column of numbers."""
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return value is None or isinstance(value, (bool, int, float))


def gaps(rewards: Mapping[str, Reward]) -> str:
    """The sentence on values that are not there; empty if all are.

    >>> gaps(recorded({"acc": [1.0, None], "score": [1.0, 0.0]}))
    "1 of 2 recorded values of 'acc' are missing or not finite; they join no baseline and cost nothing."
    """
    counts = {name: int((reward.status_n != int(Status.OK)).sum()) for name, reward in rewards.items()}
    parts = [f"{n} of {len(rewards[name].value_n)} recorded values of '{name}'" for name, n in counts.items() if n]
    if not parts:
        return ""
    more = [f"of {len(parts) - 4} more columns"] if len(parts) > 4 else []
    shown = " and ".join([*parts[:4], *more])
    return f"{shown} are missing or not finite; they join no baseline and cost nothing."
