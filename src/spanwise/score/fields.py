"""The built-in rewards `equals`, `near`, `one_of`, `listed`, `count` and `json_schema`."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from spanwise.disk import read_text
from spanwise.errors import DataError, LayoutError, RecipeError, check_number
from spanwise.objective import Objective
from spanwise.registry import register
from spanwise.score.answers import NUMBER, gold_text
from spanwise.score.custom import as_number
from spanwise.score.items import completion_text
from spanwise.score.reward import Columns, Pays, Reward, Scored, Texts, column_of, judged
from spanwise.score.worker import MISSING, is_valid, json_value, read_schema, whole_json
from spanwise.score.workers import DEADLINE, Verdict, Workers, check_limits, shared_workers
from spanwise.segment.json_fields import as_json, steps
from spanwise.types import BlockText, Status

_SIGNED = re.compile("[+-]?" + NUMBER.pattern)
_DECODER = json.JSONDecoder()
_INDEX = re.compile(r"\[(\d+)\]")
#: Matches the text before a JSON value: a colon, comma or bracket, and perhaps a quote.
_BEFORE = re.compile(r'(?:^|[:\[,])\s*+("?)\Z')
#: Stands for the gold value of an element beyond the end of the gold list.
_BEYOND = object()


@register("equals", kind="reward", tags=("tag",))
def equals(
    text: Texts, *, pays: Pays, columns: Columns, scored: Scored, tag: str = "answer", column: str = "answer"
) -> Reward:
    """Reward 1 if a field of the completion equals the dataset's gold value, 0 if not.

    Rule: the gold value stands in the column at the field's own path, where a cell holds an object (or its JSON text); else the
    cell is the gold value, or what follows `####` in a GSM8K solution. Texts are equal character for character, around which space
    does not count; numbers by value (3 = 3.0, in quotes or not); true, false, null, lists and objects as JSON. An incomplete field
    is wrong (0). No paid block: ABSENT. A gold object without the field: ERROR; an element beyond the end of the gold list: wrong.

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
    return _judge_field(text, pays, columns, tag, column, lambda field, gold: field is not None and _same(field, gold))


def _same(field: str, gold: Any) -> bool:
    """Return whether a field's text equals a gold value. Compare values other than strings as JSON."""
    if isinstance(gold, str):
        return field.strip() in (gold.strip(), gold_text(gold))
    field_value = json_value(field, decoder=_DECODER)
    if field_value is MISSING or field_value != gold:
        return False
    plain_pair = json.loads(json.dumps([field_value, gold]), parse_int=float)  # 3 equals 3.0, but true is not 1
    return json.dumps(plain_pair[0], sort_keys=True) == json.dumps(plain_pair[1], sort_keys=True)


def _check_tolerances(options: Mapping[str, Any]) -> None:
    for name in ("rel", "abs"):
        check_number(f"The option '{name}' of reward 'near'", options[name], least=0.0)


@register("near", kind="reward", tags=("tag",), check=_check_tolerances)
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
    """Reward 1 if the number in a field is close to the gold number, 0 if not.

    Rule: |stated - gold| <= max(rel |gold|, abs). The gold value is found as in `equals`. What is no number
    (digits, sign, point, exponent, in quotes or not) is wrong (0). No paid block: ABSENT. No gold value,
    or one that is no finite number: ERROR.

    Args:
        text, pays, columns, scored, tag, column: see `equals`, for errors too.
        rel, abs: how far off is close enough, as a share of the gold value and as a number.

    Example:
        >>> text = [{"price": {"": "", "price": reply}} for reply in ("99", "98", "about 100")]
        >>> near(text, pays=("price",), columns={"answer": ['{"price": 100}'] * 3}, scored={}, tag="price").value_n
        tensor([1., 0., 0.], dtype=torch.float64)
    """
    _check_tolerances({"rel": rel, "abs": abs})

    def rule(field: str | None, gold: Any) -> bool | None:
        gold_number, field_number = _number(gold), _number(field)
        if gold_number is None:
            return None
        return field_number is not None and math.fabs(field_number - gold_number) <= max(rel * math.fabs(gold_number), abs)

    return _judge_field(text, pays, columns, tag, column, rule)


@register("one_of", kind="reward", tags=("tag",))
def one_of(
    text: Texts, *, pays: Pays, columns: Columns, scored: Scored, tag: str = "answer", column: str = "answer"
) -> Reward:
    """Reward 1 if a field holds one of the values that the dataset allows, 0 if not.

    Rule: as in `equals`, but the gold value is a list of values. One that is no list, or empty: ERROR.

    Args:
        text, pays, columns, scored, tag, column: see `equals`, for errors too.

    Example:
        >>> text = [{"city": {"": "", "city": reply}} for reply in ("Roma", "Oslo")]
        >>> one_of(text, pays=("city",), columns={"answer": [["Rome", "Roma"]] * 2}, scored={}, tag="city").value_n
        tensor([1., 0.], dtype=torch.float64)
    """

    def rule(field: str | None, gold: Any) -> bool | None:
        if not isinstance(gold, list | tuple) or not gold:
            return None
        return field is not None and any(_same(field, allowed_value) for allowed_value in gold)

    return _judge_field(text, pays, columns, tag, column, rule)


@register("listed", kind="reward")
def listed(text: Texts, *, pays: Pays, columns: Columns, scored: Scored, block: str = "", column: str = "listed") -> Reward:
    """Reward each block with the number that a dataset column holds for it, such as a step's score.

    Rule: a cell is a list or an object, or its JSON text. Number i of a list is for `step[i]`. An object maps blocks to numbers;
    names with two indices need an object. No such block, or None or NaN for it: ABSENT. No number for it, or no cell: ERROR.

    Args:
        text, pays, columns, scored: see `equals`, for errors too.
        block: whose number it is; the first paid block if not given, and with `each` every block in turn.
        column: the dataset column.

    Example:
        >>> text = [{"step[0]": {"": "4 - 1"}, "step[1]": {"": "3"}}, {"step[0]": {"": "5"}, "step[1]": None}]
        >>> listed(text, pays=("step[1]",), columns={"listed": [[0.9, 0.2], [0.5]]}, scored={}).value_n
        tensor([0.2000,    nan], dtype=torch.float64)
    """
    judged_block = block or pays[0]
    block_indices = [int(digits) for digits in _INDEX.findall(judged_block)]

    def rule(_: BlockText, __: Mapping[str, str | None], cell: Any) -> Verdict | float | None:
        numbers_by_block = _parse_cell(cell)
        block_entry = MISSING
        if isinstance(numbers_by_block, Mapping):
            block_entry = numbers_by_block.get(judged_block, MISSING)
        elif isinstance(numbers_by_block, list | tuple) and len(block_indices) == 1:
            block_entry = dict(enumerate(numbers_by_block)).get(block_indices[0], MISSING)
        if block_entry is None or block_entry != block_entry:
            return Verdict(Status.ABSENT, math.nan)
        return None if isinstance(block_entry, str) else _number(block_entry)

    return judged(text, (judged_block,), "", column_of(columns, column, len(text)), rule)


def _judge_field(
    text: Texts, pays: Pays, columns: Columns, tag: str, column: str, rule: Callable[[str | None, Any], bool | None]
) -> Reward:
    """Reward completions by a rule that compares a field with its gold value. An unreadable gold value gives no reward."""

    def judge_block(_: BlockText, block: Mapping[str, str | None], cell: Any) -> bool | None:
        gold_value = _value_at(_parse_cell(cell), tag)
        is_gold_missing = gold_value is MISSING or gold_value != gold_value  # only NaN differs from itself
        return False if gold_value is _BEYOND else None if is_gold_missing else rule(block.get(tag), gold_value)

    return judged(text, pays, tag, column_of(columns, column, len(text)), judge_block)


def gold_there(objective: Objective, columns: Columns) -> Bool[Tensor, " n"] | None:
    """Return which completions have a gold value. Return None if the objective's reward compares no field with a column."""
    gold_cells = columns.get(objective.options.get("column", "answer"))
    if objective.reward not in ("equals", "near", "one_of") or gold_cells is None:
        return None
    gold_values = (_value_at(_parse_cell(cell), objective.options.get("tag", "answer")) for cell in gold_cells)
    return torch.tensor([gold is not MISSING and gold is not _BEYOND and gold == gold for gold in gold_values])


def _number(value: Any) -> float | None:
    """Return a number as a float, or None for any other value. Also None if no float holds it."""
    if isinstance(value, str):
        value = float(number_text) if _SIGNED.fullmatch(number_text := gold_text(value)) else None
    number = math.nan if isinstance(value, bool) else as_number(value)
    return number if math.isfinite(number) else None


def _parse_cell(cell: Any) -> Any:
    """Parse a dataset cell that may hold an object or list as text (JSON or Python). None if unreadable."""
    cell_text = cell.strip() if isinstance(cell, str) else ""
    parsed_cell = json_value(cell_text, decoder=_DECODER) if cell_text[:1] in ("{", "[") else MISSING
    if isinstance(parsed_cell, dict | list):
        return parsed_cell
    if re.match(r"""\{['"]|\[(?!.*'\s+')""", cell_text, re.DOTALL):  # NumPy prints lists without commas
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            if isinstance(parsed_cell := ast.literal_eval(cell_text), dict | list):
                return as_json(parsed_cell)
    return None if re.match(r"""(?s)\{\s*['"].*['"]\s*:""", cell_text) else as_json(cell)


def _value_at(value: Any, path: str) -> Any:
    """Return the value at a path of a JSON object. Return `MISSING` or `_BEYOND` if there is none."""
    if not isinstance(value, Mapping):
        return MISSING if value is None else value
    if path in value:
        return value[path]
    try:
        path_steps = steps(path)
    except LayoutError:  # an invalid path leads to no value
        return MISSING
    for step in path_steps:
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
    """Reward 1 if a list in the completion's JSON is as long as the gold list, 0 if not.

    Rule: both lists stand at `path`, in the gold object and in the completion's JSON, found as in `json_schema`. If the gold list
    is bare, the other may be bare, too. No list, or JSON cut off: wrong (0). No paid block: ABSENT. No gold list: ERROR.

    Args:
        text, pays, columns, scored: see `equals`, for errors too.
        path: of the list.
        column: the dataset column of the gold objects.

    Example:
        >>> text = [{"all": {"": reply}} for reply in ('{"items": [1, 2]}', '{"items": [1]}', '{"items": [1')]
        >>> count(text, pays=("all",), columns={"answer": ['{"items": [7]}'] * 3}, scored={}).value_n
        tensor([0., 1., 0.], dtype=torch.float64)
    """

    def as_many(blocks: BlockText, _: Mapping[str, str | None], cell: Any) -> bool | None:
        gold_json, stated_json = _parse_cell(cell), whole_json(completion_text(blocks))
        gold_list, stated_list = _value_at(gold_json, path), _value_at(stated_json, path)
        stated_list = MISSING if isinstance(gold_json, Mapping) and isinstance(stated_json, list) else stated_list
        return isinstance(stated_list, list) and len(stated_list) == len(gold_list) if isinstance(gold_list, list) else None

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
    """Reward 1 if the JSON of a completion is valid under a JSON Schema, 0 if not.

    Rule: the JSON is what a field says (`tag`), or, without one, the whole completion, whatever it pays: from its first brace on,
    if it is not JSON as a whole. What cannot be read as JSON, or is not complete, is not valid (0); a field that is no JSON is a
    string. Numbers are the decimals that are written (0.07 is a multiple of 0.01): to a float's precision, one with a point or an
    exponent beyond every float as infinite, a multiple of nothing. NaN and Infinity are no JSON. No paid block: ABSENT.
    A schema of the dataset that is missing or no schema: ERROR. A `$ref` leads to a place in the schema itself; nothing is ever
    fetched. If a schema has keywords whose time may grow faster than the value (`pattern`, `patternProperties`, `uniqueItems`,
    `$ref` and any not known to be linear), a separate process checks it. Past the deadline twice: not valid, BROKE.

    Args:
        text, pays, columns, scored: see `spanwise.score.rewards`.
        schema: the schema; or a file that ends in .json; or the dataset column of schemas, objects or their JSON texts.
        tag: what the layout calls the field: its path; "" for the whole completion.
        alone: whether text before or behind the JSON is wrong. Where nothing else pays for the end, a policy learns to write on.
        workers, deadline: how many processes check at a time, and the seconds each check may take, see `MathVerifier`.

    Raises:
        DataError: there is no such column, or jsonschema is not installed.
        RecipeError: an invalid schema, an invalid pattern, or a `$ref` that leads nowhere or back to itself.

    Example:
        >>> text = [{"all": {"": reply}} for reply in ('Sure: {"a": 3}', '{"a": "x"}', '{"a":')]
        >>> integer = {"properties": {"a": {"type": "integer"}}}
        >>> json_schema(text, pays=("all",), columns={}, scored={}, schema=integer).value_n
        tensor([1., 0., 0.], dtype=torch.float64)
    """
    recipe_schema = _schema_of_recipe(schema)
    schemas = column_of(columns, str(schema), len(text)) if recipe_schema is None else [None] * len(text)

    def rule(blocks: BlockText, block: Mapping[str, str | None], cell: Any) -> bool | tuple[str, str] | None:
        schema_text = recipe_schema or _schema_of_cell(cell)
        stated_json = _field_json(block, tag) if tag else completion_text(blocks)
        if schema_text is None or stated_json is None:
            return None if schema_text is None else False
        if alone and json_value(stated_json) is MISSING:
            return False
        return is_valid(schema_text, stated_json) if read_schema(schema_text)[1] else (schema_text, stated_json)

    return judged(text, pays, tag, schemas, rule, shared_workers(SchemaChecker, workers=workers, deadline=deadline).check)


def _check_schema(*, schema: Any, tag: str = "", alone: bool = False, **limits: Any) -> None:
    """Refuse an invalid schema, impossible limits of a check, and the option `alone` together with `tag`."""
    check_limits(limits)
    _schema_of_recipe(schema)
    if alone and tag:
        raise RecipeError(
            f"The reward 'json_schema' has tag: {tag} and alone: true. But 'alone' only works without a tag, because it forbids "
            f"text around the JSON of a whole completion. Remove one of the two options."
        )


def _field_json(block: Mapping[str, str | None], tag: str) -> str | None:
    """Return a field's value as JSON text, or None if there is no complete value."""
    field_text = block.get(tag)
    if field_text is None:
        return None
    is_json = json_value(field_text) is not MISSING
    return field_text if is_json and not _in_quotes(field_text, block.get("") or "", tag) else json.dumps(field_text)


def _in_quotes(field_text: str, block_text: str, tag: str) -> bool:
    """Return whether a field's value is in quotes in the text of its block."""
    value_prefix = field_text[:256]
    field_name = tag.rpartition(".")[2]
    first_quote = None
    value_index = block_text.find(value_prefix)
    while value_index >= 0:
        if opening_match := _BEFORE.search(block_text, max(0, value_index - 256), value_index):
            text_before = block_text[max(0, opening_match.start() - 256) : opening_match.start()].rstrip()
            if opening_match[0].startswith(":") and text_before.endswith(f'"{field_name}"'):
                return opening_match[1] == '"'
            first_quote = opening_match[1] if first_quote is None else first_quote
        value_index = block_text.find(value_prefix, value_index + 1)
    return first_quote == '"'


class SchemaChecker(Workers):
    """Check JSON against schemas in worker processes, because some schemas take very long."""

    kind = "schema"


def _schema_of_recipe(schema: Any) -> str | None:
    """Return the JSON text of the schema that a recipe holds or names. Return None if it names a column."""
    is_schema_name = isinstance(schema, str)
    if is_schema_name and not schema.endswith(".json"):
        return None
    schema_label = f"The schema '{schema}'" if is_schema_name else "The schema"
    schema_source = read_text(schema, schema_label) if is_schema_name else schema
    try:
        return _schema_text(schema_source)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"{schema_label} of reward 'json_schema' is invalid: {error}.") from error


def _schema_of_cell(cell: Any) -> str | None:
    """Return the schema in a dataset cell as JSON text. Return None without a valid schema."""
    with suppress(TypeError, ValueError, RecursionError):
        return _schema_text(cell)
    return None


def _schema_text(schema: Any) -> str:
    """Return the JSON text of a schema. Raise ValueError if the schema is invalid."""
    if importlib.util.find_spec("jsonschema") is None:
        raise DataError("The reward 'json_schema' needs jsonschema. Install 'spanwise[json]'.")
    schema_text = schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)
    read_schema(schema_text)
    return schema_text
