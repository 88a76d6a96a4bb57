"""The segmenter `channels`: finds what a chat model thinks, calls and answers, by the special tokens of its family.

Marks are `reasoning`, `tool_call` and `answer`. One table has the signs of Qwen, DeepSeek, GLM, Kimi and MiniMax (`<think>`,
`<tool_call>` and their like), Llama 3 (`<|python_tag|>`), gpt-oss (harmony: a header with `<|channel|>`) and Mistral (`[THINK]`,
`[TOOL_CALLS]`). The package `renderers` parses the same families message by message, each by a class of its own that is chosen
by a model's name; credit needs the place of every byte in whatever was sampled, cut off or malformed, from the ids alone, so the
table is ours.

Rules. What is in no other channel is the answer; white space and ends of turns are none and belong to what stands before them, so
the end of the turn belongs to the last block present. A header and what wraps calls belong to what they open in their turn. Inside
a channel that closes all is text (NESTED if it opens another one), closing signs of others too; one that does not close before its
turn ends, ends at the next opening, and says nothing (TRUNCATED). A message of harmony ends at the next header, whatever it holds.
What only the end of the turn closes (an answer, a call of Llama, Mistral or gpt-oss) says what it holds even if that token is not
there: some engines leave it out. A closing sign outside of channels is text of the answer (ORDER). A channel says its last complete
stretch, without its signs. `prefilled="reasoning"`: every turn starts inside it that is not empty and opens no channel at
once; one whose first byte is a header of Llama and that does not close the reasoning has none (TRUNCATED).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from spanwise.errors import LayoutError, unknown
from spanwise.layout import EACH, Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import Finder, Found, Sample, by_mark, taken
from spanwise.segment.delimiters import Sign, finder_of, first_of
from spanwise.types import Fault

_REASONING, _CALL, _ANSWER = "reasoning", "tool_call", "answer"
#: Channel, opening sign and closing sign; "": the next opening or the end of the turn closes it.
#: DeepSeek's signs have the bars of East Asian typography, U+FF5C.
_PAIRS = (
    (_REASONING, "<think>", "</think>"),
    (_REASONING, "[THINK]", "[/THINK]"),
    (_CALL, "<tool_call>", "</tool_call>"),
    (_CALL, "<minimax:tool_call>", "</minimax:tool_call>"),
    (_CALL, "<\uff5ctool▁call▁begin\uff5c>", "<\uff5ctool▁call▁end\uff5c>"),
    (_CALL, "<|tool_call_begin|>", "<|tool_call_end|>"),
    (_CALL, "<|python_tag|>", ""),
    (_CALL, "[TOOL_CALLS]", ""),
)


def _signs(*written: str) -> set[bytes]:
    return {sign.encode() for signs in written for sign in signs.split()}


#: Opening sign -> channel and closing sign.
_OPENS = {opening.encode(): (channel, closing.encode()) for channel, opening, closing in _PAIRS}
_CLOSES = {closing for _, closing in _OPENS.values() if closing}
_REASONING_CLOSES = tuple(closing for channel, closing in _OPENS.values() if channel == _REASONING)
#: A header of Llama, `<|start_header_id|>assistant<|end_header_id|>`.
_ROLE, _ROLE_ENDS = b"<|start_header_id|>", b"<|end_header_id|>"
#: Signs that come before an opening and belong to it.
_LEADS = {_ROLE, *_signs("<\uff5ctool▁calls▁begin\uff5c> <|tool_calls_section_begin|>")}
#: Signs that stand between channels.
_FILLS = {_ROLE_ENDS, *_signs("<\uff5ctool▁calls▁end\uff5c> <|tool_calls_section_end|>")}
#: A header of harmony, `<|start|>assistant<|channel|>analysis<|message|>`, which may begin at any of its signs.
_MESSAGE = b"<|message|>"
_HEADER = (b"<|start|>", b"<|channel|>", _MESSAGE)
_TO, _ANALYSIS = re.compile(rb"\bto="), re.compile(rb"<\|channel\|>\s*+analysis")
#: Signs that end a channel that never closes.
_NEXT = {*_OPENS, *_LEADS, *_HEADER}
#: Signs that open another channel inside a channel.
_ANOTHER = {*_OPENS, *_HEADER}
#: Signs that open a channel at once if a turn begins with them.
_AT_ONCE = _NEXT - {_ROLE}
_MESSAGE_ENDS = b"<|end|>"
_TURN_ENDS = _signs(
    "<|im_end|> <|endoftext|> <|eot_id|> <|eom_id|> <|end_of_text|> <|end|> <|call|> <|return|> </s>",
    "<\uff5cend▁of▁sentence\uff5c> <|user|> <|observation|> [e~[",
)
_SIGNS = {*_OPENS, *_CLOSES, *_LEADS, *_FILLS, *_HEADER, *_TURN_ENDS}
#: Signs that a model may also spell; the others count only as tokens.
_SPELLED = {sign for sign in {*_OPENS, *_CLOSES} if sign[:1] == b"<" and sign[1:2] != b"|" and b"\xef" not in sign}
_KNOWN = re.compile("|".join(re.escape(sign.decode()) for sign in _OPENS) + r"|<\|channel\|>[^<]*+")


def _said(text: str) -> list[str]:
    """Return the channels that a text opens."""
    openings = [sign.encode() for sign in dict.fromkeys(_KNOWN.findall(text))]
    channels_there = [_OPENS[sign][0] if sign in _OPENS else _of_header(sign) for sign in openings]
    return list(dict.fromkeys((*channels_there, _ANSWER)))


def _opening(mark: str) -> tuple[str, ...]:
    """Return the sign at the end of a prompt that has opened a channel."""
    channel = mark.removesuffix(EACH)
    header = ("<|channel|>analysis<|message|>",) if channel == _REASONING else ()
    return (*(opening for name, opening, _ in _PAIRS if name == channel), *header)


@register(
    "channels",
    kind="segmenter",
    says=_said,
    opens=_opening,
    holds=lambda text, mark: mark.removesuffix(EACH) in _said(text),
)
def channels(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find what a chat model thinks, calls and answers; see the module."""
    parts_of = by_mark(parts)
    for channel, marked in parts_of.items():
        if channel not in (_REASONING, _CALL, _ANSWER):
            raise LayoutError(unknown("channel", marked[0].mark, (_REASONING, _CALL, _ANSWER)))
    prefilled = layout.prefilled in {part.mark for part in parts}
    if prefilled and layout.prefilled != _REASONING:
        raise LayoutError(f"prefilled is '{layout.prefilled}'; of the channels a prompt can open 'reasoning' only.")
    find_signs = finder_of(_SIGNS, tokens_only=_SIGNS - _SPELLED)

    def find(sample: Sample) -> Found:
        reader = _Reader(sample.text, find_signs(sample), prefilled)
        stretches = reader.run()
        stops = [*(start for _, start, _ in stretches[1:]), len(sample.text)]
        matches = ((*stretch[:2], stop, stretch[2]) for stretch, stop in zip(stretches, stops, strict=False))
        return taken([match for match in matches if match[0] in parts_of], parts_of, again="taken", fault=reader.fault)

    return find


class _Reader:
    """Reads one completion turn by turn, from sign to sign."""

    def __init__(self, text: bytes, signs: list[Sign], prefilled: bool) -> None:
        self.text, self.signs, self.prefilled = text, signs, prefilled
        self.stretches: list[tuple[str, int, tuple[int, int] | None]] = []
        self.fault = 0
        self.loose = 0  # the first byte that is in no channel so far
        self.lead: int | None = None  # the first byte of a lead, whose opening comes next
        self.end = 0  # the place of the sign that ends this turn
        self.last: dict[bytes, int] = {}  # the last place of each sign in the turn

    def run(self) -> list[tuple[str, int, tuple[int, int] | None]]:
        """Return each channel in order: its name, its first byte, and the bytes of its content (None if cut off)."""
        ends = [place for place, sign in enumerate(self.signs) if sign.written in _TURN_ENDS]
        at = 0
        for place in (*ends, len(self.signs) - 1):
            end, self.end, self.lead = self.signs[place], place, None
            self.last = {self.signs[index].written: index for index in range(at, place)}
            sign = self.signs[at]
            empty = not self.text[self.loose : sign.start].strip()
            if self.prefilled and not (empty and (at == place or sign.written in _AT_ONCE)):
                whole = end.written == _MESSAGE_ENDS  # harmony's closing sign
                at = self._until(at - 1, _REASONING, self.loose, self.loose, _REASONING_CLOSES, whole)
            while at < self.end:
                at = self._step(at)
            self._answer(end.start)
            at, self.loose = self.end + 1, end.end
        return self.stretches

    def _step(self, at: int) -> int:
        """Read the part that a sign begins, and return the place of the next sign."""
        sign = self.signs[at]
        if sign.written in _CLOSES:
            self.fault |= Fault.ORDER
            return at + 1
        self._answer(sign.start)
        if sign.written in _OPENS:
            channel, closing = _OPENS[sign.written]
            return self._until(at, channel, sign.start, sign.end, (closing or sign.written,), not closing)
        if sign.written in _HEADER:
            return self._message(at)
        if sign.written in _LEADS and self.lead is None:
            self.lead = sign.start
        if sign.written == _ROLE and at + 1 < self.end and self.signs[at + 1].written == _ROLE_ENDS:
            at += 1
        self.loose = self.signs[at].end
        return at + 1

    def _answer(self, stop: int) -> None:
        """Add the loose text before a byte as an answer, if it is more than white space."""
        if self.text[self.loose : stop].strip():
            self._add(_ANSWER, self.loose, (self.loose, stop))
            self.loose = stop

    def _add(self, channel: str, start: int, inner: tuple[int, int] | None) -> None:
        self.stretches.append((channel, start if self.lead is None else self.lead, inner))
        self.lead = None

    def _until(self, at: int, channel: str, start: int, inner: int, ends: Sequence[bytes], whole: bool) -> int:
        """Read a channel up to the first of some signs; with `whole` it is complete without one."""
        whole = whole or any(self.last.get(end, at) > at for end in ends)
        self.fault |= 0 if whole else Fault.TRUNCATED
        place = first_of(self.signs, range(at + 1, self.end), ends if whole else _NEXT)
        sign = self.signs[place]
        if whole or sign.start > start:  # a prefilled channel without bytes does not count
            self._add(channel, start, (inner, sign.start) if whole else None)
        self.fault |= Fault.NESTED if any(other.written in _ANOTHER for other in self.signs[at + 1 : place]) else 0
        closes = sign.written in _CLOSES
        self.loose = sign.end if closes else sign.start
        return place + closes

    def _message(self, at: int) -> int:
        """Read a message of harmony, whose header names its channel."""
        sign, end = self.signs[at], self.signs[self.end]
        body = first_of(self.signs, range(at, self.end), (_MESSAGE,))
        if body == self.end:  # cut off in its header
            self.fault |= Fault.TRUNCATED
            self.loose = end.start
            return self.end
        place = first_of(self.signs, range(body + 1, self.end), _HEADER)
        channel = _of_header(self.text[sign.start : self.signs[body].start])
        whole = channel != _REASONING or (place == self.end and end.written != b"")
        self.fault |= 0 if whole else Fault.TRUNCATED
        self.loose = self.signs[place].start
        self._add(channel, sign.start, (self.signs[body].end, self.loose) if whole else None)
        return place


def _of_header(header: bytes) -> str:
    """Return the channel that a header of harmony names; a message with a recipient calls a tool."""
    if _TO.search(header):
        return _CALL
    return _REASONING if _ANALYSIS.search(header) else _ANSWER
