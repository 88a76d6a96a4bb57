"""The figures of one evaluation, and how sure they are: how often a policy is right, and whether it knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.errors import AlignmentError
from spanwise.measure.calibration import weighted_auroc, weighted_gaps, weighted_mean
from spanwise.measure.ece_interval import gaps_interval
from spanwise.measure.intervals import Interval, Prompts, Weighted, bootstrap, wilson

_SHARES = ("accuracy", "refusal_rate", "format_rate", "coverage", "verdict_rate")


def figures(
    confidence_n: Float[Tensor, " n"],
    correct_n: Float[Tensor, " n"],
    *,
    well_formed_n: Bool[Tensor, " n"],
    refusal_n: Bool[Tensor, " n"] | None = None,
) -> dict[str, float | None]:
    """The figures of one evaluation. Calibration is over the completions that stated a confidence; `coverage` is their share.

    Accuracy is over those whose answer could be judged; `verdict_rate` is their share. `brier` is the mean squared distance between
    confidence and correctness, `sharpness` the variance of the confidences: 0 if the policy always says the same.

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
    once = torch.ones(1, len(correct_n), dtype=torch.float64)
    values: dict[str, float | None] = {}
    for name, figure in _weighted(confidence_n, correct_n, well_formed_n, refusal_n).items():
        value = torch.nan if figure is None else float(figure(once)[0].abs().sum())  # one number, or the gaps of the ECE
        values[name] = None if value != value else value
    return values


def figure_intervals(
    confidence_n: Float[Tensor, " n"],
    correct_n: Float[Tensor, " n"],
    *,
    prompts: Prompts,
    well_formed_n: Bool[Tensor, " n"],
    refusal_n: Bool[Tensor, " n"] | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Interval | None]:
    """The `figures` of one evaluation with bootstrap intervals by prompt; None where a figure does not exist.

    Every figure sees the same resampled prompts. Arguments as in `figures` and `bootstrap`, whose quantiles are mirrored at the
    figure, which takes out its bias. The ECE has the interval of `ece_interval`. What share of them holds the truth:
    docs/intervals.md.

    Edge cases:
        All figures lie in [0, 1], and so do the bounds. A share of exactly 0 or 1, which no resample changes, has Wilson's interval
        over the prompts.

    >>> every = torch.ones(4, dtype=torch.bool)
    >>> stated_n, right_n = torch.tensor([.9, .8, .3, .9]), torch.tensor([1., 1., 0., 1.])
    >>> print(figure_intervals(stated_n, right_n, prompts=[0, 0, 1, 1], well_formed_n=every)["accuracy"])
    0.750 [0.500, 1.000]
    """
    intervals: dict[str, Interval | None] = {}
    for name, figure in _weighted(confidence_n, correct_n, well_formed_n, refusal_n).items():
        if figure is None:
            intervals[name] = None
            continue
        if name == "ece":
            found = gaps_interval(figure, prompts, resamples=resamples, level=0.95, seed=seed)
            low, high = found.low, found.high
        else:
            found = bootstrap(figure, prompts, resamples=resamples, seed=seed)
            low, high = 2 * found.value - found.high, 2 * found.value - found.low
        if name in _SHARES and found.sem == 0 and found.value in (0.0, 1.0):
            low, high = wilson(found.value * found.count, found.count)
        inside = replace(found, low=max(low, 0.0), high=min(high, 1.0))  # NaN stays
        intervals[name] = inside if found.value == found.value else None
    return intervals


def _weighted(
    confidence_n: Tensor, correct_n: Tensor, well_formed_n: Tensor, refusal_n: Tensor | None
) -> Mapping[str, Weighted | None]:
    """Every figure as a function of weights over all completions; of the ECE it is the gaps of its bins."""
    sizes = [len(column) for column in (confidence_n, correct_n, well_formed_n, refusal_n) if column is not None]
    if len(set(sizes)) > 1:
        raise AlignmentError(
            f"The columns of an evaluation have {', '.join(map(str, sizes))} entries; give one to each completion."
        )
    judged_n = (~correct_n.isnan() & ~confidence_n.isnan()).cpu()
    q, c = confidence_n.cpu()[judged_n], correct_n.cpu()[judged_n]

    def sharpness(weight_rn: Tensor) -> Tensor:
        deviation_rn = q.double() - weighted_mean(q, weight_rn).unsqueeze(1)
        return (weight_rn * deviation_rn.square()).sum(dim=1) / weight_rn.sum(dim=1)

    shares = {
        "accuracy": correct_n, "refusal_rate": refusal_n, "format_rate": well_formed_n, "coverage": ~confidence_n.isnan(),
        "verdict_rate": ~correct_n.isnan(),
    }  # fmt: skip
    calibration = {
        "mean_confidence": partial(weighted_mean, q),
        "sharpness": sharpness,
        "ece": partial(weighted_gaps, q, c),
        "brier": partial(weighted_mean, (q.double() - c.double()).square()),
        "auroc": partial(weighted_auroc, q, c),
    }
    over_all = {
        name: None if share_n is None else partial(weighted_mean, share_n.double()) for name, share_n in shares.items()
    }
    return over_all | {name: lambda weight_rn, of=of: of(weight_rn[:, judged_n]) for name, of in calibration.items()}
