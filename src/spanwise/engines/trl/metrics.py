"""Metrics of several generation batches between two lines of the trainer's log."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping


class MetricBuffer:
    """Values seen since the last log, kept apart for training and evaluation; a log line holds their means.

    Example:
        >>> buffer = MetricBuffer()
        >>> buffer.add("eval", {"credit/malformed": 0.5}); buffer.add("eval", {"credit/malformed": 0.0})
        >>> buffer.flush("eval"), buffer.flush("eval")
        ({'eval_credit/malformed': 0.25}, {})
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}

    def add(self, mode: str, metrics: Mapping[str, float]) -> None:
        """Remember one batch."""
        for name, value in metrics.items():
            self._values[mode][name].append(value)

    def flush(self, mode: str) -> dict[str, float | None]:
        """The mean of each metric, NaN left out (None if nothing is left), and forget them."""
        prefix = "eval_" if mode == "eval" else ""
        means: dict[str, float | None] = {}
        for name, values in self._values[mode].items():
            valid = [value for value in values if not math.isnan(value)]
            means[prefix + name] = sum(valid) / len(valid) if valid else None
        self._values[mode].clear()
        return means
