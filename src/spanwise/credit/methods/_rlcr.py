"""RLCR: correctness plus a calibration score, added before the group is compared."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.checks import check_rewards
from spanwise.credit.methods._dr_grpo import dr_grpo
from spanwise.credit.registry import Preset, register


@register(
    "rlcr",
    kind="completion",
    paper="Beyond Binary Rewards, arXiv 2507.16806",
    preset=Preset(sum_first=True, baseline="group"),
)
def rlcr(
    correct_n: Float[Tensor, " n"],
    calibration_n: Float[Tensor, " n"],
    group_n: Int[Tensor, " n"],
    *,
    calibration_weight: float = 1.0,
    min_stratum: int = 2,
) -> Float[Tensor, " n"]:
    r"""Compare the sum of correctness and calibration score with the group: one number for the whole completion.

    Equation
        R[i] = c[i] + w s[i],  s = -(q - c)^2 for Brier;   A[i] = R[i] - mean_g R

    Args:
        correct_n: 1 if the answer is right, else 0.
        calibration_n: the score of the confidence (Brier or log score); NaN in either makes the sum absent.
        group_n: prompt ids.
        calibration_weight: w.
        min_stratum: smaller groups get 0.

    Edge cases:
        A group of one and a constant group give exactly 0. With the log score, refusing with a confidence of 0 beats honest
        answers while fewer than about two thirds of them are right, and training can collapse.

    Example:
        >>> import torch
        >>> rlcr(torch.tensor([1., 0.]), torch.tensor([-.01, -.81]), torch.tensor([0, 0]))  # R = .99, -.81
        tensor([ 0.9000, -0.9000], dtype=torch.float64)

    Reference:
        Damani et al. 2025, "Beyond Binary Rewards" (arXiv 2507.16806). The authors' code uses an affine map of R. As a recipe the
        one number is spread over each block's tokens by itself (`per: block`), as `bae` spreads its own, so that the two differ
        in the credit alone; `per: completion` weighs all tokens alike.
    """
    for part_n in (correct_n, calibration_n):  # two that cancel would read as absent
        check_rewards(part_n)
    total_n = correct_n.double() + calibration_weight * calibration_n.double()
    return dr_grpo(total_n, group_n, min_stratum=min_stratum)
