"""The arm as recorded: what the trainer that wrote a file says of its completions, under the name of no method."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float

from spanwise.commands.credit.apply import Applied
from spanwise.commands.credit.score import Marked
from spanwise.errors import RecipeError
from spanwise.rollouts import RolloutTable
from spanwise.rollouts.schema import RECORDED, STOP
from spanwise.types import Credit


def apply_recorded(table: RolloutTable, marked: Marked) -> Applied:
    """What the trainer that wrote the file says of its completions, as it stands there: nothing is compared.

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
    return Applied(RECORDED, marked, found, flat.astype(np.float32), {})


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
