"""Where the fields of JSON lie, written from the rules of `spanwise.segment.json_fields`: sign by sign, with whole paths.

`slow_json` reads anything; `walked` reads well-formed JSON with the decoder of the standard library, which knows no rules of ours.
"""

import json

from spanwise.segment.json_fields import steps
from spanwise.types import Fault

SPACE = b" \t\r\n"


def pattern_of(part):
    """Return the steps of a part, with its own number filled in."""
    pattern = steps(part.mark)
    if part.index is not None and -1 in pattern:
        pattern[pattern.index(-1)] = part.index
    return pattern


def fits(pattern, path):
    return len(pattern) >= len(path) and all(
        want == step or (want == -1 and isinstance(step, int)) for want, step in zip(pattern, path, strict=False)
    )


def string_end(data, at):
    """Return where reading goes on after the string that opens at byte `at`, and whether the string ended."""
    at += 1
    while at < len(data):
        if data[at] == 0x5C:
            if at + 1 == len(data):
                return at, False
            at += 2
        elif data[at] == 0x22:
            return at + 1, True
        elif data[at] == 0x0A:
            return at, False
        else:
            at += 1
    return at, False


def unescaped(written):
    """Replace the escapes; return the text unchanged if one of them is not JSON."""
    text, units, at = written.decode(errors="replace"), "", 0
    plain = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "\\": "\\", '"': '"'}
    while at < len(text):
        if text[at] != "\\":
            units, at = units + text[at], at + 1
        elif text[at + 1] in plain:
            units, at = units + plain[text[at + 1]], at + 2
        else:
            digits = text[at + 2 : at + 6]
            if text[at + 1] != "u" or len(digits) < 4 or set(digits) - set("0123456789abcdefABCDEF"):
                return written
            units, at = units + chr(int(digits, 16)), at + 6
    return units.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def scalar(raw):
    if raw[:1] != b'"':
        return raw or None
    end, ended = string_end(raw, 0)
    return unescaped(raw[1:-1]) if ended and end == len(raw) else None


class Slow:
    def __init__(self, data, layout):
        self.data, self.layout, self.fault, self.claims, self.stack = data, layout, 0, [], []
        self.parts = [(part, pattern_of(part)) for part in layout.parts if part.segmenter == "json"]

    def wanted(self, path):
        return path is not None and any(fits(pattern, path) for _, pattern in self.parts)

    def too_many(self, path):
        """Return whether this is an element of a repeated block beyond the last one that counts."""
        return any(
            part.index is not None
            and len(path) == steps(part.mark).index(-1) + 1
            and fits(pattern[:-1] or pattern, path[:-1])
            for part, pattern in self.parts
            if -1 in steps(part.mark)
        ) and not any(len(pattern) >= len(path) and pattern[: len(path)] == path for _, pattern in self.parts)

    def end(self, at, whole=True):
        """End the value that the innermost frame reads."""
        frame = self.stack[-1]
        value, frame["value"] = frame["value"], None
        if value is None or value["path"] is None:
            return
        first, last = value["at"], at
        while first < last and self.data[first] in SPACE:
            first += 1
        while first < last and self.data[last - 1] in SPACE:
            last -= 1
        empty = first == last
        path = value["path"]
        if frame["array"] and not empty and isinstance(path[-1], int) and self.too_many(path):
            self.fault |= Fault.MORE
        if frame["array"] and empty:
            return
        for part, pattern in self.parts:
            if len(pattern) == len(path) and fits(pattern, path):
                many = part.index is None and "[*]" in part.mark
                if not many and any(claim[0] is part for claim in self.claims):
                    self.fault |= Fault.DUPLICATE
                else:
                    self.claims.append((part, value["from"], last, scalar(self.data[first:last]) if whole else None))

    def begin(self, path, start, at):
        self.stack[-1]["value"] = {"path": path, "from": start, "at": at}

    def element(self, at):
        frame = self.stack[-1]
        self.begin(None if frame["path"] is None else [*frame["path"], frame["index"]], at, at)

    def give_up(self, at):
        while self.stack:
            self.end(at, whole=False)
            self.stack.pop()

    def opened(self, at, array):
        path = []
        if self.stack:
            if self.stack[-1]["value"] is None:
                self.fault |= Fault.NESTED
                if array:
                    return
                self.give_up(at)
            else:
                path = self.stack[-1]["value"]["path"]
        self.stack.append({"array": array, "path": path, "index": 0, "value": None, "keys": set()})
        if array:
            self.element(at + 1)

    def closed(self, at, array):
        if all(frame["array"] != array for frame in self.stack):
            self.fault |= Fault.NESTED
            return
        whole = True
        while self.stack[-1]["array"] != array:
            self.end(at, whole=False)
            self.stack.pop()
            self.fault |= Fault.NESTED
            whole = False
        self.end(at, whole=whole)
        self.stack.pop()

    def key(self, start, end, after):
        frame = self.stack[-1]
        if frame["value"] is not None:
            self.fault |= Fault.NESTED
            self.end(start, whole=False)
        name = self.data[start + 1 : end - 1]
        name = (unescaped(name) if b"\\" in name else name).decode(errors="surrogateescape")
        path = None if frame["path"] is None else [*frame["path"], name]
        if not self.wanted(path):
            path = None
        elif name in frame["keys"]:
            self.fault |= Fault.DUPLICATE
            path = None
        else:
            frame["keys"].add(name)
        self.begin(path, start if self.layout.rest is None else after, after)

    def run(self):
        at = 0
        while at < len(self.data):
            sign = self.data[at : at + 1]
            if not self.stack:
                if sign == b"{":
                    self.opened(at, array=False)
            elif sign == b'"':
                end, ended = string_end(self.data, at)
                if not ended:
                    self.fault |= Fault.TRUNCATED
                after = end
                while after < len(self.data) and self.data[after] in SPACE:
                    after += 1
                if ended and not self.stack[-1]["array"] and self.data[after : after + 1] == b":":
                    self.key(at, end, after + 1)
                    end = after + 1
                at = end
                continue
            elif sign in (b"{", b"["):
                self.opened(at, array=sign == b"[")
            elif sign in (b"}", b"]"):
                self.closed(at, array=sign == b"]")
            elif sign == b",":
                self.end(at)
                if self.stack[-1]["array"]:
                    self.stack[-1]["index"] += 1
                    self.element(at + 1)
            at += 1
        if self.stack:
            self.fault |= Fault.TRUNCATED
            self.give_up(at)
        return sorted(self.claims, key=lambda claim: claim[1]), int(self.fault)


def slow_json(data, layout):
    """Claims (part, start, stop, what it says) in order, and faults."""
    return Slow(data, layout).run()


def walked(text, at=0, path=()):
    """Yield (path, first character, character after the last, value) of every value in well-formed JSON."""
    value, end = json.JSONDecoder().raw_decode(text, at)
    yield path, at, end, value
    if isinstance(value, dict | list):
        at += 1
        for index in range(len(value)):
            at = skipped(text, at, ", \n")
            step = index
            if isinstance(value, dict):
                step, at = json.JSONDecoder().raw_decode(text, at)
                at = skipped(text, at, ": \n")
            inner = list(walked(text, at, (*path, step)))
            yield from inner
            at = inner[0][2]


def skipped(text, at, signs):
    while text[at] in signs:
        at += 1
    return at
