"""Oracles of the segmenters of text, signs and tokens: byte by byte, written from each segmenter's own rules.

An oracle takes a `Case` and returns its matches in order, (mark, start, stop, text), and faults; `claimed` hands them to the
parts of a layout. A mark None is all parts of that segmenter. No code is shared with `spanwise.segment`.
"""

import math
import re
from dataclasses import dataclass

from spanwise.types import Fault

SPACE = b" \t\n\r\x0b\x0c"
DIGITS = b"0123456789"
WORD = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"


@dataclass
class Case:
    """One completion: the bytes of its trainable tokens, which of them are added ones, all added pieces, and what else is read."""

    layout: object
    tokens: list
    added: list
    specials: set
    logp: list
    columns: list

    def __post_init__(self):
        self.data = b"".join(self.tokens)

    def marks(self, name):
        return list(dict.fromkeys(part.mark for part in self.layout.parts if part.segmenter == name))


def claimed(case, name):
    """Return claims (part, start, stop, text) and faults; the parts of one mark take its matches in turn."""
    matches, fault = ORACLES[name](case)
    claims, count = [], {}
    end = spoken(case.data)
    for mark, start, stop, text in matches:
        at = -1 if text is None else case.data.rfind(text, start, stop)
        if at >= 0 and at + len(text) > end:  # no part says the tokens that end a turn
            text = case.data[at:end] if at < end else b""
        parts = [p for p in case.layout.parts if p.segmenter == name and (mark is None or p.mark in (mark, mark + "[*]"))]
        number = count[mark] = count.get(mark, -1) + 1
        if number < len(parts) or (parts and parts[-1].index is None):
            claims.append((parts[min(number, len(parts) - 1)], start, stop, text))
        elif parts:
            fault |= Fault.MORE
    return claims, int(fault)


def ends_at(data, at):
    """Return the byte after the end token that begins at a byte, or None if none does."""
    for sign in (b"</s>", b"<eos>", b"<end_of_turn>"):
        if data.startswith(sign, at):
            return at + len(sign)
    for opening, closing in ((b"<|", b"|>"), (b"<\xef\xbd\x9c", b"\xef\xbd\x9c>")):
        stop = data.find(closing, at + len(opening) + 1)
        name, forbidden = data[at + len(opening) : stop], b"<>\n|" if opening == b"<|" else b"<>\n"
        if data.startswith(opening, at) and stop > 0 and len(name) <= 64 and not set(name) & set(forbidden):
            return stop + len(closing)
    return None


def spoken(data):
    """Return where the end tokens begin that close a completion, one behind the other."""
    while True:
        at = data.rfind(b"<")
        is_struck_out = data.endswith(b"</s>") and data.count(b"<s>") >= data.count(b"</s>")
        if at < 0 or is_struck_out or ends_at(data, at) != len(data):
            return len(data)
        data = data[:at]


def lined(data):
    """Return the bytes with end tokens as white space that ends a line; `</s>` is none where there is a `<s>`."""
    at = 0
    while at < len(data):
        stop = ends_at(data, at)
        if stop is not None and not (data.startswith(b"</s>", at) and b"<s>" in data):
            data = data[:at] + b" " * (stop - at - 1) + b"\n" + data[stop:]
        at += 1
    return data


def units(case, starts):
    """Return the stretches between starts that say something: more than white space and end tokens."""
    matches = []
    data, end = lined(case.data), spoken(case.data)
    for start, stop in zip(starts, [*starts[1:], len(data)], strict=False):
        said = data[start : min(stop, end)]
        if said.strip(SPACE):
            first = start + len(said) - len(said.lstrip(SPACE))
            matches.append((None, start, stop, case.data[first : start + len(said.rstrip(SPACE))]))
    return matches, 0


def lines_of(data):
    """Return the start of each line, and the line with its line feed."""
    start, lines = 0, []
    for at, byte in enumerate(data):
        if byte == 0x0A:
            lines.append((start, data[start : at + 1]))
            start = at + 1
    return [*lines, (start, data[start:])]


def slow_lines(case):
    return units(case, [start for start, line in lines_of(lined(case.data)) if line.strip(SPACE)])


def slow_paragraphs(case):
    starts, empty = [], True
    for start, line in lines_of(lined(case.data)):
        if empty and line.strip(SPACE):
            starts.append(start)
        empty = not line.strip(SPACE)
    return units(case, starts)


def run_of(data, at, signs):
    """Return the byte after a run of the given signs."""
    while True:
        matching = [sign for sign in signs if data[at : at + len(sign)] == sign]
        if not matching:
            return at
        at += len(matching[0])


ENDS = [sign.encode() for sign in ".!?…"]
CJK_ENDS = [sign.encode() for sign in "。\uff01\uff1f"]
SHUTS = [sign.encode() for sign in "\"')]*_\u2019”」』\uff09"]
SHORT = ["Dr", "Mr", "Mrs", "Ms", "Prof", "St", "vs", "cf", "Fig", "Eq", "Sec", "No", "e.g", "i.e", "approx"]


def is_short(data, at):
    """Whether the full stop at a byte comes after a short word or after a number that begins its line."""
    for word in SHORT:
        first = at - len(word)
        if first >= 0 and data[first:at] == word.encode() and (first == 0 or data[first - 1] not in WORD):
            return True
    first = at
    while first > 0 and data[first - 1] in DIGITS:
        first -= 1
    size = at - first
    while first > 0 and data[first - 1] in SPACE and data[first - 1] != 0x0A:
        first -= 1
    return 1 <= size <= 3 and (first == 0 or data[first - 1] == 0x0A)


def slow_sentences(case):
    data, starts, at = lined(case.data), [0], 0
    while at < len(data):
        after = run_of(data, at, [bytes([space]) for space in SPACE])
        signs, cjk = run_of(data, at, ENDS), run_of(data, at, CJK_ENDS)
        if after > at:  # white space; an empty line in it ends a sentence
            if data[at:after].count(b"\n") + (at == 0) >= 2:
                starts.append(after)
            at = after
        elif signs > at:
            shut = run_of(data, signs, SHUTS)
            after = run_of(data, shut, [bytes([space]) for space in SPACE])
            small = data[after : after + 1] and 97 <= data[after] <= 122
            at, first = signs, at
            if after > shut and not small and not (data[first] == 0x2E and is_short(data, first)):
                starts.append(after)
                at = after
        elif cjk > at:
            at = run_of(data, run_of(data, cjk, SHUTS), [bytes([space]) for space in SPACE])
            starts.append(at)
        else:
            at += 1
    return units(case, starts)


def begins_step(line):
    at = run_of(line, 0, [b" "])
    if at > 3:
        return False
    head = run_of(line, at, [b"#"])
    if head > at:
        blank = run_of(line, head, [b" "])
        if head - at > 6 or blank == head:
            return False
        at = blank
    if line[at : at + 2] == b"**":
        at += 2
    if line[at : at + 4] in (b"Step", b"step", b"STEP"):
        number = run_of(line, at + 4, [b" "])
        after = run_of(line, number, [bytes([digit]) for digit in DIGITS])
        return number > at + 4 and after > number and line[after : after + 1] not in [bytes([c]) for c in WORD]
    after = run_of(line, at, [bytes([digit]) for digit in DIGITS])
    follows = line[after + 1 : after + 3]
    whole = follows == b"**" or (follows and follows[0] in SPACE)
    return 1 <= after - at <= 3 and line[after : after + 1] in (b".", b")") and bool(whole)


def slow_steps(case):
    return units(case, [start for start, line in lines_of(lined(case.data)) if begins_step(line)])


#: Patterns of RE2 and the same in `re`, where `.` is one character of UTF-8.
_CHARACTER = (
    rb"(?:[\x00-\x7f]|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|[\xe1-\xef][\x80-\xbf]{2}|\xf0[\x90-\xbf][\x80-\xbf]{2}"
    rb"|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2})"
)
PATTERNS = {
    r"[0-9]+": (rb"[0-9]+", 0),
    r"a=(?P<value>\w*)": (rb"a=(?P<value>\w*)", "value"),
    r"(?s)<.*?>": (b"<" + _CHARACTER + b"*?>", 0),
    r"x[^y]*y": (b"x(?:(?!y)" + _CHARACTER + b")*y", 0),
}


def slow_regex(case):
    every = []
    for number, mark in enumerate(case.marks("regex")):
        pattern, group = PATTERNS[mark]
        every += [(m.start(), -m.end(), number, mark, m[group]) for m in re.finditer(pattern, case.data)]
    matches, end = [], 0
    for start, stop, _, mark, text in sorted(every, key=lambda match: match[:3]):
        if start >= end and start < -stop:
            matches.append((mark, start, -stop, text))
            end = -stop
    return matches, 0


def runs(case, opens):
    """Runs of tokens that begin at token 0 and at every token of `opens`; a run without bytes is dropped."""
    starts, at = [0], 0
    for token, piece in enumerate(case.tokens):
        if token in opens and at > starts[-1]:
            starts.append(at)
        at += len(piece)
    matches = [
        (None, start, stop, case.data[start : start + spoken(case.data[start:stop])])
        for start, stop in zip(starts, [*starts[1:], at], strict=True)
        if stop > start
    ]
    return matches, 0


def slow_fixed(case):
    size = int(case.marks("fixed")[0])
    return runs(case, [token for token in range(len(case.tokens)) if token % size == 0])


def slow_cuts(case):
    number, _, threshold = case.marks("cuts")[0].partition("@")
    opens, unsure = [], 0
    for token, logp in enumerate(case.logp):
        if math.exp(logp) < float(threshold or 0.9):
            unsure += 1
            if unsure == int(number):
                unsure = 0
                opens.append(token + 1)
    return runs(case, opens)


def slow_low_probability(case):
    low = float(case.marks("low_probability")[0])
    return runs(case, [token for token, logp in enumerate(case.logp) if math.exp(logp) < low])


def slow_turns(case):
    columns = case.columns
    return runs(case, [token for token in range(1, len(columns)) if columns[token] != columns[token - 1] + 1])


def signs_in(case, wanted, tokens_only=()):
    """Signs (written, start, end) from left to right, the longest first; one that is an added token is that token only."""
    data, tokens, at = case.data, {}, 0
    for piece, added in zip(case.tokens, case.added, strict=True):
        if added and piece in wanted:
            tokens[at] = piece
        at += len(piece)
    spelled = [sign for sign in wanted if sign not in case.specials and not (case.specials and sign in tokens_only)]
    signs, at = [], 0
    while at < len(data):
        candidates = [tokens[at]] if at in tokens else [sign for sign in spelled if data[at : at + len(sign)] == sign]
        sign = max(candidates, key=len, default=b"")
        if sign and not (at not in tokens and any(place in tokens for place in range(at, at + len(sign)))):
            signs.append((sign, at, at + len(sign)))
            at += len(sign)
        else:
            at += 1
    return signs


def slow_delimiters(case):
    pairs = {mark.removesuffix("[*]").partition("...")[0].encode(): mark for mark in case.marks("delimiters")}
    closing = {opening: mark.removesuffix("[*]").partition("...")[2].encode() for opening, mark in pairs.items()}
    signs = signs_in(case, {*pairs, *closing.values()} - {b""})
    if case.layout.prefilled in pairs.values():
        signs.insert(0, (next(o for o, mark in pairs.items() if mark == case.layout.prefilled), 0, 0))
    matches, fault, at, count = [], 0, 0, {}
    while at < len(signs):
        sign, start, begin = signs[at]
        at += 1
        if sign not in pairs:
            fault |= Fault.ORDER
            continue
        mark = pairs[sign]
        parts = [part for part in case.layout.parts if part.segmenter == "delimiters" and part.mark == mark]
        count[mark] = count.get(mark, 0) + 1
        if parts[-1].index is None and not mark.endswith("[*]") and count[mark] > len(parts):
            fault |= Fault.DUPLICATE
        ends = [n for n in range(at, len(signs)) if signs[n][0] == closing[sign]]
        if ends:
            if any(signs[n][0] in pairs for n in range(at, ends[0])):
                fault |= Fault.NESTED
            matches.append((mark, start, signs[ends[0]][2], case.data[begin : signs[ends[0]][1]]))
            at = ends[0] + 1
            continue
        while at < len(signs) and signs[at][0] not in pairs:  # a sign that closes nothing
            fault |= Fault.ORDER
            at += 1
        stop = signs[at][1] if at < len(signs) else len(case.data)
        if closing[sign]:
            fault |= Fault.TRUNCATED
        matches.append((mark, start, stop, None if closing[sign] else case.data[begin:stop]))
    return matches, fault


def _bars(name):
    return f"<\uff5c{name}\uff5c>".encode()


PAIRS = {
    b"<think>": ("reasoning", b"</think>"),
    b"[THINK]": ("reasoning", b"[/THINK]"),
    b"<tool_call>": ("tool_call", b"</tool_call>"),
    b"<minimax:tool_call>": ("tool_call", b"</minimax:tool_call>"),
    _bars("tool▁call▁begin"): ("tool_call", _bars("tool▁call▁end")),
    b"<|tool_call_begin|>": ("tool_call", b"<|tool_call_end|>"),
    b"<|python_tag|>": ("tool_call", b""),
    b"[TOOL_CALLS]": ("tool_call", b""),
}
CLOSINGS = {closing for _, closing in PAIRS.values()} - {b""}
WRAPS = {_bars("tool▁calls▁begin"), b"<|tool_calls_section_begin|>"}
UNWRAPS = {_bars("tool▁calls▁end"), b"<|tool_calls_section_end|>", b"<|end_header_id|>"}
HEADER = {b"<|start|>", b"<|channel|>", b"<|message|>"}
TURN_ENDS = {
    b"<|im_end|>", b"<|endoftext|>", b"<|eot_id|>", b"<|eom_id|>", b"<|end_of_text|>", b"<|end|>", b"<|call|>", b"<|return|>",
    b"</s>", _bars("end▁of▁sentence"), b"<|user|>", b"<|observation|>", b"[e~[",
}  # fmt: skip
MAY_BE_SPELLED = {b"<think>", b"</think>", b"<tool_call>", b"</tool_call>", b"<minimax:tool_call>", b"</minimax:tool_call>"}


def slow_channels(case):
    every = {*PAIRS, *CLOSINGS, *WRAPS, *UNWRAPS, *HEADER, *TURN_ENDS, b"<|start_header_id|>"}
    signs = signs_in(case, every, every - MAY_BE_SPELLED)
    turns, start, turn_signs = [], 0, []
    for sign in signs:
        if sign[0] in TURN_ENDS:
            turns.append((start, sign[1], turn_signs, sign[0]))
            start, turn_signs = sign[2], []
        else:
            turn_signs.append(sign)
    turns.append((start, len(case.data), turn_signs, None))
    prefilled = case.layout.prefilled == "reasoning"
    channels, fault = [], 0
    for turn in turns:
        stretches, wrong = one_turn(case.data, *turn, prefilled)
        channels, fault = channels + stretches, fault | wrong
    stops = [*[start for _, start, _ in channels[1:]], len(case.data)]
    return [(name, start, stop, text) for (name, start, text), stop in zip(channels, stops, strict=False)], fault


def one_turn(data, start, stop, signs, ended, prefilled):
    """Return the stretches (channel, start, text) of one turn, and faults."""
    stretches, fault, at, loose, lead = [], 0, 0, start, None

    def edge(n):
        return signs[n][1] if n < len(signs) else stop

    def add(channel, begin, text):
        nonlocal lead
        stretches.append((channel, begin if lead is None else lead, text))
        lead = None

    def channel_from(n, name, begin, inner, closings, whole):
        """A channel whose text begins at byte `inner`, before sign n; the sign after it, and where it ends."""
        nonlocal fault
        ends = [k for k in range(n, len(signs)) if signs[k][0] in closings]
        end = ends[0] if ends else len(signs)
        if not ends and not whole:
            fault |= Fault.TRUNCATED
            opens = {*PAIRS, *WRAPS, *HEADER, b"<|start_header_id|>"}
            end = next((k for k in range(n, len(signs)) if signs[k][0] in opens), len(signs))
        if any(signs[k][0] in PAIRS or signs[k][0] in HEADER for k in range(n, end)):
            fault |= Fault.NESTED
        if ends or whole or edge(end) > begin:  # else there is no byte of it
            add(name, begin, data[inner : edge(end)] if ends or whole else None)
        if ends and signs[end][0] in CLOSINGS:
            return end + 1, signs[end][2]
        return end, edge(end)

    blank = not data[start : edge(0)].strip(SPACE)
    at_once = blank and (not signs or signs[0][0] in {*PAIRS, *HEADER, *WRAPS})
    if prefilled and not at_once:
        at, loose = channel_from(0, "reasoning", start, start, {b"</think>", b"[/THINK]"}, ended == b"<|end|>")
    while at <= len(signs):
        sign, begin, end = signs[at] if at < len(signs) else (b"", stop, stop)
        if sign in CLOSINGS:
            fault |= Fault.ORDER
            at += 1
            continue
        if data[loose:begin].strip(SPACE):
            add("answer", loose, data[loose:begin])
        at += 1
        if sign in PAIRS:
            name, closing = PAIRS[sign]
            at, loose = channel_from(at, name, begin, end, {closing or sign}, not closing)
        elif sign in HEADER:
            body = next((k for k in range(at - 1, len(signs)) if signs[k][0] == b"<|message|>"), None)
            if body is None:
                fault |= Fault.TRUNCATED
                break
            at = next((k for k in range(body + 1, len(signs)) if signs[k][0] in HEADER), len(signs))
            name, loose = of_header(data[begin : signs[body][1]]), edge(at)
            cut_off = name == "reasoning" and (at < len(signs) or ended is None)
            fault |= Fault.TRUNCATED if cut_off else 0
            add(name, begin, None if cut_off else data[signs[body][2] : loose])
        elif sign:
            if sign in WRAPS or sign == b"<|start_header_id|>":
                lead = begin if lead is None else lead
            if sign == b"<|start_header_id|>" and at < len(signs) and signs[at][0] == b"<|end_header_id|>":
                end, at = signs[at][2], at + 1
            loose = end
    return stretches, fault


def of_header(header):
    """Return the channel of a harmony header; a header with a recipient is a tool call."""
    for at in range(len(header)):
        if header[at : at + 3] == b"to=" and (at == 0 or header[at - 1] not in WORD):
            return "tool_call"
    for at in range(len(header)):
        if header[at : at + 11] == b"<|channel|>" and header[at + 11 :].lstrip(SPACE).startswith(b"analysis"):
            return "reasoning"
    return "answer"


SLOW = (
    slow_lines, slow_paragraphs, slow_sentences, slow_steps, slow_regex, slow_fixed, slow_cuts, slow_low_probability, slow_turns,
    slow_delimiters, slow_channels,
)  # fmt: skip
ORACLES = {oracle.__name__.removeprefix("slow_"): oracle for oracle in SLOW}
