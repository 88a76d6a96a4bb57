"""REINFORCE++: discounted returns of every token, standardised over all tokens of the batch."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.credit.recursion import discounted_returns
from spanwise.credit.registry import Preset
from spanwise.credit.strata import EpsAt, standardised_tokens
from spanwise.registry import register


@register(
    "reinforce++",
    kind="token",
    paper="REINFORCE++, arXiv 2501.03262",
    source="the code of verl and OpenRLHF",
    preset=Preset(per="length", calibrated=False),
    only_with={"ddof": ("whiten", (True,)), "eps": ("whiten", (True,)), "eps_at": ("whiten", (True,))},
    exceptions={"split": "standardised over the tokens of the batch"},
)
def reinforce_plus_plus(
    reward_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    gamma: float = 1.0,
    whiten: bool = True,
    ddof: int = 1,
    eps: float = 1e-8,
    eps_at: EpsAt = "variance",
) -> Float[Tensor, "n t"]:
    r"""Compare the return of a token with the returns of all trainable tokens of the batch.

    Equation
        G[k] = r[k] + gamma G[k+1] over the trainable tokens k of a completion
        A[k] = (G[k] - mean G) / sqrt(var G + eps), moments over the trainable tokens of all completions

    Args:
        reward_nt: one reward per token, mostly 0; a penalty -beta kl per token belongs in here. NaN at a trainable token: the
            completion's reward is absent, it joins no moment and gets 0.
        mask_nt: the trainable tokens.
        gamma: discount in [0, 1] from one trainable token to the next.
        whiten: standardise; False gives the returns.
        ddof: of the variance (verl and SkyRL 1, OpenRLHF 0).
        eps: see `eps_at`.
        eps_at: "variance" as verl and SkyRL have it, "floor" for max(var, eps) as OpenRLHF has it, "std" for std + eps.

    Returns:
        (N, T) in the dtype of `reward_nt`; exactly 0 at masked tokens.

    Edge cases:
        There is no group: a prompt that is always solved is credited for being easier than the others. Tokens count equally, so
        long completions dominate the moments. A batch whose returns are all equal gives exactly 0. Masked tokens are skipped, a
        reward on one of them counts for the last trainable token before it (verl drops it).

    Example:
        >>> import torch
        >>> reward_nt = torch.tensor([[0., 1.], [0., 0.]])
        >>> reinforce_plus_plus(reward_nt, torch.tensor([[True, True], [True, False]]), ddof=0)
        tensor([[ 0.7071,  0.7071],
                [-1.4142,  0.0000]])

    Reference:
        Hu 2025, "REINFORCE++" (arXiv 2501.03262), carried across masked tokens as verl does.
    """
    return_nt = discounted_returns(reward_nt, mask_nt, gamma=gamma)
    if not whiten:
        return return_nt
    if not bool(reward_nt.sum().isfinite()):  # one cheap look: only then can a reward be absent
        mask_nt = mask_nt & ~(reward_nt.isnan() & mask_nt).any(dim=1, keepdim=True)
    return standardised_tokens(return_nt, mask_nt, ddof=ddof, eps=eps, eps_at=eps_at, in_place=True)
