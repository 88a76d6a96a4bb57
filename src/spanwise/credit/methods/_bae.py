"""Methods that give each block its own advantage: Blockwise Advantage Estimation and DCPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.baselines import compare_columns
from spanwise.credit.registry import Preset
from spanwise.credit.strata import Explained, explains
from spanwise.objective import BaselineName, ScaleName
from spanwise.registry import register

_FACTS: Mapping[str, Any] = {
    "kind": "block",
    "paper": "Blockwise Advantage Estimation, arXiv 2602.10231",
    "only_with": {
        **dict.fromkeys(("leave_one_out", "min_stratum"), ("baseline", ("batch", "group", "outcome"))),
        **dict.fromkeys(("ddof", "eps"), ("scale_k", ("std",))),
    },
}


@register("bae_paper", preset=Preset(), **_FACTS)
@register("bae", preset=Preset(format=0.25), **_FACTS)
@explains
def bae(
    reward_nk: Float[Tensor, "n k"],
    group_n: Int[Tensor, " n"],
    *,
    outcome_no: Float[Tensor, "n o"] | None = None,
    given_k: Sequence[Sequence[int]] | None = None,
    baseline: BaselineName | Sequence[BaselineName] = "outcome",
    scale_k: Sequence[ScaleName] | None = None,
    back_off_k: Sequence[bool | None] | None = None,
    by_outcome_nk2: Float[Tensor, "n k 2"] | None = None,
    judged_k: Sequence[int | None] | None = None,
    if_missing_k: Sequence[float | Float[Tensor, " n"] | None] | None = None,
    voter_n: Int[Tensor, " n"] | None = None,
    leave_one_out: bool = False,
    min_stratum: int = 2,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Explained:
    r"""Give each block its reward minus the mean reward of completions with the same earlier outcomes.

    Equation
        A[i, k] = r[i, k] - b_k[i],  b_k the mean of r[:, k] over the completions that share with i:
        nothing (batch), the prompt (group), the prompt and the outcomes that block k is given (outcome)

    Args:
        reward_nk: one reward per completion and block; NaN where the block is absent (joins no baseline, gets 0). There may be
            several columns for one block: a column is one objective.
        group_n, voter_n, leave_one_out, min_stratum, ddof, eps: as for `advantage`.
        outcome_no: O discrete outcomes of each completion; NaN where unknown. None: the first block's reward.
        given_k: per column, which outcomes its baseline is given, from coarse to fine. None: all, but none for the first column.
        baseline: per column; one name is that of the columns after the first, whose baseline then is the group.
        scale_k: per column, "std" divides by the standard deviation of the stratum. None: no column.
        back_off_k: per column, whether strata that are too small use fewer outcomes, then the group; see `advantage`.
        by_outcome_nk2: the rewards under outcome 0 and 1, for `blended`.
        judged_k: per column, which of its given outcomes that is about; None: the only one.
        if_missing_k: per column, what an absent reward stands for, one number or one per completion (NaN: nothing): it gets that
            minus its baseline, see `advantage`. None: absent gets 0.

    Edge cases:
        A stratum of one and a constant stratum give exactly 0 (`blended` borrows from other prompts instead).

    Example:
        Six completions of one prompt: right or wrong, and the Brier score of the confidence.

        >>> import torch
        >>> c = torch.tensor([1., 1., 0., 0., 1., 0.])
        >>> q = torch.tensor([.9, .7, .8, .1, .8, .3])
        >>> bae(torch.stack([c, -(q - c) ** 2], dim=1), torch.zeros(6, dtype=torch.long))[:, 1]
        tensor([ 0.0367, -0.0433, -0.3933,  0.2367,  0.0067,  0.1567], dtype=torch.float64)

    Reference:
        Pavlenko et al. 2026, "Blockwise Advantage Estimation" (arXiv 2602.10231). The paper's stratum mean includes the
        completion itself, as here by default. The preset adds a price on malformed tags; `bae_paper` is without it.
    """
    column_count = reward_nk.shape[1]
    outcome_no = reward_nk[:, :1] if outcome_no is None else outcome_no
    if given_k is None:
        given_k = [range(outcome_no.shape[1]) if column > 0 else () for column in range(column_count)]
    options_by_column = {
        "baseline": ["group", *[baseline] * (column_count - 1)] if isinstance(baseline, str) else baseline,
        "outcome_no": [outcome_no[:, list(given_columns)] if len(given_columns) else None for given_columns in given_k],
        "by_outcome_n2": None if by_outcome_nk2 is None else by_outcome_nk2.unbind(dim=1),
        "judged": judged_k,
        "back_off": back_off_k,
        "scale": scale_k,
        "if_missing": if_missing_k,
    }
    base_options = {"leave_one_out": leave_one_out, "min_stratum": min_stratum, "ddof": ddof, "eps": eps, "voter_n": voter_n}
    return compare_columns(reward_nk, group_n, options_by_column, **base_options)


@register(
    "dcpo",
    kind="block",
    paper="DCPO, arXiv 2603.09117",
    source="the authors' code and third-party summaries",
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
    r"""Standardise the reward of each block over the group, whatever the outcomes of earlier blocks are.

    Equation
        A[i, k] = (r[i, k] - mean_g r[:, k]) / (std_g r[:, k] + eps)
        r[i, 0] = c[i], 1 if the answer is right; r[i, 1] = -((c[i] + mean_g c) / 2 - q[i])^2 / 2 of the confidence q (the code)

    The same as `bae` with the group as baseline of every block, in units of its standard deviation. The preset scores the
    confidence by the rule of the recipe (Brier), which is the target without smoothing.

    Args:
        reward_nk: one reward per completion and block; NaN where the block is absent (takes no part, gets 0).
        group_n, ddof, eps, min_stratum: as for `grpo`.
        if_missing_k: per block, what an absent reward stands for: it joins the deviation and not the mean, see `advantage`.

    Edge cases:
        A group of one and a block whose reward is constant in the group give exactly 0.

    Example:
        >>> import torch
        >>> c, q = torch.tensor([1., 0., 1., 1.]), torch.tensor([.9, .8, .6, .9])
        >>> one_prompt = torch.zeros(4, dtype=torch.long)
        >>> dcpo(torch.stack([c, -(((c + 0.75) / 2 - q) ** 2) / 2], dim=1), one_prompt)
        tensor([[ 0.5000,  0.7484],
                [-1.5000, -1.3647],
                [ 0.5000, -0.1321],
                [ 0.5000,  0.7484]], dtype=torch.float64)

    Reference:
        "DCPO" (arXiv 2603.09117) and its code, which takes the tokens before the confidence for the first block.
    """
    options_by_column = {"scale": ["std"] * reward_nk.shape[1], "if_missing": if_missing_k}
    return compare_columns(reward_nk, group_n, options_by_column, ddof=ddof, eps=eps, min_stratum=min_stratum)
