"""DCPO: solution and confidence each standardised over the group, with a smoothed target for the confidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.explained import Explained, call_explained, explains
from spanwise.credit.methods._bae import bae
from spanwise.credit.registry import Preset
from spanwise.credit.strata import group_index, moments
from spanwise.errors import RecipeError, unknown
from spanwise.objective import BaselineName, ScaleName
from spanwise.registry import register


@register(
    "dcpo",
    kind="block",
    paper="DCPO, arXiv 2603.09117",
    source="the authors' code; the paper through notes",
    preset=Preset(),
)
@explains
def dcpo(
    reward_nk: Float[Tensor, "n k"],
    group_n: Int[Tensor, " n"],
    *,
    if_missing_k: Sequence[float | Float[Tensor, " n"] | None] | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    min_stratum: int = 2,
) -> Explained:
    r"""Standardise the reward of each block over the group, whatever the outcome of the blocks before it.

    Equation
        A[i, k] = (r[i, k] - mean_g r[:, k]) / (std_g r[:, k] + eps)
        r[i, 0] = c[i], 1 if the answer is right; r[i, 1] = `smoothed_calibration` of the confidence

    The same as `bae` with the group as baseline of every block, in units of its standard deviation. The preset scores the
    confidence by the rule of the recipe (Brier), which is the target without smoothing.

    Args:
        reward_nk: one reward per completion and block; NaN where the block is absent (takes no part, gets 0).
        group_n: prompt ids, in any order, of any sizes.
        if_missing_k: per block, what an absent reward stands for: it joins the deviation and not the mean, see `advantage`.
        ddof: of the standard deviations.
        eps: added to them.
        min_stratum: smaller groups get 0.

    Edge cases:
        A group of one and a block whose reward is constant in the group give exactly 0. What
        is missing gets at most sqrt(G - 1) in size, however close to each other the others are.

    Example:
        >>> c, q = torch.tensor([1., 0., 1., 1.]), torch.tensor([.9, .8, .6, .9])
        >>> one_prompt = torch.zeros(4, dtype=torch.long)
        >>> dcpo(torch.stack([c, smoothed_calibration(q, c, one_prompt)], dim=1), one_prompt)
        tensor([[ 0.5000,  0.7484],
                [-1.5000, -1.3647],
                [ 0.5000, -0.1321],
                [ 0.5000,  0.7484]], dtype=torch.float64)

    Reference:
        "DCPO" (arXiv 2603.09117) and its code, which takes the tokens before the confidence for the first block.
    """
    baselines: list[BaselineName] = ["group"] * reward_nk.shape[1]
    scales: list[ScaleName] = ["std"] * reward_nk.shape[1]
    return call_explained(
        bae, reward_nk, group_n, given_k=[()] * reward_nk.shape[1], baseline=baselines, scale_k=scales, if_missing_k=if_missing_k,
        ddof=ddof, eps=eps, min_stratum=min_stratum,
    )  # fmt: skip


def smoothed_calibration(
    confidence_n: Float[Tensor, " n"],
    correct_n: Float[Tensor, " n"],
    group_n: Int[Tensor, " n"],
    *,
    share: float = 0.5,
    form: Literal["square", "absolute"] = "square",
    missing: float | None = None,
) -> Float[Tensor, " n"]:
    r"""Score a confidence against a target between the completion's own outcome and its group's rate of success.

    Equation
        target[i] = (1 - share) c[i] + share mean_g c
        score[i] = -(target - q)^2 / 2  (form "square", the code)  or  -|target - q|  ("absolute", the paper)

    Args:
        confidence_n: q in [0, 1]; NaN where there is none.
        correct_n: c, 1 if right, 0 if wrong; NaN where unknown (the score is absent).
        group_n: prompt ids.
        share: of the group's rate in the target.
        form: of the score.
        missing: the confidence that a missing one stands for (the code: -1); None: the score is absent.

    Edge cases:
        In a group of one the target is the completion's own outcome. The absolute form is no proper score: it asks for the
        median of the target, not for its mean.

    Example:
        >>> q, c = torch.tensor([.9, .7]), torch.tensor([1., 0.])
        >>> smoothed_calibration(q, c, torch.tensor([0, 0]), form="absolute")  # targets .75 and .25
        tensor([-0.1500, -0.4500], dtype=torch.float64)

    Reference:
        "DCPO" (arXiv 2603.09117). Paper and code differ, see `form`; the paper's share (lambda) is not verified.
    """
    rate_n = moments(correct_n, group_index(group_n)).mean_n()
    if missing is not None:
        confidence_n = torch.where(confidence_n.isnan(), missing, confidence_n)
    gap_n = (1 - share) * correct_n.double() + share * rate_n - confidence_n.double()
    if form not in ("square", "absolute"):
        raise RecipeError(unknown("form of the score", form, ("square", "absolute")))
    return -(gap_n.square() / 2) if form == "square" else -gap_n.abs()
