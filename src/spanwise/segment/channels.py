"""The segmenter `channels`: what a chat model thinks, calls and answers, by the tokens that its family writes for that.

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
from typing import NamedTuple

from spanwise.errors import LayoutError, unknown
from spanwise.layout import EACH, Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import Claims, Finder, Found, Sample, Taker, by_mark
from spanwise.segment.signs import Places, Sign, finder_of
from spanwise.types import Fault


def _deepseek(name: str) -> bytes:
    """A sign of DeepSeek, whose bars are those of East Asian typography."""
    return f"<\uff5c{name}\uff5c>".encode()


_REASONING, _CALL, _ANSWER = "reasoning", "tool_call", "answer"
#: Opening sign -> channel and closing sign; None: only the next opening or the end of the turn closes it.
_OPENS: dict[bytes, tuple[str, bytes | None]] = {
    b"<think>": (_REASONING, b"</think>"),
    b"[THINK]": (_REASONING, b"[/THINK]"),
    b"<tool_call>": (_CALL, b"</tool_call>"),
    b"<minimax:tool_call>": (_CALL, b"</minimax:tool_call>"),
    _deepseek("tool▁call▁begin"): (_CALL, _deepseek("tool▁call▁end")),
    b"<|tool_call_begin|>": (_CALL, b"<|tool_call_end|>"),
    b"<|python_tag|>": (_CALL, None),
    b"[TOOL_CALLS]": (_CALL, None),
}
_CLOSES = {closing for _, closing in _OPENS.values() if closing is not None}
_REASONING_CLOSES = tuple(closing for channel, closing in _OPENS.values() if channel == _REASONING and closing is not None)
#: A header of Llama, `<|start_header_id|>assistant<|end_header_id|>`.
_ROLE, _ROLE_ENDS = b"<|start_header_id|>", b"<|end_header_id|>"
#: Signs that come before an opening and belong to it.
_LEADS = {_ROLE, _deepseek("tool▁calls▁begin"), b"<|tool_calls_section_begin|>"}
#: Signs that stand between channels.
_FILLS = {_ROLE_ENDS, _deepseek("tool▁calls▁end"), b"<|tool_calls_section_end|>"}
#: A header of harmony, `<|start|>assistant<|channel|>analysis<|message|>`, which may begin at any of its signs.
_MESSAGE = b"<|message|>"
_HEADER = (b"<|start|>", b"<|channel|>", _MESSAGE)
_TO, _ANALYSIS = re.compile(rb"\bto="), re.compile(rb"<\|channel\|>\s*+analysis")
#: Where a channel that never closes ends.
_NEXT = (*_OPENS, *_LEADS, *_HEADER)
#: What opens another channel inside one.
_ANOTHER = {*_OPENS, *_HEADER}
#: What a turn begins with that opens a channel at once.
_AT_ONCE = {*_NEXT} - {_ROLE}
_TURN_ENDS = {
    b"<|im_end|>",
    b"<|endoftext|>",
    b"<|eot_id|>",
    b"<|eom_id|>",
    b"<|end_of_text|>",
    b"<|end|>",
    b"<|call|>",
    b"<|return|>",
    b"</s>",
    _deepseek("end▁of▁sentence"),
    b"<|user|>",
    b"<|observation|>",
    b"[e~[",
}
_SIGNS = {*_OPENS, *_CLOSES, *_LEADS, *_FILLS, *_HEADER, *_TURN_ENDS}
#: A model may spell these; the others are a token wherever they mean anything.
_SPELLED = {sign for sign in {*_OPENS, *_CLOSES} if sign[:1] == b"<" and sign[1:2] != b"|" and b"\xef" not in sign}
_KNOWN = re.compile("|".join(re.escape(sign.decode()) for sign in _OPENS) + r"|<\|channel\|>[^<]*+")


class _Stretch(NamedTuple):
    """One channel's bytes, from `start` to where the next stretch begins, and what they say; None: cut off."""

    channel: str
    start: int
    inner: tuple[int, int] | None


def _said(text: str) -> list[str]:
    """The channels that a text opens."""
    openings = [sign.encode() for sign in dict.fromkeys(_KNOWN.findall(text))]
    channels_there = [_OPENS[sign][0] if sign in _OPENS else _of_header(sign) for sign in openings]
    return list(dict.fromkeys((*channels_there, _ANSWER)))


def _opening(mark: str) -> tuple[str, ...]:
    """What a prompt ends with that has opened a channel."""
    channel = mark.removesuffix(EACH)
    header = ("<|channel|>analysis<|message|>",) if channel == _REASONING else ()
    return (*(sign.decode() for sign, (opened, _) in _OPENS.items() if opened == channel), *header)


@register(
    "channels",
    kind="segmenter",
    says=_said,
    opens=_opening,
    holds=lambda text, mark: mark.removesuffix(EACH) in _said(text),
)
def channels(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find what a chat model thinks, calls and answers; see the module."""
    by_channel = by_mark(parts)
    for channel, own in by_channel.items():
        if channel not in (_REASONING, _CALL, _ANSWER):
            raise LayoutError(unknown("channel", own[0].mark, (_REASONING, _CALL, _ANSWER)))
    prefilled = layout.prefilled in {part.mark for part in parts}
    if prefilled and layout.prefilled != _REASONING:
        raise LayoutError(f"prefilled is '{layout.prefilled}'; of the channels a prompt can open 'reasoning' only.")
    takers = {channel: Taker(own, again="taken") for channel, own in by_channel.items()}
    signs = finder_of(_SIGNS, tokens_only=_SIGNS - _SPELLED)

    def find(sample: Sample) -> Found:
        reader = _Reader(sample.text, signs(sample), prefilled)
        stretches = reader.run()
        claims = Claims()
        claims.fault = reader.fault
        starts = [*(stretch.start for stretch in stretches), len(sample.text)]
        for stretch, stop in zip(stretches, starts[1:], strict=True):
            if stretch.channel in takers:
                claims.take(takers[stretch.channel], stretch.start, stop, stretch.inner)
        return claims.found()

    return find


class _Reader:
    """One completion, read turn by turn, from sign to sign."""

    def __init__(self, text: bytes, signs: list[Sign], prefilled: bool) -> None:
        self.text, self.signs, self.prefilled = text, signs, prefilled
        self.places = Places(signs)
        self.found: list[_Stretch] = []
        self.fault = 0
        self.loose = 0  # where the bytes begin that are in no channel so far
        self.lead: int | None = None  # where an opening begins that is not there yet
        self.end = 0  # the place of the sign that ends this turn
        self.stop = 0  # its first byte

    def run(self) -> list[_Stretch]:
        """The stretches of channels, in order."""
        ends = [place for place, sign in enumerate(self.signs) if sign.written in _TURN_ENDS]
        at = 0
        for end in (*ends, len(self.signs)):
            self.end, self.stop, self.lead = end, self._start(end), None
            if self.prefilled and self._starts_inside(at):
                at = self._prefilled(at)
            while at < self.end:
                at = self._step(at)
            self._answer(self.stop)
            at = end + 1
            self.loose = self.signs[end].end if end < len(self.signs) else self.stop
        return self.found

    def _start(self, place: int) -> int:
        return self.signs[place].start if place < len(self.signs) else len(self.text)

    def _starts_inside(self, at: int) -> bool:
        """Whether this turn goes on with what its prompt opened; one that opens a channel at once is taken at its word."""
        opens = at < self.end and self.signs[at].written in _AT_ONCE
        return not (self._blank(self._start(at)) and (opens or at == self.end))

    def _blank(self, stop: int) -> bool:
        return not self.text[self.loose : stop].strip()

    def _step(self, at: int) -> int:
        """Read what a sign begins; the place of the sign after it."""
        sign = self.signs[at]
        if sign.written in _CLOSES:
            self.fault |= Fault.ORDER
            return at + 1
        self._answer(sign.start)
        if sign.written in _OPENS:
            return self._pair(at, *_OPENS[sign.written])
        if sign.written in _HEADER:
            return self._message(at)
        if sign.written in _LEADS and self.lead is None:
            self.lead = sign.start
        if sign.written == _ROLE and at + 1 < self.end and self.signs[at + 1].written == _ROLE_ENDS:
            at += 1
        self.loose = self.signs[at].end
        return at + 1

    def _answer(self, stop: int) -> None:
        """What stands loose before a byte, if it is more than white space."""
        if not self._blank(stop):
            self._add(_ANSWER, self.loose, (self.loose, stop))
            self.loose = stop

    def _add(self, channel: str, start: int, inner: tuple[int, int] | None) -> None:
        self.found.append(_Stretch(channel, start if self.lead is None else self.lead, inner))
        self.lead = None

    def _pair(self, at: int, channel: str, closing: bytes | None) -> int:
        """A channel from its opening sign on."""
        sign = self.signs[at]
        return self._until(
            at, channel, sign.start, sign.end, (sign.written,) if closing is None else (closing,), closing is None
        )

    def _prefilled(self, at: int) -> int:
        """The reasoning that the prompt opened."""
        closed = self.end < len(self.signs) and self.signs[self.end].written == b"<|end|>"  # as harmony closes it
        return self._until(at - 1, _REASONING, self.loose, self.loose, _REASONING_CLOSES, closed)

    def _until(self, at: int, channel: str, start: int, inner: int, ends: Sequence[bytes], whole: bool) -> int:
        """A channel up to the first of some signs; `whole`: it is complete without."""
        place = self.places.after(at, *ends)
        closed = place < self.end
        if not closed and not whole:
            self.fault |= Fault.TRUNCATED
            place = self.places.after(at, *_NEXT)
        place = min(place, self.end)
        stop = self._start(place)
        if closed or whole or stop > start:  # a prefilled one may end where it starts, and is none then
            self._add(channel, start, (inner, stop) if closed or whole else None)
        self.fault |= Fault.NESTED if any(sign.written in _ANOTHER for sign in self.signs[at + 1 : place]) else 0
        closes = closed and self.signs[place].written in _CLOSES
        self.loose = self.signs[place].end if closes else stop
        return place + closes

    def _message(self, at: int) -> int:
        """A message of harmony, whose header says its channel."""
        sign = self.signs[at]
        body = self.places.after(at - 1, _MESSAGE)
        if body >= self.end:  # cut off in its header
            self.fault |= Fault.TRUNCATED
            self.loose = self.stop
            return self.end
        place = min(self.places.after(body, *_HEADER), self.end)
        channel = _of_header(self.text[sign.start : self.signs[body].start])
        closed = place == self.end < len(self.signs)
        self.fault |= Fault.TRUNCATED if channel == _REASONING and not closed else 0
        self.loose = self._start(place)
        whole = closed or channel != _REASONING
        self._add(channel, sign.start, (self.signs[body].end, self.loose) if whole else None)
        return place


def _of_header(header: bytes) -> str:
    """The channel that a header of harmony says: whoever is written to is a tool."""
    if _TO.search(header):
        return _CALL
    return _REASONING if _ANALYSIS.search(header) else _ANSWER
