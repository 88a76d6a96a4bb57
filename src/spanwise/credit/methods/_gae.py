"""GAE over the trainable tokens, and the critic's target with a lambda of its own."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.credit.recursion import lambda_advantage, policy_lambda
from spanwise.credit.registry import Preset
from spanwise.credit.strata import standardised_tokens
from spanwise.registry import register


@register(
    "gae",
    kind="token",
    paper="High-dimensional continuous control using GAE, arXiv 1506.02438",
    source="the paper and verl's code",
    preset=Preset(per="completion", calibrated=False),
    only_with={"ddof": ("whiten", (True,)), "eps": ("whiten", (True,)), "lam": ("length_adaptive_alpha", (None,))},
)
def gae(
    reward_nt: Float[Tensor, "n t"],
    value_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    gamma: float = 1.0,
    lam: float | Float[Tensor, " n"] = 0.95,
    length_adaptive_alpha: float | None = None,
    bootstrap_n: Float[Tensor, " n"] | None = None,
    whiten: bool = False,
    ddof: int = 1,
    eps: float = 1e-8,
) -> Float[Tensor, "n t"]:
    r"""Mix one-step surprises of the critic with exponential weights, over the trainable tokens only.

    Equation
        A[k] = r[k] + gamma V[k+1] - V[k] + gamma lam A[k+1], k over the trainable tokens
        length_adaptive_alpha: lam = max(0, 1 - 1 / (alpha length)), length the trainable tokens of the completion
        whiten: A <- (A - mean) / sqrt(var + eps) over the trainable tokens of the batch

    Args:
        reward_nt: one reward per token, mostly 0; NaN at a trainable token: absent, the completion gets 0.
        value_nt: the critic's value before each token.
        mask_nt: the trainable tokens; the others are skipped, as if they were deleted.
        gamma: discount between trainable tokens, in [0, 1].
        lam: weight of later surprises, in [0, 1]; one number, or one per completion.
        length_adaptive_alpha: take the lambda of each completion's length instead of `lam`, see `length_adaptive_lambda` (VAPO).
        bootstrap_n: the value after the last token where the completion was cut off; 0 where it ended, NaN where it is unknown
            (the completion gets 0). None: all ended. See `bootstrap_values`.
        whiten: standardise over tokens; long completions then weigh more and small advantages may change sign.
        ddof: of the whitening variance (verl, SkyRL 1; OpenRLHF 0).
        eps: added to the whitening variance.

    Returns:
        (N, T) in the dtype of rewards and values; exactly 0 at masked tokens.

    Edge cases:
        A value at a masked token is never read. A reward there moves to the last trainable token before it; if there is none it
        is dropped, for nothing that was chosen can have caused it. Whitened constant advantages are exactly 0.

    Example:
        >>> reward_nt, value_nt = torch.tensor([[0., 0., 1.]]), torch.tensor([[.5, 9., .6]])
        >>> gae(reward_nt, value_nt, torch.tensor([[True, False, True]]), lam=0.5)
        tensor([[0.3000, 0.0000, 0.4000]])

        Surprises of .1 and .4; two tokens and alpha 2 make lam 1 - 1/4 = .75, and the first .1 + .75 x .4.

        >>> gae(reward_nt, value_nt, torch.tensor([[True, False, True]]), length_adaptive_alpha=2.0)
        tensor([[0.4000, 0.0000, 0.4000]])

    Reference:
        Schulman et al. 2016 (arXiv 1506.02438); masked tokens are skipped as verl does. verl whitens always, we when asked.
        Yue et al. 2025, "VAPO" (arXiv 2504.05118) for the length-adaptive lambda.
    """
    lam = policy_lambda(lam, mask_nt, alpha=length_adaptive_alpha)
    advantage_nt = lambda_advantage(reward_nt, value_nt, mask_nt, gamma=gamma, lam=lam, bootstrap_n=bootstrap_n)
    if not whiten:
        return advantage_nt
    absent_n = (reward_nt.isnan() & mask_nt).any(dim=1)
    if bootstrap_n is not None:
        absent_n |= bootstrap_n.isnan()
    return standardised_tokens(advantage_nt, mask_nt & ~absent_n[:, None], ddof=ddof, eps=eps, in_place=True)


def value_target(
    reward_nt: Float[Tensor, "n t"],
    value_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    gamma: float = 1.0,
    lam: float | Float[Tensor, " n"] = 1.0,
    bootstrap_n: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, "n t"]:
    r"""What the critic is fitted to: its value plus the GAE of a lambda of its own.

    Equation
        target[k] = V[k] + A_lam[k]; the return itself at lam = 1

    Args:
        reward_nt, value_nt, mask_nt, gamma, bootstrap_n: as for `gae`.
        lam: the critic's lambda, apart from the policy's (decoupled GAE); the policy's own gives verl's `returns`.

    Returns:
        (N, T); exactly 0 at masked tokens.

    Edge cases:
        A completion without reward keeps its values as targets, so that a squared error there is 0.

    Example:
        >>> reward_nt, value_nt = torch.tensor([[0., 0., 1.]]), torch.tensor([[.5, 9., .6]])
        >>> value_target(reward_nt, value_nt, torch.tensor([[True, False, True]]))
        tensor([[1., 0., 1.]])

    Reference:
        Yuan et al. 2025, "What's behind PPO's collapse in long-CoT" (arXiv 2503.01491): critic lambda 1, policy lambda below 1.
    """
    advantage_nt = lambda_advantage(reward_nt, value_nt, mask_nt, gamma=gamma, lam=lam, bootstrap_n=bootstrap_n)
    return torch.where(mask_nt, value_nt.detach() + advantage_nt, advantage_nt.new_zeros(()))
