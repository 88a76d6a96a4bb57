"""The figures under weights: how often each completion counts, one row per resample, one value per row.

The plain figures of `calibration` are the row of ones. All of it runs in float64 on the CPU. scikit-learn and torchmetrics take
one row of weights or none: a bootstrap would call them once per resample.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.errors import AlignmentError, RecipeError

#: Bins of equal width, or of equally many completions.
BinScheme = Literal["width", "mass"]
#: A confidence of exactly 1: in a bin of its own (the BAE paper, torchmetrics) or in the last one (scikit-learn, netcal).
One = Literal["own", "last"]


def weighted_mean(value_n: Float[Tensor, " n"], weight_rn: Float[Tensor, "r n"]) -> Float[Tensor, " r"]:
    """Mean of the values, each counted as its weight says; NaN values are left out.

    Example:
        >>> weighted_mean(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([[1.0, 1.0, 1.0], [3.0, 1.0, 1.0]])).tolist()
        [2.0, 1.5]
    """
    known_n = ~value_n.isnan().cpu()
    weight_rn = weight_rn.double()[:, known_n]
    return weight_rn @ value_n.cpu().double()[known_n] / weight_rn.sum(dim=1)


def weighted_brier(
    confidence_n: Float[Tensor, " n"], correct_n: Float[Tensor, " n"], weight_rn: Float[Tensor, "r n"]
) -> Float[Tensor, " r"]:
    """`brier` under each row of weights.

    Example:
        >>> q, c = torch.tensor([0.5, 1.0]), torch.tensor([1.0, 0.0])  # squares of .25 and 1
        >>> weighted_brier(q, c, torch.tensor([[1.0, 1.0], [1.0, 0.0]])).tolist()
        [0.625, 0.25]
    """
    check_reports(confidence_n, correct_n)
    return weighted_mean((confidence_n.double() - correct_n.double()).square(), weight_rn)


def weighted_ece(
    confidence_n: Float[Tensor, " n"],
    correct_n: Float[Tensor, " n"],
    weight_rn: Float[Tensor, "r n"],
    *,
    bins: int = 10,
    scheme: BinScheme = "width",
    one: One | None = None,
) -> Float[Tensor, " r"]:
    """`ece` under each row of weights; the bins of equal mass are those of the weighted completions.

    Example:
        >>> q, c = torch.tensor([0.75, 0.25]), torch.tensor([1.0, 0.0])  # each .25 off
        >>> weighted_ece(q, c, torch.tensor([[1.0, 1.0], [2.0, 0.0]])).tolist()
        [0.25, 0.25]
    """
    if scheme == "mass":
        check_reports(confidence_n, correct_n)
        q, c = confidence_n.cpu().double(), correct_n.cpu().double()
        weight_rn = weight_rn.double()
        bin_count(bins, scheme=scheme, one=one)
        below_rv, count_rv, gap_rv = _by_value(q, weight_rn, weight_rn * (c - q))
        total_r = count_rv.sum(dim=1, keepdim=True)
        bin_rv = (bins * (below_rv + count_rv / 2) / total_r.clamp(min=1e-300)).long().clamp(max=bins - 1)
        gap_rb = torch.zeros(len(weight_rn), bins, dtype=torch.float64).scatter_add_(1, bin_rv, gap_rv)
        return gap_rb.abs().sum(dim=1) / weight_rn.sum(dim=1)
    return weighted_gaps(confidence_n, correct_n, weight_rn, bins=bins, scheme=scheme, one=one).abs().sum(dim=1)


def weighted_gaps(
    confidence_n: Float[Tensor, " n"],
    correct_n: Float[Tensor, " n"],
    weight_rn: Float[Tensor, "r n"],
    *,
    bins: int = 10,
    scheme: BinScheme = "width",
    one: One | None = None,
) -> Float[Tensor, "r b"]:
    """What each bin adds to the ECE, with its sign: positive where answers are right more often than they claim.

    Bins of equal mass are those of the completions without weights.

    >>> q, c = torch.tensor([.75, .75, .25, 1.]), torch.tensor([1., 0., 0., 1.])
    >>> weighted_gaps(q, c, torch.ones(1, 4, dtype=torch.float64), bins=2)  # [0, .5), [.5, 1), [1, 1.5)
    tensor([[-0.0625, -0.1250,  0.0000]], dtype=torch.float64)
    """
    check_reports(confidence_n, correct_n)
    q, c = confidence_n.cpu().double(), correct_n.cpu().double()
    weight_rn = weight_rn.double()
    bin_n, count = bin_index(confidence_n, bins=bins, scheme=scheme, one=one)
    gap_rb = weight_rn @ torch.nn.functional.one_hot(bin_n, count).double().mul_((c - q).unsqueeze(1))
    return gap_rb / weight_rn.sum(dim=1, keepdim=True)


def weighted_auroc(
    confidence_n: Float[Tensor, " n"], correct_n: Float[Tensor, " n"], weight_rn: Float[Tensor, "r n"]
) -> Float[Tensor, " r"]:
    """`auroc` under each row of weights.

    Example:
        >>> q, c = torch.tensor([0.9, 0.2, 0.95]), torch.tensor([1.0, 0.0, 0.0])  # the right one is above one of two wrong ones
        >>> weighted_auroc(q, c, torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])).tolist()
        [0.5, 1.0]
    """
    check_reports(confidence_n, correct_n)
    q, weight_rn = confidence_n.cpu().double(), weight_rn.double()
    right_n = (correct_n.cpu() > 0.5).double()
    below_rv, wrong_rv, right_rv = _by_value(q, weight_rn * (1 - right_n), weight_rn * right_n)
    return (right_rv * (below_rv + wrong_rv / 2)).sum(dim=1) / (right_rv.sum(dim=1) * wrong_rv.sum(dim=1))


def weighted_sharpness(confidence_n: Float[Tensor, " n"], weight_rn: Float[Tensor, "r n"]) -> Float[Tensor, " r"]:
    """`sharpness` (ddof 0) under each row of weights.

    Example:
        >>> weighted_sharpness(torch.tensor([0.0, 1.0]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])).tolist()
        [0.25, 0.0]
    """
    check_reports(confidence_n, torch.zeros_like(confidence_n))
    q, weight_rn = confidence_n.cpu().double(), weight_rn.double()
    deviation_rn = q - weighted_mean(q, weight_rn).unsqueeze(1)
    return (weight_rn * deviation_rn.square()).sum(dim=1) / weight_rn.sum(dim=1)


def _by_value(value_n: Tensor, first_rn: Tensor, second_rn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per distinct value: the sum of `first` below it, the sum of `first` at it, the sum of `second` at it."""
    order_n = value_n.argsort()
    last_v = torch.unique_consecutive(value_n[order_n], return_counts=True)[1].cumsum(0) - 1
    nothing_r1 = torch.zeros(len(first_rn), 1, dtype=torch.float64)
    up_to_rv = torch.cat([nothing_r1, first_rn[:, order_n].cumsum(dim=1)[:, last_v]], dim=1)
    second_rv = torch.cat([nothing_r1, second_rn[:, order_n].cumsum(dim=1)[:, last_v]], dim=1)
    return up_to_rv[:, :-1], up_to_rv.diff(dim=1), second_rv.diff(dim=1)


def bin_index(confidence_n: Tensor, *, bins: int, scheme: BinScheme, one: One | None) -> tuple[Int[Tensor, " n"], int]:
    """The bin of each completion and the number of bins."""
    count = bin_count(bins, scheme=scheme, one=one)
    q = confidence_n.cpu().double()
    if scheme == "mass":
        _, value_n, count_v = torch.unique(q, return_inverse=True, return_counts=True)
        rank_v = count_v.cumsum(0) - count_v / 2
        return (bins * rank_v / max(len(q), 1)).long().clamp(max=bins - 1)[value_n], count
    # .29 * 100 must not fall below 29, nor .7 in float32 below .7: nudge by what the type cannot tell apart.
    nudge = bins * max(torch.finfo(confidence_n.dtype).eps, 1e-10)
    return (q * bins + nudge).floor().long().clamp(0, count - 1), count


def bin_count(bins: int, *, scheme: BinScheme, one: One | None) -> int:
    """The number of bins, that of exactly 1 included."""
    if bins < 1:
        raise RecipeError(f"Calibration needs at least 1 bin, not {bins}.")
    if scheme not in ("width", "mass") or one not in (None, "own", "last"):
        raise RecipeError(
            f"There are no bins of scheme '{scheme}' with one='{one}'; use 'width' or 'mass', 'own' or 'last'."
        )
    if scheme == "mass" and one == "own":
        raise RecipeError("Bins of equal mass have none of their own for a confidence of 1; leave `one` out.")
    return bins + (scheme == "width" and one != "last")


def check_reports(confidence_n: Tensor, correct_n: Tensor) -> None:
    """Refuse what is no probability."""
    if confidence_n.shape != correct_n.shape:
        raise AlignmentError(f"There are {len(confidence_n)} confidences for {len(correct_n)} answers.")
    for name, value_n in (("Confidence", confidence_n), ("Correctness", correct_n)):
        refuse_value(name, value_n, (value_n < 0) | (value_n > 1) | value_n.isnan(), "in [0, 1]")


def refuse_value(name: str, value_n: Tensor, bad_n: Tensor, allowed: str) -> None:
    """Refuse the first value that is not allowed."""
    if bool(bad_n.any()):
        where = int(bad_n.nonzero()[0])
        raise AlignmentError(f"{name} {float(value_n[where])} of completion {where} is not {allowed}.")
