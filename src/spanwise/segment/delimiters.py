"""The segmenter `delimiters`: blocks between an opening and a closing sign of any spelling.

A mark is `<think>...</think>`: the opening sign, three dots, the closing one. `### Answer:...` has no closing sign: the part runs
on to the next opening sign of the layout. A sign that the tokenizer added beside its vocabulary is that token and nothing else;
any other sign is its bytes, however they are cut into tokens.

Rules. What stands between an opening and its closing sign is text, whatever it holds (NESTED if it opens another part). A part
that never closes ends where the next one opens and says nothing (TRUNCATED). A closing sign of nothing is text (ORDER), in a part
that has not closed too. A part says its last complete pair; a second pair is a DUPLICATE unless the mark ends in `[*]` or the
block is repeated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from spanwise.errors import LayoutError
from spanwise.layout import EACH, Layout, Part
from spanwise.segment.claims import Claim, Finder, Found, Sample, numbered
from spanwise.segment.registry import register
from spanwise.segment.signs import Places, Sign, finder_of
from spanwise.types import Fault

_BETWEEN = "..."
_TAG_PAIR = re.compile(r"<(/?)([A-Za-z_][\w.:-]{0,59})>")


class _Pair:
    """One mark: its signs, and the parts that take its matches in turn."""

    def __init__(self, mark: str, parts: Sequence[Part]) -> None:
        opening, closing = signs_of(mark)
        self.opening, self.closing = opening.encode(), closing.encode()
        self.take: Callable[[int], Part | None] = numbered(parts)
        self.once = len(parts) if parts[-1].index is None and not mark.endswith(EACH) else None


def signs_of(mark: str) -> tuple[str, str]:
    """The opening and the closing sign of a mark; the closing one may be empty."""
    opening, dots, closing = mark.removesuffix(EACH).partition(_BETWEEN)
    if not dots or not opening:
        raise LayoutError(
            f"'{mark}' is no pair of delimiters; write the opening and the closing one with three dots between them, such as "
            f"<think>...</think>, or 'Answer:...' for one that nothing closes."
        )
    return opening, closing


def _opens(mark: str) -> tuple[str, ...]:
    """What a prompt ends with that has opened a mark; a sign that closes as well tells nothing."""
    opening, closing = signs_of(mark)
    return () if opening == closing else (opening,)


def _says(text: str) -> list[str]:
    """The pairs of tags in a text, as marks."""
    found = _TAG_PAIR.findall(text)
    closed = {name for slash, name in found if slash}
    return [f"<{name}>...</{name}>" for name in dict.fromkeys(name for slash, name in found if not slash) if name in closed]


@register(
    "delimiters",
    kind="segmenter",
    says=_says,
    opens=_opens,
    holds=lambda text, mark: signs_of(mark)[0] in text,
)
def delimiters(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find what stands between two signs, such as `<think>...</think>`; see the module."""
    by_mark: dict[str, list[Part]] = {}
    for part in parts:
        by_mark.setdefault(part.mark, []).append(part)
    opens: dict[bytes, _Pair] = {}
    for mark, own in by_mark.items():
        pair = _Pair(mark, own)
        if pair.opening in opens:
            raise LayoutError(
                f"'{mark}' opens as another mark does, and one sign opens one part; give each an opening sign of its own."
            )
        opens[pair.opening] = pair
    signs = finder_of({sign for pair in opens.values() for sign in (pair.opening, pair.closing) if sign})
    prefilled = None if layout.prefilled not in by_mark else opens[signs_of(layout.prefilled)[0].encode()]
    return lambda sample: _read(sample, signs(sample), opens, prefilled)


def _read(sample: Sample, signs: list[Sign], opens: dict[bytes, _Pair], prefilled: _Pair | None) -> Found:
    claims: list[Claim] = []
    fault, size = 0, len(sample.text)
    taken: dict[bytes, int] = {}
    signs = signs if prefilled is None else [Sign(prefilled.opening, 0, 0), *signs]
    places = Places(signs)
    at = 0
    while at < len(signs):
        sign = signs[at]
        pair = opens.get(sign.written)
        if pair is None:
            fault |= Fault.ORDER
            at += 1
            continue
        number = taken[pair.opening] = taken.get(pair.opening, -1) + 1
        if pair.once is not None and number >= pair.once:
            fault |= Fault.DUPLICATE
        end = places.after(at, pair.closing) if pair.closing else len(signs)
        if end < len(signs):
            inner, stop = (sign.end, signs[end].start), signs[end].end
            fault |= Fault.NESTED if any(other.written in opens for other in signs[at + 1 : end]) else 0
            at = end + 1
        else:
            after = places.after(at, *opens)
            fault |= Fault.ORDER if after > at + 1 else 0  # what stands between are closing signs of nothing
            at = after
            stop = signs[at].start if at < len(signs) else size
            inner = None if pair.closing else (sign.end, stop)
            fault |= Fault.TRUNCATED if pair.closing else 0
        part = pair.take(number)
        if part is None:
            fault |= Fault.MORE
        else:
            claims.append(Claim(part, sign.start, stop, inner))
    return Found(claims, fault)
