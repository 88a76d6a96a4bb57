"""Blockwise Advantage Estimation: every block its own reward and its own baseline."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.baselines import advantage
from spanwise.credit.registry import Preset, register
from spanwise.errors import AlignmentError
from spanwise.objective import BaselineName


@register("bae", kind="block", paper="Blockwise Advantage Estimation, arXiv 2602.10231", preset=Preset())
def bae(
    reward_nk: Float[Tensor, "n k"],
    group_n: Int[Tensor, " n"],
    *,
    outcome_nk: Float[Tensor, "n k"] | None = None,
    baseline: BaselineName = "outcome",
    by_outcome_nk2: Float[Tensor, "n k 2"] | None = None,
    leave_one_out: bool = False,
    min_stratum: int = 2,
) -> Float[Tensor, "n k"]:
    r"""Give each block its own advantage: the first against its group, the others against their baseline.

    Equation
        A[i, 0] = r[i, 0] - mean_g r[:, 0]
        A[i, k] = r[i, k] - b_k[i],  b_k = mean of r[:, k] over the group's completions with i's outcome (baseline "outcome")

    Args:
        reward_nk: one reward per completion and block; NaN where the block is absent (joins no baseline, gets 0).
        group_n: prompt ids, in any order, of any sizes.
        outcome_nk: the outcome of the prefix of each block; column 0 is not read. None: the first block's reward.
        baseline: of the blocks after the first: none, batch, group, outcome or blended.
        by_outcome_nk2: the rewards under outcome 0 and 1, for `blended`.
        leave_one_out: leave the completion out of its own means.
        min_stratum: smaller strata give 0.

    Edge cases:
        A stratum of one and a constant stratum give exactly 0 (`blended` borrows from other prompts instead).

    Example:
        Six completions of one prompt: right or wrong, and the Brier score of the confidence.

        >>> c = torch.tensor([1., 1., 0., 0., 1., 0.])
        >>> q = torch.tensor([.9, .7, .8, .1, .8, .3])
        >>> bae(torch.stack([c, -(q - c) ** 2], dim=1), torch.zeros(6, dtype=torch.long))[:, 1]
        tensor([ 0.0367, -0.0433, -0.3933,  0.2367,  0.0067,  0.1567], dtype=torch.float64)

    Reference:
        Pavlenko et al. 2026, "Blockwise Advantage Estimation" (arXiv 2602.10231). The paper's stratum mean includes the
        completion itself, as here by default.
    """
    if len(reward_nk) != len(group_n):
        raise AlignmentError(f"There are {len(reward_nk)} rows of rewards for {len(group_n)} group ids.")
    columns = []
    for k in range(reward_nk.shape[1]):
        outcome_n = reward_nk[:, 0] if outcome_nk is None else outcome_nk[:, k]
        result = advantage(
            reward_nk[:, k],
            group_n,
            baseline="group" if k == 0 else baseline,
            outcome_no=None if k == 0 else outcome_n,
            by_outcome_n2=None if by_outcome_nk2 is None else by_outcome_nk2[:, k],
            leave_one_out=leave_one_out,
            min_stratum=min_stratum,
        )
        columns.append(result.advantage_n)
    return torch.stack(columns, dim=1)
