"""Spans and rewards of a whole rollout file, worked out a part at a time: each layout once, each reward once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.batch import Batch
from spanwise.commands.credit.arms import Arm, left_out
from spanwise.commands.credit.blocks import remedy
from spanwise.errors import AlignmentError, RecipeError
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.pipeline import Reading, read
from spanwise.rollouts import RolloutTable
from spanwise.rollouts.table import at, fitting_runs
from spanwise.score import REWARDS
from spanwise.segment import Census, census, census_of, find_blocks
from spanwise.types import BlockText, Spans, whole_text

#: Places of a padded table that are worked on at a time.
AT_A_TIME = 1_000_000


@dataclass(frozen=True)
class Marked:
    """The spans of one layout over all completions; `block` lies flat, as the tokens of the table do.

    Some block is in several pieces where they are `interleaved`.
    """

    names: tuple[str, ...]
    start_nk: Int[Tensor, "n k"]
    end_nk: Int[Tensor, "n k"]
    length_nk: Int[Tensor, "n k"]
    fault_n: Int[Tensor, " n"]
    block: Int[np.ndarray, " v"]
    interleaved: bool = False

    def spans(self, rows: Tensor | slice, places: Int[np.ndarray, "r t"]) -> Spans:
        """The spans of some rows, whose tokens lie at `places`."""
        return Spans(self.names, self.start_nk[rows], self.end_nk[rows], at(places, self.block, -1), self.fault_n[rows])


def score_file(
    table: RolloutTable, arms: Sequence[Arm], *, also: Sequence[Layout] = ()
) -> tuple[dict[Layout, Marked], dict[str, Reading]]:
    """Find the blocks and rewards of every completion: layout -> its spans, arm -> what completions say and what that is worth.

    A reward that the file records (`Arm.taken`) is taken from it; what it would be under the other outcome, and every other
    reward, is computed from the text.
    """
    arms_of: dict[Layout, list[Arm]] = {layout: [] for layout in (*(arm.scheme.layout for arm in arms), *also)}
    for arm in arms:
        arms_of[arm.scheme.layout].append(arm)
    spans_of: dict[Layout, list[tuple[Tensor, ...]]] = {layout: [] for layout in arms_of}
    found: dict[str, list[Reading]] = {arm.name: [] for arm in arms}
    interleaved = dict.fromkeys(arms_of, False)
    for first, last in fitting_runs(table.tokens.lengths, AT_A_TIME):
        rows = slice(first, last)
        places = table.tokens.places(rows)
        ids_nt, mask_nt = at(places, table.tokens.values, 0), at(places, table.trainable, False)
        columns = {name: values[rows] for name, values in table.columns.items()}
        for layout, those in arms_of.items():
            spans, text = located = find_blocks(ids_nt, mask_nt, layout=layout, vocabulary=table.vocabulary)
            block_v = spans.block_nt[torch.from_numpy(places >= 0)]
            spans_of[layout].append((spans.start_nk, spans.end_nk, spans.length_nk, spans.fault_n, block_v))
            interleaved[layout] |= spans.interleaved
            for arm in those:
                recorded = {name: table.rewards[column].take(rows) for name, column in arm.taken.items()}
                batch = Batch(table.group_n[rows], ids_nt, mask_nt, columns={**columns, **_asked(table, rows, text, arm)})
                reading = read(batch, arm.scheme, table.vocabulary, recorded=recorded, located=located)
                found[arm.name].append(reading.take(slice(None)))
    marked = {}
    for layout, parts in spans_of.items():
        start_nk, end_nk, length_nk, fault_n, block_v = (torch.cat(column) for column in zip(*parts, strict=True))
        marked[layout] = Marked(
            layout.names, start_nk, end_nk, length_nk, fault_n, block_v.numpy(), interleaved=interleaved[layout]
        )
    readings = {name: Reading.joined(parts) for name, parts in found.items()}
    for name, reading in readings.items():
        if len(reading) != len(table):
            raise AlignmentError(f"Method '{name}' has {len(reading)} rewards for {len(table)} completions.")
    return marked, readings


def _asked(table: RolloutTable, rows: slice, text: Sequence[BlockText], arm: Arm) -> dict[str, Sequence[Any]]:
    """What a trainer would hand to reward functions beside the columns."""
    if not any(callable(objective.reward) for objective in arm.scheme.objectives):
        return {}
    return {
        "prompts": table.prompts[rows],
        "completions": [whole_text(blocks) for blocks in text],
        "completion_ids": [table.tokens.slice(n, n + 1).tolist() for n in range(rows.start, rows.stop)],
    }


def fitting(
    table: RolloutTable, arms: Sequence[Arm], texts: Sequence[str], *, asked: Collection[str]
) -> tuple[list[Arm], list[str]]:
    """The arms that the tags of a file are enough for, and sentences on the others and on parts that nobody writes.

    An arm needs every tag that it reads a reward in, as a reward that is read where nothing is makes everybody wrong; and a method
    by block a tag of every block that it pays. A recorded reward of the whole completion needs none.
    """
    found = {one.sentence: one for arm in arms for one in census_of(arm.scheme.layout, texts)}
    lacking = [one for one in found.values() if one.lacking]
    seen = next(iter(lacking), census(texts, []))
    lost = {arm.name: lack for arm in arms if (lack := _lacking(arm, seen))}
    kept = [arm for arm in arms if arm.name not in lost]
    rest = [f"{one.sentence} The layout asks for {'it' if len(one.lacking) == 1 else 'them'}." for one in lacking]
    if not lost:
        return kept, rest
    needed = [mark for mark in seen.wanted if any(mark in marks for marks in lost.values())]
    lack = census(texts, needed, segmenter=seen.segmenter).sentence
    if kept and not any(name in asked for name in lost):
        return kept, [left_out(list(lost), lack), *rest]
    helps = remedy(table, texts, arms[0].scheme.objectives[0].name)
    raise RecipeError(f"{' and '.join(lost)} cannot be applied to '{table.path}': {lack}{helps}")


def _lacking(arm: Arm, seen: Census) -> list[str]:
    """The marks that an arm needs and no completion has."""
    layout, objectives = arm.scheme.layout, arm.scheme.objectives
    own = layout.parts_of(seen.segmenter)
    wanted = {key for o in objectives if o.name not in arm.taken for key in _reads(o)}
    needed = [part for part in own if part.key in wanted]
    if arm.scheme.entry.kind == "block" and len(layout.names) > 1:
        paid = {name for o in objectives for name in o.pays}
        there = {part.block for part in own if seen.wanted.get(part.mark)}
        needed += [part for part in own if layout.names[part.block] in paid and part.block not in there and not part.index]
    order = dict.fromkeys(part.mark for part in own if part in needed)
    return [mark for mark in order if mark in seen.wanted and not seen.wanted[mark]]


def _reads(objective: Objective) -> list[str]:
    """The tags that a built-in reward reads."""
    if not isinstance(objective.reward, str):
        return []
    entry = REWARDS[objective.reward]
    options = {**entry.options, **objective.options}
    return [options[name] for name in entry.tags if options[name]]
