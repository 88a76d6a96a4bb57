r"""The segmenter `json`: a block per field of the JSON in a completion, whatever stands around it and wherever it breaks off.

A mark is a path: `price`, `buyer.name`, `items[0]`, `items[*].price`, `["a key with.dots"]`. The bytes are scanned once, by one
regular expression for strings and brackets and a stack of what is open. No library that was tried gives the byte offsets of the
fields of a *broken* object in prose: tree-sitter's recovery takes an odd quote in the prose for a string and flattens what is cut
off, and the tolerant parsers (jiter, partial-json-parser) give values without places.

Rules. An object starts at any `{` outside of another one; prose before, between and after is skipped. Each path has its first
match; a key that comes again in its object is a DUPLICATE and belongs to what stands before it. A closing bracket ends what it
belongs to (NESTED if something else was open), an opening brace where a key must stand starts over. A value that the text breaks
off in says nothing, since no one knows its end (TRUNCATED). A string may not hold a line break, as in JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from spanwise.errors import LayoutError
from spanwise.layout import EACH, Layout, Part
from spanwise.segment.claims import Claim, Finder, Found
from spanwise.segment.registry import register
from spanwise.types import Fault

# Possessive, so that time is linear. A string, whether it ends, and whether it is a key; or a bracket or comma.
_TOKEN = re.compile(rb'"((?:[^"\\\n]++|\\.)*+)("?)(\s*+:)?|[{}\[\],]', re.DOTALL)
_SPACE = b" \t\r\n"
_DECODER = json.JSONDecoder()
_KEY = re.compile(r'"([^"\\\n]{1,60})"\s*:')
_STEP = re.compile(r'(?:^|\.)([^.\[\]"]+)|\[(\d+|\*)\]|(?:^|\.?)\["((?:[^"\\]|\\.)*)"\]')


@dataclass(eq=False)
class _Node:
    """One step of the paths that are looked for: what its value is, and the steps from it."""

    part: Part | None = None
    steps: dict[str | int, _Node] = field(default_factory=dict)
    counted: bool = False  # its elements are blocks of their own, up to a number


class _Open:
    """An object or array that is not closed yet, and the value in it that is being read."""

    __slots__ = ("index", "node", "part", "reading", "seen", "start", "value", "within")

    def __init__(self, node: _Node | None, *, array: bool) -> None:
        self.node, self.index = node, 0 if array else -1
        self.seen: set[bytes] = set()
        self.reading = False
        self.part: Part | None = None
        self.within: _Node | None = None
        self.start = self.value = 0

    def begin(self, within: _Node | None, start: int, value: int) -> None:
        """Read the value from byte `value` on, which its part claims from `start` on."""
        self.reading, self.within, self.start, self.value = True, within, start, value
        self.part = None if within is None else within.part


@register("json", kind="segmenter", says=lambda text: list(paths(text)))
def json_fields(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find the fields of JSON objects, see the module.

    With a block for the rest a field is its value, from the colon on; the rest has keys and punctuation. Without one it runs from
    its key to the next field's key.

    Args:
        parts: with a path each.
        layout: the whole layout.

    Raises:
        LayoutError: no path, or two blocks one of which lies inside the other.

    Example:
        >>> from spanwise.segment import Sample
        >>> layout = Layout(["name", "items[*].price"], segmenter="json", most=2)
        >>> find = json_fields(layout.parts, layout=layout)
        >>> text = b'Sure: {"name": "tea", "items": [{"price": 3}, {"price": 4.5}]}'
        >>> claims = find(Sample.of(text)).claims
        >>> [(claim.part.key, text[slice(*claim.inner)]) for claim in claims]
        [('name', b'tea'), ('items[0].price', b'3'), ('items[1].price', b'4.5')]
    """
    root = _Node()
    for part in parts:
        _plant(root, part, layout)
    from_key = layout.rest is None
    return lambda sample: _Scan(sample.text, root, from_key).run()


def steps(path: str) -> list[str | int]:
    """The steps of a path: keys, indices, and -1 for `[*]`.

    Raises:
        LayoutError: it is no path.

    >>> steps('items[*].price'), steps('["a.b"][2]')
    (['items', -1, 'price'], ['a.b', 2])
    """
    found: list[str | int] = []
    at = 0
    while at < len(path):
        step = _STEP.match(path, at)
        if step is None:
            break
        key, index, quoted = step.groups()
        found.append(key if key is not None else json.loads(f'"{quoted}"') if quoted is not None else _index(index))
        at = step.end()
    if not found or at < len(path):
        raise LayoutError(f"'{path}' is no path of JSON; write price, buyer.name, items[0], items[*].price or [\"a.b\"].")
    return found


def _index(written: str) -> int:
    return -1 if written == "*" else int(written)


def _plant(root: _Node, part: Part, layout: Layout) -> None:
    """Add a path to those that are looked for."""
    node = root
    for step in steps(part.mark):
        if node.part is not None:
            raise _overlap(part, node.part, layout)
        if step == -1 and part.index is not None:
            node.counted = True
            step = part.index
        node = node.steps.setdefault(step, _Node())
    inside = node.part or next(_leaves(node), None)
    if inside is not None:
        raise _overlap(inside, part, layout)
    node.part = part


def _leaves(node: _Node) -> Iterator[Part]:
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


class _Scan:
    """One pass over one completion."""

    def __init__(self, text: bytes, root: _Node, from_key: bool) -> None:
        self.text, self.root, self.from_key = text, root, from_key
        self.stack: list[_Open] = []
        self.objects = 0  # how many of the stack are objects
        self.claims: list[Claim] = []
        self.fault = 0
        self.done: set[Part] = set()

    def run(self) -> Found:
        """The claims on the fields, in order."""
        at = self.text.find(b"{")
        while at >= 0:
            at = self.text.find(b"{", self._object(at))
        if self.stack:
            self.fault |= Fault.TRUNCATED
            while self.stack:
                self._finish(self.stack.pop(), len(self.text), whole=False)
        self.claims.sort(key=itemgetter(1))
        return Found(self.claims, self.fault)

    def _object(self, at: int) -> int:
        """Read from an opening brace to the end of its object, or of the text; where that is."""
        for match in _TOKEN.finditer(self.text, at):
            start = match.start()
            sign = self.text[start]
            if sign == 34:  # a quotation mark
                self._string(match)
            elif sign == 44:  # a comma
                top = self.stack[-1]
                self._finish(top, start)
                if top.index >= 0:
                    top.index += 1
                    self._element(top, start + 1)
            elif sign in b"{[":
                self._push(start, array=sign == 91)
            else:
                self._close(start, array=sign == 93)
                if not self.stack:
                    return start + 1
        return len(self.text)

    def _string(self, match: re.Match[bytes]) -> None:
        """A string: the key of what follows, or a value, which ends where its element ends."""
        key, closed, colon = match.groups()
        if not closed:
            self.fault |= Fault.TRUNCATED
        top = self.stack[-1]
        if not closed or colon is None or top.index >= 0:
            return
        if top.reading:  # the comma before this key is missing
            self.fault |= Fault.NESTED
            self._finish(top, match.start(), whole=False)
        if key in top.seen:
            self.fault |= Fault.DUPLICATE
            top.begin(None, 0, 0)
            return
        top.seen.add(key)
        within = None if top.node is None else top.node.steps.get(_key(key))
        top.begin(within, match.start() if self.from_key else match.end(), match.end())

    def _element(self, top: _Open, at: int) -> None:
        """Begin the next element of an array."""
        within = None
        if top.node is not None:
            within = top.node.steps.get(top.index) or top.node.steps.get(-1)
        top.begin(within, at, at)

    def _push(self, at: int, *, array: bool) -> None:
        if self.stack and self.stack[-1].index < 0 and not self.stack[-1].reading:
            self.fault |= Fault.NESTED
            if array:
                return  # no place for an array
            while self.stack:  # an object begins where a key must stand: it starts over
                self._finish(self.stack.pop(), at, whole=False)
            self.objects = 0
        top = _Open(self.stack[-1].within if self.stack else self.root, array=array)
        self.stack.append(top)
        if array:
            self._element(top, at + 1)
        else:
            self.objects += 1

    def _close(self, at: int, *, array: bool) -> None:
        """Close the innermost array or object, and what stands open inside it."""
        if not (len(self.stack) - self.objects if array else self.objects):
            self.fault |= Fault.NESTED
            return
        while True:
            top = self.stack.pop()
            right = (top.index >= 0) == array
            self.objects -= top.index < 0
            self.fault |= 0 if right else Fault.NESTED
            self._finish(top, at, whole=right)
            if right:
                return

    def _finish(self, top: _Open, at: int, *, whole: bool = True) -> None:
        """End the value that is being read; what was cut off says nothing."""
        if not top.reading:
            return
        top.reading = False
        more = top.index >= 0 and top.node is not None and top.node.counted and top.index not in top.node.steps
        part = top.part
        if part is None and not more:
            return
        text = self.text[top.value : at]
        held = text.strip(_SPACE)
        if more and held:
            self.fault |= Fault.MORE
        if part is None or (top.index >= 0 and not held):
            return
        if part in self.done:
            self.fault |= Fault.DUPLICATE
            return
        if part.index is not None or EACH not in part.mark:
            self.done.add(part)
        first = top.value + len(text) - len(text.lstrip(_SPACE))
        self.claims.append(Claim(part, top.start, first + len(held), _said(held, first) if whole else None))


def _said(held: bytes, first: int) -> tuple[int, int] | bytes | None:
    """What a value says: its JSON text, of a string what stands between the quotes."""
    if held[:1] != b'"':
        return (first, first + len(held)) if held else None
    if len(held) < 2 or held[-1:] != b'"':
        return None
    if b"\\" in held:
        try:
            return json.loads(held, strict=False).encode(errors="replace")
        except (ValueError, AttributeError):
            pass
    return first + 1, first + len(held) - 1


def _key(written: bytes) -> str:
    text = written.decode(errors="replace")
    if "\\" in text:
        try:
            return json.loads(f'"{text}"')
        except ValueError:
            return text
    return text


def paths(text: str) -> dict[str, None]:
    """The paths of all values in the JSON objects of a text; of what is no JSON the keys alone.

    >>> list(paths('So {"name": "tea", "items": [{"price": 3}]} and {"qty": 2'))
    ['name', 'items', 'items[*]', 'items[*].price', 'qty']
    """
    found: dict[str, None] = {}
    at = text.find("{")
    while at >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return found | dict.fromkeys(_KEY.findall(text, at))
        _walk(value, "", found)
        at = text.find("{", end)
    return found


def _walk(value: object, path: str, found: dict[str, None]) -> None:
    if path:
        found[path] = None
    if isinstance(value, dict):
        for key, inner in value.items():
            plain = bool(key) and not set(key) & set('.[]"')
            step = (f".{key}" if path else key) if plain else f"[{json.dumps(key)}]"
            _walk(inner, path + step, found)
    elif isinstance(value, list):
        for inner in value:
            _walk(inner, f"{path}{EACH}", found)
