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
#: Channel, opening sign, closing sign; if the closing sign is "", the next opening or the end of the turn closes the channel.
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


def _signs(*texts: str) -> set[bytes]:
    return {sign.encode() for signs in texts for sign in signs.split()}


#: Opening sign -> channel and closing sign.
_OPENS = {opening.encode(): (channel, closing.encode()) for channel, opening, closing in _PAIRS}
_CLOSES = {closing for _, closing in _OPENS.values() if closing}
_REASONING_CLOSES = tuple(closing for channel, closing in _OPENS.values() if channel == _REASONING)
#: A header of Llama, `<|start_header_id|>assistant<|end_header_id|>`.
_ROLE, _ROLE_ENDS = b"<|start_header_id|>", b"<|end_header_id|>"
#: Signs that may stand before an opening sign and belong to the same channel.
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
    """Find the reasoning, the tool calls and the answers of a chat model; see the module."""
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
        self.loose = 0  # the first byte that no channel has claimed yet
        self.lead: int | None = None  # the first byte of the signs before the next opening
        self.end = 0  # the index of the sign that ends this turn
        self.last: dict[bytes, int] = {}  # the last index of each sign in the turn

    def run(self) -> list[tuple[str, int, tuple[int, int] | None]]:
        """Return each channel in order: its name, its first byte, and the bytes of its content (None if cut off)."""
        ends = [place for place, sign in enumerate(self.signs) if sign.written in _TURN_ENDS]
        first = 0
        for place in (*ends, len(self.signs) - 1):
            end, self.end, self.lead = self.signs[place], place, None
            self.last = {self.signs[index].written: index for index in range(first, place)}
            sign = self.signs[first]
            is_blank = not self.text[self.loose : sign.start].strip()
            if self.prefilled and not (is_blank and (first == place or sign.written in _AT_ONCE)):
                ends_message = end.written == _MESSAGE_ENDS  # harmony's closing sign
                first = self._until(first - 1, _REASONING, self.loose, self.loose, _REASONING_CLOSES, ends_message)
            while first < self.end:
                first = self._step(first)
            self._answer(end.start)
            first, self.loose = self.end + 1, end.end
        return self.stretches

    def _step(self, sign_index: int) -> int:
        """Read the part that a sign begins, and return the place of the next sign."""
        sign = self.signs[sign_index]
        if sign.written in _CLOSES:
            self.fault |= Fault.ORDER
            return sign_index + 1
        self._answer(sign.start)
        if sign.written in _OPENS:
            channel, closing = _OPENS[sign.written]
            return self._until(sign_index, channel, sign.start, sign.end, (closing or sign.written,), not closing)
        if sign.written in _HEADER:
            return self._message(sign_index)
        if sign.written in _LEADS and self.lead is None:
            self.lead = sign.start
        if sign.written == _ROLE and sign_index + 1 < self.end and self.signs[sign_index + 1].written == _ROLE_ENDS:
            sign_index += 1
        self.loose = self.signs[sign_index].end
        return sign_index + 1

    def _answer(self, stop: int) -> None:
        """Add the loose text before a byte as an answer, if it is more than white space."""
        if self.text[self.loose : stop].strip():
            self._add(_ANSWER, self.loose, (self.loose, stop))
            self.loose = stop

    def _add(self, channel: str, start: int, inner: tuple[int, int] | None) -> None:
        self.stretches.append((channel, start if self.lead is None else self.lead, inner))
        self.lead = None

    def _until(self, at: int, channel: str, start: int, inner: int, ends: Sequence[bytes], complete: bool) -> int:
        """Read a channel up to the first of some signs; with `whole` it is complete without one."""
        complete = complete or any(self.last.get(end, at) > at for end in ends)
        self.fault |= 0 if complete else Fault.TRUNCATED
        end_at = first_of(self.signs, range(at + 1, self.end), ends if complete else _NEXT)
        sign = self.signs[end_at]
        if complete or sign.start > start:  # a prefilled channel without bytes does not count
            self._add(channel, start, (inner, sign.start) if complete else None)
        self.fault |= (
            Fault.NESTED if any(sign_inside.written in _ANOTHER for sign_inside in self.signs[at + 1 : end_at]) else 0
        )
        closes = sign.written in _CLOSES
        self.loose = sign.end if closes else sign.start
        return end_at + closes

    def _message(self, sign_index: int) -> int:
        """Read a message of harmony, whose header names its channel."""
        sign, end = self.signs[sign_index], self.signs[self.end]
        body_index = first_of(self.signs, range(sign_index, self.end), (_MESSAGE,))
        if body_index == self.end:  # the completion ends inside the header
            self.fault |= Fault.TRUNCATED
            self.loose = end.start
            return self.end
        next_index = first_of(self.signs, range(body_index + 1, self.end), _HEADER)
        channel = _of_header(self.text[sign.start : self.signs[body_index].start])
        is_complete = channel != _REASONING or (next_index == self.end and end.written != b"")
        self.fault |= 0 if is_complete else Fault.TRUNCATED
        self.loose = self.signs[next_index].start
        self._add(channel, sign.start, (self.signs[body_index].end, self.loose) if is_complete else None)
        return next_index


def _of_header(header: bytes) -> str:
    """Return the channel that a header of harmony names; a message with a recipient calls a tool."""
    if _TO.search(header):
        return _CALL
    return _REASONING if _ANALYSIS.search(header) else _ANSWER
