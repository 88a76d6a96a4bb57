"""Read the entries of a JSON array one after the other, with only a piece of its text in memory.

The library ijson would do this, too, but it refuses NaN, which Python and pandas write, and whole numbers beyond 64 bits.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from io import BufferedReader
from typing import Any

#: The bytes of text that are read at once; for an entry that is longer, as many again as are in memory.
_PIECE = 2**20
#: At most so many characters before the end of a text, an error may be due to the end: a name such as -Infinity, or an escape.
_CUT_OFF = 16
_SPACE = re.compile(r"[ \t\n\r]*")


def array_entries(stream: BufferedReader, count: Callable[[int], None]) -> Iterator[Any]:
    """Yield the entries of the JSON array in a stream; `count` gets the bytes of each reading, a ValueError says what is wrong."""
    text = _Text(stream, count)
    yield from text.entries()
    text.end()


def member_entries(stream: BufferedReader, name: str, count: Callable[[int], None]) -> Iterator[Any]:
    """Yield the entries of the array that a JSON object holds under a name; other members are skipped."""
    text = _Text(stream, count)
    text.require("{")
    while not text.skip("}"):
        member_name = text.parse_entry()
        text.require(":")
        if member_name == name and text.next_character() == "[":
            yield from text.entries()
        else:
            text.parse_entry()
        if text.next_character() != "}":
            text.require(",")
    text.end()


class _Text:
    """The text of a stream from the next entry on."""

    def __init__(self, stream: BufferedReader, count: Callable[[int], None]) -> None:
        self.stream, self.count = stream, count
        self.decoder = codecs.getincrementaldecoder(json.detect_encoding(stream.peek(4)[:4]))("surrogatepass")
        self.parse = json.JSONDecoder().raw_decode
        self.text, self.position = "", 0

    def read_more(self) -> bool:
        """Drop the text before the position and append as much as is left, or a piece; return whether there was more."""
        self.text, self.position = self.text[self.position :], 0
        new_text, is_last = "", False
        while not new_text and not is_last:
            new_bytes = self.stream.read(max(len(self.text), _PIECE))
            self.count(len(new_bytes))
            is_last = not new_bytes
            new_text = self.decoder.decode(new_bytes, final=is_last)
        self.text += new_text
        return bool(new_text)

    def next_character(self) -> str:
        """Skip white space and return the next character, empty at the end of the stream."""
        while True:
            space = _SPACE.match(self.text, self.position)
            self.position = self.position if space is None else space.end()
            if self.position < len(self.text):
                return self.text[self.position]
            if not self.read_more():
                return ""

    def skip(self, character: str) -> bool:
        """Return whether the next character is this one, and skip it then."""
        is_next = self.next_character() == character
        self.position += is_next
        return is_next

    def require(self, character: str) -> None:
        """Skip the next character, which must be this one."""
        if not self.skip(character):
            raise ValueError(f"Expecting {character!r}" if self.next_character() else "it ends too early")

    def end(self) -> None:
        """Refuse text after the end."""
        if self.next_character():
            raise ValueError("there is more after the end")

    def entries(self) -> Iterator[Any]:
        """Yield the entries of the array that comes next."""
        self.require("[")
        if not self.skip("]"):
            yield self.parse_entry()
            while not self.skip("]"):
                self.require(",")
                yield self.parse_entry()

    def parse_entry(self) -> Any:
        """Parse the next entry, and read more text while it is not complete."""
        self.next_character()
        while True:
            start = self.position
            try:
                entry, end = self.parse(self.text, start)
            except json.JSONDecodeError as error:
                can_go_on = error.msg.startswith("Unterminated") or error.pos > len(self.text) - _CUT_OFF
                if not (can_go_on and self.read_more()):
                    raise ValueError(error.msg) from None
                continue
            # A number near the end of the text may go on; every other entry shows its own end.
            if isinstance(entry, int | float) and end > len(self.text) - _CUT_OFF and self.read_more():
                continue
            self.position += end - start
            return entry
