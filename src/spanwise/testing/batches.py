"""Batches as trainers produce them: ragged groups in any order, absent rewards, masked tokens, steps of trajectories.

An input is known by its name, which carries its indices: `reward_nk` is a reward per completion and block, `value_nt` a value per
token, `step_s` a number per step row. n and s index rows, k blocks, m objectives, t tokens, a digit that many columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from jaxtyping import Int
from torch import Tensor

from spanwise.errors import RecipeError

NAN = float("nan")
_numbers = st.sampled_from([0.0, 0.125, -0.25, 0.5, 1.0, -1.0, 717 / 1024, 2.0, -0.5])  # exact in float32, with ties
_shares = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])

Draw = Callable[[SearchStrategy[Any]], Any]

#: What the entries of an input look like, by the name before the index letters. Extend it for a call with `inputs=`.
ENTRIES: dict[str, SearchStrategy[Any]] = {
    "reward": _numbers,
    "score": _numbers,
    "calibration": st.sampled_from([0.0, -0.25, -0.0625, -0.5625, -1.0]),
    "correct": st.sampled_from([0.0, 1.0]),
    "outcome": st.sampled_from([0.0, 1.0]),
    "confidence": _shares,
    "report": _shares,
    "by_outcome": _numbers,
    "metric": _numbers,
    "importance": _shares,
    "value": _numbers,
    "adv": _numbers,
    "advantage": _numbers,
    "bootstrap": _numbers,
    "logp": st.sampled_from([-0.125, -0.5, -1.0, -2.0, -4.0]),
    "ids": st.integers(0, 5),
    "length": st.integers(1, 9),
    "stratum": st.integers(0, 1),
    "anchor": st.sampled_from("abc"),
    "state": st.sampled_from("abc"),
}
REWARDS = ("reward", "score", "calibration", "correct")
_WHOLE = ("ids", "length", "stratum", "group", "trajectory", "step", "block", "start", "end")
_STRUCTURE = ("group", "trajectory", "step", "mask", "block")
_IDS = ("group", "trajectory", "stratum", "anchor", "state")
#: Ids as hashes are: of both signs, and so large that neighbours are one number in float64.
LABELS = (-(2**62) - 1, -(2**62), -1, -(2**63), 0, 2**62, 2**63 - 1, 2, 7)


@dataclass(frozen=True)
class Input:
    """One input of an estimator: `reward_nk` has the stem `reward` and the axes `nk`."""

    name: str
    stem: str
    axes: str
    dtype: torch.dtype | None  # None: a list of anything hashable
    entries: SearchStrategy[Any] | None

    @property
    def is_reward(self) -> bool:
        """Whether it is a reward of whole completions or blocks."""
        return self.stem in REWARDS

    @property
    def by_token(self) -> bool:
        """Whether it has one entry per token."""
        return "t" in self.axes


@dataclass(frozen=True)
class DrawnBatch:
    """The inputs of one call, before tokens get their places.

    Attributes:
        spec: the inputs.
        group_n: which rows belong together; also where the estimator is not told.
        rows: inputs per row, whole.
        tokens: inputs per token -> per row -> per trainable token.
        place_nt: which trainable token of its row stands at each place; -1 where none does (masked).
    """

    spec: tuple[Input, ...]
    group_n: Int[Tensor, " n"]
    rows: Mapping[str, Any]
    tokens: Mapping[str, tuple[tuple[Any, ...], ...]]
    place_nt: Int[Tensor, "n t"]

    def take(self, index: Sequence[int] | Tensor) -> DrawnBatch:
        """These rows, in this order."""
        picked = torch.as_tensor(index, dtype=torch.long)
        rows = {
            name: value[picked] if isinstance(value, Tensor) else [value[int(i)] for i in picked]
            for name, value in self.rows.items()
        }
        tokens = {name: tuple(ragged[int(i)] for i in picked) for name, ragged in self.tokens.items()}
        return replace(self, group_n=self.group_n[picked], rows=rows, tokens=tokens, place_nt=self.place_nt[picked])

    def put(self, changes: Mapping[str, Any]) -> DrawnBatch:
        """The same batch with other values for some inputs per row."""
        return replace(self, rows={**self.rows, **changes})

    def relabelled(self) -> DrawnBatch:
        """The same batch under other ids: `LABELS` for groups, trajectories and states, and for steps such in their order."""
        changes = {}
        for entry in self.spec:
            value = self.rows.get(entry.name)
            if not isinstance(value, Tensor) or entry.stem not in (*_IDS, "step"):
                continue
            labels = torch.tensor(sorted(LABELS) if entry.stem == "step" else LABELS)
            changes[entry.name] = labels[value.unique(return_inverse=True)[1]]
        return self.put(changes)

    def inputs(self, *, fill: float = 0.0) -> dict[str, Any]:
        """The arguments by name. Masked places hold `fill` (integers: its whole part, -100 for NaN), in rewards always 0."""
        made = dict(self.rows)
        whole = -100 if fill != fill else int(fill)
        for entry in self.spec:
            if not entry.by_token:
                continue
            if entry.stem == "mask":
                made[entry.name] = (self.place_nt >= 0).to(entry.dtype)
                continue
            other = fill if entry.dtype == torch.float64 else whole
            masked = -1 if entry.stem == "block" else 0.0 if entry.is_reward else other
            padded = torch.full(self.place_nt.shape, masked, dtype=entry.dtype)
            for row, values in enumerate(self.tokens[entry.name]):
                here = self.place_nt[row] >= 0
                padded[row, here] = torch.tensor(values, dtype=entry.dtype)[self.place_nt[row, here]]
            made[entry.name] = padded
        return {entry.name: made[entry.name] for entry in self.spec}


def read_inputs(
    estimator: Callable[..., Any], *, optional: Sequence[str] = (), entries: Mapping[str, SearchStrategy[Any]] | None = None
) -> tuple[Input, ...]:
    """What an estimator must be called with: its parameters without default, and the `optional` ones."""
    parameters = inspect.signature(estimator).parameters.values()
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    wanted = [p for p in parameters if p.kind not in variadic and (p.default is p.empty or p.name in optional)]
    try:
        hints = get_type_hints(estimator)
    except Exception:  # annotations are a help here, no more
        hints = {}
    return tuple(_input(p.name, hints.get(p.name), dict(entries or {})) for p in wanted)


def _input(name: str, hint: Any, entries: dict[str, SearchStrategy[Any]]) -> Input:
    stem, _, axes = name.rpartition("_")
    values = entries.get(name, ENTRIES.get(stem))
    indexed = bool(axes) and axes[0] in "ns" and all(axis in "nskmt" or axis.isdigit() for axis in axes)
    if not indexed or (values is None and stem not in _STRUCTURE):
        raise RecipeError(
            f"The suite does not know what to put into '{name}'. Name inputs by their indices (reward_n, value_nt) and say what "
            f"an entry looks like: inputs={{'{name}': hypothesis.strategies.floats(0, 1)}}. "
            f"Known without it: {', '.join(sorted({*ENTRIES, *_STRUCTURE}))}."
        )
    dtype = _dtype(stem, hint)
    if dtype == torch.int64 and values is not None and values is ENTRIES.get(stem) and stem in ("anchor", "state"):
        values = st.integers(0, 2)
    return Input(name, stem, axes, dtype, values)


def _dtype(stem: str, hint: Any) -> torch.dtype | None:
    if stem in ("anchor", "state") and not hasattr(hint, "dtypes"):  # anything hashable will do
        return None
    kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(getattr(kind, "dtypes", None), tuple)]
    if kinds:
        names = kinds[0].dtypes
        return torch.bool if "bool" in names else torch.float64 if "float64" in names else torch.int64
    return torch.bool if stem == "mask" else torch.int64 if stem in _WHOLE else torch.float64


@st.composite
def batches_of(
    draw: Draw,
    spec: tuple[Input, ...],
    *,
    absent: bool = False,
    most: int = 8,
    ids: SearchStrategy[tuple[int, ...]] | None = None,
) -> DrawnBatch:
    """Batches with these inputs: 1 to `most` rows, groups of any sizes in any order, right-padded tokens.

    With `absent`, some rewards of whole completions are NaN. `ids` draws the token ids of one row, which may depend on each
    other.
    """
    stems = {entry.stem for entry in spec}
    n = draw(st.sampled_from([*range(1, most + 1), *range((most + 3) // 2, most + 1)]))  # more of the larger ones
    group = draw(st.lists(st.sampled_from([0, 0, 1, 1, 2]), min_size=n, max_size=n))
    trajectory = draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)) if "trajectory" in stems else list(range(n))
    if "trajectory" in stems:  # a trajectory belongs to one group
        group = [group[trajectory.index(j)] for j in trajectory] if "group" in stems else trajectory
    elif "group" not in stems:
        group = list(range(n))
    rows_of_ids = None if ids is None else draw(st.lists(ids, min_size=n, max_size=n))
    lengths = (
        draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)) if rows_of_ids is None else list(map(len, rows_of_ids))
    )
    k = draw(st.integers(1, 3))
    rows: dict[str, Any] = {}
    tokens: dict[str, tuple[tuple[Any, ...], ...]] = {}
    has_tokens = any(entry.by_token for entry in spec)
    for entry in spec:
        if entry.stem == "mask":
            continue
        if entry.stem == "length" and has_tokens:
            rows[entry.name] = torch.tensor(lengths, dtype=entry.dtype)
        elif entry.stem == "block" and entry.by_token:
            tokens[entry.name] = tuple(
                tuple(sorted(draw(st.lists(st.integers(0, k - 1), min_size=size, max_size=size)))) for size in lengths
            )
        elif entry.stem == "ids" and rows_of_ids is not None:
            tokens[entry.name] = tuple(rows_of_ids)
        elif entry.by_token:
            tokens[entry.name] = tuple(_row_of_tokens(draw, entry, size) for size in lengths)
        else:
            rows[entry.name] = _rows(draw, entry, n, k, {"group": group, "trajectory": trajectory}, absent)
    width = max(lengths) if has_tokens else 0
    place = torch.tensor([[t if t < size else -1 for t in range(width)] for size in lengths], dtype=torch.long)
    return DrawnBatch(spec, torch.tensor(group), rows, tokens, place.reshape(n, width))


def _row_of_tokens(draw: Draw, entry: Input, size: int) -> tuple[Any, ...]:
    assert entry.entries is not None
    if entry.is_reward and size and draw(st.booleans()):  # mostly paid at the end, as verifiers do
        return (*(0.0 for _ in range(size - 1)), draw(entry.entries))
    return tuple(draw(st.lists(entry.entries, min_size=size, max_size=size)))


def _rows(draw: Draw, entry: Input, n: int, k: int, structure: dict[str, list[int]], absent: bool) -> Any:
    if entry.stem in structure:
        return torch.tensor(structure[entry.stem], dtype=entry.dtype)
    if entry.stem == "step":  # numbered in row order, with gaps: only their order counts
        row = structure["trajectory"]
        return torch.tensor([3 * row[:i].count(j) for i, j in enumerate(row)], dtype=entry.dtype)
    sizes = [{"k": k, "m": 2}.get(axis) or int(axis) for axis in entry.axes[1:]]
    count = n * int(torch.tensor(sizes).prod()) if sizes else n
    assert entry.entries is not None
    values = draw(st.lists(entry.entries, min_size=count, max_size=count))
    if entry.dtype is None:
        return values
    tensor = torch.tensor(values, dtype=entry.dtype).reshape(n, *sizes)
    if absent and entry.is_reward and entry.axes[0] == "n":
        gone = draw(st.lists(st.sampled_from([False] * 4 + [True]), min_size=n, max_size=n))
        tensor[torch.tensor(gone)] = NAN
    return tensor


@st.composite
def rearranged(draw: Draw, batch: DrawnBatch) -> Int[Tensor, "n t"]:
    """Places for the same trainable tokens with masked ones before, between and after them."""
    rows = []
    for places in batch.place_nt.tolist():
        row = [t for t in places if t >= 0]
        for _ in range(draw(st.integers(0, 3))):
            row.insert(draw(st.integers(0, len(row))), -1)
        rows.append(row)
    width = max(map(len, rows), default=0)
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.long).reshape(len(rows), width)


def left_padded(batch: DrawnBatch) -> Int[Tensor, "n t"]:
    """Places for the same tokens with all padding on the left."""
    width = batch.place_nt.shape[1] + 1
    rows = [[t for t in places if t >= 0] for places in batch.place_nt.tolist()]
    return torch.tensor([[-1] * (width - len(row)) + row for row in rows], dtype=torch.long).reshape(len(rows), width)


def moved_tokens(batches: SearchStrategy[DrawnBatch]) -> SearchStrategy[tuple[DrawnBatch, Tensor]]:
    """Batches with other places for their tokens."""
    return batches.flatmap(lambda batch: st.tuples(st.just(batch), rearranged(batch)))


def reordered(batches: SearchStrategy[DrawnBatch]) -> SearchStrategy[tuple[DrawnBatch, list[int]]]:
    """Batches with another order of their rows."""
    return batches.flatmap(lambda batch: st.tuples(st.just(batch), st.permutations(range(len(batch.group_n)))))
