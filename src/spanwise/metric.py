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
    """One number of the log.

    Attributes:
        name: with a part in angle brackets, `credit/<block>/mean_abs`, for each name that there is. A part in square brackets,
            `critic/[value/]loss`, is there where there are several.
        of: works it out of a batch, by what stands for the part in angle brackets ("" without one); None: who logs it does.
        lasting: where it holds in several training batches in a row.
        overall: where it holds for the mean over a run's training batches, and was not `lasting`.
        at_end: where it holds for the mean over the last of a run's training batches.
    """

    name: str
    of: Callable[[Any], Mapping[str, float]] | None = None
    lasting: Alarm | None = None
    overall: Alarm | None = None
    at_end: Alarm | None = None

    def part(self, key: str) -> str | None:
        """Return what a log key has in place of the brackets, "" if nothing; None if the key is not of this metric.

        >>> Metric("credit/<block>/mean_abs").part("credit/a/mean_abs"), Metric("kl").part("kl"), Metric("kl").part("k")
        ('a', '', None)
        >>> Metric("critic/[value/]loss").part("critic/brier/loss"), Metric("critic/[value/]loss").part("critic/loss")
        ('brier', '')
        """
        match = self._shape.fullmatch(key)
        return None if match is None else next(iter(match.groups("")), "")

    @cached_property
    def _shape(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"\[\w+/\]", "(?:(.+)/)?", re.sub(r"<\w+>", "(.+)", self.name)))

    def key(self, part: str = "") -> str:
        """Return the log key of a part.

        >>> Metric("credit/<block>/mean_abs").key("a"), Metric("critic/[value/]loss").key()
        ('credit/a/mean_abs', 'critic/loss')
        """
        return re.sub(r"<\w+>", part, re.sub(r"\[\w+/\]", f"{part}/" if part else "", self.name))


def metrics_in(batches: Sequence[Mapping[str, Any]], known: Sequence[Metric]) -> Iterator[tuple[str, str, Metric]]:
    """Find the known metrics in the log of some batches: the key, the part in brackets, and the metric of each."""
    for key in dict.fromkeys(key for line in batches for key in line):
        yield from ((key, part, metric) for metric in known if (part := metric.part(key)) is not None)
