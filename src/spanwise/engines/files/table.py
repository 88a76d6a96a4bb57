"""`RolloutTable`: what a rollout file holds, whoever wrote it; token rows lie end to end, without padding."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from spanwise.errors import DataError
from spanwise.score import Reward
from spanwise.segment import Vocabulary


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


@dataclass(frozen=True)
class RolloutTable:
    """The completions of a rollout file, or of a folder of them.

    Attributes:
        source: who wrote it: "spanwise", "TRL", "verl" or "verifiers".
        path: as the user gave it.
        note: sentences the user should know: where tokens come from, what was left out. May be empty.
        prompts: N prompts as text.
        group_n: the group of each completion: rows of one prompt and step.
        step_n: the step of each completion; 0 where the file has none.
        tokens: N rows of token ids, of `vocabulary`.
        trainable: one flag per token of `tokens`: the model sampled it.
        vocabulary: the bytes of every id.
        has_ids: the ids are the file's own; else the text was cut into pieces or encoded again.
        columns: further columns (answers, ...), N values each.
        rewards: the rewards the file records, by name.
        token_values: what else the file holds per token, flat as `tokens.values`: "value", "logp".
        learned_n: False at completions that the trainer left out of the loss.
        folder: the run folder the file lies in, if it is one of spanwise's own.
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
    has_ids: bool
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    rewards: Mapping[str, Reward] = field(default_factory=dict)
    token_values: Mapping[str, np.ndarray] = field(default_factory=dict)
    learned_n: Bool[Tensor, " n"] | None = None
    folder: Path | None = None

    def __len__(self) -> int:
        return len(self.tokens)


def groups(keys: Sequence[Hashable], steps: Sequence[int]) -> Int[Tensor, " n"]:
    """Number the groups: rows of one prompt and step.

    >>> groups(["a", "b", "a", "a"], [1, 1, 1, 2])
    tensor([0, 1, 0, 2])
    """
    known: dict[Hashable, int] = {}
    pairs = zip(keys, steps, strict=True)
    return torch.tensor([known.setdefault(pair, len(known)) for pair in pairs], dtype=torch.long)


def clean(text: str) -> str:
    r"""The text with lone surrogates, which no file can hold, replaced; JSON may bring them in.

    >>> clean("caf\u00e9 \ud800")
    'café �'
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def spoken(message: Any) -> str:
    """The text of one chat message, or of anything that stands for one: a string, a list of parts.

    >>> spoken({"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]})
    'Hi'
    """
    if isinstance(message, str):
        return clean(message)
    content = message.get("content") if isinstance(message, Mapping) else message
    if isinstance(content, (list, tuple, np.ndarray)):
        return "".join(spoken(part.get("text") or "" if isinstance(part, Mapping) else part) for part in content)
    return "" if content is None else clean(str(content))


def prompt_text(prompt: Any) -> str:
    r"""A prompt as text: itself, or its messages under each other, each with its role.

    >>> prompt_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2"}])
    '[system] Be brief.\n[user] 2+2'
    """
    if isinstance(prompt, (list, tuple, np.ndarray)):
        return "\n".join(
            f"[{m['role']}] {spoken(m)}" if isinstance(m, Mapping) and "role" in m else spoken(m) for m in prompt
        )
    return spoken(prompt)


def numbers(values: Sequence[Any]) -> Reward | None:
    """A column as a reward, if all it holds is numbers and gaps; None if it holds anything else, or gaps only."""
    if not any(value is not None for value in values):
        return None
    if not all(value is None or isinstance(value, (bool, int, float)) for value in values):
        return None
    floats = [None if value is None or value != value else float(value) for value in values]
    if any(value in (float("inf"), float("-inf")) for value in floats):
        return None
    return Reward.of(floats)


def check_length(what: str, got: int, size: int, *, file: Path, row: int) -> None:
    """Refuse a row whose parts differ in length.

    Raises:
        DataError: naming the file, the completion and both sizes.
    """
    if got != size:
        raise DataError(
            f"Completion {row} of '{file}' has {size} tokens and {got} values of '{what}'; "
            f"there must be one for each token. Was the file changed after it was written?"
        )
