"""Completions with Monte Carlo values before every token, what these say of tokens and segments, and the estimators compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit import advantage, gae, sae
from spanwise.credit.methods._gae import BOUNDARIES, SaeSegments
from spanwise.errors import AlignmentError


@dataclass(frozen=True)
class Trajectories:
    """N completions and what Monte Carlo says of the state before each of their tokens.

    Attributes:
        prompt_n: the prompt of each completion.
        reward_n: the reward at its end; NaN where it is absent.
        value_nt: mean reward of fresh continuations from before each token; NaN where unknown.
        noise_nt: variance of that mean.
        logp_nt: log-probability of each sampled token under the policy.
        mask_nt: the tokens that count; nothing is read at the others.
        weight_nt: how many tokens that count each one stands for, where only a sample of them was picked for Monte Carlo; 0: not
            picked, though its value may be known for the sake of a neighbour. None: all were picked.

    Example:
        >>> one = Trajectories(
        ...     prompt_n=torch.tensor([0]), reward_n=torch.tensor([1.0]), value_nt=torch.tensor([[0.5, 0.75]]),
        ...     noise_nt=torch.zeros(1, 2), logp_nt=torch.zeros(1, 2), mask_nt=torch.ones(1, 2).bool(),
        ... )
        >>> (one.reward_n[:, None] - one.value_nt).tolist()  # what each token leaves to come
        [[0.5, 0.25]]
    """

    prompt_n: Int[Tensor, " n"]
    reward_n: Float[Tensor, " n"]
    value_nt: Float[Tensor, "n t"]
    noise_nt: Float[Tensor, "n t"]
    logp_nt: Float[Tensor, "n t"]
    mask_nt: Bool[Tensor, "n t"]
    weight_nt: Float[Tensor, "n t"] | None = None

    def __post_init__(self) -> None:
        weights = () if self.weight_nt is None else (self.weight_nt,)
        sizes = {tuple(x.shape) for x in (self.value_nt, self.noise_nt, self.logp_nt, self.mask_nt, *weights)}
        if len(sizes) > 1:
            shapes = ", ".join(map(str, sorted(sizes)))
            raise AlignmentError(f"Values, noise, log-probabilities, mask and weights have the shapes {shapes}.")
        if not len(self.prompt_n) == len(self.reward_n) == len(self.mask_nt):
            raise AlignmentError(
                f"There are {len(self.prompt_n)} prompts, {len(self.reward_n)} rewards and {len(self.mask_nt)} rows of tokens."
            )

    @property
    def reward_nt(self) -> Float[Tensor, "n t"]:
        """The reward at the last token that counts, 0 before it."""
        last_nt = self.mask_nt & (self.mask_nt.cumsum(dim=1) == self.mask_nt.sum(dim=1, keepdim=True))
        return torch.where(last_nt, self.reward_n.double()[:, None], 0.0)


def monte_carlo_advantage(
    trajectories: Trajectories, segments: SaeSegments | None = None
) -> tuple[Float[Tensor, "n t"], Float[Tensor, "n t"]]:
    r"""How much the expected reward changes over each token, or over the segment it is in, and the variance of the noise.

    Equation
        A_MC[k] = V[b] - V[a], a the start of the segment of token k and b that of the next one; the reward in place of V after the
        last segment. Without segments every token that counts is one of its own: V[k+1] - V[k].
        s2[k] = noise[b] + noise[a], none after the last segment

    Args:
        trajectories: completions with Monte Carlo values.
        segments: how they are cut; None: token by token.

    Returns:
        Both (N, T), float64.

    Edge cases:
        NaN at tokens that do not count, and where a value is unknown.

    Example:
        >>> one = Trajectories(
        ...     torch.tensor([0]), torch.tensor([1.]), torch.tensor([[.5, .25, .75]]), torch.tensor([[.01, .02, .03]]),
        ...     torch.tensor([[.9, .1, .9]]).log(), torch.tensor([[True, False, True]]))
        >>> monte_carlo_advantage(one)
        (tensor([[0.2500,    nan, 0.2500]], dtype=torch.float64), tensor([[0.0400,    nan, 0.0300]], dtype=torch.float64))
        >>> monte_carlo_advantage(one, SaeSegments())  # the token that does not count cuts nothing: one segment
        (tensor([[0.5000,    nan, 0.5000]], dtype=torch.float64), tensor([[0.0100,    nan, 0.0100]], dtype=torch.float64))

    Reference:
        By segments: the reference of "Segmental Advantage Estimation" 2026 (arXiv 2601.07320).
    """
    mask_nt = trajectories.mask_nt
    opens_nt = mask_nt if segments is None else segments.opens(trajectories.logp_nt, mask_nt)
    tokens = mask_nt.shape[1]
    place_t = torch.arange(tokens)
    own_nt = torch.where(opens_nt, place_t, 0).cummax(dim=1).values
    later_nt = torch.where(opens_nt, place_t, tokens).flip(1).cummin(dim=1).values.flip(1)
    next_nt = torch.cat([later_nt[:, 1:], later_nt.new_full((len(later_nt), 1), tokens)], dim=1)
    end_n1 = trajectories.reward_n.double()[:, None]
    value_nt = torch.cat([trajectories.value_nt.double(), end_n1], dim=1)
    noise_nt = torch.cat([trajectories.noise_nt.double(), torch.zeros_like(end_n1)], dim=1)
    change_nt = value_nt.gather(1, next_nt) - value_nt.gather(1, own_nt)
    both_nt = noise_nt.gather(1, next_nt) + noise_nt.gather(1, own_nt)
    return torch.where(mask_nt, change_nt, torch.nan), torch.where(mask_nt, both_nt, torch.nan)


def place_before(mask_nt: Bool[Tensor, "n t"]) -> Tensor:
    """The place of the latest token that counts before each token; -1 where there is none."""
    place_nt = torch.where(mask_nt, torch.arange(mask_nt.shape[1]), -1).cummax(dim=1).values
    return torch.cat([place_nt.new_full((len(place_nt), 1), -1), place_nt[:, :-1]], dim=1)


#: From trajectories and a critic's values (N, T) to advantages (N, T); read at tokens that count only.
TokenEstimator = Callable[[Trajectories, Tensor], Tensor]


def _gae(trajectories: Trajectories, value_nt: Tensor, **options: Any) -> Tensor:
    return gae(trajectories.reward_nt, value_nt, trajectories.mask_nt, **options)


def _sae(trajectories: Trajectories, value_nt: Tensor, **options: Any) -> Tensor:
    return sae(trajectories.reward_nt, value_nt, trajectories.logp_nt.double(), trajectories.mask_nt, **options)


def _group_mean(trajectories: Trajectories, value_nt: Tensor) -> Tensor:
    credit_n = advantage(trajectories.reward_n.double(), trajectories.prompt_n, baseline="group").advantage_n
    return credit_n[:, None].expand_as(value_nt)


def _prompt_value(trajectories: Trajectories, value_nt: Tensor) -> Tensor:
    first_n1 = trajectories.mask_nt.long().argmax(dim=1, keepdim=True)
    return (trajectories.reward_n.double()[:, None] - value_nt.gather(1, first_n1)).expand_as(value_nt)


#: The estimators compared by default. SAE is called by its boundary, its threshold and its lambda; adaptive GAE by its alpha.
TOKEN_ESTIMATORS: Mapping[str, TokenEstimator] = {
    **{f"GAE {lam:g}": partial(_gae, lam=lam) for lam in (0.0, 0.5, 0.8, 0.95, 1.0)},
    **{f"GAE adaptive {alpha:g}": partial(_gae, length_adaptive_alpha=alpha) for alpha in (0.05, 0.4)},
    **{
        f"SAE {boundary} {threshold:g}, {lam:g}": partial(_sae, boundary=boundary, threshold=threshold, lam=lam)
        for boundary in BOUNDARIES
        for threshold in (0.2, 0.5, 0.9)
        for lam in (0.0, 0.5, 0.95)
    },
    "GRPO c - group mean": _group_mean,
    "GRPO c - V(prompt)": _prompt_value,
}
