"""The segmenter `regex`: blocks by a regular expression, searched in linear time.

Patterns are those of RE2, which never backtracks: whatever a completion holds, a search takes time linear in it. It has no
look-around and no back-references for that. Text and pattern are UTF-8, offsets are bytes; bytes that are no UTF-8 match nothing,
not even `.`. Needs `pip install 'spanwise[segment]'`.

Rules. A part is a whole match; it says what the group `value` holds, or else the first group, or else the whole match. Matches of
one pattern do not overlap; of several patterns the one that begins first wins, then the longer one, then the one that the layout
names first. An empty match claims nothing. A block that is not repeated takes every match and says the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from spanwise.errors import LayoutError
from spanwise.layout import Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import Claims, Finder, Found, Sample, by_mark

_INSTEAD = {
    "invalid perl operator: (?": "it looks around, and no search with that is linear in time; match what stands around as well and "
    "put what is meant into a group, such as 'Answer: (?P<value>[0-9]+)'",
    "invalid escape sequence: \\": "RE2 has no such escape, and no back-reference, since no search with that is linear in time; "
    "write out what may repeat, or use delimiters",
}


@register("regex", kind="segmenter", holds=lambda text, mark: _compiled(mark).search(text.encode()) is not None)
def regex(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find what matches a regular expression; see the module."""
    parts_of = by_mark(parts, bare=False)
    patterns = [(mark, _compiled(mark)) for mark in parts_of]

    def find(sample: Sample) -> Found:
        claims, end = Claims(parts_of, again="taken"), 0
        matches = [
            (match.start(), -match.end(), number, match)
            for number, (_, pattern) in enumerate(patterns)
            for match in pattern.finditer(sample.text)
            if match.end() > match.start()
        ]
        for start, _, number, match in sorted(matches, key=itemgetter(0, 1, 2)):
            if start >= end:
                mark, pattern = patterns[number]
                end = match.end()
                inner = match.span(pattern.groupindex.get(b"value", min(pattern.groups, 1)))
                claims.take(mark, start, end, inner if inner[0] >= 0 else None)
        return claims.found()

    return find


def _compiled(mark: str) -> Any:
    """The compiled pattern of bytes."""
    try:
        import re2  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise LayoutError(
            "The segmenter 'regex' needs google-re2. Install it with: pip install 'spanwise[segment]'"
        ) from None
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(mark.encode(), options)
    except re2.error as error:
        message = error.args[0] if error.args else b""
        reason = message.decode(errors="replace") if isinstance(message, bytes) else str(message)
        more = next((f": {text}" for start, text in _INSTEAD.items() if reason.startswith(start)), "")
        raise LayoutError(f"'{mark}' is no pattern of RE2 ({reason}){more}.") from None
