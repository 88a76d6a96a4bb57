"""Rewards of single fields: `equals`, `near`, `one_of`; `listed`, numbers from a list or by name; and `json_schema`."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from spanwise.errors import DataError, LayoutError, RecipeError, check_number
from spanwise.objective import Objective
from spanwise.registry import register
from spanwise.score.items import without_end
from spanwise.score.reward import Columns, Pays, Reward, Scored, Texts, column_of, judged
from spanwise.score.rewards import NUMBER
from spanwise.score.worker import MISSING, is_valid, json_value, read_schema, whole_json
from spanwise.score.workers import DEADLINE, Workers, shared_workers
from spanwise.segment.json_fields import steps
from spanwise.types import BlockText, Status, whole_text

_SIGNED = re.compile("[+-]?" + NUMBER.pattern)
_DECODER = json.JSONDecoder()
_INDEX = re.compile(r"\[(\d+)\]")
#: The text before a value.
_BEFORE = re.compile(r'(?:^|[:\[,])\s*+("?)\Z')
#: The field lies beyond the end of the list of gold values.
_BEYOND = object()


@register("equals", kind="reward", tags=("tag",))
def equals(
    text: Texts, *, pays: Pays, columns: Columns, scored: Scored, tag: str = "answer", column: str = "answer"
) -> Reward:
    """Reward 1 if a field equals the dataset's value, 0 if not.

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
    """Return whether a text equals a gold value, see `equals`."""
    if isinstance(gold, str):
        return said.strip() == gold.strip()
    value = json_value(said, decoder=_DECODER)
    return value is not MISSING and value == gold and isinstance(value, bool) == isinstance(gold, bool)


def _tolerances(options: Mapping[str, Any]) -> None:
    for name in ("rel", "abs"):
        check_number(f"The option '{name}' of reward 'near'", options[name], least=0.0)


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
    """Reward 1 if a number in a field is close to the dataset's, 0 if not: |stated - gold| <= max(rel |gold|, abs).

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
    """Reward 1 if a field holds one of the values that the dataset allows, 0 if not.

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
    """Reward each block with the number that a column holds for it, such as a reward model's score of each step.

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
        numbers, number = _parsed(cell), MISSING
        if isinstance(numbers, Mapping):
            number = numbers.get(name, MISSING)
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
    """Reward 1 or 0 for each completion by a rule of its field and the gold value; the rule returns None if gold cannot be read."""

    def of_gold(_: BlockText, block: Mapping[str, str | None], cell: Any) -> bool | None:
        gold = _gold(_parsed(cell), tag)
        return False if gold is _BEYOND else None if gold is MISSING else rule(block.get(tag), gold)

    return judged(text, pays, tag, column_of(columns, column, len(text)), of_gold)


def gold_there(objective: Objective, columns: Columns) -> Bool[Tensor, " n"] | None:
    """Return where the dataset has a gold value for an objective; None if its reward does not look for one by path."""
    options = objective.options
    cells = columns.get(options.get("column", "answer"))
    if objective.reward not in ("equals", "near", "one_of") or cells is None:
        return None
    golds = (_gold(_parsed(cell), options.get("tag", "answer")) for cell in cells)
    return torch.tensor([gold is not MISSING and gold is not _BEYOND for gold in golds])


def _number(value: Any) -> float | None:
    """Return a plain number, infinite if too large for a float; None for anything else."""
    if isinstance(value, str):
        return float(value) if _SIGNED.fullmatch(value := value.strip()) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _parsed(cell: Any) -> Any:
    """Return a cell, and the value of the JSON text in it."""
    value = json_value(cell, decoder=_DECODER) if isinstance(cell, str) and cell.lstrip()[:1] in ("{", "[") else MISSING
    return cell if value is MISSING else value


def _gold(value: Any, path: str) -> Any:
    """Return the gold value; `MISSING` or `_BEYOND` if there is none."""
    if not isinstance(value, Mapping):
        return MISSING if value is None else value
    if path in value:
        return value[path]
    try:
        way = steps(path)
    except LayoutError:  # the block belongs to another segmenter
        return MISSING
    for step in way:
        if isinstance(value, Mapping):
            value = value.get(step, MISSING)
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step] if -len(value) <= step < len(value) else _BEYOND
        else:
            return value if value is _BEYOND else MISSING
    return value


@register("count", kind="reward")
def count(
    text: Texts, *, pays: Pays, columns: Columns, scored: Scored, path: str = "items", column: str = "answer"
) -> Reward:
    """1 if a list of the completion's JSON has as many elements as the dataset's, 0 if not.

    Rule: the list stands at the path of the completion's JSON, which is found as in `json_schema`, and at the same path of the gold
    object. No list, or JSON that is not complete: wrong (0). No paid block: ABSENT. No gold list: ERROR.

    Args:
        text, pays, columns, scored: see `spanwise.score.rewards`.
        path: of the list.
        column: the dataset column of the gold objects.

    Raises:
        DataError: there is no such column.

    Example:
        >>> text = [{"all": {"": said}} for said in ('{"items": [1, 2]}', '{"items": [1]}', '{"items": [1')]
        >>> count(text, pays=("all",), columns={"answer": ['{"items": [7]}'] * 3}, scored={}).value_n
        tensor([0., 1., 0.], dtype=torch.float64)
    """

    def as_many(blocks: BlockText, _: Mapping[str, str | None], cell: Any) -> bool | None:
        gold, value = _gold(_parsed(cell), path), _gold(whole_json(whole_text(blocks)), path)
        return isinstance(value, list) and len(value) == len(gold) if isinstance(gold, list) else None

    return judged(text, pays, "", column_of(columns, column, len(text)), as_many)


@register("json_schema", kind="reward", tags=("tag",), check=lambda options: _check_schema(**options))
def json_schema(
    text: Texts,
    *,
    pays: Pays,
    columns: Columns,
    scored: Scored,
    schema: Mapping[str, Any] | str = "schema",
    tag: str = "",
    alone: bool = False,
    workers: int | None = None,
    deadline: float | int = DEADLINE,
) -> Reward:
    """1 if the JSON of a completion is valid under a schema, 0 if not.

    Rule: the JSON is what a field says (`tag`), or, without one, the whole completion, whatever it pays: from its first brace on,
    if it is not JSON as a whole. What cannot be read as JSON, or is not complete, is not valid (0); a field that is no JSON is a
    string. Numbers are the decimals that are written (0.07 is a multiple of 0.01): to a float's precision, one with a point or an
    exponent beyond every float as infinite, a multiple of nothing. NaN and Infinity are no JSON. No paid block: ABSENT.
    A schema of the dataset that is missing or no schema: ERROR. A `$ref` leads to a place in the schema itself; nothing is ever
    fetched. Where a schema has keywords whose time may grow faster than the value (`pattern`, `patternProperties`, `uniqueItems`,
    `$ref` and any that is not known to be linear), a process that can be killed checks it, and past its deadline the completion
    has no reward: TIMEOUT.

    Args:
        text, pays, columns, scored: see `spanwise.score.rewards`.
        schema: the schema; or a file that ends in .json; or the dataset column of schemas, objects or their JSON texts.
        tag: what the layout calls the field: its path; "" for the whole completion.
        alone: whether text before or behind the JSON is wrong. Where nothing else pays for the end, a policy learns to write on.
        workers, deadline: how many processes check at a time, and the seconds each check may take, see `MathVerifier`.

    Raises:
        DataError: there is no such column, or jsonschema is not installed.
        RecipeError: a schema that is none, or with a pattern that is none, or a `$ref` that leads nowhere or back to itself.

    Example:
        >>> text = [{"all": {"": said}} for said in ('Sure: {"a": 3}', '{"a": "x"}', '{"a":')]
        >>> integer = {"properties": {"a": {"type": "integer"}}}
        >>> json_schema(text, pays=("all",), columns={}, scored={}, schema=integer).value_n
        tensor([1., 0., 0.], dtype=torch.float64)
    """
    fixed = _fixed(schema)
    cells = [None] * len(text) if fixed is not None else column_of(columns, str(schema), len(text))

    def rule(blocks: BlockText, block: Mapping[str, str | None], cell: Any) -> bool | tuple[str, str] | None:
        written = fixed or _of_cell(cell)
        stated = _field(block, tag) if tag else whole_text(blocks)
        if written is None or stated is None:
            return None if written is None else False
        if alone and json_value(without_end(stated)) is MISSING:
            return False
        return is_valid(written, stated) if read_schema(written)[1] else (written, stated)

    return judged(text, pays, tag, cells, rule, shared_workers(SchemaChecker, workers=workers, deadline=deadline).check)


def _check_schema(*, schema: Any, tag: str = "", alone: bool = False, **_: Any) -> None:
    """Refuse a schema that is none, and `alone` of a field."""
    _fixed(schema)
    if alone and tag:
        raise RecipeError(
            f"The reward 'json_schema' has tag '{tag}' and alone, which is about text around the JSON of a whole completion; leave "
            f"one of them out."
        )


def _field(block: Mapping[str, str | None], tag: str) -> str | None:
    """Return a field's text as JSON, a string where it stood in quotes; None if the value is incomplete."""
    content = block.get(tag)
    if content is None:
        return None
    return json.dumps(content) if json_value(content) is MISSING or _in_quotes(content, block, tag) else content


def _in_quotes(content: str, block: Mapping[str, str | None], tag: str) -> bool:
    """Return whether a field's text is a string, "3" and not 3: judged behind its own key, else at its first place in the text."""
    written, first, key = block.get("") or "", "", f'"{tag.rpartition(".")[2]}"'
    at = written.find(content)
    while at >= 0:
        before = _BEFORE.search(written, max(0, at - 256), at)
        if before and written[max(0, before.start() - 256) : before.start()].rstrip().endswith(key):
            return before[1] == '"'
        first = first or (before[0] if before else "")
        at = written.find(content, at + len(content))
    return first.endswith('"')


class SchemaChecker(Workers):
    """Judges JSON by schemas whose time is not linear in the JSON, see `worker.py`."""

    kind = "schema"
    what = "jsonschema"
    harmless = ("{}", "{}")
    advice = "Without it no schema with a pattern, a $ref or uniqueItems can be checked."


def _fixed(schema: Any) -> str | None:
    """Return the JSON text of a schema that a recipe holds or names by file; None if the recipe names a column."""
    named = isinstance(schema, str)
    if named and not schema.endswith(".json"):
        return None
    where = f"The schema '{schema}'" if named else "The schema"
    try:
        return _checked(Path(schema).read_text(encoding="utf-8") if named else schema)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"{where} of reward 'json_schema' is none: {error}.") from error


def _of_cell(cell: Any) -> str | None:
    """Return the JSON text of a schema in a dataset's cell; None if the cell holds none."""
    try:
        return None if cell is None else _checked(cell)
    except (TypeError, ValueError, RecursionError):
        return None


def _checked(schema: Any) -> str:
    """Return the JSON text of a schema; raise ValueError if it is none."""
    if importlib.util.find_spec("jsonschema") is None:
        raise DataError("The reward 'json_schema' needs jsonschema: install 'spanwise[json]'.")
    text = schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)
    read_schema(text)
    return text
