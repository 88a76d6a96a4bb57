"""How often a policy is right, and whether it knows: accuracy, Brier score, ECE, AUROC. Pure functions on tensors."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.errors import AlignmentError


def brier(confidence_n: Float[Tensor, " n"], correct_n: Float[Tensor, " n"]) -> float:
    """Mean squared distance between confidence and correctness; lower is better, NaN without completions.

    >>> round(brier(torch.tensor([.9, .2]), torch.tensor([1., 1.])), 4)  # (.01 + .64) / 2
    0.325
    """
    _check(confidence_n, correct_n)
    return float((confidence_n.double() - correct_n.double()).square().mean())


def ece(confidence_n: Float[Tensor, " n"], correct_n: Float[Tensor, " n"], *, bins: int = 10) -> float:
    r"""Expected calibration error over equal-width bins, a confidence of exactly 1 in a bin of its own.

    Equation
        ECE = sum over bins b of (n_b / n) |mean correctness in b - mean confidence in b|,
        bins [0, .1), [.1, .2), ..., [.9, 1), [1, 1.1) for bins=10: the eleven bins of the BAE paper.

    Args:
        confidence_n: reported probabilities in [0, 1].
        correct_n: 1 where right, else 0.
        bins: bins of [0, 1), beside the one for exactly 1.

    Returns:
        A number in [0, 1]; NaN without completions. A confidence on the border belongs to the upper bin.

    Example:
        >>> q, c = torch.tensor([.75, .75, .25, 1.]), torch.tensor([1., 0., 0., 1.])
        >>> ece(q, c)  # 2/4 |.5 - .75| + 1/4 |0 - .25| + 1/4 |1 - 1|
        0.1875

    Reference:
        Pavlenko et al. 2026 (arXiv 2602.10231), evaluation protocol.
    """
    _check(confidence_n, correct_n)
    if len(confidence_n) == 0:
        return float("nan")
    q, c = confidence_n.double(), correct_n.double()
    # .29 * 100 must not fall below 29: nudge by less than any report is precise to.
    bin_n = (q * bins + 1e-9).floor().long().clamp(0, bins)
    gap_b = torch.zeros(bins + 1, dtype=torch.float64).index_add_(0, bin_n.cpu(), (c - q).cpu())
    return float(gap_b.abs().sum() / len(q))


def auroc(confidence_n: Float[Tensor, " n"], correct_n: Float[Tensor, " n"]) -> float:
    """Probability that a right answer has a higher confidence than a wrong one, ties counting half; NaN if one kind is missing.

    >>> auroc(torch.tensor([.9, .5, .5, .1]), torch.tensor([1., 1., 0., 0.]))  # 3.5 of 4 pairs
    0.875
    """
    _check(confidence_n, correct_n)
    right = correct_n.double() > 0.5
    positives, negatives = int(right.sum()), int((~right).sum())
    if positives == 0 or negatives == 0:
        return float("nan")
    _, index_n, count_v = torch.unique(confidence_n.double(), return_inverse=True, return_counts=True)
    below_v = count_v.cumsum(0) - count_v
    rank_n = (below_v + (count_v + 1) / 2)[index_n]  # mean rank of tied values, from 1
    return float((rank_n[right].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def figures(
    correct_n: Float[Tensor, " n"],
    confidence_n: Float[Tensor, " n"],
    *,
    well_formed_n: Bool[Tensor, " n"],
    refusal_n: Bool[Tensor, " n"] | None = None,
) -> dict[str, float | None]:
    """The figures of one evaluation. Calibration is over the completions that stated a confidence; `coverage` is their share.

    A collapsed policy has a beautiful ECE: read accuracy, refusal and format rate first.

    Args:
        correct_n: 1 where right, 0 where wrong; NaN where the check gave no verdict (left out).
        confidence_n: NaN where none was stated.
        well_formed_n: no fault in the tags.
        refusal_n: the completion declined to answer; None where the task knows no refusals.
    """
    known_n = ~correct_n.isnan()
    both_n = known_n & ~confidence_n.isnan()
    q, c = confidence_n[both_n], correct_n[both_n]
    values: dict[str, float | None] = {
        "accuracy": float(correct_n[known_n].double().mean()),
        "refusal_rate": None if refusal_n is None else float(refusal_n.double().mean()),
        "format_rate": float(well_formed_n.double().mean()),
        "coverage": float((~confidence_n.isnan()).double().mean()),
        "mean_confidence": float(q.double().mean()),
        "ece": ece(q, c),
        "brier": brier(q, c),
        "auroc": auroc(q, c),
    }
    return {name: None if value is None or value != value else value for name, value in values.items()}


def _check(confidence_n: Tensor, correct_n: Tensor) -> None:
    if confidence_n.shape != correct_n.shape:
        raise AlignmentError(f"There are {len(confidence_n)} confidences for {len(correct_n)} answers.")
    bad = (confidence_n < 0) | (confidence_n > 1) | confidence_n.isnan()
    if bool(bad.any()):
        where = int(bad.nonzero()[0])
        raise AlignmentError(f"Confidence {float(confidence_n[where])} of completion {where} is not in [0, 1].")
