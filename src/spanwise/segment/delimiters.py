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
from collections.abc import Sequence
from typing import NamedTuple

from spanwise.errors import LayoutError
from spanwise.layout import EACH, Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import Claims, Finder, Found, Sample, Taker, by_mark
from spanwise.segment.signs import Places, Sign, finder_of
from spanwise.types import Fault

_BETWEEN = "..."
_TAG_PAIR = re.compile(r"<(/?)([A-Za-z_][\w.:-]{0,59})>")


class _Pair(NamedTuple):
    """One mark: its signs, and the parts that take its matches in turn."""

    opening: bytes
    closing: bytes
    taker: Taker


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
    tags = _TAG_PAIR.findall(text)
    closed = {name for slash, name in tags if slash}
    return [f"<{name}>...</{name}>" for name in dict.fromkeys(name for slash, name in tags if not slash) if name in closed]


@register(
    "delimiters",
    kind="segmenter",
    says=_says,
    opens=_opens,
    holds=lambda text, mark: signs_of(mark)[0] in text,
)
def delimiters(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find what stands between two signs, such as `<think>...</think>`; see the module."""
    of_mark = by_mark(parts, bare=False)
    opens: dict[bytes, _Pair] = {}
    for mark, own in of_mark.items():
        opening, closing = signs_of(mark)
        pair = _Pair(opening.encode(), closing.encode(), Taker(own, again="duplicate"))
        if pair.opening in opens:
            raise LayoutError(
                f"'{mark}' opens as another mark does, and one sign opens one part; give each an opening sign of its own."
            )
        opens[pair.opening] = pair
    signs = finder_of({sign for pair in opens.values() for sign in (pair.opening, pair.closing) if sign})
    prefilled = None if layout.prefilled not in of_mark else opens[signs_of(layout.prefilled)[0].encode()]
    return lambda sample: _read(sample, signs(sample), opens, prefilled)


def _read(sample: Sample, signs: list[Sign], opens: dict[bytes, _Pair], prefilled: _Pair | None) -> Found:
    claims, fault, size = Claims(), 0, len(sample.text)
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
        claims.take(pair.taker, sign.start, stop, inner)
    return Found(claims.made, int(claims.fault | fault))
