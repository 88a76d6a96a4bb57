"""Reliability: accuracy against confidence, bin by bin, and what it says about the Brier score."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.measure.bins import BinScheme, One, bin_index, bin_sums, check_reports
from spanwise.measure.intervals import Prompts, prompt_index, sem, wilson


@dataclass(frozen=True)
class BrierParts:
    """Brier = reliability - resolution + uncertainty + within_variance - within_covariance, exactly, whatever the bins.

    Attributes:
        brier: the score itself.
        reliability: squared gap between accuracy and mean confidence of a bin; 0 is calibrated.
        resolution: variance of the bins' accuracies; high is good.
        uncertainty: variance of correctness, accuracy * (1 - accuracy); no report can change it.
        within_variance: of the confidences inside bins.
        within_covariance: twice the covariance of confidence and correctness inside bins.

    Example:
        A coin that says .5: all of its score is uncertainty.

        >>> found = brier_parts(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]))
        >>> found.brier, found.reliability, found.resolution, found.uncertainty
        (0.25, 0.0, 0.0, 0.25)
    """

    brier: float
    reliability: float
    resolution: float
    uncertainty: float
    within_variance: float
    within_covariance: float


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


def brier_parts(
    confidence_n: Float[Tensor, " n"],
    correct_n: Float[Tensor, " n"],
    *,
    bins: int = 10,
    scheme: BinScheme = "width",
    one: One | None = None,
) -> BrierParts:
    r"""Split the Brier score into calibration, discrimination, and what lies in the questions.

    Equation
        reliability = sum_b n_b/n (q_b - c_b)^2,  resolution = sum_b n_b/n (c_b - c)^2,  uncertainty = mean (c_i - c)^2,
        within_variance = 1/n sum (q_i - q_b)^2,  within_covariance = 2/n sum (q_i - q_b)(c_i - c_b),
        q_b and c_b the means of the bin of i; bins as in `ece`.

    Edge cases:
        All NaN without completions. The within parts vanish when every bin holds one confidence only.

    Example:
        >>> parts = brier_parts(torch.tensor([.75, .75, .25, .25]), torch.tensor([1., 0., 0., 0.]))
        >>> parts.reliability, parts.resolution, parts.uncertainty, parts.brier  # 1/16 - 1/16 + 3/16
        (0.0625, 0.0625, 0.1875, 0.1875)

    Reference:
        Murphy 1973; the two within-bin terms are of Stephenson, Coelho and Jolliffe 2008.
    """
    check_reports(confidence_n, correct_n)
    q, c = confidence_n.cpu().double(), correct_n.cpu().double()
    bin_n, bins = bin_index(confidence_n, bins=bins, scheme=scheme, one=one)
    q_mean_n, c_mean_n = (bin_sums(value_n, bin_n, bins)[bin_n] / torch.bincount(bin_n)[bin_n] for value_n in (q, c))
    return BrierParts(
        brier=float((q - c).square().mean()),
        reliability=float((q_mean_n - c_mean_n).square().mean()),
        resolution=float((c_mean_n - c.mean()).square().mean()),
        uncertainty=float((c - c.mean()).square().mean()),
        within_variance=float((q - q_mean_n).square().mean()),
        within_covariance=float(2 * ((q - q_mean_n) * (c - c_mean_n)).mean()),
    )


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
    accuracy_b = bin_sums(c, bin_n, bins) / count_b
    prompt_n = torch.arange(len(c)) if prompts is None else prompt_index(prompts, len(c))
    bounds = []
    for b in range(bins):
        inside_n = bin_n == b
        trials = _trials(c[inside_n], None if prompts is None else prompt_n[inside_n])
        bounds.append(wilson(float(accuracy_b[b]) * trials if trials else 0.0, trials, level=level))
    accuracy_low_b, accuracy_high_b = torch.tensor(bounds, dtype=torch.float64).unbind(dim=1)
    return Reliability(
        low_b, high_b, count_b, bin_sums(q, bin_n, bins) / count_b, accuracy_b, accuracy_low_b, accuracy_high_b
    )


def _trials(correct_n: Tensor, prompt_n: Tensor | None) -> float:
    """As how many independent completions these count."""
    count = len(correct_n)
    if prompt_n is None or count == 0:
        return float(count)
    prompts, p = len(torch.unique(prompt_n)), float(correct_n.mean())
    error = sem(correct_n, prompt_n)
    return float(min(max(p * (1 - p) / error**2, prompts), count) if prompts > 1 and error > 0 else prompts)
