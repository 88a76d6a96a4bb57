r"""The segmenter `json`: find a block for each JSON field of a completion.

A mark is a path: `price`, `buyer.name`, `items[0]`, `items[*].price`, `["a key with.dots"]`. The bytes are scanned once, by one
regular expression for strings and signs and a stack of what is open. No library that was tried gives the byte offsets of the
fields of a *broken* object in prose: tree-sitter's recovery takes an odd quote in the prose for a string and flattens what is cut
off, and the tolerant parsers (jiter, partial-json-parser) give values without places.

Rules.

1. Reading starts at a `{` and ends after the bracket that closes it; what stands before, between and after such objects is prose.
2. Inside, the signs are `{ } [ ] ,` and strings. A string runs from `"` to the next `"`; a backslash takes what follows it along.
   One that has no end before a line break, or before the end of the text, has broken off (TRUNCATED); reading goes on there.
3. In an object a string before a colon is a key: what follows it is its value, up to a comma, to the bracket that closes the
   object, or to the next key (NESTED: the comma is missing). In an array an element stands after the opening bracket and after
   each comma, up to the next comma or the bracket that closes it; white space is no element.
4. `{` and `[` open what stands in the value that is being read. Where an object waits for a key, `[` is passed over, and `{`
   gives up all that is open and starts over (both NESTED).
5. `}` closes the innermost object and `]` the innermost array; what is still open inside it is given up (NESTED). Where there is
   none to close, it is passed over (NESTED).
6. A part takes the first value on its path, in all objects of the completion; one without a number of its own, such as
   `items[*].price` in a block without `[*]`, takes them all. Another one, and a key that is looked for and comes again in its
   object with all that it holds, is a DUPLICATE and belongs to what stands before it. An element beyond `most`: MORE.
7. A value says its text without white space around it, a string what stands between its quotes, without escapes. It says nothing
   where no one knows its end: it is empty, is given up (4, 5) or open at the end of the text (TRUNCATED), ends at a key, or at a
   bracket that gives up what it holds, or starts with a `"` and is not one string.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal
from typing import Any

from spanwise.errors import LayoutError
from spanwise.layout import EACH, Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import Claim, Finder, Found
from spanwise.types import Fault

_DECODER = json.JSONDecoder()
_MOST_STEPS = 20  # the most keys and indices in a JSON path that `paths` lists
_KEYS = re.compile(r'"([^"\\\n]{1,60})"\s*:')
_STEP = re.compile(r'(?:^|(?<=.)\.)([^.\[\]"]+)|\[(\d+|\*)\]|(?:(?<=.)\.)?\["((?:[^"\\]|\\.)*)"\]')
# Possessive quantifiers keep the search linear in time.
_INSIDE = rb'(?:[^"\\\n]++|\\.)*+'
#: Matches a bracket, a comma or a JSON string. Groups: the string's text, its closing quote, the colon after a key.
_TOKEN = re.compile(rb'"(%b)(?:(")([ \t\r\n]*+:)?+)?+|[{}\[\],]' % _INSIDE, re.DOTALL)
#: The last group that `_TOKEN` matches (`lastindex`) for a string without a closing quote, and for a key.
_BROKEN, _KEY = 1, 3
_WHOLE = re.compile(rb'"%b"' % _INSIDE, re.DOTALL)
_COMMA, _ARRAY, _ARRAY_END = b",[]"
_SPACE = b" \t\r\n"
# Faults as integers, because operations on enum flags are slow.
_NESTED, _TRUNCATED, _DUPLICATE, _MORE = map(int, (Fault.NESTED, Fault.TRUNCATED, Fault.DUPLICATE, Fault.MORE))


@dataclass(eq=False)
class Node:
    """A node of the tree of JSON values that the layout names, such as `items[*].price`."""

    part: Part | None
    steps: dict[bytes | int, Node]
    counted: bool  # True if each element of the array is a block


#: One shared node for all JSON values that the layout does not name.
_NOWHERE = Node(None, {}, counted=False)


@dataclass(eq=False, slots=True)
class _Open:
    """An object or array that is not closed yet, and the value in it that is being read."""

    node: Node
    array: bool
    index: int = -1  # the index of the element that is being read
    seen: set[Node] = field(default_factory=set)
    #: The value being read: its node, the byte where its field begins, and the byte where the value begins.
    reading: tuple[Node, int, int] | None = None


@register(
    "json",
    kind="segmenter",
    says=lambda text: list(paths(text)),
    asks=lambda mark: [step for step in steps(mark) if isinstance(step, str)],
)
def json_fields(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find the fields of JSON objects. The rules are at the top of this module."""
    root_node = _build_node([(part, steps(part.mark)) for part in parts], layout)
    starts_at_key = layout.rest is None  # else the rest has the keys and the punctuation
    return lambda sample: _Scan(sample.text, root_node, starts_at_key).run()


class _Scan:
    """Scans a completion for the layout's fields, and notes where each begins and ends."""

    def __init__(self, text: bytes, root: Node, from_key: bool) -> None:
        self.text, self.root, self.from_key = text, root, from_key
        self.stack: list[_Open] = []
        self.open = [0, 0]  # how many objects and how many arrays are open
        self.claims: list[Claim] = []
        self.fault = 0
        self.done: set[Part] = set()

    def run(self) -> Found:
        """Scan all JSON objects of the completion. Return the bytes of the layout's fields, in order, and the faults."""
        brace_index = self.text.find(b"{")
        while brace_index >= 0:
            brace_index = self.text.find(b"{", self._read_object(brace_index))
        if self.stack:
            self.fault |= _TRUNCATED
            self._close(len(self.text))
        return Found(self.claims, self.fault)

    def _read_object(self, at: int) -> int:
        """Read an object from its opening brace on. Return the byte after the object, or the end of the text."""
        for match in _TOKEN.finditer(self.text, at):
            token_start, token_kind = match.start(), match.lastindex
            if token_kind is None:
                punctuation_byte = self.text[token_start]
                if punctuation_byte == _COMMA:
                    self._read_comma(token_start)
                elif punctuation_byte in b"{[":
                    self._open_value(token_start, array=punctuation_byte == _ARRAY)
                else:
                    self._close(token_start, array=punctuation_byte == _ARRAY_END)
                    if not self.stack:
                        return token_start + 1
            elif token_kind == _BROKEN:
                self.fault |= _TRUNCATED
            elif token_kind == _KEY and not self.stack[-1].array:  # a string in an array is not a key
                self._read_key(match)
        return len(self.text)

    def _read_key(self, match: re.Match[bytes]) -> None:
        """Read a key of the innermost object, and begin its value."""
        container = self.stack[-1]
        key = match[1]
        if container.reading:  # a comma is missing before this key
            self.fault |= _NESTED
            self._end_value(container, match.start(), is_whole=False)
        inner_nodes = container.node.steps
        key_node = inner_nodes.get(key)
        if key_node is None and b"\\" in key:
            key_node = inner_nodes.get(unescaped(key))
        key_node = key_node or _NOWHERE
        if key_node in container.seen:
            self.fault |= _DUPLICATE
            key_node = _NOWHERE
        elif key_node is not _NOWHERE:
            container.seen.add(key_node)
        container.reading = key_node, match.start() if self.from_key else match.end(), match.end()

    def _read_comma(self, at: int) -> None:
        """Read a comma: end the value before it, if there is one. In an array, begin the next element."""
        container = self.stack[-1]
        self._end_value(container, at)
        if container.array:
            container.index += 1
            element_node = container.node.steps.get(container.index) or container.node.steps.get(-1) or _NOWHERE
            container.reading = element_node, at + 1, at + 1

    def _open_value(self, at: int, *, array: bool) -> None:
        """Open an object or array inside another value."""
        if self.stack and not self.stack[-1].reading:  # no key stands before this object or array
            self.fault |= _NESTED
            if array:
                return
            self._close(at)
        outer_value = self.stack[-1].reading if self.stack else None
        self.stack.append(_Open(outer_value[0] if outer_value else self.root, array))
        self.open[array] += 1
        self._read_comma(at)

    def _close(self, at: int, *, array: bool | None = None) -> None:
        """Close the innermost array (or object) and everything that is open inside it. If `array` is None, close all."""
        is_innermost = self.stack[-1].array == array
        self.fault |= 0 if is_innermost or array is None else _NESTED
        is_already_closed = array is not None and not self.open[array]
        while self.stack and not is_already_closed:
            container = self.stack.pop()
            self.open[container.array] -= 1
            self._end_value(container, at, is_whole=is_innermost)
            is_already_closed = container.array == array

    def _end_value(self, container: _Open, at: int, *, is_whole: bool = True) -> None:
        """End the value that is being read. Claim its bytes if it is a field of the layout."""
        open_value = container.reading
        container.reading = None
        if open_value is None:
            return
        value_node, claim_start, value_start = open_value
        value_part = value_node.part
        is_extra_element = container.array and container.node.counted and container.index not in container.node.steps
        if value_part is None and not is_extra_element:
            return
        unstripped_text = self.text[value_start:at]
        value_text = unstripped_text.strip(_SPACE)
        self.fault |= _MORE if is_extra_element and value_text else 0
        if value_part is None or (container.array and not value_text):
            return
        if value_part in self.done:
            self.fault |= _DUPLICATE
            return
        if value_part.index is not None or EACH not in value_part.mark:
            self.done.add(value_part)
        text_start = value_start + len(unstripped_text) - len(unstripped_text.lstrip(_SPACE))
        value_content = _value_content(value_text, text_start) if is_whole else None
        self.claims.append(Claim(value_part, claim_start, text_start + len(value_text), value_content))


def _value_content(value_text: bytes, start: int) -> tuple[int, int] | bytes | None:
    """Return the content of a JSON value: a string without quotes and escapes, or another value as it is."""
    if value_text[:1] != b'"':
        return (start, start + len(value_text)) if value_text else None
    if not _WHOLE.fullmatch(value_text):
        return None
    return unescaped(value_text[1:-1]) if b"\\" in value_text else (start + 1, start + len(value_text) - 1)


def _build_node(paths: Sequence[tuple[Part, list[str | int]]], layout: Layout) -> Node:
    """Build a tree from the JSON paths of a layout's parts."""
    node_parts = [part for part, steps_left in paths if not steps_left]
    if node_parts and len(paths) > 1:
        outer_part = node_parts[-1]
        inner_parts = [part for part, steps_left in paths if steps_left]
        overlapping_part = inner_parts[0] if inner_parts else node_parts[0]
        relation = "is the same as" if overlapping_part.mark == outer_part.mark else "lies inside"
        raise LayoutError(
            f"Blocks '{layout.names[overlapping_part.block]}' and '{layout.names[outer_part.block]}' overlap: "
            f"'{overlapping_part.mark}' {relation} '{outer_part.mark}'. But a token can belong to one block only. Name the "
            f"fields of '{outer_part.mark}' one by one, or leave out one of the two blocks."
        )
    next_steps = [(_resolve_step(part, steps_left[0]), part, steps_left[1:]) for part, steps_left in paths if steps_left]
    # In a path, `[*]` (key -1) stands for all elements of an array, including those that other paths name by index.
    inner_nodes: dict[bytes | int, Node] = {}
    for key in dict.fromkeys(step for step, _, _ in next_steps):
        matching_steps = {key, -1} if isinstance(key, int) else {key}
        inner_nodes[key] = _build_node([(part, tail) for step, part, tail in next_steps if step in matching_steps], layout)
    has_counted_elements = any(part.index is not None and steps_left[:1] == [-1] for part, steps_left in paths)
    return Node(node_parts[0] if node_parts else None, inner_nodes, has_counted_elements)


def _resolve_step(part: Part, step: str | int) -> bytes | int:
    """Return the key in `Node.steps` for one step of a JSON path. The part's index replaces `[*]` (-1), if it has one."""
    if isinstance(step, str):
        return step.encode()
    return part.index if step == -1 and part.index is not None else step


def steps(path: str) -> list[str | int]:
    """Return the steps of a JSON path such as `items[*].price`: keys, indices, and -1 for `[*]`."""
    step_matches = list(_STEP.finditer(path))
    path_steps = [_parse_step(match) for match in step_matches]
    if "".join(match[0] for match in step_matches) != path or not isinstance(next(iter(path_steps), 0), str):
        raise LayoutError(
            f"'{path}' is not a path into JSON. Such a path begins with a key of an object, for example price, buyer.name, "
            f'items[0], items[*].price or ["a.b"].'
        )
    return path_steps


def _parse_step(match: re.Match[str]) -> str | int:
    plain_key, array_index, quoted_key = match.groups()
    if array_index is not None:
        return -1 if array_index == "*" else int(array_index)
    return plain_key if quoted_key is None else unescaped(quoted_key.encode(errors="replace")).decode()


def unescaped(written: bytes) -> bytes:
    """Return a JSON string without its escapes. If the escapes are invalid, return it unchanged."""
    try:
        text: str = json.loads(f'"{written.decode(errors="replace")}"', strict=False)
    except ValueError:
        return written
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def as_json(value: Any) -> Any:
    """Convert a value to JSON: arrays to lists, decimals to numbers, dates or bytes to text, others to NaN.

    >>> as_json({"price": Decimal("3.10"), "day": date(2024, 1, 5), "sizes": (1, 2), "id": object()})
    {'price': 3.1, 'day': '2024-01-05', 'sizes': [1, 2], 'id': nan}
    """
    try:
        return json.loads(json.dumps(value, default=_plain_value, skipkeys=True))
    except (ArithmeticError, AttributeError, TypeError, ValueError, RecursionError):
        return None


def _plain_value(value: Any) -> Any:
    if isinstance(value, date | time):
        return value.isoformat().removesuffix("T00:00:00") if value == value else math.nan
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, Decimal):
        is_whole_number = value.is_finite() and value.adjusted() < 100 and value == value.to_integral_value()
        return int(value) if is_whole_number else float(str(value))
    numpy_value = value.numpy(force=True) if hasattr(value, "numpy") else value
    array_type: Any = getattr(numpy_value, "dtype", None)
    if getattr(array_type, "kind", "") == "f" and array_type.itemsize != 8:
        return numpy_value.astype(str).astype(float).tolist()  # keep the float32 3.1 as 3.1, not as 3.0999999
    if getattr(array_type, "kind", "") == "M":
        return numpy_value.astype("datetime64[us]").tolist()
    if hasattr(numpy_value, "tolist"):
        return numpy_value.tolist()
    return float(numpy_value) if hasattr(numpy_value, "__float__") else math.nan


def paths(text: str) -> dict[str, None]:
    """List the paths of all values in a text's JSON objects. If the JSON is broken, list only its keys."""
    all_paths: dict[str, None] = {}
    brace_index = text.find("{")
    while brace_index >= 0:
        try:
            json_object, object_end = _DECODER.raw_decode(text, brace_index)
        except (ValueError, RecursionError):
            return all_paths | dict.fromkeys(_KEYS.findall(text, brace_index))
        _add_paths(json_object, "", all_paths)
        brace_index = text.find("{", object_end)
    return all_paths


def _add_paths(value: object, path: str, paths: dict[str, None], depth: int = 0) -> None:
    """Add the paths of a JSON value and of all values inside it to `paths`."""
    if path:
        paths[path] = None
    if depth == _MOST_STEPS:
        return
    if isinstance(value, dict):
        for key, inner_value in value.items():
            is_plain_key = bool(key) and not set(key) & set('.[]"')
            dotted_key = f".{key}" if path else key
            path_step = dotted_key if is_plain_key else f"[{json.dumps(key)}]"
            _add_paths(inner_value, path + path_step, paths, depth + 1)
    elif isinstance(value, list):
        for inner_value in value:
            _add_paths(inner_value, f"{path}{EACH}", paths, depth + 1)
