"""Compute the accuracy of n samples: pass@k, or a choice by majority, weighted majority or highest confidence (MaxConf).

Every number is the expected value over random subsets of n of a prompt's samples: exact where a closed form or all subsets are
cheap (always, up to 16 samples), else over seeded random subsets. Prompts count equally.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import combinations, pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from spanwise.credit.strata import check_counts, list_ids
from spanwise.errors import AlignmentError, RecipeError
from spanwise.measure.calibration import refuse_value
from spanwise.measure.intervals import Interval, Prompts, bootstrap, prompt_index, weighted_mean

#: The ways to choose among a prompt's samples. Only the last two need a stated confidence.
_WAYS = ("pass@1", "pass@k", "majority", "weighted", "maxconf")
_MICRO = 1e6  # votes are rounded to multiples of 1 / _MICRO, so that equal votes tie exactly


@dataclass(frozen=True)
class Curve:
    """The accuracy of one way to choose among n samples of a prompt, for several n.

    Attributes:
        budgets: the numbers of samples.
        value_pb: expected correctness of each prompt at each budget; NaN where the prompt has fewer samples.
        prompts: the ids of the prompts, in the order of `value_pb`.
        intervals: mean over prompts at each budget, with its bootstrap interval; `count` is the number of prompts that have enough.

    Example:
        >>> curves = voting(["4", "4", "7"], torch.tensor([0.3, 0.4, 0.9]), torch.tensor([0.0, 0.0, 1.0]), prompts=[0, 0, 0])
        >>> curves["majority"].budgets, curves["majority"].value_pb[0, -1].item()  # two of three say 4, which is wrong
        ((1, 2, 3), 0.0)
    """

    budgets: tuple[int, ...]
    value_pb: Float[Tensor, "p b"]
    prompts: tuple[object, ...]
    intervals: tuple[Interval, ...]


def voting(
    answers: Sequence[str | None],
    confidence_n: Float[Tensor, " n"],
    correct_n: Float[Tensor, " n"],
    *,
    prompts: Prompts,
    budgets: Sequence[int] | None = None,
    subsets: int = 20_000,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Curve]:
    r"""Compute accuracy by the number of samples per prompt. Each way of choosing an answer has a curve.

    Equation
        pass@1     mean correctness, whatever the budget
        pass@k     1 - C(m - c, n) / C(m, n): at least one of n is right, for c right ones of m
        majority   argmax_a #{i: a(i) = a}
        weighted   argmax_a sum_i q(i) 1{a(i) = a}; as maxconf, only where some sample states a confidence
        maxconf    the sample of highest confidence

    Args:
        answers: compared as strings after `strip`; None and blank cast no vote.
        confidence_n: in [0, 1]; NaN where none was stated: it votes in `majority`, has no weight in `weighted`, and is chosen by
            `maxconf` only where no sample of the subset stated one.
        correct_n: 1 where right, else 0; NaN where there is no verdict, see the edge cases.
        prompts: the prompt of each sample.
        budgets: numbers of samples n; default 1 to 16, or to the size of the largest prompt.
        subsets: up to so many subsets all are taken (16 samples have at most 12,870), else so many random ones are drawn.
        resamples: of the bootstrap by prompt.
        seed: of random subsets and resamples.

    Edge cases:
        Ties give the expected value of a fair choice: among tied answers, or for maxconf among tied samples. A subset in which
        nobody votes is wrong. If all weights are 0, all answers that were given tie. Prompts with fewer than n samples
        are left out at n. An answer judged both ways counts with its mean. Weights are rounded to 1e-6, so that .3 + .6 ties
        with .9. A sample without a verdict votes all the same: its answer counts as it was judged in other samples, and as not
        right where it never was; to leave it out would be to leave out hard prompts. A prompt without any verdict has no value.

    Raises:
        AlignmentError: columns of different lengths.
        RecipeError: a budget that no prompt can pay.

    Example:
        Two of three samples agree on a wrong answer and are less sure of it than the third.

        >>> curves = voting(["4", "4 ", "7"], torch.tensor([.3, .4, .9]), torch.tensor([0., 0., 1.]), prompts=[0, 0, 0])
        >>> {name: [round(float(v), 3) for v in curve.value_pb[0]] for name, curve in curves.items()}
        {'pass@1': [0.333, 0.333, 0.333],
         'pass@k': [0.333, 0.667, 1.0],
         'majority': [0.333, 0.333, 0.0],
         'weighted': [0.333, 0.667, 1.0],
         'maxconf': [0.333, 0.667, 1.0]}

    Reference:
        pass@k: Chen et al. 2021 (arXiv 2107.03374). Majority: Wang et al. 2022 (arXiv 2203.11171). MaxConf and weighted: as in
        Pavlenko et al. 2026 (arXiv 2602.10231), which leaves ties open.
    """
    prompt_n = prompt_index(prompts, len(answers))
    for name, column_n in (("verdicts", correct_n), ("confidences", confidence_n)):
        check_counts(column_n, name, answers, "answers", advice="give one to each answer")
    refuse_value("Confidence", confidence_n, (confidence_n < 0) | (confidence_n > 1), "in [0, 1]")
    refuse_value("Correctness", correct_n, (correct_n != 0) & (correct_n != 1) & ~correct_n.isnan(), "0, 1 or NaN")
    max_samples = 0 if bool(correct_n.isnan().all()) else int(torch.bincount(prompt_n).max())
    sample_counts = tuple(range(1, min(16, max_samples) + 1)) if budgets is None else tuple(budgets)
    for n in sample_counts:
        if not 1 <= n <= max_samples:
            refusal_reason = "no sample has a verdict" if max_samples == 0 else f"prompts have at most {max_samples} samples"
            raise RecipeError(f"A budget of {n} samples is not possible: {refusal_reason}.")
    samples_by_prompt: dict[int, list[tuple[str, float, float]]] = {prompt: [] for prompt in sorted(set(prompt_n.tolist()))}
    for prompt, answer, c, q in zip(prompt_n.tolist(), answers, correct_n.tolist(), confidence_n.tolist(), strict=True):
        samples_by_prompt[prompt].append(("" if answer is None else str(answer).strip(), c, q))
    usable_voting_rules = _WAYS[:3] if bool(confidence_n.isnan().all()) else _WAYS
    accuracies_by_prompt = [
        _expected_accuracies(samples, sample_counts, usable_voting_rules, subsets, seed * 100_003 + prompt)
        for prompt, samples in samples_by_prompt.items()
    ]
    id_of_prompt = dict(zip(prompt_n.tolist(), list_ids(prompts), strict=True))
    ids = tuple(id_of_prompt[prompt] for prompt in samples_by_prompt)
    curves = {}
    for rule in usable_voting_rules:
        accuracy_pb = torch.tensor([accuracies[rule] for accuracies in accuracies_by_prompt], dtype=torch.float64)
        curves[rule] = _build_curve(sample_counts, accuracy_pb.reshape(len(ids), len(sample_counts)), ids, resamples, seed)
    return curves


def curve_difference(a: Curve, b: Curve) -> Curve:
    """Subtract curve `b` from curve `a`, prompt by prompt. Return the mean difference, with its interval, at each n.

    For two ways of choosing among the same samples, and for two runs (or two attempts) on the same prompts.

    Raises:
        AlignmentError: other prompts or other budgets.

    Example:
        Of three samples the sure one is right: choosing the most confident wins where the majority loses.

        >>> curves = voting(["4", "4", "7"], torch.tensor([0.3, 0.4, 0.9]), torch.tensor([0.0, 0.0, 1.0]), prompts=[0, 0, 0])
        >>> curve_difference(curves["maxconf"], curves["majority"]).value_pb[0, -1].item()
        1.0
    """
    if a.budgets != b.budgets or a.prompts != b.prompts:
        raise AlignmentError(
            "Two voting curves can only be subtracted if they have the same prompts and budgets (completions per vote). "
            f"They have {len(a.prompts)} and {len(b.prompts)} prompts ({'equal' if a.prompts == b.prompts else 'different'} "
            f"ids). Their budgets are {list(a.budgets)} and {list(b.budgets)}."
        )
    return _build_curve(a.budgets, a.value_pb - b.value_pb, a.prompts)


def _build_curve(
    budgets: tuple[int, ...], value_pb: Tensor, prompts: tuple[object, ...], resamples: int = 1000, seed: int = 0
) -> Curve:
    """Build a curve of the mean accuracy over prompts, with bootstrap intervals, against the number of samples."""
    intervals = []
    for value_p in value_pb.unbind(dim=1):
        known_value_i = value_p[~value_p.isnan()]
        mean_function = partial(weighted_mean, known_value_i)
        intervals.append(bootstrap(mean_function, range(len(known_value_i)), resamples=resamples, seed=seed))
    return Curve(budgets, value_pb, prompts, tuple(intervals))


def _expected_accuracies(
    samples: list[tuple[str, float, float]], budgets: Sequence[int], ways: Sequence[str], subsets: int, seed: int
) -> dict[str, list[float]]:
    """For each way of choosing an answer, return its expected accuracy at each number of samples."""
    # Sort the samples (answer, correctness, confidence), so that random subsets do not depend on the samples' order.
    # Each prompt has its own `seed`, so that the errors of random subsets average out over the prompts.
    samples = sorted(
        samples, key=lambda sample: (sample[0], *((math.isnan(x), 0.0 if math.isnan(x) else x) for x in sample[1:]))
    )
    total = len(samples)
    answer_texts, *report_columns = zip(*samples, strict=True)
    index_of_answer = {text: index for index, text in enumerate(dict.fromkeys(filter(None, answer_texts)))}
    answer_index_m = torch.tensor([index_of_answer.get(text, -1) for text in answer_texts])
    vote_am = (torch.arange(len(index_of_answer))[:, None] == answer_index_m).double()
    correctness_m, confidence_m = (torch.tensor(column, dtype=torch.float64) for column in report_columns)
    is_judged_m = ~correctness_m.isnan()
    judged_count_a = vote_am @ is_judged_m.double()
    accuracy_a = vote_am @ correctness_m.nan_to_num(nan=0.0) / judged_count_a.clamp_(min=1)
    correctness_m = torch.where(is_judged_m, correctness_m, vote_am.T @ accuracy_a)
    correct_count = int((correctness_m > 0.5).sum())
    weight_m = confidence_m.nan_to_num(nan=0.0)
    possible_sample_counts = {n for n in budgets if n <= total and bool(is_judged_m.any())}
    one_m = torch.ones_like(weight_m)
    weight_wm = torch.stack([one_m, weight_m] if "weighted" in ways else [one_m])
    vote_accuracies = {
        n: _vote(vote_am, accuracy_a, weight_wm, _draw_subsets(total, n, subsets, seed)) for n in possible_sample_counts
    }
    accuracy_functions: dict[str, Callable[[int], float]] = {
        "pass@1": lambda n: float(correctness_m.mean()),
        "pass@k": lambda n: 1 - math.comb(total - correct_count, n) / math.comb(total, n),
        "majority": lambda n: vote_accuracies[n][0],
        "weighted": lambda n: vote_accuracies[n][1],
        "maxconf": lambda n: _choose_highest(correctness_m, confidence_m, n),
    }
    return {way: [accuracy_functions[way](n) if n in possible_sample_counts else math.nan for n in budgets] for way in ways}


def _choose_highest(correct_m: Tensor, score_m: Tensor, n: int) -> float:
    """Return the mean correctness of the top-scored one of n random samples. Ties have equal odds; NaN is lowest."""
    filled_score_m = score_m.nan_to_num(nan=-math.inf)
    distinct_score_v, rank_m, count_v = torch.unique(filled_score_m, return_inverse=True, return_counts=True)
    mean_correct_v = torch.zeros(len(distinct_score_v), dtype=torch.float64).index_add_(0, rank_m, correct_m) / count_v
    counts_below = [0, *count_v.cumsum(0).tolist()]
    subset_counts = [math.comb(high_count, n) - math.comb(low_count, n) for low_count, high_count in pairwise(counts_below)]
    correct_sum = sum(count * mean for count, mean in zip(subset_counts, mean_correct_v.tolist(), strict=True))
    return correct_sum / math.comb(len(score_m), n)


def _vote(vote_am: Tensor, value_a: Tensor, weight_wm: Tensor, subsets: Iterator[Float[Tensor, "m s"]]) -> list[float]:
    """For each row of weights, return the mean accuracy of the answers that win a subset's vote. Tied answers count equally."""
    if not len(value_a):
        return [0.0] * len(weight_wm)
    vote_weight_wam = vote_am * (weight_wm * _MICRO).round()[:, None]  # whole numbers have exact sums and ties
    correct_sum_w, subset_count = torch.zeros(len(weight_wm), dtype=torch.float64), 0
    for subset_ms in subsets:
        has_vote_as = vote_am @ subset_ms > 0
        answer_weight_was = vote_weight_wam @ subset_ms
        is_winner_was = (has_vote_as & (answer_weight_was == answer_weight_was.amax(dim=1, keepdim=True))).double()
        correct_sum_w += (value_a @ is_winner_was / is_winner_was.sum(dim=1).clamp_(min=1)).sum(dim=1)
        subset_count += subset_ms.shape[1]
    return (correct_sum_w / subset_count).tolist()


def _draw_subsets(m: int, n: int, most: int, seed: int) -> Iterator[Float[Tensor, "m s"]]:
    """Yield subsets of n out of m samples as columns of zeros and ones. Above `most` subsets, draw `most` at random."""
    if math.comb(m, n) <= most:
        yield _all_subsets(m, n)
        return
    generator = torch.Generator().manual_seed((seed * 1009 + m) * 1009 + n)  # different m or n get different random subsets
    for drawn_count in range(0, most, 4096):
        random_ms = torch.rand(m, min(4096, most - drawn_count), generator=generator)
        chosen_ns = random_ms.topk(n, dim=0, sorted=False).indices
        yield torch.zeros_like(random_ms, dtype=torch.float64).scatter_(0, chosen_ns, 1.0)


@lru_cache(maxsize=64)
def _all_subsets(m: int, n: int) -> Float[Tensor, "m s"]:
    """Return every subset of n out of m samples as a column of zeros and ones."""
    chosen_sample_ns = torch.tensor(list(combinations(range(m), n))).T
    return torch.zeros(m, chosen_sample_ns.shape[1], dtype=torch.float64).scatter_(0, chosen_sample_ns, 1.0)
