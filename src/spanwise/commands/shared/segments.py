"""Where segments open, as `sae` cuts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from jaxtyping import Bool, Float

from spanwise.credit import METHODS, segment_openings


@dataclass(frozen=True)
class Segments:
    """What opens a segment of a completion, as `fidelity.SaeSegments`, which needs scipy.

    >>> Segments.of("sae", {"threshold": 0.5}).words
    'A tick stands where a token of a probability below 0.5 opens a segment.'
    """

    threshold: float
    boundary: Literal["start", "end"]

    @staticmethod
    def of(method: str | None, options: Mapping[str, Any] | None) -> Segments | None:
        """Those of a method under its options; None where it knows none.

        >>> Segments.of("gae", {}), Segments.of("sae", None)
        (None, Segments(threshold=0.2, boundary='start'))
        """
        known = METHODS[method].options if method is not None and method in METHODS else {}
        if not {"threshold", "boundary"} <= set(known):
            return None
        given = {**known, **(options or {})}
        return Segments(float(given["threshold"]), cast(Literal["start", "end"], str(given["boundary"])))

    @property
    def words(self) -> str:
        """What a boundary is, in a sentence."""
        does = "opens a segment" if self.boundary == "start" else "has closed a segment"
        return f"A tick stands where a token of a probability below {self.threshold:g} {does}."

    def opens(self, logp: Float[np.ndarray, " t"], trained: Bool[np.ndarray, " t"]) -> list[int]:
        """The tokens that open a segment, but for the first trained one, which has none before it.

        Example:
            >>> logp, trained = np.log([0.1, 0.1, 0.9, 0.1]), np.array([True, False, True, True])
            >>> Segments(0.2, "start").opens(logp, trained), Segments(0.2, "end").opens(logp, trained)
            ([3], [2])
        """
        places = np.flatnonzero(trained)
        logp_1t = torch.from_numpy(logp[places]).float().nan_to_num(nan=0.0)[None]  # what is not known cuts nothing
        mask_1t = torch.ones_like(logp_1t, dtype=torch.bool)
        opens_1t = segment_openings(logp_1t, mask_1t, threshold=self.threshold, boundary=self.boundary)
        return places[1:][opens_1t[0, 1:].numpy()].tolist()
