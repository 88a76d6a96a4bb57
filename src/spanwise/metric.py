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
    #: Other figures that mean nothing then.
    hollow: tuple[str, ...] = ()
    #: A metric that makes it as it should be, where that is above half.
    unless: str = ""
    #: What is said where no batch has a value.
    unknown: str = ""

    def holds(self, value: float) -> bool:
        """Whether a value of the metric is beyond the threshold."""
        return _BEYOND[self.side](value, self.threshold)


@dataclass(frozen=True)
class Metric:
    """One number of the log."""

    name: str  # may have a part in brackets: `credit/<block>/mean_abs`, or `critic/[value/]loss` if there are several values
    of: Callable[[Any], Mapping[str, float]] | None = None  # from a batch to the number of each part; None: caller logs it
    lasting: Alarm | None = None  # for several training batches in a row
    overall: Alarm | None = None  # for the mean over a run's training batches, if `lasting` did not hold
    at_end: Alarm | None = None  # for the mean over the last of a run's training batches

    def part(self, key: str) -> str | None:
        """Return the part of a log key that stands in the brackets, "" without one; None if the key is of another metric."""
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
