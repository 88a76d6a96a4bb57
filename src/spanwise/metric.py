"""`Metric`: the name of a logged number, the function that computes it, and its alarms."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

_BEYOND = {"above": operator.gt, "below": operator.lt, "at least": operator.ge, "at most": operator.le}


@dataclass(frozen=True)
class Alarm:
    """A warning about a metric beyond its threshold. `{name}`: block or objective; `{share}`: value in %."""

    side: Literal["above", "below", "at least", "at most"]
    threshold: float
    sentence: str
    cause: str = ""
    hollow: tuple[str, ...] = ()  # The names of metrics that mean nothing while this alarm holds.
    unless: str = ""  # No alarm is raised while the metric of this name is above one half.
    unknown: str = ""  # The sentence for a run in which no batch has a value of the metric.

    def holds(self, value: float) -> bool:
        """Return whether a value of the metric is beyond the alarm's threshold."""
        return _BEYOND[self.side](value, self.threshold)


@dataclass(frozen=True)
class Metric:
    """A logged number. A placeholder in its name, such as `<block>`, stands for each block or objective."""

    name: str
    of: Callable[[Any], Mapping[str, float]] | None = None  # Computes the metric for each block or objective.
    lasting: Alarm | None = None  # Warns if the metric is beyond the alarm's threshold in several training batches in a row.
    overall: Alarm | None = None  # Warns if a run's mean is beyond the alarm's threshold, unless `lasting` has warned.
    at_end: Alarm | None = None  # Warns if the mean over a run's last batches is beyond the alarm's threshold.

    def part(self, key: str) -> str | None:
        """Return the block or objective that a logged key names, or None if the key belongs to another metric."""
        key_match = self._shape.fullmatch(key)
        return None if key_match is None else next(iter(key_match.groups("")), "")

    @cached_property
    def _shape(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"\[\w+/\]", "(?:(.+)/)?", re.sub(r"<\w+>", "(.+)", self.name)))

    def key(self, part: str = "") -> str:
        """Return this metric's key in the log. `part` (a block, an objective, ...) replaces the placeholder."""
        return re.sub(r"<\w+>", part, re.sub(r"\[\w+/\]", f"{part}/" if part else "", self.name))


def metrics_in(batches: Sequence[Mapping[str, Any]], known_metrics: Sequence[Metric]) -> Iterator[tuple[str, str, Metric]]:
    """Find the known metrics in a log. Yield each key of the log, its block or objective, and the metric."""
    for key in dict.fromkeys(key for batch_metrics in batches for key in batch_metrics):
        yield from ((key, part, metric) for metric in known_metrics if (part := metric.part(key)) is not None)
