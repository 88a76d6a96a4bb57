"""LaSeR's formulas: a reserved token's score, its share in the credit, and its loss."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.strata import centred, first_of, group_index, moments
from spanwise.errors import AlignmentError, RewardError


def self_reward(logp_n: Float[Tensor, " n"], *, beta: float, reference: float) -> Float[Tensor, " n"]:
    r"""Score a policy's own answers by a reserved token's log-probability after each answer.

    Equation
        r_s[i] = beta (log pi(token | prompt_i, completion_i, end) - reference)

    Args:
        logp_n: log-probability of the reserved token, in nats; NaN for a completion that did not end, whose score is NaN too. At a
            sampling temperature T other than 1 it is T times the log-probability at T, as in the released code.
        beta, reference: see `Laser`.

    Returns:
        (N,), with gradient and not clipped; clipped to [0, 1] it is a confidence.

    Source: LaSeR, arXiv 2510.14943.

    Example:
        >>> self_reward(torch.tensor([-14., -16., -20., float("nan")]), beta=0.1, reference=-23.0)
        tensor([0.9000, 0.7000, 0.3000,    nan])
    """
    return beta * (logp_n - reference)


def own_opinion(
    self_reward_n: Float[Tensor, " n"], group_n: Int[Tensor, " n"], *, mix: float, threshold: float, scale: str
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    r"""Return the weight of a policy's own score in the advantage, and the score relative to its group.

    Equation
        A[i] = (1 - tau[i]) A_v[i] + tau[i] z[i],   A_v the advantage of the verdict, in the paper z of it
        z[i] = (s[i] - mean_G s) / std_G s,   s = clip(r_s, 0, 1), the standard deviation of the sample; scale "none": not divided
        tau[i] = mix; 0 where r_s is absent, fewer than two of the group ended, or std_G s is below the threshold or 0

    Args:
        self_reward_n: r_s, NaN where it is absent: that completion keeps its advantage and is in no group's mean.
        group_n: prompt ids.
        mix, threshold, scale: see `Laser`.

    Returns:
        tau and z, (N,) float64.

    Source: LaSeR, arXiv 2510.14943.

    Example:
        >>> verdict_n, score_n = torch.tensor([1., 0., 0., 0.]), torch.tensor([.9, .7, .3, .1])
        >>> one_n = torch.zeros(4).long()
        >>> share_n, own_n = own_opinion(score_n, one_n, mix=0.1, threshold=0.1, scale="std")
        >>> [round(a, 7) for a in ((1 - share_n) * centred(verdict_n, one_n, scale="std") + share_n * own_n).tolist()]
        [1.4595445, -0.3952277, -0.5047723, -0.5595445]
    """
    score_n = self_reward_n.double().clamp(0.0, 1.0)
    group_index_n = group_index(group_n)
    group_std_n = moments(score_n, group_index_n).std_n(ddof=1)
    is_mixed_n = ~score_n.isnan() & (group_std_n > 0) & (group_std_n >= threshold)
    mix_share_n = mix * is_mixed_n.double()
    return mix_share_n, centred(score_n, group_index_n, scale=scale, ddof=1)


def class_weights(verdict_n: Float[Tensor, " n"], *, balanced: bool = True) -> Float[Tensor, " n"]:
    r"""Return weights that make right and wrong answers count equally in total.

    Equation
        w = (N_c + N_i) / (2 N_c) for right, (N_c + N_i) / (2 N_i) for wrong; 0 where there is no verdict

    The weights add up to N_c + N_i; if all answers are right, or all wrong, to half of it, as in the released code.

    Args:
        verdict_n: 1 for right, 0 for wrong, NaN for completions without a verdict (cut off, not checked).
        balanced: False: 1 wherever there is a verdict, see `Laser`.

    Raises:
        RewardError: a verdict is neither 0 nor 1.

    Example:
        >>> class_weights(torch.tensor([1., 0., 0., 0., float("nan")]))
        tensor([2.0000, 0.6667, 0.6667, 0.6667, 0.0000])
    """
    is_right_n, is_wrong_n = verdict_n == 1, verdict_n == 0
    for n in first_of(~(is_right_n | is_wrong_n | verdict_n.isnan())):
        raise RewardError(
            f"The verdict of completion {n} of {len(verdict_n)} is {float(verdict_n[n]):g}, but laser needs 1 (right) or 0 "
            "(wrong). Let laser.verdict name an objective whose reward is 1 or 0."
        )
    is_judged_n = (~verdict_n.isnan()).to(verdict_n.dtype)
    class_size_n = torch.where(is_right_n, is_right_n.sum(), is_wrong_n.sum()).clamp(min=1)
    return is_judged_n * is_judged_n.sum() / (2 * class_size_n) if balanced else is_judged_n


def verification_loss(
    self_reward_n: Float[Tensor, " n"],
    verdict_n: Float[Tensor, " n"],
    *,
    weight_n: Float[Tensor, " n"] | None = None,
    count: float | None = None,
) -> Float[Tensor, ""]:
    r"""Return the class-balanced squared error between a policy's own scores and the rewards.

    Equation
        l = 1 / (N_c + N_i) * sum over completions with score and verdict of  w (r_s - r_v)^2

    Args:
        self_reward_n: r_s with its gradient, not clipped; NaN if it is absent.
        verdict_n: r_v, 1 or 0, NaN if it is absent.
        weight_n: w; None: `class_weights` of these completions. For a part of a batch, pass the weights of the whole batch.
        count: N_c + N_i; None: their number among these completions. (The released code also counts truncated ones.)

    Returns:
        A number with a gradient, in the dtype of the scores; 0 if no completion has both score and verdict.

    Raises:
        AlignmentError: sizes differ; RewardError: a verdict is neither 0 nor 1.

    Source: LaSeR, arXiv 2510.14943.

    Example:
        >>> score_n, verdict_n = torch.tensor([.9, .7, .3, .1]), torch.tensor([1., 0., 0., 0.])
        >>> round(float(verification_loss(score_n, verdict_n)), 7)
        0.1033333
    """
    if self_reward_n.shape != verdict_n.shape:
        raise AlignmentError(
            f"There are {len(self_reward_n)} scores and {len(verdict_n)} verdicts. Give one score and one verdict per completion."
        )
    is_known_n = ~(self_reward_n.isnan() | verdict_n.isnan())
    if weight_n is None:
        weight_n = class_weights(torch.where(is_known_n, verdict_n, torch.nan))
    if count is None:
        count = float(is_known_n.sum())
    known_verdict_n = torch.where(is_known_n, verdict_n, 0.0).to(self_reward_n.dtype)
    error_n = torch.where(is_known_n, self_reward_n, 0.0) - known_verdict_n
    used_weight_n = torch.where(is_known_n, weight_n, 0.0).to(self_reward_n.dtype)
    return (used_weight_n * error_n.square()).sum() / max(count, 1.0)
