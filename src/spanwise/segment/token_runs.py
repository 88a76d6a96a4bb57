"""The segmenters `fixed`, `cuts`, `low_probability` and `turns`: runs of tokens, whatever they say.

They are for repeated blocks, `Layout({"chunk[*]": "fixed:32"})`. Runs follow each other without a gap and say their text. More
of them than `most`: the fault MORE, and the others belong to the last one, or to the rest. A token without bytes at a cut belongs
to the run before it; a run without bytes is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from spanwise.errors import LayoutError
from spanwise.layout import Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import Finder, Sample
from spanwise.segment.units import check_no_mark, in_a_row


@register("fixed", kind="segmenter")
def fixed(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Cut after every so many trainable tokens: `fixed:32`."""
    size = _count(_one_mark(parts), parts, example="fixed:32")
    return _runs(parts, lambda sample: np.arange(size, len(sample.end_t), size))


@register("cuts", kind="segmenter", reads_logp=True)
def cuts(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Cut after every so many tokens that the policy was not sure of: `cuts:5`, of probability below .9, or `cuts:5@0.8`.

    Reference:
        "Segment Policy Optimization" 2025 (arXiv 2505.23564), SPO-chain: cutpoints below .9, five to a segment.
    """
    mark = _one_mark(parts)
    number, at, threshold = mark.partition("@")
    every = _count(number, parts, example="cuts:5@0.9")
    low = _log(threshold if at else "0.9", parts, example="cuts:5@0.9")
    return _runs(parts, lambda sample: np.flatnonzero(sample.logp_t < low)[every - 1 :: every] + 1)


@register("low_probability", kind="segmenter", reads_logp=True)
def low_probability(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Cut before every token less probable than this: `low_probability:0.2`, the segments that the method `sae` bootstraps from.

    Reference:
        "Segmental Advantage Estimation" 2026 (arXiv 2601.07320); the side of the cut is that of `sae(boundary="start")`.
    """
    low = _log(_one_mark(parts), parts, example="low_probability:0.2")
    return _runs(parts, lambda sample: np.flatnonzero(sample.logp_t < low))


@register("turns", kind="segmenter")
def turns(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find the turns of a row: runs of trainable tokens with masked ones, such as tool output, between them; `turns:`.

    The one segmenter to which masked tokens are not as if deleted.
    """
    check_no_mark(parts, layout)
    return _runs(parts, lambda sample: np.flatnonzero(np.diff(sample.column_t) > 1) + 1)


def _runs(parts: Sequence[Part], cuts_of: Callable[[Sample], np.ndarray]) -> Finder:
    """A finder of the runs between the first tokens of new ones."""

    def starts_of(sample: Sample) -> list[int]:
        end_t = sample.end_t
        firsts = cuts_of(sample)
        return [0, *end_t[firsts[(firsts > 0) & (firsts < len(end_t))] - 1].tolist()]

    return in_a_row(parts, starts_of, trimmed=False)


def _one_mark(parts: Sequence[Part]) -> str:
    """The mark of all parts: a completion is cut in one way."""
    other = next((part.mark for part in parts if part.mark != parts[0].mark), None)
    if other is not None:
        raise LayoutError(
            f"'{parts[0].mark}' and '{other}' cut the same tokens in two ways; write one of them, in a block called 'name[*]'."
        )
    return parts[0].mark


def _count(written: str, parts: Sequence[Part], *, example: str) -> int:
    if not (written.isascii() and written.isdecimal() and int(written) > 0):
        raise _refused(written, parts, "a whole number of tokens from 1 on", example)
    return int(written)


def _log(written: str, parts: Sequence[Part], *, example: str) -> float:
    try:
        value = float(written)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise _refused(written, parts, "a probability above 0 and up to 1", example)
    return math.log(value)


def _refused(written: str, parts: Sequence[Part], wanted: str, example: str) -> LayoutError:
    return LayoutError(f"The segmenter '{parts[0].segmenter}' takes {wanted}, such as {example}; there is '{written}'.")
