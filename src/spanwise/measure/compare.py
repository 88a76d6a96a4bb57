"""Compare methods over several seeds: means with intervals, paired differences, and which of them are noise.

Nothing here ranks. A difference is a number with an interval and a sentence.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

import scipy
import torch

from spanwise.errors import RecipeError, check_known
from spanwise.explain.alarms import alarms, by_sentence
from spanwise.measure.intervals import Interval, mean_interval

#: The figures of all runs: method -> seed -> figure -> value, with None or NaN for a figure that does not exist.
Runs = Mapping[str, Mapping[int, Mapping[str, float | None]]]
#: "clear": beyond the noise of seeds, all pairs of the figure considered; "borderline": its own interval excludes 0, the number of
#: pairs (or of seeds) explains it; "noise": the interval holds 0; "same": equal in every seed; "unknown": no two common seeds.
Verdict = Literal["clear", "borderline", "noise", "same", "unknown"]


@dataclass(frozen=True)
class Difference:
    """A figure of method `a` minus that of method `b`, seed by seed.

    Attributes:
        figure, a, b: what is compared.
        interval: mean difference over the common seeds, with its own t interval.
        p: of the paired t test, two-sided; of the sign test, 2^(1 - S), where all S differences are equal.
        p_adjusted: by Holm over the differences of this figure.
        verdict: what may be said.
        seeds_needed: to call a true difference of this size clear with a power of .8, among as many pairs; None if it is 0,
            unknown, or equal in all seeds (no spread to plan with).

    Example:
        >>> ece = {"a": [0.07, 0.06, 0.08], "b": [0.13, 0.12, 0.14]}
        >>> found = compare_arms({name: {s: {"ece": v} for s, v in enumerate(values)} for name, values in ece.items()})
        >>> (one,) = found.differences
        >>> one.a, one.b, round(one.interval.value, 2)
        ('a', 'b', -0.06)
    """

    figure: str
    a: str
    b: str
    interval: Interval
    p: float
    p_adjusted: float
    verdict: Verdict
    seeds_needed: int | None

    def sentence(self) -> str:
        """Say what this difference shows, and whether it is more than noise."""
        interval = self.interval
        title = f"{self.figure} of {self.a} minus {self.b}"
        if self.verdict == "unknown":
            return f"{title}: {interval.count} common seeds cannot tell a difference from noise."
        if self.verdict == "same":
            return f"{title}: the same in all {interval.count} seeds."
        text = f"{title}: {interval.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}] over {interval.count} seeds"
        if self.verdict == "clear":
            return f"{text}, beyond the noise."
        hint = "" if self.seeds_needed is None else f"; a difference of this size would need {self.seeds_needed} seeds"
        if self.verdict == "borderline":
            return f"{text}; 0 lies outside, but that is not enough among all pairs (Holm p = {self.p_adjusted:.2f}){hint}."
        return f"{text}, inside the noise{hint}."


@dataclass(frozen=True)
class ArmComparison:
    """The comparison of several methods over seeds.

    Attributes:
        methods, figures: rows and columns, in the order given.
        cells: by (method, figure), the mean over its seeds with Student's t interval; `count` seeds have the figure.
        differences: by figure, then pair.
        level: of all intervals.
        wrong: by (method, figure), what is wrong with that figure in at least one seed (`explain.alarms`).

    Example:
        >>> found = compare_arms({"a": {0: {"ece": 0.1}, 1: {"ece": 0.2}}, "b": {0: {"ece": 0.3}, 1: {"ece": 0.4}}})
        >>> found.methods, found.figures
        (('a', 'b'), ('ece',))
    """

    methods: tuple[str, ...]
    figures: tuple[str, ...]
    cells: Mapping[tuple[str, str], Interval]
    differences: tuple[Difference, ...]
    level: float
    wrong: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def markdown(self) -> str:
        """Return the table as Markdown: mean ± half the interval, with n if seeds are missing."""
        seed_count = max((cell.count for cell in self.cells.values()), default=0)
        lines = ["| method | " + " | ".join(self.figures) + " |", "|---|" + "---|" * len(self.figures)]
        for method in self.methods:
            lines.append(f"| {method} | " + " | ".join(self.row(method, seed_count)) + " |")
        lines.append("")
        lines += [f"! {sentence}" for sentence in self.warnings()] + [""] * bool(self.wrong)
        lines.append(f"Mean ± half of the {100 * self.level:g} % interval (Student's t) over {seed_count} seeds.")
        return "\n".join(lines)

    def row(self, method: str, most: int) -> list[str]:
        """Return the cells of a method, as "0.5 ± 0.1 (n=2)", with "!" beside a figure that is in `wrong`."""
        cells = []
        for figure in self.figures:
            interval, mark = self.cells[method, figure], " !" * ((method, figure) in self.wrong)
            half_width = "" if math.isnan(interval.low) else f" ± {(interval.high - interval.low) / 2:.3f}"
            seed_count = "" if interval.count == most else f" (n={interval.count})"
            cells.append(("-" if interval.count == 0 else f"{interval.value:.3f}{half_width}{seed_count}") + mark)
        return cells

    def warnings(self) -> list[str]:
        """Say which figures, marked with "!", must not be trusted, and of which method."""
        reasons = by_sentence({(method, figure): f"{method}: {why}" for (method, figure), why in self.wrong.items()})
        return [f"{sentence} ({', '.join(figure for _, figure in cells)})." for sentence, cells in reasons.items()]

    def sentences(self, *verdicts: Verdict) -> list[str]:
        """Return a sentence for each difference, of these verdicts if any are given."""
        sentences = []
        for diff in self.differences:
            reasons = [f"{method}: {why}" for method in (diff.a, diff.b) if (why := self.wrong.get((method, diff.figure)))]
            if not verdicts or diff.verdict in verdicts:
                sentences.append(diff.sentence() + (f" ({'; '.join(reasons)})" if reasons else ""))
        return sentences

    def summary(self) -> str:
        """Say how many differences are beyond the noise, and which."""
        names = [f"{diff.figure} ({diff.a} and {diff.b})" for diff in self.differences if diff.verdict == "clear"]
        total = len(self.differences)
        if not names:
            return f"Beyond the noise: none of {total} differences; these runs do not order the methods."
        addition = f"; the other {total - len(names)} do not order the methods" if total > len(names) else ""
        figures = len({diff.figure for diff in self.differences})
        return (
            f"Beyond the noise: {len(names)} of {total} differences, {', '.join(names)}{addition}. Noise is the seed spread on "
            f"the same held-out prompts; Holm corrects within one figure, so over {figures} figures up to "
            f"{figures * (1 - self.level):.2g} of these differences may be luck."
        )


def compare_arms(
    runs: Runs,
    *,
    figures: Sequence[str] | None = None,
    reference: str | None = None,
    level: float = 0.95,
) -> ArmComparison:
    r"""Compare methods over seeds.

    Equation
        difference of a figure: d_s = a_s - b_s over the seeds both have; mean d +- t_{S-1} sd(d) / sqrt(S)

    Args:
        runs: method -> seed -> figure -> value; None and NaN are missing.
        figures: which, in order; default: all, as they first appear.
        reference: compare every other method with this one only; default: all pairs. Fewer pairs, more certain of each.
        level: of the intervals; a difference is clear when its Holm-adjusted p is below 1 - level. The adjustment is over the pairs
            of a figure, not over figures.

    Edge cases:
        One seed has a mean and no interval. A figure that is missing in a seed leaves that seed out.
        Differences equal in all seeds, and not 0, have no spread for a t test: the sign test takes its place, which needs 6 seeds.
        Differences below 1e-9 in all seeds are rounding: the same.

    Raises:
        RecipeError: no runs, an unknown reference.

    Example:
        >>> ece = {"a": [.071, .066, .078, .069], "b": [.128, .121, .133, .130], "c": [.087, .060, .099, .071]}
        >>> result = compare_arms({method: {s: {"ece": v} for s, v in enumerate(values)} for method, values in ece.items()})
        >>> for sentence in result.sentences():
        ...     print(sentence)
        ece of a minus b: -0.057 [-0.062, -0.052] over 4 seeds, beyond the noise.
        ece of a minus c: -0.008 [-0.028, +0.012] over 4 seeds, inside the noise; a difference of this size would need 20 seeds.
        ece of b minus c: +0.049 [+0.028, +0.070] over 4 seeds, beyond the noise.
    """
    if not runs or not any(runs.values()):
        raise RecipeError("There is nothing to compare: give at least one method with one seed.")
    if reference is not None:
        check_known("method", reference, runs)
    names = dict.fromkeys(name for seeds in runs.values() for values in seeds.values() for name in values)
    names_shown = tuple(names) if figures is None else tuple(figures)
    for name in names_shown:
        check_known("figure", name, names)
    pairs = list(combinations(runs, 2)) if reference is None else [(m, reference) for m in runs if m != reference]
    cells: dict[tuple[str, str], Interval] = {}
    differences: list[Difference] = []
    for name in names_shown:
        numbers = {
            method: {s: math.nan if (value := values.get(name)) is None else value for s, values in seeds.items()}
            for method, seeds in runs.items()
        }
        cells |= {(method, name): _over_seeds(by_seed.values(), level) for method, by_seed in numbers.items()}
        intervals = [
            _over_seeds([numbers[a][s] - numbers[b][s] for s in numbers[a] if s in numbers[b]], level) for a, b in pairs
        ]
        p_values = [_p(interval) for interval in intervals]
        for (a, b), interval, p, adjusted in zip(pairs, intervals, p_values, holm(p_values), strict=True):
            takes, verdict = None, "borderline" if interval.excludes(0.0) else "noise"
            if interval.count > 1 and not _flat(interval):
                factor = adjusted / p if p > 0 and adjusted < 1 else len(pairs)
                takes = seeds_needed(interval.value, interval.sd, alpha=(1 - level) / max(1.0, factor))
            if interval.count < 2:
                verdict = "unknown"
            elif _flat(interval) and abs(interval.value) <= 1e-9:
                verdict = "same"
            elif adjusted < 1 - level:
                verdict = "clear"
            differences.append(Difference(name, a, b, interval, p, adjusted, verdict, takes))
    return ArmComparison(tuple(runs), names_shown, cells, tuple(differences), level, _wrong(runs, names_shown))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values for multiple tests by Holm's method; NaN is not counted."""
    # SciPy has no such function; statsmodels (65 MB) would count NaN as a test.
    p, order = torch.tensor(p_values, dtype=torch.float64).sort()  # torch.sort puts NaN last
    tests_left = int((~p.isnan()).sum()) - torch.arange(len(p))
    return (p * tests_left).clamp(max=1.0).cummax(dim=0).values[order.argsort()].tolist()


def _wrong(runs: Runs, figures: Sequence[str]) -> dict[tuple[str, str], str]:
    """Return the warnings of each method and figure, with the number of seeds they apply to."""
    sentences: dict[tuple[str, str], str] = {}
    for method, seeds in runs.items():
        alarms_by_seed = [alarms(values) for values in seeds.values()]
        for figure in figures:
            reasons = [alarms_of_seed[figure] for alarms_of_seed in alarms_by_seed if figure in alarms_of_seed]
            if reasons:
                seed_share = f"{len(reasons)} of {len(seeds)} seeds" if len(seeds) > 1 else "its seed"
                sentences[method, figure] = f"{max(dict.fromkeys(reasons), key=reasons.count)} in {seed_share}"
    return sentences


def _over_seeds(values: Iterable[float], level: float) -> Interval:
    return mean_interval(torch.tensor(list(values), dtype=torch.float64), level=level)


def _p(interval: Interval) -> float:
    """Return the two-sided p value of a mean of 0."""
    if interval.count < 2:
        return math.nan
    if _flat(interval):
        return 1.0 if abs(interval.value) <= 1e-9 else 2.0 ** (1 - interval.count)
    return 2 * float(scipy.stats.t.sf(abs(interval.value) / interval.sem, interval.count - 1))


def _flat(interval: Interval) -> bool:
    """Return whether the values are equal up to rounding."""
    return interval.sem <= 1e-9 * max(abs(interval.value), 1.0)


def seeds_needed(difference: float, sd: float, *, alpha: float, power: float = 0.8, most: int = 1_000_000) -> int | None:
    """Return how many seeds a paired t test at level `alpha` needs to see this difference; None if more than `most`."""

    def enough(n: int) -> bool:
        shift, limit = abs(difference) / sd * math.sqrt(n), scipy.stats.t.ppf(1 - alpha / 2, n - 1)
        # The lower tail is computed as the upper tail of -shift, because nct.cdf(-limit, df, shift) is NaN for large shifts.
        return float(sum(scipy.stats.nct.sf(limit, n - 1, side) for side in (shift, -shift))) >= power

    high = 2
    while not enough(high):
        if high >= most:
            return None
        high = min(2 * high, most)
    return bisect_left(range(high), True, lo=max(high // 2, 2), key=enough)
