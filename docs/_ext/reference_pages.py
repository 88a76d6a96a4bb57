"""The parts of the reference that are no Python names, as Markdown: command line, recipe, rollout files, metrics."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import logged
from docstrings import entries, prose, sections
from reference_api import api, link
from spanwise.cli import app
from spanwise.modes import MODES
from spanwise.modes.critic.config import CriticConfig
from spanwise.modes.laser.config import Laser
from spanwise.objective import Objective
from spanwise.recipe import HUB, Recipe
from spanwise.rollouts import schema

_WORDS = {
    "str": "text", "int": "whole number", "float": "number", "bool": "true or false", "NoneType": "null",
    "CriticConfig": "name: anything", "Laser": "name: anything",
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------- command line


def cli() -> str:
    """Every command with its arguments and options, from the command line itself."""
    whole = app.generate_docs(output_format="markdown", recursive=True)
    commands = whole[whole.index("\n## spanwise ") :]
    # How Python itself was started ends up in the usage line.
    commands = re.sub(r"^```console\n(spanwise [\w-]+)(?: -m [\w.]+)?", r"```console\n$ \1", commands, flags=re.MULTILINE)
    commands = re.sub(r"\n {4,}(?=\S)", " ", commands)  # what an argument says goes on in the next line
    commands = re.sub(r", --empty-[\w-]+", "", commands)
    outside = re.compile(r"(```.*?```|`[^`]*`)", re.DOTALL)
    return "".join(one if n % 2 else one.replace("<", r"\<") for n, one in enumerate(outside.split(commands)))


# ------------------------------------------------------------------------------------------------------------- recipe


def recipe() -> str:
    """Every field of a recipe by the groups of the code, then the fields of its parts."""
    parts = []
    for heading, names in recipe_groups().items():
        parts += [f"## {heading}", _table([_recipe_row(name) for name in names])]
    about = (("objectives", Objective, "Each entry of `objectives`"), ("critic", CriticConfig, "What stands under `critic`"),
             ("laser", Laser, "What stands under `laser`"))  # fmt: skip
    for field, kind, what in about:
        parts += [
            f"## Fields of {field}",
            f"{what} has these fields, those of {link(kind.__name__)}.",
            _table(part_rows(kind)),
        ]
    return "\n\n".join(parts)


def recipe_groups() -> dict[str, list[str]]:
    """The fields of a recipe under the comments that stand above them in the code."""
    groups: dict[str, list[str]] = {}
    for line in inspect.getsource(Recipe).splitlines():
        comment, field = re.match(r"^    # (.+)\.$", line), re.match(r"^    (\w+): ", line)
        if comment:
            groups[comment[1]] = []
        elif field and field[1] in Recipe.model_fields:
            groups[next(reversed(groups))].append(field[1])
    groups["Rule of credit"] += list(MODES)
    return groups


def _recipe_row(name: str) -> tuple[str, str, str, str]:
    if name in MODES:
        return name, kind_of(dict[str, Any]), "null", prose(_first_up(MODES[name].about), link)
    field = Recipe.model_fields[name]
    default = field.get_default(call_default_factory=True)
    bounds = [
        f"{words} {getattr(one, key)}" for one in field.metadata for key, words in _BOUNDS.items() if hasattr(one, key)
    ]
    default_text = _value(default)
    if name in HUB:
        default_text += f"; {_value(HUB[name])} with a model by name"
    return (
        name,
        ", ".join([kind_of(field.annotation), *bounds]),
        default_text,
        prose(_first_up(field.description or ""), link),
    )


_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most"}


def part_rows(kind: type) -> list[tuple[str, str, str, str]]:
    """The fields of a frozen dataclass that recipes write, with what its docstring says of each."""
    texts = entries(
        sections(inspect.getdoc(kind) or "").get("Args", "") or sections(kind.__doc__ or "").get("Attributes", "")
    )
    hints = typing.get_type_hints(kind)
    rows = []
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        missing = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default_text = "required" if missing else _value(default)
        rows.append(
            (field.name, kind_of(hints[field.name]), default_text, prose(_first_up(texts.get(field.name, "")), link))
        )
    return rows


def kind_of(note: Any) -> str:
    """A type in words.

    >>> from typing import Literal
    >>> kind_of(int | None), kind_of(Literal["easy", "hard"]), kind_of(str | list[str])
    ('whole number', '`easy` or `hard`', 'text or a list of text')
    """
    origin, args = typing.get_origin(note), typing.get_args(note)
    if origin is typing.Literal:
        return " or ".join(f"`{one}`" for one in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(kind_of(one) for one in args if one is not type(None)))
    if note is Any:
        return "anything"
    if isinstance(note, type) and origin is None:
        return _WORDS.get(note.__name__, note.__name__)
    if "Callable" in str(origin):
        return "a function (Python only)"
    if "Mapping" in str(origin) or origin is dict:
        return f"name: {kind_of(args[1])}"
    return f"a list of {kind_of(args[0])}"


def _value(value: Any) -> str:
    """A value as YAML writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value in ({}, [], (), ""):
        return "none"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _first_up(text: str) -> str:
    """A sentence; what begins with one of the values of its field stays as it is written."""
    text = " ".join(text.split()).rstrip(".")
    return text and (text if re.match(r"\w+[,:]|[`']", text) else text[0].upper() + text[1:]) + "."


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    lines = [f"| `{name}` | {kind} | {default} | {says} |" for name, kind, default, says in rows]
    return "\n".join(["| field | what it takes | default | what it does |", "|---|---|---|---|", *lines])


# ------------------------------------------------------------------------------------------------------ rollout files


def rollouts() -> str:
    """The columns of a rollout file, as its module says them."""
    text = inspect.cleandoc(schema.__doc__ or "")
    first, _, rest = text.partition("\n\n")
    return rest.replace("\n\n", "\n\n", 1) if first else text


# ------------------------------------------------------------------------------------------------------------ metrics


def metrics() -> str:
    """Every number that can stand in a log, by group."""
    parts = []
    for heading, group in logged.GROUPS.items():
        rows = [f"| `{name}` | {prose(one.what, link)} | {prose(one.worry, link)} |" for name, one in group.items()]
        parts += [f"## {heading}", "\n".join(["| metric | what it is | when to worry |", "|---|---|---|", *rows])]
    return "\n\n".join(parts)


PARTS: Mapping[str, Callable[..., str]] = {
    "api": api,
    "cli": cli,
    "recipe": recipe,
    "rollouts": rollouts,
    "metrics": metrics,
}
