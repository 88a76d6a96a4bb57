"""Compute the figures of an evaluation (accuracy, calibration) and their intervals.

The intervals of an ECE, and of the difference of two, are right where a bootstrap of the ECE itself is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import NamedTuple

import scipy
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit.strata import list_ids
from spanwise.errors import AlignmentError
from spanwise.measure.calibration import weighted_auroc, weighted_ece, weighted_gaps
from spanwise.measure.intervals import (
    Interval,
    Prompts,
    Weighted,
    check_level,
    prompt_index,
    resample,
    unseen_interval,
    weighted_mean,
)


def figures(
    confidence_n: Float[Tensor, " n"],
    correct_n: Float[Tensor, " n"],
    *,
    well_formed_n: Bool[Tensor, " n"],
    refusal_n: Bool[Tensor, " n"] | None = None,
) -> dict[str, float | None]:
    """Compute the metrics of one evaluation. Calibration covers only completions that state a confidence.

    Their share is `coverage`. Accuracy is over those whose answer could be judged; `verdict_rate` is their share. `brier` is the
    mean squared distance between confidence and correctness, `sharpness` the variance of the confidences: 0 if all are the same.

    A collapsed policy has a beautiful ECE: read accuracy, refusal and format rate first.

    Args:
        confidence_n: NaN where none was stated.
        correct_n: 1 where right, 0 where wrong; NaN where the check gave no verdict (left out).
        well_formed_n: no fault in the tags.
        refusal_n: the completion declined to answer; None where the task knows no refusals.

    Example:
        >>> confidence, right = torch.tensor([0.9, 0.5]), torch.tensor([1.0, 0.0])
        >>> result = figures(confidence, right, well_formed_n=torch.tensor([True, True]))
        >>> result["accuracy"], round(result["brier"], 2), result["coverage"]  # (.01 + .25) / 2
        (0.5, 0.13, 1.0)
    """
    value_of_figure: dict[str, float | None] = {}
    for name, figure in build_figures(confidence_n, correct_n, well_formed_n, refusal_n).items():
        value_of_figure[name] = None
        if figure is not None:
            figure_value = float(figure.function(*figure.columns, torch.ones(1, len(figure.columns[0]))))
            value_of_figure[name] = None if math.isnan(figure_value) else figure_value
    return value_of_figure


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
    """Compute the figures of one evaluation with intervals from resampled prompts. An undefined figure is None.

    Equation
        [Q_{.025} f(w, and a prompt that makes f low), Q_{.975} f(w, and a prompt that makes f high)],  w ~ Exp(1) by prompt

    A bound counts on one more prompt, of average size, which nobody saw and which holds the worst there can be. The ECE has the
    interval of `ece_interval`. Why, and what share of them holds the truth: docs/intervals.md.

    Args:
        confidence_n, correct_n, well_formed_n, refusal_n: as in `figures`.
        prompts: the prompt of each completion.
        resamples: how often prompts are weighted anew.
        seed: of the weights.

    Edge cases:
        All figures lie in [0, 1], and so do the bounds. None has width 0. One prompt gives no bounds.

    >>> every = torch.ones(4, dtype=torch.bool)
    >>> stated_n, right_n = torch.tensor([.9, .8, .3, .9]), torch.tensor([1., 1., 0., 1.])
    >>> print(figure_intervals(stated_n, right_n, prompts=[0, 0, 1, 1], well_formed_n=every)["accuracy"])
    0.750 [0.104, 0.993]

    Reference:
        Gaffke 2005, "Three test statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative variable"; for
        binary values Clopper and Pearson 1934.
    """
    intervals: dict[str, Interval | None] = {}
    prompt_n = prompt_index(prompts, len(correct_n))
    for name, figure in build_figures(confidence_n, correct_n, well_formed_n, refusal_n).items():
        intervals[name] = None
        if figure is None or not len(figure.columns[0]):
            continue
        known_prompts, bootstrap_options = prompt_n[figure.known_n], {"resamples": resamples, "seed": seed}
        if name == "ece":
            interval = ece_interval(Reports(*figure.columns, prompts=known_prompts), **bootstrap_options)
        else:
            interval = unseen_interval(figure.function, figure.columns, figure.ends, known_prompts, **bootstrap_options)
        if not math.isnan(interval.value):
            # unknown bounds stay NaN, because max(nan, 0.0) is NaN
            intervals[name] = replace(interval, low=max(interval.low, 0.0), high=min(interval.high, 1.0))
    return intervals


class BoundedFigure(NamedTuple):
    """An evaluation figure, its data, and the values of one more prompt that would lower and raise it most."""

    function: Callable[..., Tensor]
    columns: tuple[Float[Tensor, " n"], ...]
    known_n: Bool[Tensor, " n"]
    ends: tuple[tuple[Sequence[float], ...], tuple[Sequence[float], ...]]


def build_figures(
    confidence_n: Tensor, correct_n: Tensor, well_formed_n: Tensor, refusal_n: Tensor | None
) -> dict[str, BoundedFigure | None]:
    """Map each evaluation figure's name to its function and data. The refusal rate is None for tasks without refusals."""
    lengths = [len(column) for column in (confidence_n, correct_n, well_formed_n, refusal_n) if column is not None]
    if len(set(lengths)) > 1:
        lengths_text = ", ".join(map(str, lengths))
        raise AlignmentError(f"The columns of an evaluation have {lengths_text} entries; give one entry to each completion.")
    is_judged_n = (~correct_n.isnan() & ~confidence_n.isnan()).cpu()
    reports = (confidence_n.cpu()[is_judged_n], correct_n.cpu()[is_judged_n])
    confidence_i, correct_i = (column.double() for column in reports)
    mean_confidence = float(confidence_i.mean())
    share_ends = (([0.0],), ([1.0],))  # the values of one more prompt that lower and raise a mean most
    sharpness_ends = (([mean_confidence],), ([float(mean_confidence < 0.5)],))

    def share(column_n: Tensor | None) -> BoundedFigure | None:
        if column_n is None:
            return None
        is_known_n = ~column_n.isnan().cpu()
        return BoundedFigure(weighted_mean, (column_n.cpu()[is_known_n].double(),), is_known_n, share_ends)

    return {
        "accuracy": share(correct_n),
        "refusal_rate": share(refusal_n),
        "format_rate": share(well_formed_n),
        "coverage": share(~confidence_n.isnan()),
        "verdict_rate": share(~correct_n.isnan()),
        "mean_confidence": BoundedFigure(weighted_mean, (confidence_i,), is_judged_n, share_ends),
        "sharpness": BoundedFigure(_variance, (confidence_i,), is_judged_n, sharpness_ends),
        "ece": BoundedFigure(weighted_ece, reports, is_judged_n, ((), ())),
        "brier": BoundedFigure(weighted_mean, ((confidence_i - correct_i).square(),), is_judged_n, share_ends),
        "auroc": BoundedFigure(weighted_auroc, reports, is_judged_n, (([1.0, 0.0], [0.0, 1.0]), ([1.0, 0.0], [1.0, 0.0]))),
    }


def _variance(value_n: Tensor, weight_rn: Tensor) -> Tensor:
    """Compute the variance of the values under each row of weights."""
    deviation_rn = value_n.double() - weighted_mean(value_n, weight_rn).unsqueeze(1)
    return (weight_rn * deviation_rn.square()).sum(dim=1) / weight_rn.sum(dim=1)


@dataclass(frozen=True)
class Reports:
    """The stated confidence, the correctness and the prompt of each completion in a run.

    Attributes:
        confidence_n: in [0, 1].
        correct_n: 1 where right, else 0.
        prompts: the prompt of each completion.

    Example:
        >>> reports = Reports(torch.tensor([0.9, 0.6]), torch.tensor([1.0, 0.0]), prompts=["a", "b"])
        >>> round(ece_interval(reports).value, 2)  # |1 - .9| / 2 + |0 - .6| / 2
        0.35
    """

    confidence_n: Float[Tensor, " n"]
    correct_n: Float[Tensor, " n"]
    prompts: Prompts


def ece_interval(reports: Reports, *, bins: int = 10, resamples: int = 1000, level: float = 0.95, seed: int = 0) -> Interval:
    r"""Compute the interval of an expected calibration error. It comes from bootstrap noise of the bins.

    Equation
        ECE = sum_b |g_b|, g_b = sum over the completions of bin b of (correct - confidence) / N;  Z_b: noise of g_b
        sum_b s_b Z_b  <=  ECE - true ECE  <=  sum_{b clear} s_b Z_b + sum_{b unclear} |Z_b|,  s_b = sign of g_b
        [ECE - f max(Q_{1 - a/2}, -Q_{a/2})(right side), ECE + f max(Q_{1 - a/2}, -Q_{a/2})(left side)], not below 0;  a = 1 - level
        b is clear if |g_b| > sqrt(2 log P) sd(Z_b);  f = sqrt(P / (P - 1)) t_{P-1} / z
        Z_b = g_b resampled - g_b + sum of (E_j - 1) v_jb / P over two prompts j that were not seen;  E_j ~ Exp(1)

    The gaps of the bins lack the bias of the ECE, and |x| is convex, which gives both sides. The answers of one unseen prompt all
    contradict their confidence, those of the other all agree with it. Why: docs/intervals.md.

    Args:
        reports: of the run.
        bins: see `ece`.
        resamples, level, seed: see `bootstrap`.

    Edge cases:
        One prompt gives no bounds; with two prompts or more the interval never has width 0.

    Example:
        >>> q, c = torch.tensor([.9, .9, .6, .6] * 10), torch.tensor([1., 1., 1., 0.] * 10)
        >>> print(ece_interval(Reports(q, c, list(range(20)) * 2)))  # 1/2 |1 - .9| + 1/2 |.5 - .6|
        0.100 [0.000, 0.261]

    Reference:
        The two sides are the subgradient inequality of the sum and the triangle inequality; which bins are clear is the moment
        selection of Andrews and Soares 2010 (Econometrica 78). Bias of the ECE: Broecker 2012; Kumar et al. 2019
        (arXiv 1909.10155).
    """
    gap_function = partial(weighted_gaps, reports.confidence_n, reports.correct_n, bins=bins)
    prompt_n = prompt_index(reports.prompts, len(reports.correct_n))
    unseen_gap_jb = unseen_gaps(reports.confidence_n, prompt_n, bins=bins)
    return gaps_interval(gap_function, unseen_gap_jb, prompt_n, resamples=resamples, level=level, seed=seed)


def ece_difference(
    a: Reports, b: Reports, *, bins: int = 10, resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> Interval:
    """Compute the interval of run `a`'s ECE minus run `b`'s. Both have the same prompts and resamples.

    The upper side of `ece_interval` for the one run with the resampled error |g + Z| - |g| of the other, and the other way round,
    because how far the two biases cancel depends on what is not known.

    Raises:
        AlignmentError: a prompt is in one run only.

    >>> q, c = torch.tensor([.9, .9, .6, .6] * 10), torch.tensor([1., 1., 1., 0.] * 10)
    >>> ids = list(range(20)) * 2
    >>> print(ece_difference(Reports(q, c, ids), Reports(q - .3, c, ids)))  # .1 - (.4 + .2) / 2
    -0.200 [-0.511, -0.026]
    """
    ids_a, ids_b = list_ids(a.prompts), list_ids(b.prompts)
    prompt_n = prompt_index([*ids_a, *ids_b], len(a.correct_n) + len(b.correct_n))
    if unpaired_prompts := set(ids_a) ^ set(ids_b):
        unpaired_prompt = next(iter(unpaired_prompts))
        raise AlignmentError(
            f"A paired difference needs the same prompts in both runs. They have {len(set(ids_a))} and {len(set(ids_b))} prompts, "
            f"and {len(set(ids_a) & set(ids_b))} prompts are in both. Prompt {unpaired_prompt!r} is missing in the "
            f"{'second' if unpaired_prompt in ids_a else 'first'} run."
        )

    def gaps(weight_rn: Float[Tensor, "r n"]) -> Float[Tensor, "r b"]:
        weighted_runs = ((a, weight_rn[:, : len(ids_a)]), (b, weight_rn[:, len(ids_a) :]))
        return torch.cat([weighted_gaps(x.confidence_n, x.correct_n, w_rn, bins=bins) for x, w_rn in weighted_runs], dim=1)

    unseen_of_a_jb = unseen_gaps(a.confidence_n, prompt_n[: len(ids_a)], bins=bins)
    unseen_of_b_jb = unseen_gaps(b.confidence_n, prompt_n[len(ids_a) :], bins=bins)
    unseen_gap_jb = torch.cat([unseen_of_a_jb, unseen_of_b_jb.flip(0)], dim=1)
    return gaps_interval(gaps, unseen_gap_jb, prompt_n, minus=True, resamples=resamples, level=level, seed=seed)


def unseen_gaps(confidence_n: Float[Tensor, " n"], prompt_n: Int[Tensor, " n"], *, bins: int = 10) -> Float[Tensor, "2 b"]:
    """Return how one more prompt may change each bin's gap: its answers contradict (row 0) or match (row 1) confidences."""
    weight_1n = torch.ones(1, len(prompt_n), dtype=torch.float64)
    contrary_answer_n = (confidence_n < 0.5).to(confidence_n)
    contrary_gap_1b = weighted_gaps(confidence_n, contrary_answer_n, weight_1n, bins=bins)
    agreeing_gap_1b = weighted_gaps(confidence_n, 1 - contrary_answer_n, weight_1n, bins=bins)
    return torch.cat([contrary_gap_1b, agreeing_gap_1b]) / len(prompt_n.unique())


def gaps_interval(
    gaps: Weighted,
    unseen_jb: Float[Tensor, "2 b"],
    prompts: Prompts,
    *,
    minus: bool = False,
    resamples: int,
    level: float,
    seed: int,
) -> Interval:
    """Compute the interval of an ECE from the gap of each confidence bin. With `minus`: of a difference of two ECEs."""
    check_level(level)
    gap_b, gap_rb, count = resample(gaps, prompts, resamples=resamples, seed=seed)
    run_sign_b = torch.ones_like(gap_b)
    if minus:
        run_sign_b[len(gap_b) // 2 :] = -1
    known_gap_rb = gap_rb[~gap_rb.isnan().any(dim=1)]
    ece_value = float((run_sign_b * gap_b.abs()).sum())
    if count < 2 or len(known_gap_rb) < 2 or math.isnan(ece_value):
        return Interval(ece_value, math.nan, math.nan, math.nan, level, count)
    noise_rb = known_gap_rb - gap_b
    ece_low, ece_high = bounds(gap_b, noise_rb, unseen_jb, run_sign_b, count=count, level=level, seed=seed)
    ece_r = (run_sign_b * known_gap_rb.abs()).sum(dim=1)
    return Interval(ece_value, max(ece_low, -1.0 if minus else 0.0), min(ece_high, 1.0), float(ece_r.std()), level, count)


def bounds(
    gap_b: Float[Tensor, " b"],
    noise_rb: Float[Tensor, "r b"],
    unseen_jb: Float[Tensor, "2 b"],
    run_sign_b: Float[Tensor, " b"],
    *,
    count: int,
    level: float,
    seed: int,
) -> tuple[float, float]:
    """Compute the bounds of an ECE or of a difference of two ECEs."""
    tail = (1 - level) / 2
    t_quantile = float(scipy.stats.t.isf(tail, count - 1))
    width_factor = math.sqrt(count / (count - 1)) * t_quantile / NormalDist().inv_cdf(1 - tail)
    generator = torch.Generator().manual_seed(seed + 1)  # use another seed than the one that drew the prompts
    centred_weight_rj = torch.empty(len(noise_rb), 2, dtype=torch.float64).exponential_(generator=generator) - 1
    # Add the noise of two unseen prompts in both orders, so that swapping the two runs only negates the bounds.
    unseen_noise_rb = centred_weight_rj @ unseen_jb
    swapped_noise_rb = centred_weight_rj.flip(1) @ unseen_jb
    noise_rb = torch.cat([noise_rb + unseen_noise_rb, noise_rb + swapped_noise_rb])
    has_clear_sign_b = gap_b.abs() > math.sqrt(2 * math.log(count)) * noise_rb.std(dim=0)
    gap_sign_b = gap_b.round(decimals=12).sign()  # a gap that differs from 0 only by rounding errors has no sign
    signed_noise_rb = gap_sign_b * noise_rb
    upper_error_rb = torch.where(has_clear_sign_b, signed_noise_rb, noise_rb.abs())
    # Noise raises each run's ECE, so the lower error of a difference of runs is how much noise changes the absolute gap.
    is_single_run = bool((run_sign_b > 0).all())
    lower_error_rb = signed_noise_rb if is_single_run else (gap_b + noise_rb).abs() - gap_b.abs()
    upper_error_r = torch.where(run_sign_b > 0, upper_error_rb, -lower_error_rb).sum(dim=1)
    lower_error_r = torch.where(run_sign_b > 0, lower_error_rb, -upper_error_rb).sum(dim=1)
    has_unknown_sign_b = (gap_sign_b == 0) & is_single_run  # a gap that is measured as 0 may truly have either sign
    extra_noise_r = noise_rb[:, has_unknown_sign_b].abs().sum(dim=1)
    ece_value = float((run_sign_b * gap_b.abs()).sum())
    margin_below = max(float(upper_error_r.quantile(1 - tail)), -float(upper_error_r.quantile(tail)))
    margin_above = max(
        float((lower_error_r + extra_noise_r).quantile(1 - tail)), -float((lower_error_r - extra_noise_r).quantile(tail))
    )
    return ece_value - width_factor * margin_below, ece_value + width_factor * margin_above
