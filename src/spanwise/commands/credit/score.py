"""Spans and rewards of a whole rollout file, worked out a part at a time: each layout once, each reward once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
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

    def spans(self, table: RolloutTable, first: int, last: int) -> Spans:
        """The spans of the rows first..last - 1, padded; rows that were left out of the loss have none."""
        filled = table.tokens.filled(first, last)
        block_nt = np.full(filled.shape, -1, dtype=self.block.dtype)
        block_nt[filled] = table.tokens.with_values(self.block).slice(first, last)
        rows = slice(first, last)
        start_nk, end_nk, block = self.start_nk[rows], self.end_nk[rows], torch.from_numpy(block_nt)
        if table.learned_n is not None and not bool(table.learned_n[rows].all()):
            kept_n1 = table.learned_n[rows, None]
            start_nk, end_nk, block = start_nk * kept_n1, end_nk * kept_n1, block.masked_fill(~kept_n1, -1)
        return Spans(self.names, start_nk, end_nk, block, self.fault_n[rows])


def score_file(
    table: RolloutTable, arms: Sequence[Arm], *, also: Sequence[Layout] = ()
) -> tuple[dict[Layout, Marked], dict[str, Reading]]:
    """Find the blocks and rewards of every completion: layout -> its spans, arm -> what completions say and what that is worth.

    A reward that the file records (`Arm.taken`) is taken from it; what it would be under the other outcome, and every other
    reward, is computed from the text.
    """
    layouts = list(dict.fromkeys([*(arm.scheme.layout for arm in arms), *also]))
    parts: dict[Layout, list[Spans]] = {layout: [] for layout in layouts}
    flat: dict[Layout, list[np.ndarray]] = {layout: [] for layout in layouts}
    found: dict[str, list[Reading]] = {arm.name: [] for arm in arms}
    for first, last in table.tokens.chunks(AT_A_TIME):
        part = table.rows(first, last)
        ids, filled = part.tokens.padded(0, len(part))
        mask = np.zeros(filled.shape, dtype=np.bool_)
        mask[filled] = part.trainable
        ids_nt, mask_nt = torch.from_numpy(ids), torch.from_numpy(mask)
        batch = Batch(part.group_n, ids_nt, mask_nt, columns=part.columns)
        for layout in layouts:
            located = find_blocks(ids_nt, mask_nt, layout=layout, vocabulary=table.vocabulary)
            spans, text = located
            parts[layout].append(_small(spans))
            flat[layout].append(spans.block_nt.numpy()[filled])
            for arm in arms:
                if arm.scheme.layout == layout:
                    recorded = {name: part.rewards[column] for name, column in arm.taken.items()}
                    asked = replace(batch, columns={**part.columns, **_asked(part, text, arm)})
                    reading = read(asked, arm.scheme, table.vocabulary, recorded=recorded, located=located)
                    found[arm.name].append(reading.take(slice(None)))
    marked = {layout: _joined(parts[layout], flat[layout]) for layout in layouts}
    readings = {name: Reading.joined(parts) for name, parts in found.items()}
    for name, reading in readings.items():
        if len(reading) != len(table):
            raise AlignmentError(f"Method '{name}' has {len(reading)} rewards for {len(table)} completions.")
    return marked, readings


def _small(spans: Spans) -> Spans:
    """The spans without their tokens, which are kept flat."""
    kept = Spans(spans.names, spans.start_nk, spans.end_nk, spans.block_nt[:, :0], spans.fault_n)
    vars(kept).update(length_nk=spans.length_nk, interleaved=spans.interleaved)
    return kept


def _joined(parts: Sequence[Spans], flat: Sequence[np.ndarray]) -> Marked:
    return Marked(
        parts[0].names,
        torch.cat([part.start_nk for part in parts]),
        torch.cat([part.end_nk for part in parts]),
        torch.cat([part.length_nk for part in parts]),
        torch.cat([part.fault_n for part in parts]),
        np.concatenate(flat),
        any(part.interleaved for part in parts),
    )


def _asked(part: RolloutTable, text: Sequence[BlockText], arm: Arm) -> dict[str, Sequence[Any]]:
    """What a trainer would hand to reward functions beside the columns."""
    if not any(callable(objective.reward) for objective in arm.scheme.objectives):
        return {}
    return {
        "prompts": part.prompts,
        "completions": [whole_text(blocks) for blocks in text],
        "completion_ids": [part.tokens.slice(n, n + 1).tolist() for n in range(len(part))],
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
