"""RLCR: correctness plus a calibration score, added before the group is compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.checks import check_rewards
from spanwise.credit.explained import Explained, explains
from spanwise.credit.registry import Preset
from spanwise.credit.strata import compare_in_strata, group_index, weighted
from spanwise.errors import AlignmentError
from spanwise.registry import register

_FACTS: Mapping[str, Any] = {
    "kind": "completion",
    "paper": "Beyond Binary Rewards, arXiv 2507.16806",
    "source": "the authors' code; the paper through notes",
}


@register("rlcr_paper", preset=Preset(), **_FACTS)
@register("rlcr", preset=Preset(format=0.25), **_FACTS)
@explains
def rlcr(
    reward_nm: Float[Tensor, "n m"],
    group_n: Int[Tensor, " n"],
    *,
    weight_m: Float[Tensor, " m"] | None = None,
    leave_one_out: bool = False,
    min_stratum: int = 2,
) -> Explained:
    r"""Compare the sum of correctness and calibration score with the group: one number for the whole completion.

    Equation
        R[i] = c[i] + w s[i],  s = -(q - c)^2 for Brier;   A[i] = R[i] - mean_g R

    Args:
        reward_nm: a column of 1 (the answer is right) and 0, and one of the scores of the confidence (Brier or log score), or any
            others; NaN in one of them makes the sum absent.
        group_n: prompt ids.
        weight_m: of each column; None: 1 each.
        leave_one_out: leave the completion out of its own mean.
        min_stratum: smaller groups get 0.

    Edge cases:
        A group of one and a constant group give exactly 0. With the log score, refusing with a confidence of 0 beats honest
        answers while fewer than about two thirds of them are right, and training can collapse.

    Example:
        >>> rlcr(torch.tensor([[1., -.01], [0., -.81]]), torch.tensor([0, 0]))  # R = .99, -.81
        tensor([ 0.9000, -0.9000], dtype=torch.float64)

    Reference:
        Damani et al. 2025, "Beyond Binary Rewards" (arXiv 2507.16806). The authors' code uses an affine map of R and pays the
        format too, at the weight of correctness; the preset pays it a quarter of that, as `bae` does (`rlcr_paper`: R alone). As
        a recipe the one number is spread over each block's tokens by itself (`per: block`), as `bae` spreads its own, so that
        the two differ in the credit alone; `per: completion` weighs all tokens alike.
    """
    if weight_m is not None and len(weight_m) != reward_nm.shape[1]:
        raise AlignmentError(f"There are {len(weight_m)} weights for {reward_nm.shape[1]} rewards; give one to each reward.")
    for m in range(reward_nm.shape[1]):  # two infinite ones that cancel would read as absent
        check_rewards(reward_nm[:, m])
    weight_m = torch.ones(reward_nm.shape[1], dtype=torch.float64) if weight_m is None else weight_m.double()
    total_n = weighted(reward_nm.double(), weight_m.to(reward_nm.device)).sum(dim=1)
    return compare_in_strata(total_n, group_index(group_n), leave_one_out=leave_one_out, min_stratum=min_stratum)
