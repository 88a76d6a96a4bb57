"""`json_schema`: whether a field, or the JSON of a whole completion, is as a schema says."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from spanwise.errors import DataError, RecipeError
from spanwise.registry import register
from spanwise.score.fields import json_value
from spanwise.score.reward import Columns, Pays, Reward, Scored, Texts, block_with, column_of, of_verdicts
from spanwise.types import whole_text

_DECODER = json.JSONDecoder()


@register("json_schema", kind="reward", tags=("tag",), check=lambda options: _fixed(options["schema"]))
def json_schema(
    text: Texts,
    *,
    pays: Pays,
    columns: Columns,
    scored: Scored,
    schema: Mapping[str, Any] | str = "schema",
    tag: str = "",
) -> Reward:
    """1 if the JSON of a completion is valid under a schema, 0 if not.

    Rule: the JSON is what a field says (`tag`), or, without one, the whole completion, whatever it pays: from its first brace on,
    if it is not JSON as a whole. What cannot be read as JSON, or is not complete, is not valid (0); a field that is no JSON is a
    string. No paid block: ABSENT. A schema of the dataset that is missing or no schema: ERROR. The validator is made once for each
    schema. A `$ref` leads to a place in the schema itself; nothing is ever fetched.

    Args:
        text, pays, columns, scored: see `spanwise.score.rewards`.
        schema: the schema; or a file that ends in .json; or the dataset column of schemas, objects or their JSON texts.
        tag: what the layout calls the field: its path; "" for the whole completion.

    Raises:
        DataError: there is no such column, or jsonschema is not installed.
        RecipeError: a schema that is none, or with a `$ref` that leads nowhere.

    Example:
        >>> text = [{"all": {"": said}} for said in ('Sure: {"a": 3}', '{"a": "x"}', '{"a":')]
        >>> integer = {"properties": {"a": {"type": "integer"}}}
        >>> json_schema(text, pays=("all",), columns={}, scored={}, schema=integer).value_n
        tensor([1., 0., 0.], dtype=torch.float64)
    """
    fixed = _fixed(schema)
    cells = [None] * len(text) if fixed is not None else column_of(columns, str(schema), len(text))
    verdicts: dict[int, bool | None] = {}
    for n, (blocks, cell) in enumerate(zip(text, cells, strict=True)):
        block = block_with(blocks, pays, tag)
        if block is not None:
            validator = fixed or _of_cell(cell)
            value = _field(block, tag) if tag else _whole(whole_text(blocks))
            verdicts[n] = None if validator is None else value is not None and _is_valid(validator, value[0])
    return of_verdicts(len(text), verdicts)


def _whole(said: str) -> tuple[Any] | None:
    """The JSON in a text, in a tuple of one; None if there is none."""
    value = json_value(said)
    if value is not None:
        return value
    try:
        return (_DECODER.raw_decode(said, said.index("{"))[0],)
    except (ValueError, RecursionError):
        return None


def _field(block: Mapping[str, str | None], tag: str) -> tuple[Any] | None:
    """What a field says as JSON; what stood in quotes is a string."""
    content = block.get(tag)
    if content is None:
        return None
    value = json_value(content)
    if value is None:
        return (content,)
    # The text of a field is without its quotes: "3" and 3 differ in what stands before them.
    written = re.search(r'(?:^|[:\[,])\s*+("?)' + re.escape(content), block.get("") or "")
    return (content,) if written and written[1] else value


def _is_valid(validator: Any, value: Any) -> bool:
    try:
        return validator.is_valid(value)
    except RecursionError:  # nested deeper than any schema means
        return False


def _fixed(schema: Any) -> Any:
    """The validator of a schema that a recipe holds or names by file; None: it names a column."""
    named = isinstance(schema, str)
    if named and not schema.endswith(".json"):
        return None
    where = f"The schema '{schema}'" if named else "The schema"
    try:
        return _validator(Path(schema).read_text(encoding="utf-8") if named else json.dumps(schema, sort_keys=True))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{where} of reward 'json_schema' is none: {error}.") from error


def _of_cell(cell: Any) -> Any:
    """The validator of a schema in a dataset; None if it is none."""
    try:
        return None if cell is None else _validator(cell if isinstance(cell, str) else json.dumps(cell, sort_keys=True))
    except (TypeError, ValueError):
        return None


@lru_cache(maxsize=4096)
def _validator(text: str) -> Any:
    """What checks values under a schema, of its JSON text."""
    if importlib.util.find_spec("jsonschema") is None:
        raise DataError("The reward 'json_schema' needs jsonschema: install 'spanwise[json]'.")
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY
    from referencing import Resource
    from referencing.jsonschema import DRAFT202012

    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError(f"it is {text:.60}, and must be an object")
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        place = "/".join(map(str, error.absolute_path))
        raise ValueError(f"{error.message:.200}" + (f" (at {place})" if place else "")) from error
    resource = Resource.from_contents(schema, default_specification=DRAFT202012)
    registry = REGISTRY.with_resource(resource.id() or "", resource).crawl()  # without a way to fetch anything
    _follow(resource, registry.resolver(resource.id() or ""))
    validator = kind(schema, registry=registry)
    try:
        validator.is_valid({})
    except RecursionError:
        raise ValueError("its $ref leads back to itself") from None
    return validator


def _follow(resource: Any, resolver: Any) -> None:
    """Look up every reference of a schema and of those in it."""
    from referencing.exceptions import Unresolvable

    resolver = resolver.in_subresource(resource)
    contents = resource.contents
    for key in ("$ref", "$dynamicRef"):
        if isinstance(contents, dict) and isinstance(contents.get(key), str):
            try:
                resolver.lookup(contents[key])
            except Unresolvable:
                why = f"its {key} {contents[key]!r} leads nowhere; nothing is fetched, so put what it means under $defs"
                raise ValueError(why) from None
    for inner in resource.subresources():
        _follow(inner, resolver)
