"""Paths of JSON, `items[*].price`: what they look for, as a tree of steps, and which of them a text has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from spanwise.errors import LayoutError
from spanwise.layout import EACH, Layout, Part

_DECODER = json.JSONDecoder()
_DEEP = 20  # steps of the paths that are suggested
_KEYS = re.compile(r'"([^"\\\n]{1,60})"\s*:')
_STEP = re.compile(r'(?:^|(?<=.)\.)([^.\[\]"]+)|\[(\d+|\*)\]|(?:(?<=.)\.)?\["((?:[^"\\]|\\.)*)"\]')


@dataclass(eq=False)
class Node:
    """One step of the paths that are looked for: what its value is, and the steps from it."""

    part: Part | None = None
    steps: dict[str | int, Node] = field(default_factory=dict)
    counted: bool = False  # its elements are blocks of their own, up to a number
    many: bool = False  # its part takes every match
    keys: dict[bytes, Node] = field(default_factory=dict)  # those of the steps that are keys, as completions spell them


def tree(parts: Sequence[Part], layout: Layout) -> Node:
    """The paths of some parts as one tree."""
    root = Node()
    for part in parts:
        _plant(root, part, layout)
    _settle(root, layout)
    return root


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


def _plant(root: Node, part: Part, layout: Layout) -> None:
    """Add a path to those that are looked for."""
    node = root
    for step in steps(part.mark):
        if node.part is not None:
            raise _overlap(part, node.part, layout)
        if step == -1 and part.index is not None:
            node.counted = True
            step = part.index
        node = node.steps.setdefault(step, Node())
    inside = node.part or next(_leaves(node), None)
    if inside is not None:
        raise _overlap(inside, part, layout)
    node.part, node.many = part, part.index is None and EACH in part.mark


def _settle(node: Node, layout: Layout) -> None:
    """What is looked for in every element of an array is looked for in those that a path names by number, too."""
    for step, child in node.steps.items():
        if isinstance(step, str):
            node.keys[step.encode()] = child
        elif step >= 0 and -1 in node.steps:
            node.steps[step] = _merged(child, node.steps[-1], layout)
    for child in node.steps.values():
        _settle(child, layout)


def _merged(one: Node, other: Node, layout: Layout) -> Node:
    for outer, inner in ((one, other), (other, one)):
        part = inner.part or next(_leaves(inner), None)
        if outer.part is not None and part is not None:
            raise _overlap(part, outer.part, layout)
    node = Node(one.part or other.part, {**one.steps, **other.steps}, one.counted or other.counted, one.many or other.many)
    for step in one.steps.keys() & other.steps.keys():
        node.steps[step] = _merged(one.steps[step], other.steps[step], layout)
    return node


def _leaves(node: Node) -> Iterator[Part]:
    for child in node.steps.values():
        if child.part is not None:
            yield child.part
        yield from _leaves(child)


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
