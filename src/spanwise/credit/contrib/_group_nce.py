"""Group NCE: the right completions of a group told from the wrong ones by a score, the form of EntQA."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.checks import check_rewards, first_of
from spanwise.credit.strata import group_index
from spanwise.errors import AlignmentError, RewardError
from spanwise.registry import register


@register(
    "group_nce",
    kind="completion",
    paper="EntQA, arXiv 2110.02369",
    source="notes on the loss in EntQA's code; no paper confirms it as credit for completions, and it is not ReNCE",
    exceptions={"shift": "0 is wrong and 1 is right, and nothing else is taken"},
)
def group_nce(
    correct_n: Float[Tensor, " n"], group_n: Int[Tensor, " n"], score_n: Float[Tensor, " n"]
) -> Float[Tensor, " n"]:
    r"""A function to call from Python: credit a completion with what a contrastive loss over its group does to its score.

    No source says which score a trainer should give it.

    Equation
        L = -sum over the right i of log[ e^s_i / (e^s_i + sum over the wrong j of e^s_j) ],  Z_i the divisor of i
        A[i] = -dL/ds_i = 1 - e^s_i / Z_i,   A[j] = -dL/ds_j = -sum over i of e^s_j / Z_i

    With m right and n wrong completions of equal scores this is (m + n) / (1 + n) times `dr_grpo`. With others the right
    ones of low and the wrong ones of high score get more.

    Args:
        correct_n: 1 right, 0 wrong; NaN where unknown (takes no part, gets 0).
        group_n: prompt ids, in any order, of any sizes.
        score_n: the score of each completion, such as the sum or the mean of `logp_nt` over its trainable tokens; NaN where
            unknown (takes no part, gets 0). A log-ratio to the policy that sampled is 0 when credit is given: equal scores.

    Edge cases:
        A group without a right or without a wrong completion gives exactly 0. Adding a constant to the scores of a group changes
        nothing, and scores of any size stay finite. The credit of a group adds up to 0.

    Raises:
        RewardError: a reward other than 0 and 1, an infinite score.
        AlignmentError: sizes differ.

    Example:
        >>> right_n, score_n = torch.tensor([1., 1., 0., 0.]), torch.tensor([.3, -.1, .2, -.4]).double()
        >>> group_nce(right_n, torch.zeros(4, dtype=torch.long), score_n)
        tensor([ 0.5836,  0.6764, -0.8135, -0.4465], dtype=torch.float64)

    Reference:
        Zhang, Hua, Stratos 2021, "EntQA" (arXiv 2110.02369), whose code has this loss for candidates of entities. No paper confirms
        it for completions. It is not ReNCE (arXiv 2601.22432), of which docs/not_shipped.md says what is not known.
    """
    if not len(correct_n) == len(group_n) == len(score_n):
        raise AlignmentError(
            f"There are {len(correct_n)} rewards, {len(group_n)} group ids and {len(score_n)} scores; give one of each."
        )
    check_rewards(correct_n)
    if place := first_of(~correct_n.isnan() & (correct_n != 0) & (correct_n != 1)):
        raise RewardError(
            f"The reward of completion {place[0]} is {float(correct_n[place]):g}; group_nce tells right (1) from wrong (0) and "
            f"takes no other reward. Cut it at a threshold, or use dr_grpo."
        )
    if place := first_of(score_n.isinf()):
        raise RewardError(
            f"The score of completion {place[0]} is {float(score_n[place])}; a score must be finite, or NaN where it is unknown."
        )
    known_n = ~correct_n.isnan() & ~score_n.isnan()
    dense_n = torch.where(known_n, group_index(group_n), -1)
    advantage_n = torch.zeros(len(correct_n), dtype=torch.float64, device=correct_n.device)
    for g in dense_n[known_n].unique():
        right_n, wrong_n = (dense_n == g) & (correct_n == 1), (dense_n == g) & (correct_n == 0)
        if not bool(right_n.any()) or not bool(wrong_n.any()):
            continue
        score_i, score_j = score_n[right_n].double(), score_n[wrong_n].double()
        wrong = score_j.logsumexp(dim=0)
        advantage_n[right_n] = torch.sigmoid(wrong - score_i)  # 1 - q without taking it from 1
        advantage_n[wrong_n] = -(score_j - torch.logaddexp(score_i, wrong)[:, None]).exp().sum(dim=0)
    return advantage_n
