"""Reliability: accuracy against confidence, bin by bin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.measure.intervals import Prompts, prompt_index, sem, wilson
from spanwise.measure.weighted import BinScheme, One, bin_index, check_reports


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram in numbers, one entry per bin; NaN in empty bins.

    Attributes:
        low_b, high_b: the borders of the bin (equal mass: its smallest and largest confidence).
        count_b: completions in it.
        confidence_b, accuracy_b: their mean confidence and accuracy.
        accuracy_low_b, accuracy_high_b: Wilson interval of the accuracy; (0, 1) in an empty bin.

    Example:
        >>> found = reliability(torch.tensor([0.75, 0.75, 0.25]), torch.tensor([1.0, 0.0, 0.0]), bins=2, one="last")
        >>> found.count_b.tolist(), found.accuracy_b.tolist()
        ([1, 2], [0.0, 0.5])
    """

    low_b: Float[Tensor, " b"]
    high_b: Float[Tensor, " b"]
    count_b: Int[Tensor, " b"]
    confidence_b: Float[Tensor, " b"]
    accuracy_b: Float[Tensor, " b"]
    accuracy_low_b: Float[Tensor, " b"]
    accuracy_high_b: Float[Tensor, " b"]


def reliability(
    confidence_n: Float[Tensor, " n"],
    correct_n: Float[Tensor, " n"],
    *,
    prompts: Prompts | None = None,
    bins: int = 10,
    scheme: BinScheme = "width",
    one: One | None = None,
    level: float = 0.95,
) -> Reliability:
    """The table behind a reliability diagram; bins as in `ece`, which is its mean |accuracy - confidence| weighted by count.

    Args:
        confidence_n: reported probabilities in [0, 1].
        correct_n: 1 where right, else 0.
        prompts: the prompt of each completion. With them the Wilson interval of a bin counts as many independent trials as would
            give its standard error by prompt, at least its prompts and at most its completions (Korn and Graubard 1998); without
            them every completion counts as one, which is too sure of itself when prompts have many samples.
        bins: as in `ece`, like `scheme` and `one`.
        scheme, one: as in `ece`.
        level: of the intervals.

    Example:
        >>> table = reliability(torch.tensor([.75, .75, .25, 1.]), torch.tensor([1., 0., 0., 1.]), bins=2)
        >>> for low, count, accuracy in zip(table.low_b, table.count_b, table.accuracy_b):
        ...     print(float(low), int(count), float(accuracy))
        0.0 1 0.0
        0.5 2 0.5
        1.0 1 1.0
    """
    check_reports(confidence_n, correct_n)
    q, c = confidence_n.cpu().double(), correct_n.cpu().double()
    regular = bins
    bin_n, bins = bin_index(confidence_n, bins=bins, scheme=scheme, one=one)
    width = torch.arange(regular + 1, dtype=torch.float64) / regular
    count_b = torch.bincount(bin_n, minlength=bins)
    low_b, high_b = width[:bins], torch.cat([width[1:], width[-1:]])[:bins]
    if scheme == "mass":
        nothing_b = torch.full((bins,), torch.nan, dtype=torch.float64)
        low_b = nothing_b.scatter_reduce(0, bin_n, q, "amin", include_self=False)
        high_b = nothing_b.scatter_reduce(0, bin_n, q, "amax", include_self=False)
    accuracy_b = _sums(c, bin_n, bins) / count_b
    prompt_n = torch.arange(len(c)) if prompts is None else prompt_index(prompts, len(c))
    bounds = []
    for b in range(bins):
        inside_n = bin_n == b
        trials = _trials(c[inside_n], None if prompts is None else prompt_n[inside_n])
        bounds.append(wilson(float(accuracy_b[b]) * trials if trials else 0.0, trials, level=level))
    accuracy_low_b, accuracy_high_b = torch.tensor(bounds, dtype=torch.float64).unbind(dim=1)
    return Reliability(low_b, high_b, count_b, _sums(q, bin_n, bins) / count_b, accuracy_b, accuracy_low_b, accuracy_high_b)


def _trials(correct_n: Tensor, prompt_n: Tensor | None) -> float:
    """As how many independent completions these count."""
    count = len(correct_n)
    if prompt_n is None or count == 0:
        return float(count)
    prompts, p = len(torch.unique(prompt_n)), float(correct_n.mean())
    error = sem(correct_n, prompt_n)
    return float(min(max(p * (1 - p) / error**2, prompts), count) if prompts > 1 and error > 0 else prompts)


def _sums(value_n: Tensor, bin_n: Tensor, bins: int) -> Float[Tensor, " b"]:
    return torch.zeros(bins, dtype=torch.float64).index_add_(0, bin_n, value_n)
