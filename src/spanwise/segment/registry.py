"""The registry of segmenters: what finds the parts of a layout, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spanwise.registry import Registry
from spanwise.segment.claims import Finder


@dataclass(frozen=True)
class Segmenter:
    """A named segmenter.

    Attributes:
        name: as in layouts.
        function: `(parts, *, layout) -> finder`: takes the parts of a layout that it has to find, refuses marks that it does not
            understand (LayoutError), and returns a function from a `Sample` to what it `Found` in it.
        kind: always "segmenter".
        reads_logp: it cuts by log-probabilities.
        says: a function from a completion's text to the marks that would find something in it, most telling first, for the
            sentence that says what completions have instead of what a layout asks for. None: it cannot tell.
        asks: a function from a mark to the words that a prompt must hold for a model to write it, for the sentence on prompts
            that do not. None: it finds what models write anyway.
        holds: a function of a text and a mark: whether the mark would find something in it; None: where `says` names the mark.
        opens: a function from a mark to what a prompt ends with that has opened it already. None: no prompt can.

    Example:
        >>> SEGMENTERS.find("json").reads_logp, SEGMENTERS.find("low_probability").reads_logp
        (False, True)
    """

    name: str
    function: Callable[..., Finder]
    kind: str = "segmenter"
    reads_logp: bool = False
    says: Callable[[str], Any] | None = None
    asks: Callable[[str], Sequence[str]] | None = None
    holds: Callable[[str, str], bool] | None = None
    opens: Callable[[str], Sequence[str]] | None = None


#: Every segmenter by name; `spanwise.testing.check_segmenter` says what one must do.
SEGMENTERS: Registry[Segmenter] = Registry("segmenter", kinds=("segmenter",), group="spanwise.segmenters", entry=Segmenter)
