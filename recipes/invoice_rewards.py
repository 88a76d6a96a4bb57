"""Two reward functions for `recipes/invoices.yaml`: whether a due date is stated, and whether a total adds up."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

#: The parts of a completion by block; None for a part that the completion lacks.
Parts = Mapping[str, Mapping[str, str | None] | None]
Blocks = Sequence[Parts]
MOST_ITEMS = 3


def due_stated(blocks: Blocks, answer: Sequence[str]) -> list[float | None]:
    """Reward 1 if the due date is null exactly if the gold one is, whatever date it is; None without a due date."""

    def is_as_gold(due_block: Mapping[str, str | None], gold: Mapping[str, Any]) -> bool:
        return (due_block["due"] == "null") == (gold["due"] is None)

    due_blocks = [completion_blocks["due"] for completion_blocks in blocks]
    return [
        None if due_block is None else float(is_as_gold(due_block, json.loads(gold_text)))
        for due_block, gold_text in zip(due_blocks, answer, strict=True)
    ]


def adds_up(blocks: Blocks) -> list[float | None]:
    """Reward 1 if the total is the sum of quantity times price over the object's own items, right or not; None without a total."""
    return [None if parts["total"] is None else float(_number(parts, "total") == _own_total(parts)) for parts in blocks]


def _own_total(parts: Parts) -> float:
    """Add up quantity times price over the items; NaN, which equals nothing, if there is no item or one lacks a number."""
    keys = ("name", "quantity", "price")
    indices = [n for n in range(MOST_ITEMS) if any(parts.get(f"items[{n}].{key}") is not None for key in keys)]
    pairs = [(_number(parts, f"items[{index}].quantity"), _number(parts, f"items[{index}].price")) for index in indices]
    return sum(quantity * price for quantity, price in pairs) if pairs else math.nan


def _number(parts: Parts, path: str) -> float:
    """Return the number that a field holds; NaN if it holds none."""
    field_text = (parts.get(path) or {}).get(path) or ""
    return float(field_text) if field_text.isdigit() else math.nan
