r"""The segmenter `json`: a block per field of the JSON in a completion, whatever stands around it and wherever it breaks off.

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

import re
from collections.abc import Sequence

from spanwise.layout import EACH, Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import Claim, Finder, Found
from spanwise.segment.json_paths import Node, paths, steps, tree, unescaped
from spanwise.types import Fault

# Possessive, so that time is linear: a sign is read twice at most. A string, whether it ends, whether it is a key, and the value of
# that if it is a string or has no signs in it; or a bracket or comma. The names are the last group that each of these has.
_INSIDE = rb'(?:[^"\\\n]++|\\.)*+'
_TOKEN = re.compile(
    rb'"(%b)(?:(")(?:([ \t\r\n]*+:)(?:[ \t\r\n]*+(?:"(%b)"[ \t\r\n]*+|([^"{}\[\],]++))(?:,|(?=\})))?+)?+)?+'
    % (_INSIDE, _INSIDE)
    + rb"|[{}\[\],]",
    re.DOTALL,
)
_BROKEN, _STRING, _KEY, _LITERAL = 1, 2, 3, 5
_WHOLE = re.compile(rb'"%b"' % _INSIDE, re.DOTALL)
_COMMA, _ARRAY, _ARRAY_END = b",[]"
_SPACE = b" \t\r\n"
_NESTED, _TRUNCATED, _DUPLICATE, _MORE = map(
    int, (Fault.NESTED, Fault.TRUNCATED, Fault.DUPLICATE, Fault.MORE)
)  # flags are slow


class _Open:
    """An object or array that is not closed yet, and the value in it that is being read."""

    __slots__ = ("index", "node", "reading", "seen", "start", "value", "within")

    def __init__(self, node: Node | None, *, array: bool) -> None:
        self.node, self.index = node, 0 if array else -1
        self.seen: set[Node] = set()
        self.reading = False
        self.within: Node | None = None
        self.start = self.value = 0

    def begin(self, within: Node | None, start: int, value: int) -> None:
        """Read the value from byte `value` on, which its part claims from `start` on."""
        self.reading, self.within, self.start, self.value = True, within, start, value


@register(
    "json",
    kind="segmenter",
    says=lambda text: list(paths(text)),
    asks=lambda mark: [step for step in steps(mark) if isinstance(step, str)],
)
def json_fields(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find the fields of JSON objects, see the module.

    With a block for the rest a field is its value, from the colon on; the rest has keys and punctuation. Without one it runs from
    its key to the next field's key.
    """
    root, from_key = tree(parts, layout), layout.rest is None
    return lambda sample: _Scan(sample.text, root, from_key).run()


class _Scan:
    """One pass over one completion."""

    def __init__(self, text: bytes, root: Node, from_key: bool) -> None:
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
            self.fault |= _TRUNCATED
            self._give_up(len(self.text))
        return Found(self.claims, self.fault)

    def _object(self, at: int) -> int:
        """Read from an opening brace to the end of its object, or of the text; where that is."""
        for match in _TOKEN.finditer(self.text, at):
            start, last = match.start(), match.lastindex
            if last is None:
                sign = self.text[start]
                if sign == _COMMA:
                    self._comma(start)
                elif sign in b"{[":
                    self._push(start, array=sign == _ARRAY)
                else:
                    self._close(start, array=sign == _ARRAY_END)
                    if not self.stack:
                        return start + 1
            elif last == _BROKEN:
                self.fault |= _TRUNCATED
            elif last > _STRING:
                if self.stack[-1].index < 0:
                    self._key(match, last)
                elif last > _KEY and self.text[match.end() - 1] == _COMMA:  # in an array a string is no key
                    self._comma(match.end() - 1)
        return len(self.text)

    def _key(self, match: re.Match[bytes], last: int) -> None:
        """A key of the innermost object and its value, if that is a number, a word or a string; else the value is what follows."""
        top, key = self.stack[-1], match[1]
        if top.reading:  # the comma before this key is missing
            self.fault |= _NESTED
            self._finish(top, match.start(), whole=False)
        keys = {} if top.node is None else top.node.keys
        within = keys.get(key) or (keys.get(unescaped(key)) if b"\\" in key else None)
        if within in top.seen:
            self.fault |= _DUPLICATE
            within = None
        elif within is not None:
            top.seen.add(within)
        start, value = match.start() if self.from_key else match.end(_KEY), match.end(_KEY)
        if last == _KEY:
            top.begin(within, start, value)
        elif within is not None and within.part is not None:
            first, stop = match.span(last)
            if last == _LITERAL:
                stop = first + len(self.text[first:stop].rstrip(_SPACE))
                self._claim(within.part, start, stop, (first, stop))
            else:
                content = unescaped(match[last]) if b"\\" in match[last] else (first, stop)
                self._claim(within.part, start, stop + 1, content)

    def _comma(self, at: int) -> None:
        top = self.stack[-1]
        self._finish(top, at)
        if top.index >= 0:
            top.index += 1
            self._element(top, at + 1)

    def _element(self, top: _Open, at: int) -> None:
        """Begin the next element of an array."""
        steps = {} if top.node is None else top.node.steps
        top.begin(steps.get(top.index) or steps.get(-1), at, at)

    def _push(self, at: int, *, array: bool) -> None:
        if self.stack and not self.stack[-1].reading:
            self.fault |= _NESTED
            if array:
                return  # no place for an array
            self._give_up(at)  # an object begins where a key must stand: it starts over
        top = _Open(self.stack[-1].within if self.stack else self.root, array=array)
        self.stack.append(top)
        if array:
            self._element(top, at + 1)
        else:
            self.objects += 1

    def _close(self, at: int, *, array: bool) -> None:
        """Close the innermost array or object, and what stands open inside it."""
        if not (len(self.stack) - self.objects if array else self.objects):
            self.fault |= _NESTED
            return
        whole = True
        while True:
            top = self.stack.pop()
            right = (top.index >= 0) == array
            self.objects -= top.index < 0
            self._finish(top, at, whole=whole and right)
            if right:
                return
            whole = False
            self.fault |= _NESTED

    def _give_up(self, at: int) -> None:
        """Leave everything that is open."""
        while self.stack:
            self._finish(self.stack.pop(), at, whole=False)
        self.objects = 0

    def _finish(self, top: _Open, at: int, *, whole: bool = True) -> None:
        """End the value that is being read; what was cut off says nothing."""
        node, part = top.node, None if top.within is None else top.within.part
        more = top.index >= 0 and node is not None and node.counted and top.index not in node.steps
        if top.reading and (part is not None or more):
            text = self.text[top.value : at]
            value = text.strip(_SPACE)
            if more and value:
                self.fault |= _MORE
            if part is not None and (value or top.index < 0):
                first = top.value + len(text) - len(text.lstrip(_SPACE))
                self._claim(part, top.start, first + len(value), _said(value, first) if whole else None)
        top.reading = False

    def _claim(self, part: Part, start: int, stop: int, content: tuple[int, int] | bytes | None) -> None:
        if part in self.done:
            self.fault |= _DUPLICATE
            return
        if part.index is not None or EACH not in part.mark:
            self.done.add(part)
        self.claims.append(Claim(part, start, stop, content))


def _said(value: bytes, first: int) -> tuple[int, int] | bytes | None:
    """What a complete value says: its JSON text, of a string what stands between the quotes."""
    if value[:1] != b'"':
        return (first, first + len(value)) if value else None
    if not _WHOLE.fullmatch(value):
        return None
    return unescaped(value[1:-1]) if b"\\" in value else (first + 1, first + len(value) - 1)
