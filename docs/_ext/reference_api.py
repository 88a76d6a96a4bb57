"""The reference of every public name, from its signature and its docstring."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
import typing
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import public_face
from docstrings import markdown

SHORT = 300  # of a constant's value, in signs


@cache
def places() -> dict[str, tuple[str, Any]]:
    """Every public name in full, as in `spanwise.credit.gae` -> the name it is shown under, and what it is.

    What several rooms offer is shown once: in the first of them in the order of `public_face.ROOMS`, and `spanwise` is the first.
    """
    place_by_name: dict[str, tuple[str, Any]] = {}
    homes: dict[tuple[str, int], str] = {}
    for room in public_face.ROOMS:
        module = importlib.import_module(room)
        for name in module.__all__:
            thing = getattr(module, name)
            home = homes.setdefault((name, id(thing)), f"{room}.{name}")
            place_by_name[f"{room}.{name}"] = (home, thing)
    return place_by_name


@cache
def _targets() -> dict[str, str]:
    """What code in a docstring may link to: names that mean one thing only."""
    targets: dict[str, str] = {}
    for full, (home, _) in places().items():
        short = full.rsplit(".", 1)[1]
        if short != short.lower() or "_" in short:
            targets.setdefault(short, home)
        targets[full] = home
    return targets


def link(code: str) -> str:
    """Code in a docstring, linked where it is a public name.

    >>> link("Layout"), link("pays")
    ('{py:obj}`Layout <spanwise.Layout>`', '`pays`')
    """
    target = _targets().get(code)
    return f"{{py:obj}}`{code} <{target}>`" if target else f"`` {code} ``" if "`" in code else f"`{code}`"


def api(room: str) -> str:
    """The reference of a room: what it is for, its names in a table, then each of them."""
    module = importlib.import_module(room)
    own, other = [], []
    for name in sorted(module.__all__, key=str.lower):
        home, thing = places()[f"{room}.{name}"]
        (own if home == f"{room}.{name}" else other).append((name, home, thing))
    parts = [markdown(module.__doc__ or "", link)]
    if other:
        also = ", ".join(f"{{py:obj}}`{name} <{home}>`" for name, home, _ in other)
        parts.append(f"Also here: {also}.")
    parts += [f"## {name}\n\n{entry(f'{room}.{name}', thing)}" for name, _, thing in own]
    return "\n\n".join(parts)


def entry(name: str, thing: Any) -> str:
    """One name in full."""
    if inspect.isclass(thing):
        return _class(name, thing)
    if inspect.isfunction(thing):
        return _fenced("py:function", f"{name}{signature(thing)}", markdown(inspect.getdoc(thing) or "", link))
    return _constant(name, thing)


def _fenced(directive: str, argument: str, body: str, options: str = "") -> str:
    fence = "`" * (3 + max([0, *(len(ticks) - 2 for ticks in re.findall(r"^`{3,}", body, re.MULTILINE))]))
    return f"{fence}{{{directive}}} {argument}\n{options}\n{body}\n{fence}"


def signature(function: Any, *, drop: int = 0) -> str:
    """How something is called, on one line, with annotations as they are written; the first `drop` parameters are left out.

    >>> signature(lambda a, *more, b=1: 0)
    '(a, *more, b=1)'
    """
    try:
        declared = inspect.signature(inspect.unwrap(function))
    except (TypeError, ValueError):
        return ""
    parameters: list[str] = []
    for one in list(declared.parameters.values())[drop:]:
        if one.kind is one.KEYWORD_ONLY and not any(word.startswith("*") for word in parameters):
            parameters.append("*")
        parameters.append(_parameter(one))
        if one.kind is one.POSITIONAL_ONLY and "/" not in parameters:
            parameters.append("/")
    back = declared.return_annotation
    returns = "" if back in (declared.empty, "None", None) else f" -> {_annotation(back)}"
    return f"({', '.join(parameters)}){returns}"


def _parameter(one: inspect.Parameter) -> str:
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    note = "" if one.annotation is one.empty else f": {_annotation(one.annotation)}"
    value = repr(one.default)
    value = "..." if "<" in value or len(value) > 60 else value
    default = "" if one.default is one.empty else f" = {value}" if note else f"={value}"
    return f"{stars}{one.name}{note}{default}"


def _annotation(note: Any) -> str:
    """An annotation as it is written in the code, without the names of modules and with shapes in one kind of quotes.

    >>> _annotation("Float[Tensor, ' n']"), _annotation(typing.Mapping[str, int])
    ('Float[Tensor, "n"]', 'Mapping[str, int]')
    """
    if isinstance(note, typing.ForwardRef):
        note = note.__forward_arg__
    text = note.__name__ if isinstance(note, type) and not typing.get_args(note) else str(note)
    text = re.sub(r"\b(typing|collections\.abc|torch|jaxtyping|pathlib|numpy)\.", "", text)
    return re.sub(r"(\[[\w.]+, )['\"] ?([^'\"]*)['\"]\]", r'\1"\2"]', text)


def _class(name: str, thing: type) -> str:
    own = vars(thing)
    parts = [markdown(inspect.getdoc(thing) or "", link) if own.get("__doc__") else ""]
    if issubclass(thing, enum.Enum):
        parts += [_member_values(thing)]
    for key, member in own.items():
        if key.startswith("_") or issubclass(thing, Exception):
            continue
        function = getattr(member, "__func__", member)
        doc = getattr(member, "__doc__", None) or ""
        if isinstance(member, (property, cached_property)):
            parts.append(_fenced("py:property", f"{name}.{key}", markdown(doc, link)))
        elif inspect.isfunction(function) and doc:
            drop = 0 if isinstance(member, staticmethod) else 1
            kind = {staticmethod: ":staticmethod:\n", classmethod: ":classmethod:\n"}.get(type(member), "")
            parts.append(_fenced("py:method", f"{name}.{key}{signature(function, drop=drop)}", markdown(doc, link), kind))
    if issubclass(thing, Exception):
        return _fenced("py:exception", name, "\n\n".join(filter(None, parts)))
    plain = (
        issubclass(thing, (enum.Enum, dict)) or getattr(thing, "_is_protocol", False) or "Config" in str(thing.__mro__[1:-1])
    )
    parameters = "" if plain else re.sub(r" -> .*$", "", signature(thing))
    return _fenced("py:class", f"{name}{parameters}", "\n\n".join(filter(None, parts)))


def _member_values(thing: type[enum.Enum]) -> str:
    """The members of an enumeration, with what the code says beside each."""
    comments = dict(re.findall(r"^    ([A-Z_]+) = [^#\n]*#\s*(.*)$", inspect.getsource(thing), re.MULTILINE))
    return "\n".join(
        f"- `{one.name}` = {one.value}{': ' + comments[one.name] if one.name in comments else ''}" for one in thing
    )


def _constant(name: str, thing: Any) -> str:
    """A constant or an alias: what it is for, and its value."""
    text = str(thing) if typing.get_origin(thing) else repr(thing)
    text = re.sub(r"\b(typing|collections\.abc|torch|jaxtyping)\.", "", text)
    if isinstance(thing, typing.Mapping):
        text = "keys: " + ", ".join(map(str, thing))
    body = markdown(said_of(name), link)
    if "<" not in text and len(text) <= 4 * SHORT:
        body += f"\n\n```text\n{text}\n```"
    return _fenced("py:data", name, body)


def said_of(name: str) -> str:
    """The comment above a constant (`#: ...`), where it is defined.

    >>> said_of("spanwise.tasks.DIGITS_LAYOUT")
    'The two blocks of a completion of the task `digits`, a chain of operations modulo 10.'
    """
    room, _, short = name.rpartition(".")
    module = _origin(room, short)
    source = Path(importlib.import_module(module).__file__ or "").read_text(encoding="utf-8")
    match = re.search(rf"((?:^#: .*\n)+){short}\b", source, re.MULTILINE)
    return " ".join(match[1].replace("#: ", " ").split()) if match else ""


def _origin(module: str, name: str) -> str:
    """The module that defines what a package only passes on."""
    source = Path(importlib.import_module(module).__file__ or "").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and any((one.asname or one.name) == name for one in node.names):
            return _origin(node.module, name)
    return module
