"""How often a policy is right, and whether it knows: accuracy, Brier score, ECE, AUROC. Pure functions on tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.errors import AlignmentError
from spanwise.measure.bootstrap import Kind, Weighted, bootstrap
from spanwise.measure.ece_interval import gaps_interval
from spanwise.measure.intervals import Interval, Prompts, wilson
from spanwise.measure.weighted import (
    BinScheme,
    One,
    check_reports,
    weighted_auroc,
    weighted_brier,
    weighted_ece,
    weighted_gaps,
    weighted_mean,
    weighted_sharpness,
)


def brier(confidence_n: Float[Tensor, " n"], correct_n: Float[Tensor, " n"]) -> float:
    """Mean squared distance between confidence and correctness; lower is better, NaN without completions.

    >>> round(brier(torch.tensor([.9, .2]), torch.tensor([1., 1.])), 4)  # (.01 + .64) / 2
    0.325
    """
    return float(weighted_brier(confidence_n, correct_n, _once(confidence_n)))


def ece(
    confidence_n: Float[Tensor, " n"],
    correct_n: Float[Tensor, " n"],
    *,
    bins: int = 10,
    scheme: BinScheme = "width",
    one: One | None = None,
) -> float:
    r"""Expected calibration error: how far accuracy is from confidence, bin by bin.

    Equation
        ECE = sum over bins b of (n_b / n) |mean correctness in b - mean confidence in b|
        width: [0, .1), [.1, .2), ..., [.9, 1), [1, 1.1) for bins=10: the eleven bins of the BAE paper; one="last" has [.9, 1].
        mass: bin = floor(bins * rank / n), rank = completions below plus half of those at the same confidence.

    Args:
        confidence_n: reported probabilities in [0, 1].
        correct_n: 1 where right, else 0.
        bins: bins of [0, 1), beside the one for exactly 1 if it has its own.
        scheme: equal width or equal mass; equal confidences are never parted, so masses differ where many tie.
        one: where a confidence of exactly 1 goes; default "own" for width; mass knows only "last".

    Edge cases:
        NaN without completions. A confidence on a border belongs to the upper bin, also where rounding puts it just below
        (.7 in float32).

    Example:
        >>> q, c = torch.tensor([.75, .75, .25, 1.]), torch.tensor([1., 0., 0., 1.])
        >>> ece(q, c)  # 2/4 |.5 - .75| + 1/4 |0 - .25| + 1/4 |1 - 1|
        0.1875
        >>> ece(q, c, scheme="mass", bins=2)  # {.25, .75, .75}: 3/4 |1/3 - 1.75/3|, {1}: 0
        0.1875

    Reference:
        Pavlenko et al. 2026 (arXiv 2602.10231), evaluation protocol. Equal mass: Nguyen and O'Connor 2015 (arXiv 1508.05154), who
        part ties by position.
    """
    return float(weighted_ece(confidence_n, correct_n, _once(confidence_n), bins=bins, scheme=scheme, one=one))


def auroc(confidence_n: Float[Tensor, " n"], correct_n: Float[Tensor, " n"]) -> float:
    """Probability that a right answer has a higher confidence than a wrong one, ties counting half; NaN if one kind is missing.

    >>> auroc(torch.tensor([.9, .5, .5, .1]), torch.tensor([1., 1., 0., 0.]))  # 3.5 of 4 pairs
    0.875
    """
    return float(weighted_auroc(confidence_n, correct_n, _once(confidence_n)))


def sharpness(confidence_n: Float[Tensor, " n"], *, ddof: int = 0) -> float:
    """Variance of the confidences: 0 if the policy always says the same, whatever the question; NaN with at most `ddof`.

    >>> sharpness(torch.tensor([0., 1., .5, .5]))
    0.125
    """
    check_reports(confidence_n, torch.zeros_like(confidence_n))
    return float(confidence_n.cpu().double().var(correction=ddof)) if len(confidence_n) > ddof else math.nan


def figures(
    confidence_n: Float[Tensor, " n"],
    correct_n: Float[Tensor, " n"],
    *,
    well_formed_n: Bool[Tensor, " n"],
    refusal_n: Bool[Tensor, " n"] | None = None,
) -> dict[str, float | None]:
    """The figures of one evaluation. Calibration is over the completions that stated a confidence; `coverage` is their share.

    Accuracy is over those whose answer could be judged; `verdict_rate` is their share.

    A collapsed policy has a beautiful ECE: read accuracy, refusal and format rate first.

    Args:
        confidence_n: NaN where none was stated.
        correct_n: 1 where right, 0 where wrong; NaN where the check gave no verdict (left out).
        well_formed_n: no fault in the tags.
        refusal_n: the completion declined to answer; None where the task knows no refusals.

    Example:
        >>> said, right = torch.tensor([0.9, 0.5]), torch.tensor([1.0, 0.0])
        >>> found = figures(said, right, well_formed_n=torch.tensor([True, True]))
        >>> found["accuracy"], round(found["brier"], 2), found["coverage"]  # (.01 + .25) / 2
        (0.5, 0.13, 1.0)
    """
    once = _once(correct_n)
    weighted = _weighted(confidence_n, correct_n, well_formed_n, refusal_n)
    values = {name: None if figure is None else float(figure(once)[0]) for name, figure in weighted.items()}
    return {name: None if value is None or value != value else value for name, value in values.items()}


def figure_intervals(
    confidence_n: Float[Tensor, " n"],
    correct_n: Float[Tensor, " n"],
    *,
    prompts: Prompts,
    well_formed_n: Bool[Tensor, " n"],
    refusal_n: Bool[Tensor, " n"] | None = None,
    resamples: int = 1000,
    level: float = 0.95,
    kind: Kind = "basic",
    seed: int = 0,
) -> dict[str, Interval | None]:
    """The `figures` of one evaluation with bootstrap intervals by prompt; None where a figure does not exist.

    Every figure sees the same resampled prompts. Arguments as in `figures` and `bootstrap`; `kind` is of all but the ECE, which no
    kind holds: its interval is that of `ece_interval`. What share of them holds the truth: docs/intervals.md.

    Edge cases:
        All figures lie in [0, 1], and so do the bounds. A share of exactly 0 or 1, which no resample changes, has Wilson's interval
        over the prompts.

    >>> every = torch.ones(4, dtype=torch.bool)
    >>> stated_n, right_n = torch.tensor([.9, .8, .3, .9]), torch.tensor([1., 1., 0., 1.])
    >>> print(figure_intervals(stated_n, right_n, prompts=[0, 0, 1, 1], well_formed_n=every)["accuracy"])
    0.750 [0.500, 1.000]
    """
    weighted = _weighted(confidence_n, correct_n, well_formed_n, refusal_n)
    options = {"resamples": resamples, "level": level, "seed": seed}
    intervals: dict[str, Interval | None] = {}
    for name, figure in weighted.items():
        if name == "ece":
            intervals[name] = gaps_interval(_judged(weighted_gaps, confidence_n, correct_n), prompts, **options)
        else:
            intervals[name] = None if figure is None else bootstrap(figure, prompts, kind=kind, **options)
    return {name: None if i is None or i.value != i.value else _bounded(i, name in _SHARES) for name, i in intervals.items()}


_SHARES = ("accuracy", "refusal_rate", "format_rate", "coverage", "verdict_rate")


def _bounded(interval: Interval, share: bool) -> Interval:
    """Bounds inside [0, 1]."""
    if share and interval.sem == 0 and interval.value in (0.0, 1.0):
        low, high = wilson(interval.value * interval.count, interval.count, level=interval.level)
    else:
        low, high = max(interval.low, 0.0), min(interval.high, 1.0)  # NaN stays
    return replace(interval, low=low, high=high)


def _weighted(
    confidence_n: Tensor, correct_n: Tensor, well_formed_n: Tensor, refusal_n: Tensor | None
) -> dict[str, Weighted | None]:
    """Every figure as a function of weights over all completions."""
    sizes = [len(column) for column in (confidence_n, correct_n, well_formed_n, refusal_n) if column is not None]
    if len(set(sizes)) > 1:
        raise AlignmentError(
            f"The columns of an evaluation have {', '.join(map(str, sizes))} entries; give one to each completion."
        )
    stated_n = ~confidence_n.isnan()
    return {
        "accuracy": partial(weighted_mean, correct_n),
        "refusal_rate": None if refusal_n is None else partial(weighted_mean, refusal_n.double()),
        "format_rate": partial(weighted_mean, well_formed_n.double()),
        "coverage": partial(weighted_mean, stated_n.double()),
        "verdict_rate": partial(weighted_mean, (~correct_n.isnan()).double()),
        "mean_confidence": _judged(lambda q, c, weight_rn: weighted_mean(q, weight_rn), confidence_n, correct_n),
        "sharpness": _judged(lambda q, c, weight_rn: weighted_sharpness(q, weight_rn), confidence_n, correct_n),
        "ece": _judged(weighted_ece, confidence_n, correct_n),
        "brier": _judged(weighted_brier, confidence_n, correct_n),
        "auroc": _judged(weighted_auroc, confidence_n, correct_n),
    }


def _judged(figure: Callable[[Tensor, Tensor, Tensor], Tensor], confidence_n: Tensor, correct_n: Tensor) -> Weighted:
    """A figure of the completions that stated a confidence and were judged, as a function of weights over all."""
    both_n = (~correct_n.isnan() & ~confidence_n.isnan()).cpu()
    q, c = confidence_n.cpu()[both_n], correct_n.cpu()[both_n]
    return lambda weight_rn: figure(q, c, weight_rn[:, both_n])


def _once(confidence_n: Tensor) -> Float[Tensor, "1 n"]:
    return torch.ones(1, len(confidence_n), dtype=torch.float64)
