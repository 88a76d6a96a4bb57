"""MaxRL: one reward per completion, relative to the mean of its group."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.checks import check_rewards
from spanwise.credit.explained import Explained, explains
from spanwise.credit.registry import Preset
from spanwise.credit.strata import compare_in_strata, group_index
from spanwise.errors import RewardError
from spanwise.registry import register


@register(
    "maxrl",
    kind="completion",
    paper="Maximum Likelihood Reinforcement Learning, arXiv 2602.02710",
    source="the code of SkyRL and prime-rl; the paper through notes",
    preset=Preset(whole=True, per="length", calibrated=False),
    exceptions={
        "negative": "the mean reward is a divisor, and 0 means failure",
        "shift": "the reward is divided by the mean reward",
    },
)
@explains
def maxrl(
    reward_n: Float[Tensor, " n"], group_n: Int[Tensor, " n"], *, eps: float = 1e-6, min_stratum: int = 2
) -> Explained:
    r"""Compare a completion with its group, in units of the group's mean: rare successes weigh more.

    Equation
        A[i] = (r[i] - mean_g r) / (mean_g r + eps)

    Args:
        reward_n: one reward per completion, 0 or more; NaN where absent (takes no part, gets 0).
        group_n: prompt ids, in any order, of any sizes.
        eps: added to the mean (SkyRL 1e-6, prime-rl 0).
        min_stratum: smaller groups get 0.

    Edge cases:
        A group of one and a constant group, all-wrong or all-right, give exactly 0 (SkyRL returns the raw reward for a group of
        one). Adding a constant to the rewards of a group changes the result, for 0 means failure here.

    Raises:
        RewardError: a negative reward; the mean would no longer be a rate of success, and signs could flip.

    Example:
        >>> import torch
        >>> maxrl(torch.tensor([1., 0., 0., 0.]), torch.tensor([0, 0, 0, 0]), eps=0.0)
        tensor([ 3., -1., -1., -1.], dtype=torch.float64)

    Reference:
        "Maximum Likelihood Reinforcement Learning" (arXiv 2602.02710), after its implementations. With K successes in G samples
        the paper's weight of a completion is (r - K/G) / K, which is A/G; the mean over the batch supplies the 1/G.
    """
    check_rewards(reward_n)
    negative_n = reward_n < 0
    if bool(negative_n.any()):
        i = int(torch.nonzero(negative_n)[0])
        raise RewardError(
            f"The reward of completion {i} is {float(reward_n[i]):g}; maxrl divides by the group's mean and takes rewards of 0 "
            f"(failure) and more only. Use rewards in [0, 1] or another method, such as rloo."
        )
    return compare_in_strata(reward_n, group_index(group_n), scale="mean", eps=eps, min_stratum=min_stratum)
