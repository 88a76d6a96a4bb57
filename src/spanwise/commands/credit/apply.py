"""One method over a whole rollout file: credit per block, advantages per token, strata without signal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.batch import Batch, Steps
from spanwise.commands.credit.arms import Arm
from spanwise.commands.credit.per_token import recorded, token_keys
from spanwise.commands.credit.score import AT_A_TIME, Marked
from spanwise.pipeline import Reading, advantages, credit_batch, dead_strata
from spanwise.rollouts import RolloutTable
from spanwise.scheme import Scheme
from spanwise.types import Comparison, Credit, Scores, Spans


@dataclass(frozen=True)
class Applied:
    """What one arm credits the completions of a file with.

    Attributes:
        name: of the arm.
        marked: the spans of its layout.
        credit: per block, of all completions; NaN where nothing is recorded. What is known per token has the mean over the block.
        tokens: advantages of each token, as those of the table lie; or the scheme that spreads `credit` over them.
        dead: comparison -> share of its strata in which nobody gets any credit.
    """

    name: str
    marked: Marked
    credit: Credit
    tokens: np.ndarray | Scheme
    dead: dict[str, float]

    def advantages(self, table: RolloutTable, first: int, last: int) -> Float[np.ndarray, " s"]:
        """The advantages of the tokens of the rows first..last - 1, end to end."""
        if isinstance(self.tokens, np.ndarray):
            return table.tokens.with_values(self.tokens).slice(first, last)
        part = self.credit.take(slice(first, last))
        spread_nt = advantages(part, self.marked.spans(table, first, last), self.tokens)
        return spread_nt.numpy()[table.tokens.filled(first, last)]

    @property
    def by_block(self) -> dict[str, Float[Tensor, " n"]]:
        """The credit of each block; NaN where a completion does not have it."""
        held_nk = torch.where(self.marked.length_nk > 0, self.credit.block_nk, torch.nan)
        return {name: held_nk[:, k] for k, name in enumerate(self.marked.names)}

    @property
    def silent_n(self) -> Bool[Tensor, " n"]:
        """The completions none of whose blocks gets any credit."""
        return (self.credit.block_nk == 0).all(dim=1) & (self.credit.stop_n == 0)


@dataclass(frozen=True)
class CreditResult:
    """A rollout file under several methods.

    Attributes:
        table: the file.
        group_n: the groups as they were compared.
        arms: the methods, in order.
        applied: what they credit, and last what the file itself records (`recorded`), if that is shown.
        scores: rewards and statuses of the objectives of all methods; the first method that has one speaks for it.
        marked: the spans that are shown: of the layout with the most blocks.
        notes: what the user should know, sentence by sentence.
        score: what the self-rewarding scores of the file are worth (`score_figures`); None where it has none.
    """

    table: RolloutTable
    group_n: Tensor
    arms: tuple[Arm, ...]
    applied: tuple[Applied, ...]
    scores: Scores
    marked: Marked
    notes: tuple[str, ...]
    score: dict[str, Any] | None = None

    @property
    def note(self) -> str:
        """The notes as one text."""
        return " ".join(self.notes)


def apply_arm(table: RolloutTable, arm: Arm, reading: Reading, marked: Marked, group_n: Int[Tensor, " n"]) -> Applied:
    """Turn the rewards of a file into credit, step by step: a batch is what was generated in one step."""
    if arm.scheme.entry.kind == "token" or arm.scheme.refine is not None:
        return _per_token(table, arm, reading, marked, group_n)
    strata, dead = Counter[str](), Counter[str]()
    parts: list[tuple[Tensor, Credit]] = []
    for rows in steps(table.step_n):
        batch = Batch(group_n[rows], steps=_steps(table, rows), **recorded(arm.scheme, table, rows))
        found = credit_batch(reading.take(rows), batch, arm.scheme)
        held_n = (marked.length_nk[rows] > 0).any(dim=1)  # without any token, nothing carries what stopping costs
        parts.append((rows, replace(found, stop_n=found.stop_n.masked_fill(~held_n, 0.0))))
        for name, (total, silent) in dead_strata(found, arm.scheme).items():
            strata[name] += total
            dead[name] += silent
    silent = {name: dead[name] / total for name, total in strata.items() if total}
    whole = _joined(parts, len(table))
    whole = replace(whole, length_nk=marked.length_nk if whole.length_nk is None else whole.length_nk)
    return Applied(arm.name, marked, whole, arm.scheme, silent)


def _joined(parts: Sequence[tuple[Tensor, Credit]], completions: int) -> Credit:
    """The credit of all parts, each at its rows; strata of different parts have different numbers."""

    def at_rows(values: Sequence[Any]) -> Any:
        if any(value is None for value in values):
            return None
        whole = values[0].new_zeros((completions, *values[0].shape[1:]))
        for (rows, _), value in zip(parts, values, strict=True):
            whole[rows] = value
        return whole

    credits = [one for _, one in parts]
    numbered, strata = [], 0
    for one in credits:
        assert one.comparison is not None, "it was credited here"
        here = one.comparison.stratum_nm
        numbered.append(vars(one.comparison) | {"stratum_nm": torch.where(here >= 0, here + strata, -1)})
        strata += int(here.max()) + 1 if here.numel() else 0
    tables = ("block_nk", "stop_n", "adv_nm", "mean_length_n", "length_nk")
    return replace(
        credits[0],
        **{name: at_rows([getattr(one, name) for one in credits]) for name in tables},
        comparison=Comparison(**{name: at_rows([one[name] for one in numbered]) for name in numbered[0]}),
        token_nt=None,
        refined_nt=None,
    )


def steps(step_n: Int[Tensor, " n"]) -> Iterator[Int[Tensor, " r"]]:
    """The rows of each step, in the order of the steps.

    >>> [rows.tolist() for rows in steps(torch.tensor([2, 1, 2]))]
    [[1], [0, 2]]
    """
    order = torch.argsort(step_n, stable=True)
    sizes = torch.unique_consecutive(step_n[order], return_counts=True)[1]
    yield from torch.split(order, sizes.tolist())


def _steps(table: RolloutTable, rows: Tensor) -> Steps | None:
    """Whose parts some completions are, where a rollout is several."""
    return None if table.rollout_n is None else Steps(table.rollout_n[rows], rows)


def _mean_lengths(table: RolloutTable, marked: Marked) -> Float[Tensor, " n"]:
    """The mean tokens of a completion of the step that each completion is of."""
    mean_n = torch.zeros(len(table), dtype=torch.float64)
    for rows in steps(table.step_n):
        mean_n[rows] = marked.length_nk[rows].sum(dim=1).double().mean()
    return mean_n


def _per_token(table: RolloutTable, arm: Arm, reading: Reading, marked: Marked, group_n: Tensor) -> Applied:
    """A method per token, on as many rows at a time as fit, or on whole steps where it compares them."""
    flat = np.zeros(len(table.tokens.values), dtype=np.float32)
    credited: list[tuple[Tensor, Credit]] = []
    compares = "split" in arm.scheme.entry.exceptions or bool(arm.scheme.options.get("whiten"))
    compares = compares or any(mode.compares for mode in arm.scheme.modes)
    compares = compares or arm.scheme.entry.kind != "token"  # refined: what it refines, and often it, compares completions
    mean_length_n = _mean_lengths(table, marked)  # a part is not a whole step
    for rows in steps(table.step_n):
        for part in _parts(table, rows, whole=compares):
            batch, spans, places = _padded(table, arm, marked, group_n, part)
            here = reading.take(torch.tensor(part))
            local = Reading(here.scores, here.length_nk, here.fault_n, spans=spans)
            found = replace(credit_batch(local, batch, arm.scheme), mean_length_n=mean_length_n[part])
            filled = places >= 0
            flat[places[filled]] = advantages(found, spans, arm.scheme).numpy()[filled]
            credited.append((torch.tensor(part), found))
    whole = _joined(credited, len(table))
    assert whole.adv_nm is not None, "it was credited here"
    return Applied(arm.name, marked, whole, flat, _dead_groups(arm, group_n, whole.adv_nm[:, 0] != 0))


def _dead_groups(arm: Arm, group_n: Tensor, moved_n: Tensor) -> dict[str, float]:
    """The share of groups in which no token of any completion moved."""
    groups = int(group_n.max()) + 1 if len(group_n) else 0
    moved = torch.zeros(groups).index_add(0, group_n, moved_n.float()) > 0
    there = len(group_n.unique())
    name = " + ".join(arm.scheme.names)
    return {name: (there - int(moved.sum())) / there} if there else {}


def _parts(table: RolloutTable, rows: Tensor, *, whole: bool) -> Iterator[list[int]]:
    """Rows that are worked on together: all of a step where the method compares them, else as many as fit."""
    listed = rows.tolist()
    if whole:
        yield listed
        return
    lengths, part, widest = table.tokens.lengths, [], 0
    for n in listed:
        widest = max(widest, int(lengths[n]))
        if part and widest * (len(part) + 1) > AT_A_TIME:
            yield part
            part, widest = [], int(lengths[n])
        part.append(n)
    if part:
        yield part


def _padded(
    table: RolloutTable, arm: Arm, marked: Marked, group_n: Tensor, rows: list[int]
) -> tuple[Batch, Spans, np.ndarray]:
    """Some rows as a batch with what the file holds per token, their spans, and where each place lies in the flat table."""
    offsets = table.tokens.offsets
    lengths = table.tokens.lengths[rows]
    places = np.arange(lengths.max(initial=0))[None, :] + offsets[rows][:, None]
    places = np.where(np.arange(lengths.max(initial=0)) < lengths[:, None], places, -1)

    def at(values: np.ndarray, nowhere: float | int | bool) -> Tensor:
        return torch.from_numpy(np.where(places >= 0, values[places], np.asarray(nowhere, dtype=values.dtype)))

    known: dict[str, Any] = {
        need: torch.stack([at(table.token_values[key], 0.0) for key in keys], dim=2)
        for need, keys in token_keys(arm.scheme).items()
    }
    known = {need: values.squeeze(2) if values.shape[2] == 1 else values for need, values in known.items()}
    known |= recorded(arm.scheme, table, rows)
    batch = Batch(group_n[rows], at(table.tokens.values, 0), at(table.trainable, False), **known)
    block_nt = at(marked.block, -1)
    return batch, Spans(marked.names, marked.start_nk[rows], marked.end_nk[rows], block_nt, marked.fault_n[rows]), places
