"""A confidence without words (LaSeR): the score of one reserved token, and how it is mixed into the credit of a verdict."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.strata import centred, group_index, moments
from spanwise.errors import AlignmentError


def self_reward(logp_n: Float[Tensor, " n"], *, beta: float, reference: float) -> Float[Tensor, " n"]:
    r"""What a policy says of its own answer by the log-probability of one reserved token after its end.

    Equation
        r_s[i] = beta (log pi(token | prompt_i, completion_i, end) - reference)

    Args:
        logp_n: of the reserved token, in nats; NaN for a completion that did not end, and then so is the score. At a sampling
            temperature other than 1 the released code takes it there and multiplies by the temperature, and so do the engines here.
        beta: the worth of a nat.
        reference: the mean of `logp_n` under the starting policy.

    Returns:
        (N,), the logp's dtype, not clipped: about 0 for a policy that has not learned it, 1 for an answer called right. The
        gradient flows. As a confidence it is read clipped to [0, 1]; above .5 says right.

    Source: LaSeR, arXiv 2510.14943.

    Example:
        >>> import torch
        >>> self_reward(torch.tensor([-14., -16., -20., float("nan")]), beta=0.1, reference=-23.0)
        tensor([0.9000, 0.7000, 0.3000,    nan])
    """
    return beta * (logp_n - reference)


def mixed_advantage(
    adv_n: Float[Tensor, " n"],
    self_reward_n: Float[Tensor, " n"],
    group_n: Int[Tensor, " n"],
    *,
    mix: float = 0.1,
    threshold: float = 0.1,
    scale: str = "std",
) -> Float[Tensor, " n"]:
    r"""The advantage of a verdict with a share of what the policy itself says, compared in the same group.

    Equation
        A[i] = (1 - tau[i]) A_v[i] + tau[i] z[i]
        z[i] = (s[i] - mean_G s) / std_G s,   s = clip(r_s, 0, 1), the standard deviation of the sample; scale "none": not divided
        tau[i] = mix; 0 where r_s is absent, fewer than two of the group ended, or std_G s is below the threshold or 0

    Args:
        adv_n: A_v, the advantage of the verifier's reward; in the paper z of it.
        self_reward_n: r_s, NaN where it is absent: that completion keeps its advantage and is in no group's mean.
        group_n: prompt ids.
        mix, threshold, scale: see `Laser`.

    Returns:
        (N,) float64.

    Raises:
        AlignmentError: sizes differ.

    Source: LaSeR, arXiv 2510.14943.

    Example:
        >>> import torch
        >>> verdict_n, score_n = torch.tensor([1., 0., 0., 0.]), torch.tensor([.9, .7, .3, .1])
        >>> one_n = torch.zeros(4).long()
        >>> [round(a, 7) for a in mixed_advantage(centred(verdict_n, one_n, scale="std"), score_n, one_n).tolist()]
        [1.4595445, -0.3952277, -0.5047723, -0.5595445]
    """
    if not len(adv_n) == len(self_reward_n) == len(group_n):
        raise AlignmentError(
            f"{len(adv_n)} advantages, {len(self_reward_n)} scores and {len(group_n)} groups differ; give one to each completion."
        )
    share_n, own_n = own_opinion(self_reward_n, group_n, mix=mix, threshold=threshold, scale=scale)
    return adv_n.double() + share_n * (own_n - adv_n.double())


def own_opinion(
    self_reward_n: Float[Tensor, " n"], group_n: Int[Tensor, " n"], *, mix: float, threshold: float, scale: str
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """The share tau and the compared score z: tau is 0 where the score is absent, or its group's scores do not differ by enough.

    Args:
        self_reward_n, group_n, mix, threshold, scale: see `mixed_advantage`.

    Example:
        >>> import torch
        >>> share_n, own_n = own_opinion(torch.tensor([1., 0.]), torch.tensor([0, 0]), mix=0.1, threshold=0.1, scale="none")
        >>> share_n, own_n
        (tensor([0.1000, 0.1000], dtype=torch.float64), tensor([ 0.5000, -0.5000], dtype=torch.float64))
    """
    score_n, dense_n = self_reward_n.double().clamp(0.0, 1.0), group_index(group_n)
    std_n = moments(score_n, dense_n).std_n(ddof=1)
    share_n = mix * (~score_n.isnan() & (std_n > 0) & (std_n >= threshold)).double()
    return share_n, centred(score_n, dense_n, scale=scale, ddof=1)
