"""Paths of JSON, `items[*].price`: what they look for, as a tree of steps, and which of them a text has."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from spanwise.errors import LayoutError
from spanwise.layout import EACH, Layout, Part

_DECODER = json.JSONDecoder()
_DEEP = 20  # steps of the paths that are suggested
_KEYS = re.compile(r'"([^"\\\n]{1,60})"\s*:')
_STEP = re.compile(r'(?:^|(?<=.)\.)([^.\[\]"]+)|\[(\d+|\*)\]|(?:(?<=.)\.)?\["((?:[^"\\]|\\.)*)"\]')


@dataclass(eq=False)
class Node:
    """One place that paths lead to: the part that its value is, and the steps from it."""

    part: Part | None
    steps: dict[str | int, Node]
    counted: bool  # its elements are blocks of their own, up to a number
    keys: dict[bytes, Node]  # those of the steps that are keys, as completions spell them


def tree(parts: Sequence[Part], layout: Layout) -> Node:
    """The paths of some parts as one tree."""
    return _node([(part, steps(part.mark)) for part in parts], layout)


def _node(paths: Sequence[tuple[Part, list[str | int]]], layout: Layout) -> Node:
    """The place that some paths have led to, each with the steps that are left of it.

    What is looked for in every element of an array is looked for in those that a path names by number, too.
    """
    here = [part for part, left in paths if not left]
    if here and len(paths) > 1:
        raise _overlap(next((part for part, left in paths if left), here[0]), here[-1], layout)
    ways = [(_way(part, left[0]), part, left) for part, left in paths if left]
    nodes = {
        way: _node(
            [(part, left[1:]) for own, part, left in ways if own == way or (own == -1 and isinstance(way, int))], layout
        )
        for way in dict.fromkeys(way for way, _, _ in ways)
    }
    keys = {way.encode(): node for way, node in nodes.items() if isinstance(way, str)}
    counted = any(way != left[0] for way, _, left in ways)
    return Node(here[0] if here else None, nodes, counted, keys)


def _way(part: Part, step: str | int) -> str | int:
    """A step of the path of a part: every element of an array is the one that has the number of the part's block."""
    return part.index if step == -1 and part.index is not None else step


def steps(path: str) -> list[str | int]:
    """The steps of a path: keys, indices, and -1 for `[*]`."""
    path_steps: list[str | int] = []
    at = 0
    while at < len(path):
        step = _STEP.match(path, at)
        if step is None:
            break
        key, index, quoted = step.groups()
        if quoted is not None:
            key = unescaped(quoted.encode(errors="replace")).decode()
        path_steps.append(key if key is not None else -1 if index == "*" else int(index))
        at = step.end()
    if at < len(path) or not path_steps or isinstance(path_steps[0], int):
        raise LayoutError(
            f"'{path}' is no path of JSON, which begins at a key of an object; write price, buyer.name, items[0], items[*].price "
            f'or ["a.b"].'
        )
    return path_steps


def _overlap(inner: Part, outer: Part, layout: Layout) -> LayoutError:
    one, other = layout.names[inner.block], layout.names[outer.block]
    where = "is the same as" if inner.mark == outer.mark else "lies inside"
    return LayoutError(
        f"Blocks '{one}' and '{other}' overlap: '{inner.mark}' {where} '{outer.mark}', and a token belongs to one block. Name the "
        f"fields of '{outer.mark}' one by one, or leave one of the two out."
    )


def unescaped(written: bytes) -> bytes:
    """What stands between quotes, without the escapes of JSON; as it is where there is no such escape."""
    try:
        text: str = json.loads(f'"{written.decode(errors="replace")}"', strict=False)
    except ValueError:
        return written
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def paths(text: str) -> dict[str, None]:
    """The paths of all values in the JSON objects of a text; of what is no JSON the keys alone."""
    listed: dict[str, None] = {}
    at = text.find("{")
    while at >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return listed | dict.fromkeys(_KEYS.findall(text, at))
        _walk(value, "", listed)
        at = text.find("{", end)
    return listed


def _walk(value: object, path: str, found: dict[str, None], depth: int = 0) -> None:
    if path:
        found[path] = None
    if depth == _DEEP:
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            plain = bool(key) and not set(key) & set('.[]"')
            step = (f".{key}" if path else key) if plain else f"[{json.dumps(key)}]"
            _walk(inner, path + step, found, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _walk(inner, f"{path}{EACH}", found, depth + 1)
