"""What credit should say of each of K dependent parts, known from the policy's own probabilities instead of from samples."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def own_advantage(
    logp_nkv: Float[Tensor, "n k v"], value_nk: Int[Tensor, "n k"], gold_nk: Int[Tensor, "n k"]
) -> Float[Tensor, "n k"]:
    r"""The exact advantage of each part for its own reward, where a part is one token and right if it is the gold one.

    Equation
        A[i, k] = [value[i, k] = gold[i, k]] - p(gold[i, k] | everything before part k)

    It is what Monte Carlo estimates with ever more fresh parts behind the same prefix. Errors made before part k are in both terms.

    Args:
        logp_nkv: log-probabilities of all tokens at the place of each part, behind what completion i itself wrote.
        value_nk: the token that it wrote there.
        gold_nk: the token that is right.

    Example:
        Gold is token 0, of probability .8 behind a right part and .1 behind a wrong one.

        >>> logp = torch.tensor([[[.8, .2]], [[.8, .2]], [[.1, .9]]]).log()
        >>> own_advantage(logp, torch.tensor([[0], [1], [1]]), torch.tensor([[0], [0], [0]])).flatten()
        tensor([ 0.2000, -0.8000, -0.1000], dtype=torch.float64)
    """
    chance_nk = logp_nkv.double().exp().gather(2, gold_nk[:, :, None]).squeeze(2)
    return (value_nk == gold_nk).double() - chance_nk


def to_go_advantage(reward_nk: Float[Tensor, "n k"], to_go_nk: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    r"""The advantage of each part for the sum of its own reward and all later ones.

    Equation
        A[i, k] = r[i, k] + V[i, k+1] - V[i, k],  V[i, k] = E[r[k] + ... + r[K-1] | everything before part k],  V[i, K] = 0

    Args:
        reward_nk: the rewards of the K parts, in order.
        to_go_nk: V; an estimate's noise enters the result.

    Example:
        Two fair parts, the second right only behind a right first one: V = 1 at the start, then .5 or 0.

        >>> to_go_advantage(torch.tensor([[1., 0.], [0., 0.]]), torch.tensor([[.75, .5], [.75, 0.]]))
        tensor([[ 0.7500, -0.5000],
                [-0.7500,  0.0000]])
    """
    after_nk = torch.cat([to_go_nk[:, 1:], torch.zeros_like(to_go_nk[:, :1])], dim=1)
    return reward_nk + after_nk - to_go_nk


def weighted_correlation(
    left_n: Float[Tensor, " n"], right_n: Float[Tensor, " n"], weight_rn: Float[Tensor, "r n"]
) -> Float[Tensor, " r"]:
    """Pearson's correlation under each row of weights; NaN where a column does not vary.

    >>> weighted_correlation(torch.tensor([0.0, 1.0, 5.0]), torch.tensor([3.0, 1.0, 0.0]), torch.tensor([[1.0, 1.0, 0.0]]))
    tensor([-1.], dtype=torch.float64)
    """
    weight_rn = weight_rn.double() / weight_rn.double().sum(dim=1, keepdim=True)
    gap_rn, other_rn = (x.cpu().double() - (weight_rn @ x.cpu().double())[:, None] for x in (left_n, right_n))
    var_r, other_r = ((weight_rn * gap.square()).sum(dim=1) for gap in (gap_rn, other_rn))
    both_r = (weight_rn * gap_rn * other_rn).sum(dim=1)
    varies_r = (var_r > 1e-24) & (other_r > 1e-24)
    return torch.where(varies_r, both_r / torch.where(varies_r, var_r * other_r, 1.0).sqrt(), torch.nan)
