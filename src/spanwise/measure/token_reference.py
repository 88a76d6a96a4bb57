"""What Monte Carlo values say of each token, or of each segment of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.credit import segment_openings
from spanwise.errors import RecipeError, unknown
from spanwise.measure.trajectories import BOUNDARIES, Trajectories


@dataclass(frozen=True)
class Segments:
    """Segments as SAE cuts them: at tokens that are less probable than a threshold.

    Attributes:
        threshold: tokens less probable than this are boundaries.
        boundary: whether such a token starts a segment or ends one.
    """

    threshold: float = 0.2
    boundary: Literal["start", "end"] = "start"

    def __post_init__(self) -> None:
        if self.boundary not in BOUNDARIES:
            raise RecipeError(unknown("boundary", self.boundary, BOUNDARIES))

    def opens(self, logp_nt: Float[Tensor, "n t"], mask_nt: Bool[Tensor, "n t"]) -> Bool[Tensor, "n t"]:
        """The tokens that count and that a segment starts with; the first one of a completion always does.

        >>> logp_nt = torch.tensor([[.9, .1, .9, .9]]).log()
        >>> mask_nt = torch.tensor([[True, True, False, True]])
        >>> [Segments(boundary=side).opens(logp_nt, mask_nt).tolist() for side in ("start", "end")]
        [[[True, True, False, False]], [[True, False, False, True]]]
        """
        opens_nt = segment_openings(logp_nt, mask_nt, threshold=self.threshold, boundary=self.boundary)
        return mask_nt & (opens_nt | (place_before(mask_nt) < 0))


def monte_carlo_advantage(
    trajectories: Trajectories, segments: Segments | None = None
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
        >>> monte_carlo_advantage(one, Segments())  # the token that does not count cuts nothing: one segment
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
