"""The registry of segmenters: what finds the blocks of a layout, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Int, Shaped
from torch import Tensor

from spanwise.layout import Layout
from spanwise.registry import Registry
from spanwise.segment.vocabulary import Vocabulary
from spanwise.types import BlockText, Spans


@dataclass(frozen=True)
class Segmenter:
    """A named segmenter.

    Attributes:
        name: as in layouts.
        function: `(ids_nt, mask_nt, *, layout, vocabulary) -> (Spans, texts)`, see `spanwise.segment.segment`.
        kind: always "segmenter".
    """

    name: str
    function: Callable[..., tuple[Spans, list[BlockText]]]
    kind: str = "segmenter"


#: Every segmenter by name; `spanwise.testing.check_segmenter` says what one must do.
SEGMENTERS: Registry[Segmenter] = Registry("segmenter", kinds=("segmenter",), group="spanwise.segmenters", entry=Segmenter)


def locate(
    ids_nt: Int[Tensor, "n t"], mask_nt: Shaped[Tensor, "n t"], *, layout: Layout, vocabulary: Vocabulary
) -> tuple[Spans, list[BlockText]]:
    """Find the blocks of every completion with the segmenter that the layout names.

    Args:
        ids_nt, mask_nt, layout, vocabulary: see `spanwise.segment.segment`.

    Raises:
        RecipeError: there is no segmenter of that name.

    Example:
        >>> import torch
        >>> vocabulary = Vocabulary((b"<a>", b"4", b"</a>", b"<c>", b"0.9", b"</c>"))
        >>> layout = Layout({"solution": ["a"], "confidence": ["c"]})
        >>> locate(torch.arange(6)[None], torch.ones(1, 6).bool(), layout=layout, vocabulary=vocabulary)[0].block_nt.tolist()
        [[0, 0, 0, 1, 1, 1]]
    """
    return SEGMENTERS.find(layout.segmenter).function(ids_nt, mask_nt, layout=layout, vocabulary=vocabulary)
