"""How sure a figure is: Wilson and Student's t intervals, standard errors by prompt, and how many seeds it takes.

Samples of one prompt are not independent, so what counts here is the prompt, never the single completion.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import scipy
import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.errors import AlignmentError, RecipeError

#: The prompt of each completion: integers or any other ids, in any order, any number of completions each.
Prompts = Int[Tensor, " n"] | Sequence[Hashable]


@dataclass(frozen=True)
class Interval:
    """A figure and how far the noise may have moved it.

    Attributes:
        value: the figure itself; NaN where it is undefined.
        low, high: the bounds; NaN where the noise cannot be told (one prompt, one seed).
        sem: standard error.
        level: the share of such intervals that hold the truth.
        count: how many prompts or seeds it rests on.
        undefined: resamples in which the figure did not exist (an AUROC without wrong answers); they are left out.
    """

    value: float
    low: float
    high: float
    sem: float
    level: float
    count: int
    undefined: int = 0

    def excludes(self, value: float = 0.0) -> bool:
        """Whether `value` lies outside; False where the bounds are unknown."""
        return value < self.low or value > self.high

    def __str__(self) -> str:
        """The figure and its bounds, three decimals."""
        if math.isnan(self.value):
            return "-"
        return f"{self.value:.3f}" + ("" if math.isnan(self.low) else f" [{self.low:.3f}, {self.high:.3f}]")


def wilson(successes: int | float, count: int | float, *, level: float = 0.95) -> tuple[float, float]:
    r"""Wilson's interval of a proportion; never empty, never outside [0, 1], also at 0 and `count` successes.

    Equation
        (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n),  p = successes / n

    Edge cases:
        A count of 0 gives (0, 1). Trials are taken as independent.

    >>> low, high = wilson(16, 32)
    >>> round((high - low) / 2, 3)
    0.164
    """
    # scipy.stats.binomtest has it for whole numbers only, and `reliability` counts effective trials.
    z = NormalDist().inv_cdf((1 + check_level(level)) / 2)
    if not 0 <= successes <= count:
        raise RecipeError(f"There are {successes} successes in {count} trials.")
    if count == 0:
        return 0.0, 1.0
    p, extra = successes / count, z**2 / count
    half = z * math.sqrt(p * (1 - p) / count + extra / (4 * count))
    low, high = (p + extra / 2 - half) / (1 + extra), (p + extra / 2 + half) / (1 + extra)
    return (0.0 if successes == 0 else low), (1.0 if successes == count else high)


def sem(value_n: Float[Tensor, " n"], prompts: Prompts | None = None, *, ddof: int = 1) -> float:
    r"""Standard error of a mean over completions, by prompt.

    Equation
        sqrt(P / (P - ddof) * sum over prompts of (sum_p v - n_p mean)^2) / N

    With equally many samples per prompt it is the standard deviation of the prompts' means over sqrt(P).

    Args:
        value_n: one value per completion; NaN is left out.
        prompts: the prompt of each completion; None: every completion is a prompt of its own.
        ddof: 1 is unbiased for equal sizes; 0 with `prompts=None` is the sigma / sqrt(n) of the BAE paper.

    Edge cases:
        At most `ddof` prompts give NaN.

    Example:
        Two prompts, two samples each, always both right or both wrong: two facts, not four.

        >>> correct_n = torch.tensor([1., 1., 0., 0.])
        >>> round(sem(correct_n, ["a", "a", "b", "b"]), 4), round(sem(correct_n), 4)
        (0.5, 0.2887)
    """
    value_i, prompt_i, count = _known(value_n, prompts)
    if count <= ddof:
        return math.nan
    excess_p = torch.zeros(count, dtype=torch.float64).index_add_(0, prompt_i, value_i - value_i.mean())
    return float((excess_p.square().sum() * count / (count - ddof)).sqrt() / len(value_i))


def _known(value_n: Tensor, prompts: Prompts | None) -> tuple[Tensor, Tensor, int]:
    """The values that are no NaN, the prompt of each by number, and how many prompts they are of."""
    prompt_n = torch.arange(len(value_n)) if prompts is None else prompt_index(prompts, len(value_n))
    known_n = ~value_n.isnan().cpu()
    ids, prompt_i = torch.unique(prompt_n[known_n], return_inverse=True)
    return value_n.cpu()[known_n].double(), prompt_i, len(ids)


def mean_interval(value_n: Float[Tensor, " n"], prompts: Prompts | None = None, *, level: float = 0.95) -> Interval:
    """Mean with Student's t interval by prompt (or by value, without `prompts`), of P - 1 degrees of freedom.

    NaN values are left out; a single prompt gives a value without bounds.

    >>> print(mean_interval(torch.tensor([.1, .2, .3, .4, .5])))  # sem .0707, t of 4 degrees of freedom 2.776
    0.300 [0.104, 0.496]
    """
    value_i, _, count = _known(value_n, prompts)
    value, error = float(value_i.mean()), sem(value_n, prompts)
    half = float(scipy.stats.t.ppf((1 + check_level(level)) / 2, count - 1)) * error if count > 1 else math.nan
    return Interval(value, value - half, value + half, error, level, count)


def t_power(shift: float, df: int, *, alpha: float = 0.05) -> float:
    r"""Probability that a two-sided t test at level `alpha` rejects, when its statistic is centred at `shift` instead of 0.

    Equation
        P(|T'| > t),  T' noncentral t of `df` degrees of freedom around `shift`,  t the 1 - alpha/2 quantile of Student's t

    >>> round(t_power(0.0, 9), 6), round(t_power(2.8, 1000), 2)  # no difference: alpha; 2.8 standard errors: the usual 80 %
    (0.05, 0.8)
    """
    if df < 1:
        raise RecipeError(f"Student's t needs at least 1 degree of freedom, not {df}; measure at least two things.")
    if not 0 < alpha < 1:
        raise RecipeError(f"A test has a level between 0 and 1, not {alpha}.")
    limit = scipy.stats.t.ppf(1 - alpha / 2, df)
    # The lower tail as the upper one of -shift: nct.cdf(-limit, df, shift) is NaN for large shifts.
    return float(scipy.stats.nct.sf(limit, df, shift) + scipy.stats.nct.sf(limit, df, -shift))


def seeds_needed(
    difference: int | float,
    sd: int | float,
    *,
    power: float = 0.8,
    alpha: float = 0.05,
    paired: bool = True,
    most: int = 1_000_000,
) -> int | None:
    r"""How many seeds (per method) a two-sided t test needs to see a difference of this size.

    Equation
        smallest n with P(reject) >= power; paired: shift = |d| sqrt(n) / sd, df = n - 1; else |d| sqrt(n/2) / sd, df = 2n - 2

    Args:
        difference: the true difference of the two methods' means.
        sd: of the differences by seed if `paired`, else of one method over its seeds.
        power: the probability of seeing it.
        alpha: the probability of seeing one that is not there.
        paired: both methods ran on the same seeds.
        most: None is returned if it takes more (a difference of 0 is never seen).

    Edge cases:
        At least 2, also without any noise.

    Example:
        >>> seeds_needed(0.02, 0.02), seeds_needed(0.02, 0.02, paired=False), seeds_needed(0.01, 0.02)
        (10, 17, 34)

    Reference:
        Cohen 1988; the power is `t_power`.
    """
    if sd < 0 or not math.isfinite(sd) or not math.isfinite(difference):
        raise RecipeError(f"A difference of {difference} with standard deviation {sd} has no number of seeds.")
    if difference == 0:
        return None
    if sd == 0:
        return 2

    def enough(n: int) -> bool:
        shift = abs(difference) / sd * math.sqrt(n if paired else n / 2)
        return t_power(shift, n - 1 if paired else 2 * n - 2, alpha=alpha) >= power

    high = 2
    while not enough(high):
        if high >= most:
            return None
        high = min(2 * high, most)
    return bisect_left(range(high), True, lo=max(high // 2, 2), key=enough)


def prompt_index(prompts: Prompts, completions: int) -> Int[Tensor, " n"]:
    """Dense prompt numbers 0..P-1 in sorted order of the ids, so that the order of completions does not matter.

    >>> prompt_index(["b", "a", "b"], 3)
    tensor([1, 0, 1])
    """
    if len(prompts) != completions:
        raise AlignmentError(f"There are {len(prompts)} prompt ids for {completions} completions; give one id to each.")
    if isinstance(prompts, Tensor):
        return torch.unique(prompts.cpu(), return_inverse=True)[1]

    def rank(prompt: Hashable) -> tuple[str, Any]:
        return type(prompt).__name__, prompt if isinstance(prompt, int | float | str) else repr(prompt)

    dense = {prompt: index for index, prompt in enumerate(sorted(set(prompts), key=rank))}
    return torch.tensor([dense[prompt] for prompt in prompts], dtype=torch.long)


def plain_ids(prompts: Prompts) -> list[Hashable]:
    """The ids as a list of plain Python values."""
    return prompts.tolist() if isinstance(prompts, Tensor) else list(prompts)


def check_level(level: float) -> float:
    """The level itself, if it is one."""
    if not 0 < level < 1:
        raise RecipeError(f"A level of confidence lies between 0 and 1, not at {level}.")
    return level
