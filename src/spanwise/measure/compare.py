"""Compare methods over several seeds: means, paired differences and their intervals.

Methods are never ranked: a difference is a number with an interval and a sentence.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

import scipy
import torch

from spanwise.errors import RecipeError, check_known
from spanwise.explain.alarms import alarms, by_sentence
from spanwise.measure.intervals import Interval, mean_interval

#: Maps method, seed and figure to a value. None and NaN stand for a missing figure.
Runs = Mapping[str, Mapping[int, Mapping[str, float | None]]]
#: Whether a difference between two methods is real or may be noise.
Verdict = Literal["clear", "borderline", "noise", "same", "unknown"]


@dataclass(frozen=True)
class Difference:
    """The difference in one evaluation figure between two methods. Paired by seed, with a verdict.

    Attributes:
        figure, a, b: what is compared.
        interval: mean difference over the common seeds, with its own t interval.
        p: of the paired t test, two-sided; of the sign test, 2^(1 - S), where all S differences are equal.
        p_adjusted: by Holm over the differences of this figure.
        verdict: "clear": beyond the noise after Holm's correction. "borderline": only the uncorrected
            interval excludes 0. "noise": the interval holds 0. "same": the methods are equal in every seed.
            "unknown": fewer than two common seeds, or an infinite figure.
        seeds_needed: to call a true difference of this size clear with a power of .8, among as many pairs; None if it is 0,
            unknown, or equal in all seeds (no spread to plan with).

    Example:
        >>> ece = {"a": [0.07, 0.06, 0.08], "b": [0.13, 0.12, 0.14]}
        >>> comparison = compare_arms({name: {s: {"ece": v} for s, v in enumerate(values)} for name, values in ece.items()})
        >>> (one,) = comparison.differences
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
        """State the difference between two methods with its interval, and whether it may be noise."""
        interval = self.interval
        subject = f"{self.figure} of {self.a} minus {self.b}"
        if self.verdict == "unknown" and interval.count > 1:
            return f"{subject} is unknown, because the figure is infinite in at least one seed."
        if self.verdict == "unknown":
            return f"{subject} is unknown, because it needs at least 2 common seeds and has {interval.count}."
        if self.verdict == "same":
            return f"{subject} is 0 in each of {interval.count} seeds."
        finding = f"{subject}: {interval.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}] over {interval.count} seeds"
        if self.verdict == "clear":
            return f"{finding}, beyond the noise."
        seeds_hint = (
            "" if self.seeds_needed is None else f" A clear verdict on this difference needs {self.seeds_needed} seeds."
        )
        if self.verdict == "borderline" and self.p >= 1 - interval.level:  # all seeds agree: p is that of a sign test
            return f"{finding}. Every seed has this difference. With so few seeds this may be luck (p = {self.p:.2f})."
        if self.verdict == "borderline":
            luck_text = (
                f"Over all method pairs, the difference may be luck (p = {self.p_adjusted:.2f} after Holm's correction)."
            )
            return f"{finding}. Its interval excludes 0. {luck_text}{seeds_hint}"
        return f"{finding}, inside the noise.{seeds_hint}"


@dataclass(frozen=True)
class ArmComparison:
    """The mean evaluation figures of several methods over seeds, and their differences.

    Attributes:
        methods, figures: rows and columns, in the order given.
        cells: by (method, figure), the mean over its seeds with Student's t interval; `count` seeds have the figure.
        differences: by figure, then pair.
        level: of all intervals.
        wrong: by (method, figure), what is wrong with that figure in at least one seed (`explain.alarms`).

    Example:
        >>> comparison = compare_arms({"a": {0: {"ece": 0.1}, 1: {"ece": 0.2}}, "b": {0: {"ece": 0.3}, 1: {"ece": 0.4}}})
        >>> comparison.methods, comparison.figures
        (('a', 'b'), ('ece',))
    """

    methods: tuple[str, ...]
    figures: tuple[str, ...]
    cells: Mapping[tuple[str, str], Interval]
    differences: tuple[Difference, ...]
    level: float
    wrong: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def markdown(self) -> str:
        """Return a Markdown table, one row per method. Cell: mean ± half interval; n if seeds are missing."""
        max_seed_count = max((cell.count for cell in self.cells.values()), default=0)
        table_lines = ["| method | " + " | ".join(self.figures) + " |", "|---|" + "---|" * len(self.figures)]
        table_lines += [f"| {method} | " + " | ".join(self.row(method, max_seed_count)) + " |" for method in self.methods]
        table_lines += ["", *(f"! {sentence}" for sentence in self.warnings()), *[""] * bool(self.wrong)]
        caption = (
            f"A figure is the mean over {max_seed_count} seeds. The number after ± is half the width of the mean's "
            f"{100 * self.level:g} % interval (Student's t)."
        )
        return "\n".join([*table_lines, caption])

    def row(self, method: str, most: int) -> list[str]:
        """Return a method's row of the table. Its cells read like "0.5 ± 0.1 (n=2)", with "!" after a dubious figure."""
        cell_texts = []
        for figure in self.figures:
            interval = self.cells[method, figure]
            alarm_mark = " !" if (method, figure) in self.wrong else ""
            width_text = "" if math.isnan(interval.low) else f" ± {(interval.high - interval.low) / 2:.3f}"
            count_text = "" if interval.count == most else f" (n={interval.count})"
            cell_texts.append(("-" if interval.count == 0 else f"{interval.value:.3f}{width_text}{count_text}") + alarm_mark)
        return cell_texts

    def warnings(self) -> list[str]:
        """Say why figures marked "!" in the table cannot be trusted. One sentence per method and reason."""
        reasons = {(method, figure): f"{method}: {reason}" for (method, figure), reason in self.wrong.items()}
        return [
            f"{reason}. Do not rely on these figures: {', '.join(figure for _, figure in cells)}."
            for reason, cells in by_sentence(reasons).items()
        ]

    def sentences(self, *verdicts: Verdict) -> list[str]:
        """Return a sentence for each difference between two methods. `verdicts` limit the differences."""
        difference_sentences = []
        for diff in self.differences:
            alarm_by_method = {method: self.wrong.get((method, diff.figure)) for method in (diff.a, diff.b)}
            alarm_text = "; ".join(f"{method}: {alarm}" for method, alarm in alarm_by_method.items() if alarm)
            if not verdicts or diff.verdict in verdicts:
                difference_sentences.append(diff.sentence() + (f" ({alarm_text})" if alarm_text else ""))
        return difference_sentences

    def summary(self) -> str:
        """Say how many differences between methods are beyond the noise of seeds, and name them."""
        clear_texts = [f"{diff.figure} ({diff.a} and {diff.b})" for diff in self.differences if diff.verdict == "clear"]
        diff_count = len(self.differences)
        if not clear_texts:
            return f"None of {diff_count} differences is beyond the noise: these runs do not show which method is better."
        noise_count = diff_count - len(clear_texts)
        noise_text = f" Differences that may be noise: {noise_count}." if noise_count else ""
        figure_count = len({diff.figure for diff in self.differences})
        return (
            f"{len(clear_texts)} of {diff_count} differences are beyond the noise: {', '.join(clear_texts)}.{noise_text} The noise "
            "is how much seeds differ on the same held-out prompts. Holm's correction covers the pairs of methods, but not the "
            f"number of figures ({figure_count}). So up to {figure_count * (1 - self.level):.2g} differences may be luck."
        )


def compare_arms(
    runs: Runs, *, figures: Sequence[str] | None = None, reference: str | None = None, level: float = 0.95
) -> ArmComparison:
    r"""Compare the evaluation figures of training methods over seeds. Each difference has a verdict.

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
        ece of a minus c: -0.008 [-0.028, +0.012] over 4 seeds, inside the noise. A clear verdict on this difference needs 20 seeds.
        ece of b minus c: +0.049 [+0.028, +0.070] over 4 seeds, beyond the noise.
    """
    if not runs or not any(runs.values()):
        raise RecipeError("There is nothing to compare: give at least one method with one seed.")
    method_pairs = list(combinations(runs, 2))
    if reference is not None:
        check_known("method", reference, runs)
        method_pairs = [(method, reference) for method in runs if method != reference]
    figures_of_runs = [values for figures_by_seed in runs.values() for values in figures_by_seed.values()]
    known_figure_names = dict.fromkeys(name for values in figures_of_runs for name in values)
    figure_names = tuple(known_figure_names) if figures is None else tuple(figures)
    for name in figure_names:
        check_known("figure", name, known_figure_names)
    cells: dict[tuple[str, str], Interval] = {}
    differences: list[Difference] = []
    for name in figure_names:
        values_by_method = {
            method: {s: math.nan if (value := values.get(name)) is None else value for s, values in figures_by_seed.items()}
            for method, figures_by_seed in runs.items()
        }
        cells |= {(method, name): _over_seeds(run_values.values(), level) for method, run_values in values_by_method.items()}
        intervals = []
        for a, b in ((values_by_method[a], values_by_method[b]) for a, b in method_pairs):
            intervals.append(_over_seeds([a[seed] - b[seed] for seed in a if seed in b], level))
        p_values = [_p_value(interval) for interval in intervals]
        for (a, b), interval, p, adjusted_p in zip(method_pairs, intervals, p_values, holm(p_values), strict=True):
            needed_seed_count = None
            verdict = "borderline" if interval.excludes(0.0) else "noise"
            has_known_interval = interval.count > 1 and math.isfinite(interval.sem)
            if has_known_interval and not _is_flat(interval):
                holm_factor = adjusted_p / p if p > 0 and adjusted_p < 1 else len(method_pairs)
                needed_seed_count = seeds_needed(interval.value, interval.sd, alpha=(1 - level) / max(1.0, holm_factor))
            if not has_known_interval:
                verdict = "unknown"
            elif _is_flat(interval) and abs(interval.value) <= 1e-9:
                verdict = "same"
            elif adjusted_p < 1 - level:
                verdict = "clear"
            differences.append(Difference(name, a, b, interval, p, adjusted_p, verdict, needed_seed_count))
    return ArmComparison(tuple(runs), figure_names, cells, tuple(differences), level, _find_wrong(runs, figure_names))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values for multiple tests by Holm's method. NaN does not count as a test."""
    # SciPy lacks Holm's method, and statsmodels counts NaN as a test.
    sorted_p, sorted_index = torch.tensor(p_values, dtype=torch.float64).sort()  # torch.sort puts NaN last
    remaining_test_counts = int((~sorted_p.isnan()).sum()) - torch.arange(len(sorted_p))
    return (sorted_p * remaining_test_counts).clamp(max=1.0).cummax(dim=0).values[sorted_index.argsort()].tolist()


def _find_wrong(runs: Runs, figures: Sequence[str]) -> dict[tuple[str, str], str]:
    """For each method and figure, list the warnings, the most frequent first, each with the number of seeds that gave it."""
    sentence_of_cell: dict[tuple[str, str], str] = {}
    for method, figures_by_seed in runs.items():
        alarms_by_seed = [alarms(values) for values in figures_by_seed.values()]
        for figure in figures:
            if alarm_sentences := [alarms_of_seed[figure] for alarms_of_seed in alarms_by_seed if figure in alarms_of_seed]:
                sentence_of_cell[method, figure] = ", ".join(
                    f"{reason} in {f'{count} of {len(figures_by_seed)} seeds' if len(figures_by_seed) > 1 else 'the only seed'}"
                    for reason, count in Counter(alarm_sentences).most_common()
                )
    return sentence_of_cell


def _over_seeds(values: Iterable[float], level: float) -> Interval:
    """Return the mean over seeds with Student's t interval."""
    return mean_interval(torch.tensor(list(values), dtype=torch.float64), level=level)


def _p_value(interval: Interval) -> float:
    """Return the two-sided p value for the hypothesis that two methods are equal."""
    if interval.count < 2:
        return math.nan
    if _is_flat(interval):
        return 1.0 if abs(interval.value) <= 1e-9 else 2.0 ** (1 - interval.count)
    return 2 * float(scipy.stats.t.sf(abs(interval.value) / interval.sem, interval.count - 1))


def _is_flat(interval: Interval) -> bool:
    """Return whether the averaged values are all equal up to rounding."""
    return interval.sem <= 1e-9 * max(abs(interval.value), 1.0)


def seeds_needed(difference: float, sd: float, *, alpha: float, power: float = 0.8, most: int = 1_000_000) -> int | None:
    """Return how many seeds a paired t test needs to detect a difference. Return None if above `most`."""

    def is_enough(n: int) -> bool:
        noncentrality = abs(difference) / sd * math.sqrt(n)
        critical_t = scipy.stats.t.ppf(1 - alpha / 2, n - 1)
        # SciPy's nct.cdf is NaN for a large noncentrality, but nct.sf is not.
        return float(sum(scipy.stats.nct.sf(critical_t, n - 1, shift) for shift in (noncentrality, -noncentrality))) >= power

    seed_count = bisect_left(range(most + 1), True, lo=2, key=is_enough)  # the fewest seeds that reach the power
    return seed_count if seed_count <= most else None
