"""The registry of segmenters: what finds the parts of a layout, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spanwise.registry import Registry, register
from spanwise.segment.claims import Finder

__all__ = ["SEGMENTERS", "Segmenter", "register"]  # `register` from here comes after its registry


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
    """

    name: str
    function: Callable[..., Finder]
    kind: str = "segmenter"
    reads_logp: bool = False
    says: Callable[[str], Any] | None = None


#: Every segmenter by name; `spanwise.testing.check_segmenter` says what one must do.
SEGMENTERS: Registry[Segmenter] = Registry("segmenter", kinds=("segmenter",), group="spanwise.segmenters", entry=Segmenter)
