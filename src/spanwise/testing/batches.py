"""Draw random batches like those of trainers, with ragged groups, absent rewards and masked tokens.

An input is known by its name, which carries its indices: `reward_nk` is a reward per completion and block, `value_nt` a value per
token, `step_s` a number per step row. n and s index rows, k blocks, m objectives, t tokens, a digit that many columns.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from spanwise.errors import RecipeError

NAN = float("nan")
_numbers = st.sampled_from([0.0, 0.125, -0.25, 0.5, 1.0, -1.0, 717 / 1024, 2.0, -0.5])  # float32 holds each number exactly

Draw = Callable[[SearchStrategy[Any]], Any]

#: Maps an input's name, without a suffix such as `_nk`, to its possible values.
ENTRIES: dict[str, SearchStrategy[Any]] = {
    **dict.fromkeys(("reward", "score", "by_outcome", "metric", "value", "adv", "advantage", "bootstrap"), _numbers),
    **dict.fromkeys(("confidence", "report", "importance"), st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])),
    **dict.fromkeys(("correct", "outcome"), st.sampled_from([0.0, 1.0])),
    **dict.fromkeys(("anchor", "state"), st.integers(0, 2)),
    "calibration": st.sampled_from([0.0, -0.25, -0.0625, -0.5625, -1.0]),
    "logp": st.sampled_from([-0.125, -0.5, -1.0, -2.0, -4.0]),
    "ids": st.integers(0, 5),
    "length": st.integers(1, 9),
    "stratum": st.integers(0, 1),
}
_REWARDS = ("reward", "score", "calibration", "correct")
_WHOLE = ("ids", "length", "stratum", "group", "trajectory", "step", "block", "start", "end", "anchor", "state")
_STRUCTURE = ("group", "trajectory", "step", "mask", "block")
#: Ids like hashes, so large that neighbouring ids are the same float64.
LABELS = (-(2**62) - 1, -(2**62), -1, -(2**63), 0, 2**62, 2**63 - 1, 2, 7)


@dataclass(frozen=True)
class Input:
    """One input of an estimator. Its name, such as `reward_nk`, is a stem and one letter per axis."""

    name: str
    stem: str
    axes: str
    dtype: torch.dtype
    entries: SearchStrategy[Any] | None

    @property
    def is_reward(self) -> bool:
        """Whether the input is a reward."""
        return self.stem in _REWARDS

    @property
    def by_token(self) -> bool:
        """Whether the input has one entry per token."""
        return "t" in self.axes


def take(columns: Mapping[str, Any], index: Sequence[int]) -> dict[str, Any]:
    """Select rows by their indices, in the given order. Columns are tensors or lists."""
    return {
        name: value[list(index)] if isinstance(value, Tensor) else [value[row] for row in index]
        for name, value in columns.items()
    }


@dataclass(frozen=True)
class DrawnBatch:
    """The inputs of one call of a function under test. `place_nt` holds each column's trainable token (-1: none)."""

    spec: tuple[Input, ...]
    group_n: Int[Tensor, " n"]  # the group of each row, even if the function under test takes no groups
    rows: Mapping[str, Any]
    place_nt: Int[Tensor, "n t"]
    fill: float = 0.0

    def __len__(self) -> int:
        """The number of completions or steps, one in each row."""
        return len(self.group_n)

    def take(self, index: Sequence[int]) -> DrawnBatch:
        """Return a batch of the rows with these indices, in the given order."""
        indices = list(index)
        return replace(self, group_n=self.group_n[indices], rows=take(self.rows, indices), place_nt=self.place_nt[indices])

    def put(self, changes: Mapping[str, Any]) -> DrawnBatch:
        """Return a copy of the batch in which `changes` replace the arguments of the same names."""
        return replace(self, rows={**self.rows, **changes})

    def inputs(self) -> dict[str, Any]:
        """Return the arguments for one call of the function under test, by name."""
        input_by_name = dict(self.rows)
        integer_fill = -100 if math.isnan(self.fill) else int(self.fill)
        for entry in (entry for entry in self.spec if entry.by_token):
            entry_fill = self.fill if entry.dtype == torch.float64 else integer_fill
            masked_value = -1 if entry.stem == "block" else 0.0 if entry.is_reward else entry_fill
            input_by_name[entry.name] = (
                self.place_nt >= 0 if entry.stem == "mask" else placed(self.rows[entry.name], self.place_nt, masked_value)
            )
        return {entry.name: input_by_name[entry.name] for entry in self.spec}


def placed(token_nt: Tensor, place_nt: Int[Tensor, "n t"], masked: float | int) -> Tensor:
    """Move trainable tokens to new columns: `place_nt` gives each column's token. Fill all other columns with `masked`."""
    return pad(token_nt, (0, 1), value=masked).gather(1, place_nt % (token_nt.shape[1] + 1))


def read_inputs(
    estimator: Callable[..., Any], *, optional: Sequence[str] = (), entries: Mapping[str, SearchStrategy[Any]] | None = None
) -> tuple[Input, ...]:
    """Return an estimator's inputs: its parameters without a default value, and those in `optional`."""
    input_specs = []
    for parameter in inspect.signature(estimator).parameters.values():
        name = parameter.name
        is_variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if is_variadic or (parameter.default is not parameter.empty and name not in optional):
            continue
        input_stem, _, axis_letters = name.rpartition("_")
        entry_strategy = (entries or {}).get(name, ENTRIES.get(input_stem))
        has_known_axes = axis_letters[:1] in ("n", "s") and all(axis in "nskmt" or axis.isdigit() for axis in axis_letters)
        if not has_known_axes or (entry_strategy is None and input_stem not in _STRUCTURE):
            raise RecipeError(
                f"spanwise does not know which values to test the argument '{name}' with. End its name with its axes (n: "
                "completions, t: tokens), as in reward_n or value_nt. Pass the values that it may have: "
                f"inputs={{'{name}': hypothesis.strategies.floats(0, 1)}}. These names need no inputs: "
                f"{', '.join(sorted({*ENTRIES, *_STRUCTURE}))}."
            )
        input_dtype = torch.bool if input_stem == "mask" else torch.int64 if input_stem in _WHOLE else torch.float64
        input_specs.append(Input(name, input_stem, axis_letters, input_dtype, entry_strategy))
    return tuple(input_specs)


@st.composite
def batches_of(
    draw: Draw,
    spec: tuple[Input, ...],
    *,
    absent: bool = False,
    most: int = 8,
    ids: SearchStrategy[tuple[int, ...]] | None = None,
) -> DrawnBatch:
    """Draw random batches with the inputs in `spec`. They have 1 to `most` rows, any groups in any order, right-padded."""
    input_stems = {entry.stem for entry in spec}
    large_sizes = range((most + 3) // 2, most + 1)
    row_count = draw(st.sampled_from([*range(1, most + 1), *large_sizes]))  # draw large batches more often
    group_of_row = draw(st.lists(st.sampled_from([0, 0, 1, 1, 2]), min_size=row_count, max_size=row_count))
    trajectory_of_row = list(range(row_count))
    if "trajectory" in input_stems:
        trajectory_of_row = draw(st.lists(st.integers(0, 4), min_size=row_count, max_size=row_count))
    # All rows of a trajectory belong to one group.
    first_row_of_trajectory = [trajectory_of_row.index(j) for j in trajectory_of_row]
    group_of_row = [group_of_row[row] for row in first_row_of_trajectory] if "group" in input_stems else trajectory_of_row
    has_tokens = any(entry.by_token for entry in spec)
    ids_strategy = st.integers(0, 4).map(range) if ids is None else ids
    id_rows = draw(st.lists(ids_strategy, min_size=row_count, max_size=row_count)) if has_tokens else [()] * row_count
    row_lengths = [len(row) for row in id_rows]
    has_blocks = any("k" in entry.axes or entry.stem == "block" for entry in spec)
    n_blocks = draw(st.integers(1, 3)) if has_blocks else 1
    token_structure = {"length": row_lengths} if has_tokens else {}
    row_structure = {"group": group_of_row, "trajectory": trajectory_of_row, **token_structure}
    inputs: dict[str, Any] = {}
    for entry in spec:
        if not entry.by_token:
            inputs[entry.name] = _draw_rows(draw, entry, row_count, n_blocks, row_structure, absent)
        elif entry.stem == "ids" and ids is not None:
            inputs[entry.name] = _pad(id_rows, entry.dtype)
        elif entry.stem != "mask":
            inputs[entry.name] = _pad([_draw_tokens(draw, entry, length, n_blocks) for length in row_lengths], entry.dtype)
    return DrawnBatch(spec, torch.tensor(group_of_row), inputs, _pad([range(length) for length in row_lengths], fill=-1))


def _draw_tokens(draw: Draw, entry: Input, length: int, k: int) -> tuple[Any, ...]:
    """Draw the values of the input `entry` at the tokens of one row."""
    if entry.stem == "block":
        return tuple(sorted(draw(st.lists(st.integers(0, k - 1), min_size=length, max_size=length))))
    assert entry.entries is not None
    if entry.is_reward and length and draw(st.booleans()):  # in some rows, only the last token has a reward
        return (*(0.0 for _ in range(length - 1)), draw(entry.entries))
    return tuple(draw(st.lists(entry.entries, min_size=length, max_size=length)))


def _draw_rows(draw: Draw, entry: Input, n: int, k: int, structure: dict[str, list[int]], absent: bool) -> Any:
    """Draw the values of the input `entry` for all rows. With `absent` some rewards are NaN."""
    if entry.stem in structure:
        return torch.tensor(structure[entry.stem], dtype=entry.dtype)
    if entry.stem == "step":  # step numbers have gaps, because only their order counts
        trajectory_of_row = structure["trajectory"]
        return torch.tensor([3 * trajectory_of_row[:i].count(j) for i, j in enumerate(trajectory_of_row)], dtype=entry.dtype)
    size_of_letter = {"k": k, "m": 2}
    axis_sizes = [size_of_letter[axis] if axis in size_of_letter else int(axis) for axis in entry.axes[1:]]
    value_count = n * math.prod(axis_sizes)
    assert entry.entries is not None
    entry_values = draw(st.lists(entry.entries, min_size=value_count, max_size=value_count))
    if not isinstance(entry_values[0], int | float):  # values that are no numbers, such as states, fit in no tensor
        return entry_values
    input_tensor = torch.tensor(entry_values, dtype=entry.dtype).reshape(n, *axis_sizes)
    if absent and entry.is_reward and entry.axes[0] == "n":
        absent_flags = draw(st.lists(st.sampled_from([False] * 4 + [True]), min_size=n, max_size=n))
        input_tensor[torch.tensor(absent_flags)] = NAN
    return input_tensor


def _pad(rows: Sequence[Sequence[Any]], dtype: torch.dtype = torch.int64, *, fill: int = 0) -> Tensor:
    """Stack rows of different lengths into one tensor, padded on the right."""
    return pad_sequence([torch.tensor(list(row), dtype=dtype) for row in rows], batch_first=True, padding_value=fill)


def rearranged(batch: DrawnBatch, draw: Draw) -> Int[Tensor, "n t"]:
    """Insert masked tokens before, between and after the trainable tokens. Return the new `place_nt`."""
    place_rows = [[t for t in places if t >= 0] for places in batch.place_nt.tolist()]
    for places in place_rows:
        for _ in range(draw(st.integers(0, 3))):
            places.insert(draw(st.integers(0, len(places))), -1)
    return _pad(place_rows, fill=-1)


def left_padded(batch: DrawnBatch) -> Int[Tensor, "n t"]:
    """Move all padding of a batch to the left. Return the new `place_nt`."""
    return pad(batch.place_nt, (1, 0), value=-1).sort(dim=1).values
