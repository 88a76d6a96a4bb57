"""The segmenter `channels`: find a chat model's reasoning, tool calls and answers.

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
from spanwise.segment.claims import Finder, Found, Sample, assign, group_by_mark
from spanwise.segment.delimiters import Sign, index_of_first, sign_finder
from spanwise.types import Fault

_REASONING, _CALL, _ANSWER = "reasoning", "tool_call", "answer"
#: Channels with their opening and closing signs. Without a closing sign, the next opening sign or the turn's
#: end closes a channel.
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
    return {sign.encode() for text in texts for sign in text.split()}


#: Maps an opening sign, such as `<think>`, to its channel and closing sign.
_OPENS = {opening.encode(): (channel, closing.encode()) for channel, opening, closing in _PAIRS}
_CLOSES = {closing for _, closing in _OPENS.values() if closing}
_REASONING_CLOSES = tuple(closing for channel, closing in _OPENS.values() if channel == _REASONING)
#: Llama's special tokens before and after a role, as in `<|start_header_id|>assistant<|end_header_id|>`.
_ROLE, _ROLE_ENDS = b"<|start_header_id|>", b"<|end_header_id|>"
#: Special tokens before a channel (reasoning, tool call or answer). They belong to the channel that opens after them.
_LEADS = {_ROLE, *_signs("<\uff5ctool▁calls▁begin\uff5c> <|tool_calls_section_begin|>")}
#: Special tokens that end a header or a section, and neither open nor close a channel.
_FILLS = {_ROLE_ENDS, *_signs("<\uff5ctool▁calls▁end\uff5c> <|tool_calls_section_end|>")}
#: Special tokens that may begin a harmony header, such as `<|start|>assistant<|channel|>analysis<|message|>`.
_MESSAGE = b"<|message|>"
_HEADER = (b"<|start|>", b"<|channel|>", _MESSAGE)
_TO, _ANALYSIS = re.compile(rb"\bto="), re.compile(rb"<\|channel\|>\s*+analysis")
#: Special tokens that open a channel. Inside another channel they are a fault.
_ANY_OPENING = {*_OPENS, *_HEADER}
#: Special tokens that end a channel that has no closing sign.
_NEXT = _ANY_OPENING | _LEADS
#: Special tokens. If a turn begins with one, the turn does not continue the reasoning that the prompt began.
_AT_ONCE = _NEXT - {_ROLE}
_MESSAGE_ENDS = b"<|end|>"
_TURN_ENDS = _signs(
    "<|im_end|> <|endoftext|> <|eot_id|> <|eom_id|> <|end_of_text|> <|end|> <|call|> <|return|> </s>",
    "<\uff5cend▁of▁sentence\uff5c> <|user|> <|observation|> [e~[",
)
_SIGNS = {*_OPENS, *_CLOSES, *_LEADS, *_FILLS, *_HEADER, *_TURN_ENDS}
#: Signs, such as `<think>`, that a model may spell in several tokens.
_SPELLED = {sign for sign in {*_OPENS, *_CLOSES} if sign[:1] == b"<" and sign[1:2] != b"|" and b"\xef" not in sign}
_OPENING = re.compile("|".join(re.escape(sign.decode()) for sign in _OPENS) + r"|<\|channel\|>[^<]*+")


def _list_channels(text: str) -> list[str]:
    """List the channels (reasoning, tool call) that a text opens. The answer, which has no opening sign, comes last."""
    opening_signs = [sign.encode() for sign in dict.fromkeys(_OPENING.findall(text))]
    opened_channels = [_OPENS[sign][0] if sign in _OPENS else _channel_of_header(sign) for sign in opening_signs]
    return list(dict.fromkeys((*opened_channels, _ANSWER)))


def _prompt_endings(mark: str) -> tuple[str, ...]:
    """Return the signs, such as `<think>`, that open a channel when they end the prompt."""
    channel = mark.removesuffix(EACH)
    opening_signs = [opening_sign for name, opening_sign, _ in _PAIRS if name == channel]
    return (*opening_signs, "<|channel|>analysis<|message|>") if channel == _REASONING else tuple(opening_signs)


@register(
    "channels",
    kind="segmenter",
    says=_list_channels,
    opens=_prompt_endings,
    holds=lambda text, mark: mark.removesuffix(EACH) in _list_channels(text),
)
def channels(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find a chat model's reasoning, tool calls and answers. The rules are at the top of this module."""
    parts_of_mark = group_by_mark(parts)
    for channel, channel_parts in parts_of_mark.items():
        if channel not in (_REASONING, _CALL, _ANSWER):
            raise LayoutError(unknown("channel", channel_parts[0].mark, (_REASONING, _CALL, _ANSWER)))
    has_prefilled_part = layout.prefilled in {part.mark for part in parts}
    if has_prefilled_part and str(layout.prefilled).removesuffix(EACH) != _REASONING:
        raise LayoutError(f"prefilled is '{layout.prefilled}', but a prompt can open only 'reasoning'. Remove 'prefilled'.")
    find_signs = sign_finder(_SIGNS, tokens_only=_SIGNS - _SPELLED)

    def find(sample: Sample) -> Found:
        channel_reader = _Reader(sample.text, find_signs(sample), has_prefilled_part)
        channel_reader.run()
        next_channel_starts = [start for _, start, _ in channel_reader.channels[1:]]
        channel_stops = [*next_channel_starts, len(sample.text)]
        channel_matches = [
            (channel, start, stop, content_span)
            for (channel, start, content_span), stop in zip(channel_reader.channels, channel_stops, strict=False)
            if channel in parts_of_mark
        ]
        return assign(channel_matches, parts_of_mark, surplus="keep", fault=channel_reader.fault)

    return find


class _Reader:
    """Reads one completion turn by turn, from special token to special token. Collects its channels and faults."""

    def __init__(self, text: bytes, signs: list[Sign], prefilled: bool) -> None:
        self.text, self.signs, self.prefilled = text, signs, prefilled
        #: Each channel's name, its first byte, and its content's bytes (None if cut off).
        self.channels: list[tuple[str, int, tuple[int, int] | None]] = []
        self.fault = 0
        self.unclaimed = 0  # The first byte that is not yet assigned to a channel, such as reasoning.
        self.lead_start: int | None = None  # Where the special tokens in front of the next channel start, if there are any.
        self.turn_end = 0  # The index in `signs` of the special token that ends the current turn.
        self.last_index: dict[bytes, int] = {}  # Maps each special token to its last index in this turn.

    def run(self) -> None:
        """Read all turns of the completion: list their channels in `channels`, and collect the faults in `fault`."""
        turn_end_indices = [index for index, sign in enumerate(self.signs) if sign.written in _TURN_ENDS]
        sign_index = 0
        for turn_end in (*turn_end_indices, len(self.signs) - 1):
            self.turn_end = turn_end
            self.lead_start = None
            end_sign = self.signs[turn_end]
            self.last_index = {self.signs[i].written: i for i in range(sign_index, turn_end)}
            next_sign = self.signs[sign_index]
            is_blank = not self.text[self.unclaimed : next_sign.start].strip()
            if self.prefilled and not (is_blank and (sign_index == turn_end or next_sign.written in _AT_ONCE)):
                start = self.unclaimed
                is_complete = end_sign.written == _MESSAGE_ENDS
                sign_index = self._read_channel(sign_index - 1, _REASONING, start, start, _REASONING_CLOSES, is_complete)
            while sign_index < turn_end:
                sign_index = self._read_sign(sign_index)
            self._add_answer(end_sign.start)
            self.unclaimed = end_sign.end
            sign_index = turn_end + 1

    def _read_sign(self, index: int) -> int:
        """Read one sign (special token), and the channel that it may open. Return the index to read next."""
        sign = self.signs[index]
        if sign.written in _CLOSES:
            self.fault |= Fault.ORDER
            return index + 1
        self._add_answer(sign.start)
        if sign.written in _OPENS:
            channel, end_sign = _OPENS[sign.written]
            return self._read_channel(index, channel, sign.start, sign.end, (end_sign or sign.written,), not end_sign)
        if sign.written in _HEADER:
            return self._read_message(index)
        if sign.written in _LEADS and self.lead_start is None:
            self.lead_start = sign.start
        if sign.written == _ROLE and index + 1 < self.turn_end and self.signs[index + 1].written == _ROLE_ENDS:
            index += 1
        self.unclaimed = self.signs[index].end
        return index + 1

    def _add_answer(self, stop: int) -> None:
        """Add the text that belongs to no channel as an answer. Skip mere white space."""
        if self.text[self.unclaimed : stop].strip():
            self._add(_ANSWER, self.unclaimed, (self.unclaimed, stop))
            self.unclaimed = stop

    def _add(self, channel: str, start: int, inner: tuple[int, int] | None) -> None:
        self.channels.append((channel, start if self.lead_start is None else self.lead_start, inner))
        self.lead_start = None

    def _read_channel(
        self, index: int, channel: str, start: int, inner_start: int, closings: Sequence[bytes], is_complete: bool
    ) -> int:
        """Read a channel up to its first closing sign. Without one, read up to the next opening sign."""
        is_complete = is_complete or any(self.last_index.get(closing_sign, index) > index for closing_sign in closings)
        self.fault |= 0 if is_complete else Fault.TRUNCATED
        end_signs = closings if is_complete else _NEXT
        end_index = index_of_first(self.signs, range(index + 1, self.turn_end), end_signs)
        end_sign = self.signs[end_index]
        if is_complete or end_sign.start > start:  # skip a channel that the prompt opened and that is empty
            self._add(channel, start, (inner_start, end_sign.start) if is_complete else None)
        if any(sign.written in _ANY_OPENING for sign in self.signs[index + 1 : end_index]):
            self.fault |= Fault.NESTED
        is_closing_sign = end_sign.written in _CLOSES
        self.unclaimed = end_sign.end if is_closing_sign else end_sign.start
        return end_index + is_closing_sign

    def _read_message(self, index: int) -> int:
        """Read a message in harmony, the message format of gpt-oss."""
        sign = self.signs[index]
        end_sign = self.signs[self.turn_end]
        body_index = index_of_first(self.signs, range(index, self.turn_end), (_MESSAGE,))
        if body_index == self.turn_end:  # the header breaks off before `<|message|>`
            self.fault |= Fault.TRUNCATED
            self.unclaimed = end_sign.start
            return self.turn_end
        next_header_index = index_of_first(self.signs, range(body_index + 1, self.turn_end), _HEADER)
        channel = _channel_of_header(self.text[sign.start : self.signs[body_index].start])
        ends_with_turn = next_header_index == self.turn_end and end_sign.written != b""
        is_complete = channel != _REASONING or ends_with_turn
        self.fault |= 0 if is_complete else Fault.TRUNCATED
        self.unclaimed = self.signs[next_header_index].start
        self._add(channel, sign.start, (self.signs[body_index].end, self.unclaimed) if is_complete else None)
        return next_header_index


def _channel_of_header(header: bytes) -> str:
    """Return the channel that a harmony (gpt-oss) header names. A header with a recipient, `to=`, is a tool call."""
    if _TO.search(header):
        return _CALL
    return _REASONING if _ANALYSIS.search(header) else _ANSWER
