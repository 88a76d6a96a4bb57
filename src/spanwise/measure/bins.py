"""Where a confidence falls: bins of equal width or equal mass."""

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


def bin_sums(value_n: Tensor, bin_n: Tensor, bins: int) -> Float[Tensor, " b"]:
    """Sum of the values in each bin."""
    return torch.zeros(bins, dtype=torch.float64).index_add_(0, bin_n, value_n)


def check_reports(confidence_n: Tensor, correct_n: Tensor) -> None:
    """Refuse what is no probability."""
    if confidence_n.shape != correct_n.shape:
        raise AlignmentError(f"There are {len(confidence_n)} confidences for {len(correct_n)} answers.")
    for name, value_n in (("Confidence", confidence_n), ("Correctness", correct_n)):
        bad_n = (value_n < 0) | (value_n > 1) | value_n.isnan()
        if bool(bad_n.any()):
            where = int(bad_n.nonzero()[0])
            raise AlignmentError(f"{name} {float(value_n[where])} of completion {where} is not in [0, 1].")
