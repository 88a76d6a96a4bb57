"""Measure the calibration of stated confidences: ECE, AUROC and reliability.

A row of weights says how often each completion counts in a resample. All of it runs in float64 on the CPU. scikit-learn and
torchmetrics take one row of weights or none, so a bootstrap would call them once per resample.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.strata import check_counts, first_of
from spanwise.errors import AlignmentError, RecipeError
from spanwise.measure.intervals import Prompts, mean_interval, prompt_index, wilson


def ece(confidence_n: Float[Tensor, " n"], correct_n: Float[Tensor, " n"], *, bins: int = 10) -> float:
    r"""Compute the expected calibration error. It is the mean gap of accuracy and confidence, over bins.

    Equation
        ECE = sum over bins b of (n_b / n) |mean correctness in b - mean confidence in b|
        bins: [0, .1), [.1, .2), ..., [.9, 1), [1, 1.1) for bins=10: the eleven bins of the BAE paper.

    Args:
        confidence_n: reported probabilities in [0, 1].
        correct_n: 1 where right, else 0.
        bins: bins of equal width of [0, 1), beside the one for exactly 1.

    Edge cases:
        NaN without completions. A confidence on a border belongs to the upper bin, also where rounding puts it just below
        (.7 in float32).

    Example:
        >>> q, c = torch.tensor([.75, .75, .25, 1.]), torch.tensor([1., 0., 0., 1.])
        >>> ece(q, c)  # 2/4 |.5 - .75| + 1/4 |0 - .25| + 1/4 |1 - 1|
        0.1875

    Reference:
        Pavlenko et al. 2026 (arXiv 2602.10231), evaluation protocol.
    """
    return float(weighted_ece(confidence_n, correct_n, torch.ones(1, len(confidence_n)), bins=bins))


def auroc(confidence_n: Float[Tensor, " n"], correct_n: Float[Tensor, " n"]) -> float:
    """Compute the chance that a right answer is more confident than a wrong one. Ties: 1/2; NaN without both.

    >>> auroc(torch.tensor([.9, .5, .5, .1]), torch.tensor([1., 1., 0., 0.]))  # 3.5 of 4 pairs
    0.875
    """
    return float(weighted_auroc(confidence_n, correct_n, torch.ones(1, len(confidence_n))))


def reliability(
    confidence_n: Float[Tensor, " n"], correct_n: Float[Tensor, " n"], *, prompts: Prompts | None = None, bins: int = 10
) -> list[dict[str, float]]:
    """Return the table behind a reliability diagram. Rows: accuracy and mean confidence per bin.

    Args:
        confidence_n: reported probabilities in [0, 1]; NaN where there is none.
        correct_n: 1 where right, else 0; NaN where there is no verdict.
        prompts: the prompt of each completion. With them the Wilson interval of a bin counts as many independent trials as would
            give its standard error by prompt, at least its prompts and at most its completions (Korn and Graubard 1998); without
            them every completion counts as one, which is too sure of itself when prompts have many samples.
        bins: as in `ece`.

    Returns:
        A row for each bin with a completion: its borders `low` and `high`, the `count` of completions in it, their mean
        `confidence` and `accuracy`, and Wilson's interval of the accuracy, `accuracy_low` and `accuracy_high`.

    Example:
        >>> for row in reliability(torch.tensor([.75, .75, .25, 1.]), torch.tensor([1., 0., 0., 1.]), bins=2):
        ...     print(row["low"], row["high"], row["count"], row["accuracy"])
        0.0 0.5 1 0.0
        0.5 1.0 2 0.5
        1.0 1.0 1 1.0
    """
    is_known_n = ~(confidence_n.isnan() | correct_n.isnan())
    confidence_i, correct_i = _check_reports(confidence_n[is_known_n], correct_n[is_known_n])
    bin_n = bin_index(confidence_n[is_known_n], bins)
    prompt_ids = range(len(is_known_n)) if prompts is None else prompts
    prompt_n = prompt_index(prompt_ids, len(is_known_n))[is_known_n.cpu()]
    count_b = torch.bincount(bin_n)
    confidence_b = torch.bincount(bin_n, weights=confidence_i) / count_b
    accuracy_b = torch.bincount(bin_n, weights=correct_i) / count_b
    bin_rows = []
    for b in count_b.nonzero().flatten().tolist():
        trial_count = _effective_trials(correct_i[bin_n == b], prompt_n[bin_n == b])
        accuracy_low, accuracy_high = wilson(float(accuracy_b[b]) * trial_count, trial_count)
        bin_rows.append({
            "low": b / bins, "high": min(b + 1, bins) / bins, "count": int(count_b[b]), "confidence": float(confidence_b[b]),
            "accuracy": float(accuracy_b[b]), "accuracy_low": accuracy_low, "accuracy_high": accuracy_high,
        })  # fmt: skip
    return bin_rows


def _effective_trials(correct_n: Tensor, prompt_n: Tensor) -> float:
    """Return the effective number of independent completions. Those of one prompt are dependent."""
    accuracy = float(correct_n.mean())
    interval = mean_interval(correct_n, prompt_n)
    trial_count = accuracy * (1 - accuracy) / interval.sem**2 if interval.sem > 0 else interval.count
    return float(min(max(trial_count, interval.count), len(correct_n)))


def weighted_ece(
    confidence_n: Float[Tensor, " n"], correct_n: Float[Tensor, " n"], weight_rn: Float[Tensor, "r n"], *, bins: int = 10
) -> Float[Tensor, " r"]:
    """Compute one expected calibration error for each row of `weight_rn`, which weights the completions.

    >>> q, c = torch.tensor([0.75, 0.25]), torch.tensor([1.0, 0.0])  # each .25 off
    >>> weighted_ece(q, c, torch.tensor([[1.0, 1.0], [2.0, 0.0]])).tolist()
    [0.25, 0.25]
    """
    return weighted_gaps(confidence_n, correct_n, weight_rn, bins=bins).abs().sum(dim=1)


def weighted_gaps(
    confidence_n: Float[Tensor, " n"], correct_n: Float[Tensor, " n"], weight_rn: Float[Tensor, "r n"], *, bins: int = 10
) -> Float[Tensor, "r b"]:
    """Return each bin's accuracy minus confidence, times the bin's share of weights. The ECE adds up the absolute values."""
    confidence_i, is_right_n = _check_reports(confidence_n, correct_n)
    weight_rn = weight_rn.double()
    is_in_bin_nb = torch.nn.functional.one_hot(bin_index(confidence_n, bins), bins + 1).double()
    return weight_rn @ is_in_bin_nb.mul_((is_right_n - confidence_i).unsqueeze(1)) / weight_rn.sum(dim=1, keepdim=True)


def weighted_auroc(
    confidence_n: Float[Tensor, " n"], correct_n: Float[Tensor, " n"], weight_rn: Float[Tensor, "r n"]
) -> Float[Tensor, " r"]:
    """For each row of `weight_rn`, compute the AUROC of the confidences with the row as weights of the completions.

    >>> q, c = torch.tensor([0.9, 0.2, 0.95]), torch.tensor([1.0, 0.0, 0.0])  # the right one is above one of two wrong ones
    >>> weighted_auroc(q, c, torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])).tolist()
    [0.5, 1.0]
    """
    confidence_n, correct_n = _check_reports(confidence_n, correct_n)
    is_right_n = (correct_n > 0.5).double()
    confidence_order_n = confidence_n.argsort()
    _, tie_count_v = torch.unique_consecutive(confidence_n[confidence_order_n], return_counts=True)
    last_position_v = tie_count_v.cumsum(0) - 1

    def sums_by_confidence(answer_weight_rn: Tensor) -> Tensor:
        running_sum_rn = answer_weight_rn[:, confidence_order_n].cumsum(dim=1)
        return torch.nn.functional.pad(running_sum_rn[:, last_position_v], (1, 0))  # the sum before the first answer is 0

    wrong_sum_rv = sums_by_confidence(weight_rn.double() * (1 - is_right_n))
    wrong_weight_rv = wrong_sum_rv.diff(dim=1)
    right_weight_rv = sums_by_confidence(weight_rn.double() * is_right_n).diff(dim=1)
    won_pairs_r = (right_weight_rv * (wrong_sum_rv[:, :-1] + wrong_weight_rv / 2)).sum(dim=1)
    return won_pairs_r / (right_weight_rv.sum(dim=1) * wrong_weight_rv.sum(dim=1))


def bin_index(confidence_n: Tensor, bins: int) -> Int[Tensor, " n"]:
    """Return the index of each completion's confidence bin, 0 to `bins` inclusive. Bin number `bins` is for confidence 1."""
    if bins < 1:
        raise RecipeError(f"Calibration needs at least 1 bin, not {bins}.")
    # Add half a rounding unit, so that .29 * 100 does not fall below its bin's border.
    epsilon = torch.finfo(confidence_n.dtype).eps if confidence_n.is_floating_point() else 0.0
    float64_confidence_n = confidence_n.cpu().double()
    rounding_error_n = epsilon * 2.0 ** (torch.frexp(float64_confidence_n).exponent - 2)
    return ((float64_confidence_n + rounding_error_n + 1e-10) * bins).floor().long().clamp(0, bins)


def _check_reports(confidence_n: Tensor, correct_n: Tensor) -> tuple[Tensor, Tensor]:
    """Return confidence and correctness in float64 on the CPU. Refuse numbers outside [0, 1]."""
    check_counts(confidence_n, "confidences", correct_n, "answers", advice="give one to each answer")
    for name, column_n in (("Confidence", confidence_n), ("Correctness", correct_n)):
        refuse_value(name, column_n, (column_n < 0) | (column_n > 1) | column_n.isnan(), "in [0, 1]")
    return confidence_n.cpu().double(), correct_n.cpu().double()


def refuse_value(name: str, value_n: Tensor, bad_n: Tensor, allowed: str) -> None:
    """Raise an AlignmentError that names the first value which `bad_n` marks as not allowed."""
    for n in first_of(bad_n):
        raise AlignmentError(f"{name} {float(value_n[n])} of completion {n} is not {allowed}.")
