"""Read the entries of a JSON array one by one, to save memory.

The library ijson would do this, too, but it refuses NaN, which Python and pandas write, and whole numbers beyond 64 bits.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from io import BufferedReader
from typing import Any

#: The smallest number of bytes to read at once.
_PIECE = 2**20
#: A parse error this near the end of the text (in characters) may only mean that the text is cut off.
_CUT_OFF = 16
_SPACE = re.compile(r"[ \t\n\r]*")


def array_entries(stream: BufferedReader, count: Callable[[int], None]) -> Iterator[Any]:
    """Yield the entries of the JSON array in a stream. After each read, call `count` with the number of bytes."""
    unread_text = _Text(stream, count)
    yield from unread_text.entries()
    unread_text.end()


def member_entries(stream: BufferedReader, name: str, count: Callable[[int], None]) -> Iterator[Any]:
    """Yield the entries of one array in a JSON object. Skip the object's other members."""
    unread_text = _Text(stream, count)
    unread_text.require("{")
    while not unread_text.skip("}"):
        member_name = unread_text.parse_entry()
        unread_text.require(":")
        if member_name == name and unread_text.next_character() == "[":
            yield from unread_text.entries()
        else:
            unread_text.parse_entry()
        if unread_text.next_character() != "}":
            unread_text.require(",")
    unread_text.end()


class _Text:
    """The text of a stream that has not been parsed yet."""

    def __init__(self, stream: BufferedReader, count: Callable[[int], None]) -> None:
        self.stream, self.count = stream, count
        self.decoder = codecs.getincrementaldecoder(json.detect_encoding(stream.peek(4)[:4]))("surrogatepass")
        self.parse = json.JSONDecoder().raw_decode
        self.text, self.position = "", 0

    def read_more(self) -> bool:
        """Drop the parsed text, and read more from the stream. Return False at the end of the stream."""
        self.text, self.position = self.text[self.position :], 0
        while True:
            new_bytes = self.stream.read(max(len(self.text), _PIECE))
            self.count(len(new_bytes))
            new_text = self.decoder.decode(new_bytes, final=not new_bytes)
            if new_text or not new_bytes:
                break
        self.text += new_text
        return bool(new_text)

    def next_character(self) -> str:
        """Skip white space, and return the next character. It is empty at the end."""
        while True:
            space_match = _SPACE.match(self.text, self.position)
            self.position = self.position if space_match is None else space_match.end()
            if self.position < len(self.text):
                return self.text[self.position]
            if not self.read_more():
                return ""

    def skip(self, character: str) -> bool:
        """Skip the next character if it is `character`. Return whether it was."""
        is_skipped = self.next_character() == character
        self.position += is_skipped
        return is_skipped

    def require(self, character: str) -> None:
        """Skip the next character, which must be `character`."""
        if not self.skip(character):
            raise ValueError(f"Expecting {character!r}" if self.next_character() else "it ends too early")

    def end(self) -> None:
        """Refuse text after the end of the JSON value."""
        if self.next_character():
            raise ValueError("more text follows the end of the JSON")

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
            entry_start = self.position
            try:
                parsed_entry, entry_end = self.parse(self.text, entry_start)
            except json.JSONDecodeError as error:
                may_be_cut_off = error.msg.startswith("Unterminated") or error.pos > len(self.text) - _CUT_OFF
                if not (may_be_cut_off and self.read_more()):
                    raise ValueError(error.msg) from None
                continue
            # The last digits of a number may not have been read yet.
            if isinstance(parsed_entry, int | float) and entry_end > len(self.text) - _CUT_OFF and self.read_more():
                continue
            self.position += entry_end - entry_start
            return parsed_entry
