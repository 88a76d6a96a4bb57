"""Compute confidence intervals: Wilson's, Student's t, and the bootstrap over prompts.

Samples of one prompt are not independent, so the unit is the prompt, never the single completion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from statistics import NormalDist
from typing import Any

import scipy
import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.strata import group_index, list_ids
from spanwise.errors import AlignmentError, RecipeError

#: The prompt of each completion: integers or other ids, in any order.
Prompts = Int[Tensor, " n"] | Sequence[Hashable]
#: A function that returns one number per row of a table of weights. A row holds one weight per completion.
Weighted = Callable[[Float[Tensor, "r n"]], Float[Tensor, " r"]]

_CHUNK = 4_000_000  # the most weights in one chunk of resamples


@dataclass(frozen=True)
class Interval:
    """A figure with an interval that holds its true value with the probability `level`.

    Attributes:
        value: the figure itself; NaN where it is undefined.
        low, high: the bounds; NaN where the noise cannot be told (one prompt, one seed).
        sem: standard error.
        level: the share of such intervals that hold the truth.
        count: how many prompts or seeds it rests on.

    Example:
        >>> accuracy = Interval(0.5, 0.3, 0.7, sem=0.1, level=0.95, count=25)
        >>> str(accuracy), accuracy.sd
        ('0.500 [0.300, 0.700]', 0.5)
    """

    value: float
    low: float
    high: float
    sem: float
    level: float
    count: int

    @property
    def sd(self) -> float:
        """Return the sample standard deviation (ddof 1) of the averaged values. A single value gives NaN."""
        return self.sem * math.sqrt(self.count)

    def excludes(self, value: float = 0.0) -> bool:
        """Return whether `value` lies outside the interval. False if the bounds are unknown."""
        return value < self.low or value > self.high

    def __str__(self) -> str:
        """Format the figure and its bounds with three decimals."""
        if math.isnan(self.value):
            return "-"
        return f"{self.value:.3f}" + ("" if math.isnan(self.low) else f" [{self.low:.3f}, {self.high:.3f}]")


def bounds_text(interval: Interval | None, show: Callable[[Any], str]) -> str:
    """Write the bounds of an interval as a text. Unknown bounds give an empty text."""
    if interval is None or math.isnan(interval.low):
        return ""
    if math.isclose(interval.low, interval.high, rel_tol=1e-9, abs_tol=1e-12):
        return "unknown, as all prompts agree"
    return f"{show(interval.low).removesuffix(' %')} to {show(interval.high)}"


def wilson(successes: int | float, count: int | float, *, level: float = 0.95) -> tuple[float, float]:
    r"""Compute Wilson's interval of a proportion. It lies in [0, 1] and has a width even if no or every trial succeeds.

    Equation
        (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n),  p = successes / n

    Edge cases:
        A count of 0 gives (0, 1). Trials are taken as independent.

    >>> low, high = wilson(16, 32)
    >>> round((high - low) / 2, 3)
    0.164
    """
    # `reliability` passes counts that are not whole, but scipy.stats.binomtest takes whole numbers only.
    z_score = NormalDist().inv_cdf((1 + check_level(level)) / 2)
    if not 0 <= successes <= count:
        raise RecipeError(f"There are {successes} successes in {count} trials; give 0 to {count} successes.")
    if count == 0:
        return 0.0, 1.0
    rate = successes / count
    scaled_z_square = z_score**2 / count
    half_width = z_score * math.sqrt(rate * (1 - rate) / count + scaled_z_square / (4 * count))
    lower_bound = (rate + scaled_z_square / 2 - half_width) / (1 + scaled_z_square)
    upper_bound = (rate + scaled_z_square / 2 + half_width) / (1 + scaled_z_square)
    return (0.0 if successes == 0 else lower_bound), (1.0 if successes == count else upper_bound)


def mean_interval(value_n: Float[Tensor, " n"], prompts: Prompts | None = None, *, level: float = 0.95) -> Interval:
    r"""Compute a mean with Student's t interval. Samples of the same prompt count as dependent.

    Equation
        sem = sqrt(P / (P - 1) * sum over prompts of (sum_p v - n_p mean)^2) / N

    Student's t has P - 1 degrees of freedom. Without `prompts`, each value is a prompt. With equally many samples per prompt, sem
    is the standard deviation of the prompts' means over sqrt(P). NaN values are left out; one prompt gives a value without bounds.

    >>> print(mean_interval(torch.tensor([.1, .2, .3, .4, .5])))  # sem .0707, t of 4 degrees of freedom 2.776
    0.300 [0.104, 0.496]
    >>> correct_n = torch.tensor([1., 1., 0., 0.])  # two prompts, always both right or both wrong: two facts, not four
    >>> round(mean_interval(correct_n, ["a", "a", "b", "b"]).sem, 4), round(mean_interval(correct_n).sem, 4)
    (0.5, 0.2887)
    """
    prompt_n = torch.arange(len(value_n)) if prompts is None else prompt_index(prompts, len(value_n))
    is_known_n = ~value_n.isnan().cpu()
    value_i = value_n.cpu()[is_known_n].double()
    prompt_i = group_index(prompt_n[is_known_n])
    mean_value = float(value_i.mean())
    prompt_count = len(prompt_i.unique())
    tail_probability = (1 - check_level(level)) / 2
    if prompt_count < 2:
        return Interval(mean_value, math.nan, math.nan, math.nan, level, prompt_count)
    deviation_i = value_i - value_i.mean()
    deviation_sum_p = torch.zeros(prompt_count, dtype=torch.float64).index_add_(0, prompt_i, deviation_i)
    sum_variance = deviation_sum_p.square().sum() * prompt_count / (prompt_count - 1)
    standard_error = float(sum_variance.sqrt() / len(value_i))
    half_width = float(scipy.stats.t.ppf(1 - tail_probability, prompt_count - 1)) * standard_error
    return Interval(mean_value, mean_value - half_width, mean_value + half_width, standard_error, level, prompt_count)


def bootstrap(figure: Weighted, prompts: Prompts, *, resamples: int = 1000, level: float = 0.95, seed: int = 0) -> Interval:
    r"""Compute the bootstrap interval of `figure`. Draws prompts with replacement, each with all samples.

    Args:
        figure: from weights (R, N) to values (R), such as `partial(weighted_ece, confidence_n, correct_n)`.
        prompts: the prompt of each completion.
        resamples: how often to draw.
        level: of the interval, between quantiles of the resampled values.
        seed: of the draws; the same seed draws the same prompts for every figure.

    Edge cases:
        One prompt gives no bounds. Resamples in which the figure is NaN are left out.
        Of a small ECE the interval holds nothing (docs/intervals.md). Use `ece_interval`, and `ece_difference` for two runs.

    Example:
        >>> from functools import partial
        >>> from spanwise.measure import weighted_auroc
        >>> confidence_n, correct_n = torch.tensor([.9, .8, .3, .4, .7, .2]), torch.tensor([1., 1., 0., 1., 0., 0.])
        >>> bootstrap(partial(weighted_auroc, confidence_n, correct_n), [1, 1, 2, 2, 3, 3], seed=1).value  # 8 of 9 pairs
        0.8888888888888888

    Reference:
        Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapters 13 and 14; by cluster as in Field and Welsh 2007.
    """
    # A single undefined resample makes both bounds of scipy.stats.bootstrap NaN.
    figure_value, resampled_value_r, prompt_count = resample(figure, prompts, resamples=resamples, seed=seed)
    known_value_r = resampled_value_r[~resampled_value_r.isnan()]
    tail_probability = (1 - check_level(level)) / 2
    if prompt_count < 2 or len(known_value_r) < 2 or bool(figure_value.isnan()):
        return Interval(float(figure_value), math.nan, math.nan, math.nan, level, prompt_count)
    lower_bound, upper_bound = (float(known_value_r.quantile(q)) for q in (tail_probability, 1 - tail_probability))
    return Interval(float(figure_value), lower_bound, upper_bound, float(known_value_r.std()), level, prompt_count)


def unseen_interval(
    figure: Callable[..., Tensor],
    columns: Sequence[Float[Tensor, " n"]],
    ends: Sequence[Sequence[Sequence[float]]],
    prompts: Prompts,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Compute a bootstrap interval over prompts. Each bound adds unseen prompts with one entry of `ends` as values."""
    interval = bootstrap(partial(figure, *columns), prompts, resamples=resamples, seed=seed)
    if math.isnan(interval.low):
        return interval
    prompt_n = prompt_index(prompts, len(prompts))
    samples_per_prompt = math.ceil(len(prompts) / interval.count)
    unseen_prompt_n = interval.count + torch.arange(len(ends[0][0])).repeat(samples_per_prompt)
    extended_prompt_n = torch.cat([prompt_n, unseen_prompt_n])

    def extend(column_n: Tensor, end_values: Sequence[float]) -> Tensor:
        return torch.cat([column_n.cpu(), column_n.new_tensor(end_values).cpu().repeat(samples_per_prompt)])

    columns_of_ends = [[extend(*pair) for pair in zip(columns, end, strict=True)] for end in ends]
    low_figure_r, high_figure_r = resample(
        lambda weight_rn: torch.stack([figure(*extended_columns, weight_rn) for extended_columns in columns_of_ends], dim=1),
        extended_prompt_n, resamples=resamples, seed=seed, smooth=True,
    )[1].unbind(dim=1)  # fmt: skip
    lower_bound = low_figure_r.quantile((1 - interval.level) / 2)
    upper_bound = high_figure_r.quantile((1 + interval.level) / 2)
    return replace(interval, low=float(lower_bound), high=float(upper_bound))


def weighted_mean(value_n: Float[Tensor, " n"], weight_rn: Float[Tensor, "r n"]) -> Float[Tensor, " r"]:
    """Compute the mean of `value_n`, weighted by each row of `weight_rn`. NaN values are left out.

    >>> weighted_mean(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([[1.0, 1.0, 1.0], [3.0, 1.0, 1.0]])).tolist()
    [2.0, 1.5]
    """
    is_known_n = ~value_n.isnan().cpu()
    weight_rn = weight_rn.double()[:, is_known_n]
    return weight_rn @ value_n.cpu().double()[is_known_n] / weight_rn.sum(dim=1)


def resample(
    figure: Weighted, prompts: Prompts, *, resamples: int, seed: int, smooth: bool = False
) -> tuple[Tensor, Tensor, int]:
    """Return a figure, its values in bootstrap resamples, and the number of prompts. `smooth`: weights are exponential."""
    prompt_n = prompt_index(prompts, len(prompts))
    n_prompts = int(prompt_n.max()) + 1 if len(prompt_n) else 0
    figure_value = figure(torch.ones(1, len(prompt_n), dtype=torch.float64))[0]
    weight_chunks = draw_weights(n_prompts, len(prompt_n), resamples, seed, smooth)
    value_parts = [figure(weight_rp[:, prompt_n]) for weight_rp in weight_chunks]
    return figure_value, torch.cat(value_parts) if value_parts else figure_value.new_zeros(0, *figure_value.shape), n_prompts


def draw_weights(prompts: int, completions: int, resamples: int, seed: int, smooth: bool) -> Iterator[Float[Tensor, "r p"]]:
    """Yield chunks of bootstrap resamples: rows of random prompt weights. Chunk sizes do not change the weights."""
    if resamples < 1:
        raise RecipeError(f"A bootstrap needs at least 1 resample, not {resamples}.")
    generator = torch.Generator().manual_seed(seed)
    chunk_size = max(1, _CHUNK // max(completions, 1))
    for first_resample in range(0, resamples if prompts else 0, chunk_size):
        ones_rp = torch.ones(min(chunk_size, resamples - first_resample), prompts, dtype=torch.float64)
        if smooth:
            yield ones_rp.exponential_(generator=generator)
        else:
            drawn_prompt_rp = torch.randint(prompts, ones_rp.shape, generator=generator)
            yield torch.zeros_like(ones_rp).scatter_add_(1, drawn_prompt_rp, ones_rp)


def prompt_index(prompts: Prompts, completions: int) -> Int[Tensor, " n"]:
    """Return each completion's prompt as a number 0..P-1. Prompts are numbered by sorted id, so row order does not matter.

    Equal ids are one prompt, as in `group_index`: 1, 1.0 and True are, 1 and "1" are not.
    """
    if len(prompts) != completions:
        raise AlignmentError(f"There are {len(prompts)} prompt ids for {completions} completions; give each an id.")
    prompt_ids = list_ids(prompts)
    # Sort prompt ids: numbers first, then others by type and text.
    sort_key_of_id = {
        id: ("", id) if isinstance(id, Real) else (type(id).__name__, id if isinstance(id, str) else repr(id))
        for id in prompt_ids
    }
    sorted_ids = sorted(sort_key_of_id, key=sort_key_of_id.__getitem__)
    index_of_prompt = {prompt: index for index, prompt in enumerate(sorted_ids)}
    return torch.tensor([index_of_prompt[prompt] for prompt in prompt_ids], dtype=torch.long)


def check_level(level: float) -> float:
    """Return a confidence level, but refuse one that is not between 0 and 1."""
    if not 0 < level < 1:
        raise RecipeError(f"A level of confidence must lie between 0 and 1, but it is {level}.")
    return level
