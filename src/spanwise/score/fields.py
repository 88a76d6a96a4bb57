"""Rewards of single fields: `equals`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spanwise.registry import register
from spanwise.score.reward import Reward, column_of
from spanwise.segment.json_fields import steps
from spanwise.types import BlockText, Status

_INDEXED = re.compile(r"\[\d+\]")
_MISSING = object()


@register("equals", kind="reward", tags=("tag",))
def equals(
    text: Sequence[BlockText],
    *,
    pays: tuple[str, ...],
    columns: Mapping[str, Any],
    scored: Mapping[str, Reward],
    tag: str = "answer",
    column: str = "answer",
) -> Reward:
    """1 if a field says what the dataset says, 0 if not.

    Rule: the gold value stands in the column at the field's own path, where a cell holds an object (or its JSON text); else the
    cell is the gold value. Texts are equal character for character, around which space does not count; numbers by value
    (3 = 3.0, in quotes or not); true, false, null, lists and objects as JSON. A field that says nothing complete is wrong (0). No
    paid block: ABSENT. A gold object without the field: ERROR; but an element beyond the end of the gold list is wrong.

    Args:
        text, pays, columns, scored: see `spanwise.score.rewards`.
        tag: what the layout calls the field: its path.
        column: the dataset column of the gold values.

    Raises:
        DataError: there is no such column.

    Example:
        >>> text = [{"price": {"": "", "price": "3.0"}}, {"price": {"": "", "price": None}}, {"price": None}]
        >>> gold = ['{"price": 3, "name": "tea"}'] * 3
        >>> equals(text, pays=("price",), columns={"answer": gold}, scored={}, tag="price").value_n
        tensor([1., 0., nan], dtype=torch.float64)
    """
    return _judged(text, pays, columns, tag, column, same)


def same(said: str, gold: Any) -> bool:
    """Whether a text says a gold value, see `equals`.

    >>> same(" tea", "tea"), same("3.0", 3), same("1", True), same("[1, 2]", [1, 2])
    (True, True, False, True)
    """
    if isinstance(gold, str):
        return said.strip() == gold.strip()
    try:
        value = json.loads(said)
    except (ValueError, RecursionError):
        return False
    return value == gold and isinstance(value, bool) == isinstance(gold, bool)


def _judged(
    text: Sequence[BlockText],
    pays: Sequence[str],
    columns: Mapping[str, Any],
    tag: str,
    column: str,
    rule: Callable[[str, Any], bool],
) -> Reward:
    """1 or 0 for each completion by a rule of what a field says and its gold value."""
    values: list[float | None] = []
    status: list[Status] = []
    for blocks, cell in zip(text, column_of(columns, column, len(text)), strict=True):
        there = [block for name in pays if (block := blocks.get(name)) is not None]
        said = next((block[tag] for block in there if tag in block), None)
        gold = _gold(cell, tag)
        if not there or (gold is None and not _INDEXED.search(tag)):
            values.append(None)
        else:
            values.append(float(said is not None and gold is not None and rule(said, gold[0])))
        status.append(Status.ABSENT if not there else Status.ERROR)
    return Reward.of(values, status=status)


def _gold(cell: Any, path: str) -> tuple[Any] | None:
    """The gold value, in a tuple of one; None if there is none."""
    held = cell
    if isinstance(cell, str) and cell.lstrip()[:1] in ("{", "["):
        try:
            held = json.loads(cell)
        except ValueError:
            held = cell
    if not isinstance(held, (Mapping, list)):
        return None if held is None else (held,)
    for step in steps(path):
        if isinstance(held, Mapping):
            held = held.get(step, _MISSING)
        else:
            held = held[step] if isinstance(held, list) and isinstance(step, int) and step < len(held) else _MISSING
        if held is _MISSING:
            return None
    return (held,)
