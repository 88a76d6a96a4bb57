"""`Metric`: one logged number in one place: its name, how it is computed, and when it is an alarm."""

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
    """A sentence for a metric that is beyond a threshold; `{name}` stands for the part in angle brackets."""

    side: Literal["above", "below", "at least", "at most"]
    threshold: float
    sentence: str
    cause: str = ""
    #: Metrics that mean nothing during this alarm.
    hollow: tuple[str, ...] = ()
    #: A metric that explains the value if it is above one half; then there is no alarm.
    unless: str = ""
    #: The sentence for a run in which no batch has a value.
    unknown: str = ""

    def holds(self, value: float) -> bool:
        """Return whether a value of the metric is beyond the threshold."""
        return _BEYOND[self.side](value, self.threshold)


@dataclass(frozen=True)
class Metric:
    """One number of the log; its name may hold `<part>`, a name of several, or `[part/]`, which only several need."""

    name: str
    # computes the number of each part from a batch; None: its logger computes it
    of: Callable[[Any], Mapping[str, float]] | None = None
    lasting: Alarm | None = None  # alarm for a value in several training batches in a row
    overall: Alarm | None = None  # alarm for the mean over a run's batches, unless `lasting` held
    at_end: Alarm | None = None  # alarm for the mean over the last batches of a run

    def part(self, key: str) -> str | None:
        """Return the part of a log key in place of the brackets, "" if there is none; None for the key of another metric."""
        match = self._shape.fullmatch(key)
        return None if match is None else next(iter(match.groups("")), "")

    @cached_property
    def _shape(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"\[\w+/\]", "(?:(.+)/)?", re.sub(r"<\w+>", "(.+)", self.name)))

    def key(self, part: str = "") -> str:
        """Return the log key of a part."""
        return re.sub(r"<\w+>", part, re.sub(r"\[\w+/\]", f"{part}/" if part else "", self.name))


def metrics_in(batches: Sequence[Mapping[str, Any]], known: Sequence[Metric]) -> Iterator[tuple[str, str, Metric]]:
    """Find the known metrics in the log of some batches: the key, the part in brackets, and the metric of each."""
    for key in dict.fromkeys(key for line in batches for key in line):
        yield from ((key, part, metric) for metric in known if (part := metric.part(key)) is not None)
