"""The segmenters `delimiters`, for text between two signs, and `regex`, for patterns.

A mark of `delimiters` is `<think>...</think>`: the opening sign, three dots, the closing one. `### Answer:...` has no closing
sign: the part runs on to the next opening sign of the layout. A sign that the tokenizer added beside its vocabulary is that token
and nothing else; any other sign is its bytes, however they are cut into tokens.

Rules. What stands between an opening and its closing sign is text, whatever it holds (NESTED if it opens another part). A part
that never closes ends where the next one opens and says nothing (TRUNCATED). A closing sign of nothing is text (ORDER), in a part
that has not closed too. A part says its last complete pair; a second pair is a DUPLICATE unless the mark ends in `[*]` or the
block is repeated.

A mark of `regex` is a pattern of RE2, which never backtracks: whatever a completion holds, a search takes time linear in it. It
has no look-around and no back-references for that. Text and pattern are UTF-8, offsets are bytes; bytes that are no UTF-8 match
nothing, not even `.`. Needs `pip install 'spanwise[segment]'`.

Rules. A part is a whole match; it says what the group `value` holds, or else the first group, or else the whole match. Matches of
one pattern do not overlap; of several patterns the one that begins first wins, then the longer one, then the one that the layout
names first. An empty match claims nothing. A block that is not repeated takes every match and says the last one.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from spanwise.errors import LayoutError
from spanwise.layout import EACH, Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import Finder, Found, Match, Sample, assign, group_by_mark
from spanwise.segment.vocabulary import Vocabulary
from spanwise.types import Fault

_BETWEEN = "..."
_TAG = re.compile(r"<(/?)([A-Za-z_][\w.:-]{0,59})>")
#: Maps the start of an error message of RE2 (a regex library) to advice.
_ADVICE = {
    "invalid perl operator: (?": (
        " RE2 does not support lookaround. Let the pattern match the surrounding text, too. Put the text that you want "
        "into a group, such as 'Answer: (?P<value>[0-9]+)'."
    ),
    "invalid escape sequence: \\": " RE2 does not support this escape sequence, and it has no back-references such as \\1. "
    "Write the repeated text in full, or use the segmenter 'delimiters'.",
}


class Sign(NamedTuple):
    """A delimiter found in a completion, such as `</think>`: its spelling and its bytes [start, end)."""

    written: bytes
    start: int
    end: int


def sign_finder(signs: Collection[bytes], *, tokens_only: Collection[bytes] = ()) -> Callable[[Sample], list[Sign]]:
    """Return a function that lists a text's delimiters (signs) in order. The last, empty one is its end."""

    @lru_cache(maxsize=4)
    def compile_signs(vocabulary: Vocabulary) -> tuple[list[int], re.Pattern[bytes]]:
        """Split delimiters into those that are added tokens (returned as ids) and all others (returned as a pattern)."""
        added_sign_ids = [token_id for token_id in vocabulary.added if vocabulary.pieces[token_id] in signs]
        added_signs = {vocabulary.pieces[token_id] for token_id in added_sign_ids}
        text_signs = set(signs) - added_signs - set(tokens_only if vocabulary.added else ())
        signs_longest_first = sorted(text_signs, key=lambda sign: (-len(sign), sign))
        return added_sign_ids, re.compile(b"|".join(map(re.escape, signs_longest_first)) or rb"(?!)")

    def find(sample: Sample) -> list[Sign]:
        added_sign_ids, text_sign_pattern = compile_signs(sample.vocabulary)
        text_signs = [Sign(match.group(), *match.span()) for match in text_sign_pattern.finditer(sample.text)]
        sign_token_positions = np.flatnonzero(np.isin(sample.id_t, added_sign_ids))
        sign_texts = [sample.vocabulary.pieces[token_id] for token_id in sample.id_t[sign_token_positions]]
        token_ends = sample.end_t[sign_token_positions].tolist()
        token_signs = [Sign(text, end - len(text), end) for text, end in zip(sign_texts, token_ends, strict=True)]
        token_starts = [sign.start for sign in token_signs]
        # Drop delimiters found by text search if they overlap one that is an added token.
        nonoverlapping_signs = [
            sign for sign in text_signs if bisect_left(token_starts, sign.end) == bisect_left(token_ends, sign.start + 1)
        ]
        end_sign = Sign(b"", len(sample.text), len(sample.text))
        return [*sorted([*nonoverlapping_signs, *token_signs], key=lambda sign: sign.start), end_sign]

    return find


def index_of_first(signs: Sequence[Sign], indices: range, wanted: Collection[bytes]) -> int:
    """Return the first index in a range at which a wanted delimiter stands, or the range's end."""
    return next((index for index in indices if signs[index].written in wanted), indices.stop)


def signs_of(mark: str) -> tuple[str, str]:
    """Split a mark such as `<think>...</think>` into its opening and closing signs. The closing sign may be empty."""
    opening_sign, separator, closing_sign = mark.removesuffix(EACH).partition(_BETWEEN)
    if not separator or not opening_sign:
        raise LayoutError(
            f"'{mark}' is not a pair of delimiters. Write the opening sign, three dots and the closing sign, such as "
            "<think>...</think>. If there is no closing sign, leave it out, as in 'Answer:...'."
        )
    return opening_sign, closing_sign


def _opens(mark: str) -> tuple[str, ...]:
    """Return the opening sign of a mark such as `<think>...</think>`. Return () if the closing sign is the same."""
    opening_sign, closing_sign = signs_of(mark)
    return () if opening_sign == closing_sign else (opening_sign,)


def _says(text: str) -> list[str]:
    """Return the mark `<tag>...</tag>` of each tag that a text both opens and closes."""
    tags = _TAG.findall(text)
    closed_names = {name for slash, name in tags if slash}
    opened_names = dict.fromkeys(name for slash, name in tags if not slash)
    return [f"<{name}>...</{name}>" for name in opened_names if name in closed_names]


@register("delimiters", kind="segmenter", says=_says, opens=_opens, holds=lambda text, mark: signs_of(mark)[0] in text)
def delimiters(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find the text between two signs, such as `<think>...</think>`. The module has the rules."""
    parts_of_mark = group_by_mark(parts, bare=False)
    pair_of_opening: dict[bytes, tuple[str, bytes]] = {}  # maps an opening delimiter to its mark and closing delimiter
    for mark in parts_of_mark:
        opening_sign, closing_sign = signs_of(mark)
        if opening_sign.encode() in pair_of_opening:
            raise LayoutError(
                f"'{mark}' has the same opening sign as another pair of delimiters. Give each pair its own opening sign."
            )
        pair_of_opening[opening_sign.encode()] = mark, closing_sign.encode()
    closing_signs = {closing_sign for _, closing_sign in pair_of_opening.values() if closing_sign}
    find_signs = sign_finder({*pair_of_opening, *closing_signs})
    prefilled_signs = [Sign(signs_of(mark)[0].encode(), 0, 0) for mark in parts_of_mark if mark == layout.prefilled]

    def find(sample: Sample) -> Found:
        pair_matches = list[Match]()
        fault_flags = 0
        signs = [*prefilled_signs, *find_signs(sample)]
        last_index_by_sign = {sign.written: sign_index for sign_index, sign in enumerate(signs)}
        sign_index = 0
        while sign_index < len(signs) - 1:
            sign = signs[sign_index]
            if sign.written not in pair_of_opening:
                fault_flags |= Fault.ORDER
                sign_index += 1
                continue
            mark, closing_sign = pair_of_opening[sign.written]
            has_closing_sign = closing_sign != b"" and last_index_by_sign.get(closing_sign, 0) > sign_index
            end_signs = (closing_sign,) if has_closing_sign else pair_of_opening
            end_index = index_of_first(signs, range(sign_index + 1, len(signs) - 1), end_signs)
            end_sign = signs[end_index]
            inner_signs = {inner_sign.written for inner_sign in signs[sign_index + 1 : end_index]}
            if has_closing_sign:
                fault_flags |= Fault.NESTED if inner_signs & pair_of_opening.keys() else 0
            else:
                fault_flags |= Fault.ORDER if inner_signs else 0  # signs between two opening signs close other pairs
                fault_flags |= Fault.TRUNCATED if closing_sign else 0
            is_complete = has_closing_sign or not closing_sign
            content_span = (sign.end, end_sign.start) if is_complete else None
            pair_matches.append((mark, sign.start, end_sign.end if has_closing_sign else end_sign.start, content_span))
            sign_index = end_index + 1 if has_closing_sign else end_index
        return assign(pair_matches, parts_of_mark, surplus="report", fault=fault_flags)

    return find


@register("regex", kind="segmenter", holds=lambda text, mark: _compile(mark).search(text.encode()) is not None)
def regex(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find the matches of regular expressions. The rules are at the top of this module."""
    parts_of_mark = group_by_mark(parts, bare=False)
    marks_and_patterns = [(mark, _compile(mark)) for mark in parts_of_mark]

    def find(sample: Sample) -> Found:
        disjoint_matches = list[Match]()
        previous_stop = 0
        matches = [(mark, pattern, match) for mark, pattern in marks_and_patterns for match in pattern.finditer(sample.text)]
        for mark, pattern, match in sorted(matches, key=lambda entry: (entry[2].start(), -entry[2].end())):
            match_start = match.start()
            if previous_stop <= match_start < match.end():
                previous_stop = match.end()
                content_group_index = pattern.groupindex.get(b"value", min(pattern.groups, 1))  # group 0 is the whole match
                content_span = match.span(content_group_index)
                disjoint_matches.append((mark, match_start, previous_stop, content_span if content_span[0] >= 0 else None))
        return assign(disjoint_matches, parts_of_mark, surplus="keep")

    return find


def _compile(mark: str) -> Any:
    """Compile a pattern with RE2, or explain why RE2 refuses it."""
    try:
        import re2  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise LayoutError(
            "The segmenter 'regex' needs google-re2. Install it with: pip install 'spanwise[segment]'"
        ) from None
    re2_options = re2.Options()
    re2_options.log_errors = False
    try:
        return re2.compile(mark.encode(), re2_options)
    except re2.error as error:
        re2_message = error.args[0] if error.args else b""
        error_reason = re2_message.decode(errors="replace") if isinstance(re2_message, bytes) else str(re2_message)
        advice = next((text for message_start, text in _ADVICE.items() if error_reason.startswith(message_start)), "")
        raise LayoutError(f"RE2 cannot read the pattern '{mark}' ({error_reason}).{advice}") from None
