"""What a method, or the trainer that wrote a file, credits its completions with: per block, per token, strata without signal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.batch import Batch, Steps
from spanwise.commands.credit.arms import Arm, token_columns
from spanwise.commands.credit.score import AT_A_TIME, Marked
from spanwise.credit_metrics import dead_strata
from spanwise.errors import RecipeError
from spanwise.pipeline import Reading, advantages, credit_batch
from spanwise.rollouts import RolloutTable
from spanwise.rollouts.schema import RECORDED, STOP
from spanwise.rollouts.table import at, fitting_runs
from spanwise.scheme import Scheme
from spanwise.types import Comparison, Credit, Scores


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
        """The advantages of the tokens of the rows first..last - 1, end to end; 0 in completions that were left out of the loss."""
        if isinstance(self.tokens, np.ndarray):
            return table.tokens.with_values(self.tokens).slice(first, last)
        rows = slice(first, last)
        places = table.tokens.places(rows)
        adv_nt = advantages(self.credit.take(rows), self.marked.spans(rows, places), self.tokens)
        if table.learned_n is not None:
            adv_nt = adv_nt * table.learned_n[rows, None]
        return adv_nt.numpy()[places >= 0]

    @property
    def by_block(self) -> dict[str, Float[Tensor, " n"]]:
        """The credit of each block; NaN where a completion does not have it."""
        held_nk = self.credit.block_nk.masked_fill(self.marked.length_nk == 0, torch.nan)
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
    """Turn the rewards of a file into credit, step by step: a batch is what was generated in one step.

    A method per token goes over as many completions at a time as fit, unless it compares them.
    """
    scheme, lengths = arm.scheme, table.tokens.lengths
    by_token = scheme.entry.kind == "token" or scheme.refine is not None
    flat = np.zeros(len(table.tokens.values), dtype=np.float32)
    strata, dead = Counter[str](), Counter[str]()
    parts: list[tuple[Tensor, Credit]] = []
    for step in steps(table.step_n):
        mean_length = marked.length_nk[step].sum(dim=1).double().mean()  # a part is not a whole step
        runs = fitting_runs(lengths[step.numpy()], AT_A_TIME) if by_token and not _compares(scheme) else [(0, len(step))]
        for rows in [step[first:last] for first, last in runs]:
            here = reading.take(rows)
            known: dict[str, Any] = {
                name: value for mode in scheme.modes for name, value in mode.recorded(table, rows).items()
            }
            if by_token:
                places = table.tokens.places(rows.numpy())
                spans = marked.spans(rows, places)
                known |= {
                    need: torch.stack([at(places, table.token_values[name], 0.0) for name in names], dim=2).squeeze(2)
                    for need, names in token_columns(scheme).items()
                }
                batch = Batch(group_n[rows], at(places, table.tokens.values, 0), at(places, table.trainable, False), **known)
                found = credit_batch(replace(here, spans=spans), batch, scheme)
                found = replace(found, mean_length_n=mean_length.expand(len(rows)))
                flat[places[places >= 0]] = advantages(found, spans, scheme).numpy()[places >= 0]
            else:
                turns = None if table.rollout_n is None else Steps(table.rollout_n[rows], rows)
                found = credit_batch(here, Batch(group_n[rows], steps=turns, **known), scheme)
                empty_n = ~here.present_nk.any(dim=1)  # without any token, nothing carries what stopping costs
                found = replace(found, stop_n=found.stop_n.masked_fill(empty_n, 0.0))
                for name, (total, silent) in dead_strata(found, scheme).items():
                    strata[name] += total
                    dead[name] += silent
            parts.append((rows, found))
    whole = _joined(parts, len(table))
    if by_token:
        assert whole.adv_nm is not None, "it was credited here"
        return Applied(arm.name, marked, whole, flat, _dead_groups(arm, group_n, whole.adv_nm[:, 0] != 0))
    whole = replace(whole, length_nk=marked.length_nk if whole.length_nk is None else whole.length_nk)
    return Applied(arm.name, marked, whole, scheme, {name: dead[name] / total for name, total in strata.items() if total})


def _compares(scheme: Scheme) -> bool:
    """Whether a method per token compares the completions of a step; what is refined does, and often the refinement."""
    alone = scheme.entry.kind == "token" and "split" not in scheme.entry.exceptions and not scheme.options.get("whiten")
    return not alone or any(mode.compares for mode in scheme.modes)


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


def _dead_groups(arm: Arm, group_n: Tensor, moved_n: Tensor) -> dict[str, float]:
    """The share of groups in which no token of any completion moved."""
    groups = int(group_n.max()) + 1 if len(group_n) else 0
    moved = torch.zeros(groups).index_add(0, group_n, moved_n.float()) > 0
    there = len(group_n.unique())
    name = " + ".join(arm.scheme.names)
    return {name: (there - int(moved.sum())) / there} if there else {}


def apply_recorded(table: RolloutTable, marked: Marked) -> tuple[Applied, str]:
    """What the trainer that wrote the file says of its completions, as it stands there: nothing is compared; and a sentence.

    A number is shared out evenly over the tokens that the model sampled in the rollout, as a trainer does, one of a block over
    those of the block; one per token keeps its place.
    """
    held = table.as_recorded
    if held is None:
        raise RecipeError(
            f"'{table.path}' records no advantages, score or reward, so there is nothing to show under '{RECORDED}'; leave it out."
        )
    rows = np.repeat(np.arange(len(table)), table.tokens.lengths)
    inside = np.flatnonzero(marked.block >= 0)
    rows, blocks = rows[inside], marked.block[inside].astype(np.int64)
    length_nk, stop_n = marked.length_nk.numpy(), np.zeros(len(table))
    flat = np.where(np.isnan(held.number), np.nan, 0.0)
    if held.by_block:
        block_nk, stop_n = _recorded_blocks(table, marked, held.by_block)
        flat[inside] = (block_nk / np.maximum(length_nk, 1))[rows, blocks]
        flat[inside[np.flatnonzero(np.diff(rows, append=-1))]] += stop_n[np.unique(rows)]  # the last sampled token of each
    else:
        number = held.number[inside]
        rollout_n = np.arange(len(table)) if table.rollout_n is None else table.rollout_n.numpy()
        flat[inside] = number if held.shares else number / np.bincount(rollout_n[rows])[rollout_n[rows]]
        place = rows * len(marked.names) + blocks
        total_nk = np.bincount(place, weights=number, minlength=length_nk.size).reshape(length_nk.shape)
        block_nk = total_nk / (1 if held.shares else np.maximum(length_nk, 1))
    nobody_m = torch.zeros(0, dtype=torch.long)
    found = Credit(torch.from_numpy(block_nk), torch.from_numpy(stop_n), nobody_m, nobody_m)
    shared = f"shared out over the tokens of the {'block' if held.by_block else 'completion'}"
    shared = "as it stands there" if held.shares else shared
    note = f"{RECORDED} is no method: {held.says}, {shared}."
    return Applied(RECORDED, marked, found, flat.astype(np.float32), {}), note


def _recorded_blocks(
    table: RolloutTable, marked: Marked, by_block: Mapping[str, np.ndarray]
) -> tuple[Float[np.ndarray, "n k"], Float[np.ndarray, " n"]]:
    """The credit of each block and of stopping, 0 where a completion has none."""
    present_nk = marked.length_nk > 0
    nothing_n = np.zeros(len(table))
    written = zip(marked.names, present_nk.any(dim=0).tolist(), strict=True)
    unknown = [name for name, anywhere in written if anywhere and name not in by_block]
    if unknown:
        there = ", ".join(name for name in by_block if name != STOP)
        raise RecipeError(
            f"'{table.path}' records credit of the blocks {there}, and the layout has {', '.join(unknown)}; give the layout "
            f"that the trainer had to see it under '{RECORDED}'."
        )
    block_nk = np.nan_to_num(np.stack([by_block.get(name, nothing_n) for name in marked.names], axis=1))
    return block_nk * present_nk.numpy(), np.nan_to_num(by_block.get(STOP, nothing_n))
