"""Rewards of single fields: `equals`, `near`, `one_of`; and `listed`, numbers that come as a list or by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from spanwise.errors import LayoutError, RecipeError
from spanwise.registry import register
from spanwise.score.reward import Columns, Pays, Reward, Scored, Texts, column_of, of_verdicts, read_tag
from spanwise.score.rewards import NUMBER
from spanwise.segment.json_paths import steps
from spanwise.types import Status

_SIGNED = re.compile("[+-]?" + NUMBER.pattern)
_INDEX = re.compile(r"\[(\d+)\]")
#: There is no gold value; there is a list of gold values, and the field lies beyond its end.
_MISSING, _BEYOND = object(), object()


@register("equals", kind="reward", tags=("tag",))
def equals(
    text: Texts, *, pays: Pays, columns: Columns, scored: Scored, tag: str = "answer", column: str = "answer"
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
    return _judged(text, pays, columns, tag, column, lambda said, gold: said is not None and same(said, gold))


def same(said: str, gold: Any) -> bool:
    """Whether a text says a gold value, see `equals`."""
    if isinstance(gold, str):
        return said.strip() == gold.strip()
    value = json_value(said)
    return value is not None and value[0] == gold and isinstance(value[0], bool) == isinstance(gold, bool)


def json_value(text: str) -> tuple[Any] | None:
    """What the JSON of a text says, in a tuple of one; None if it is no JSON."""
    try:
        return (json.loads(text),)
    except (ValueError, RecursionError):
        return None


def _tolerances(options: Mapping[str, Any]) -> None:
    for name in ("rel", "abs"):
        value = options[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise RecipeError(f"The option '{name}' of reward 'near' is {value!r}; write a number that is not negative.")


@register("near", kind="reward", tags=("tag",), check=_tolerances)
def near(
    text: Texts,
    *,
    pays: Pays,
    columns: Columns,
    scored: Scored,
    tag: str = "answer",
    column: str = "answer",
    rel: float | int = 0.01,
    abs: float | int = 0.0,
) -> Reward:
    """1 if a field says a number close to the dataset's, 0 if not: |said - gold| <= max(rel |gold|, abs).

    Rule: the gold value is found as in `equals`. What is no plain number (digits, a sign, a point, an exponent, in quotes or not)
    is wrong (0). No paid block: ABSENT. No gold value, or one that is no finite number: ERROR.

    Args:
        text, pays, columns, scored, tag, column: see `equals`.
        rel, abs: how far off is close enough, as a share of the gold value and as a number.

    Raises:
        DataError: there is no such column.

    Example:
        >>> text = [{"price": {"": "", "price": said}} for said in ("99", "98", "about 100")]
        >>> near(text, pays=("price",), columns={"answer": ['{"price": 100}'] * 3}, scored={}, tag="price").value_n
        tensor([1., 0., 0.], dtype=torch.float64)
    """
    _tolerances({"rel": rel, "abs": abs})

    def rule(said: str | None, gold: Any) -> bool | None:
        right, number = _number(gold), None if said is None else _number(said)
        if right is None or not math.isfinite(right):
            return None
        return number is not None and math.fabs(number - right) <= max(rel * math.fabs(right), abs)

    return _judged(text, pays, columns, tag, column, rule)


@register("one_of", kind="reward", tags=("tag",))
def one_of(
    text: Texts, *, pays: Pays, columns: Columns, scored: Scored, tag: str = "answer", column: str = "answer"
) -> Reward:
    """1 if a field says one of the values that the dataset allows, 0 if not.

    Rule: as in `equals`, but the gold value is a list of values. One that is no list, or empty: ERROR.

    Args:
        text, pays, columns, scored, tag, column: see `equals`.

    Raises:
        DataError: there is no such column.

    Example:
        >>> text = [{"city": {"": "", "city": said}} for said in ("Roma", "Oslo")]
        >>> one_of(text, pays=("city",), columns={"answer": [["Rome", "Roma"]] * 2}, scored={}, tag="city").value_n
        tensor([1., 0.], dtype=torch.float64)
    """

    def rule(said: str | None, gold: Any) -> bool | None:
        if not isinstance(gold, list | tuple) or not gold:
            return None
        return said is not None and any(same(said, value) for value in gold)

    return _judged(text, pays, columns, tag, column, rule)


@register("listed", kind="reward")
def listed(text: Texts, *, pays: Pays, columns: Columns, scored: Scored, block: str = "", column: str = "listed") -> Reward:
    """The number that a column holds for a block: what a model of rewards said of each step, for one.

    Rule: a cell is a list, whose number i is that of the block with the index i (`step[i]`), or an object of numbers by block;
    or the JSON text of one. No such block, None or NaN in its place: ABSENT. No number in its place, no cell: ERROR.

    Args:
        text, pays, columns, scored: see `spanwise.score.rewards`.
        block: whose number it is; the first paid block if not given, and with `each` every block in turn.
        column: the dataset column.

    Raises:
        DataError: there is no such column.

    Example:
        >>> text = [{"step[0]": {"": "4 - 1"}, "step[1]": {"": "3"}}, {"step[0]": {"": "5"}, "step[1]": None}]
        >>> listed(text, pays=("step[1]",), columns={"listed": [[0.9, 0.2], [0.5]]}, scored={}).value_n
        tensor([0.2000,    nan], dtype=torch.float64)
    """
    name = block or pays[0]
    index = _INDEX.search(name)
    values: list[float | None] = []
    status: list[Status] = []
    for blocks, cell in zip(text, column_of(columns, column, len(text)), strict=True):
        numbers, number = _parsed(cell), _MISSING
        if isinstance(numbers, Mapping):
            number = numbers.get(name, _MISSING)
        elif isinstance(numbers, list | tuple) and index is not None and int(index[1]) < len(numbers):
            number = numbers[int(index[1])]
        absent = blocks.get(name) is None or number is None or number != number
        value = None if absent or isinstance(number, str) else _number(number)
        values.append(value if value is not None and math.isfinite(value) else None)
        status.append(Status.ABSENT if absent else Status.ERROR)
    return Reward.of(values, status=status)


def _judged(
    text: Texts, pays: Pays, columns: Columns, tag: str, column: str, rule: Callable[[str | None, Any], bool | None]
) -> Reward:
    """1 or 0 for each completion by a rule of what a field says and its gold value; None: the gold value cannot be read."""
    verdicts: dict[int, bool | None] = {}
    for n, (blocks, cell) in enumerate(zip(text, column_of(columns, column, len(text)), strict=True)):
        here, value = read_tag(blocks, pays, tag)
        if here:
            gold = _gold(_parsed(cell), tag)
            verdicts[n] = False if gold is _BEYOND else None if gold is _MISSING else rule(value, gold)
    return of_verdicts(len(text), verdicts)


def _number(value: Any) -> float | None:
    """A plain number, maybe too large for a float (infinite); None if it is none."""
    if isinstance(value, str):
        return float(value) if _SIGNED.fullmatch(value := value.strip()) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _parsed(cell: Any) -> Any:
    """A cell, and what it is the JSON text of."""
    value = json_value(cell) if isinstance(cell, str) and cell.lstrip()[:1] in ("{", "[") else None
    return cell if value is None else value[0]


def _gold(value: Any, path: str) -> Any:
    """The gold value; `_MISSING` or `_BEYOND` if there is none."""
    if not isinstance(value, Mapping):
        return _MISSING if value is None else value
    if path in value:
        return value[path]
    try:
        way = steps(path)
    except LayoutError:  # another segmenter's mark
        return _MISSING
    for step in way:
        if isinstance(value, Mapping):
            value = value.get(step, _MISSING)
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step] if -len(value) <= step < len(value) else _BEYOND
        else:
            return value if value is _BEYOND else _MISSING
    return value
