"""Methods that use a critic's values: GAE and SAE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.credit.recursion import lambda_advantage
from spanwise.credit.registry import METHODS, Preset
from spanwise.credit.strata import check_mask, check_shapes, first_of, standardise_tokens
from spanwise.errors import RecipeError, RewardError, check_known
from spanwise.registry import register

_ROWS = 64
#: In SAE, an improbable token is the "start" or the "end" of a segment.
BOUNDARIES: tuple[Literal["start"], Literal["end"]] = ("start", "end")


@register(
    "gae",
    kind="token",
    paper="High-dimensional continuous control using GAE, arXiv 1506.02438",
    source="its paper and verl's code",
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
    r"""Sum the critic's errors from each token on, weighted by lambda to the power of the distance.

    Equation
        A[k] = r[k] + gamma V[k+1] - V[k] + gamma lam A[k+1], k over the trainable tokens
        length_adaptive_alpha: lam = max(0, 1 - 1 / (alpha length)), length the trainable tokens of the completion
        whiten: A <- (A - mean) / sqrt(var + eps) over the trainable tokens of the batch

    Args:
        reward_nt: one reward per token, mostly 0; NaN at a trainable token: absent, the completion gets 0.
        value_nt: the critic's value before each token; the result has the wider dtype of rewards and values.
        mask_nt: the trainable tokens; the others are skipped, as if they were deleted, and get exactly 0.
        gamma: discount between trainable tokens, in [0, 1].
        lam: weight of later surprises, in [0, 1]; one number, or one per completion.
        length_adaptive_alpha: take the lambda of each completion's length instead of `lam`, see `length_adaptive_lambda` (VAPO).
        bootstrap_n: the value after the last token where the completion was cut off; 0 where it ended, NaN where it is unknown
            (the completion gets 0). None: all ended. See `bootstrap_values`.
        whiten: standardise over tokens; long completions then weigh more and small advantages may change sign.
        ddof, eps: of the whitening variance (verl and SkyRL have ddof 1, OpenRLHF 0).

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
        Yue et al. 2025, "VAPO" (arXiv 2504.05118) for the length-adaptive lambda. docs/methods.md shows spans instead of tokens
        (VinePPO, arXiv 2410.01679; SPO-chain, arXiv 2505.23564).
    """
    decay_options: dict[str, Any] = {"gamma": gamma, "lam": lam, "alpha": length_adaptive_alpha}
    advantage_nt = lambda_advantage(reward_nt, value_nt, mask_nt, **decay_options, bootstrap_n=bootstrap_n)
    if not whiten:
        return advantage_nt
    lacks_reward_n = (reward_nt.isnan() & mask_nt).any(dim=1)
    if bootstrap_n is not None:
        lacks_reward_n |= bootstrap_n.isnan()
    return standardise_tokens(advantage_nt, mask_nt & ~lacks_reward_n[:, None], ddof=ddof, eps=eps, in_place=True)


def value_target(
    reward_nt: Float[Tensor, "n t"],
    value_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    gamma: float = 1.0,
    lam: float | Float[Tensor, " n"] = 1.0,
    bootstrap_n: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, "n t"]:
    r"""Compute the critic's target: its value plus a GAE with the critic's own lambda.

    Equation
        target[k] = V[k] + A_lam[k]; the return itself at lam = 1

    Args:
        reward_nt, value_nt, mask_nt, gamma, bootstrap_n: as for `gae`.
        lam: the critic's lambda, apart from the policy's (decoupled GAE); the policy's own gives verl's `returns`.

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


@register(
    "sae",
    kind="token",
    paper="Segmental Advantage Estimation, arXiv 2601.07320",
    source="third-party summaries and reviews of the paper (its full text was not used, and there is no public code)",
    preset=Preset(per="completion", calibrated=False),
    only_with={"lam": ("length_adaptive_alpha", (None,))},
)
def sae(
    reward_nt: Float[Tensor, "n t"],
    value_nt: Float[Tensor, "n t"],
    logp_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    gamma: float = 1.0,
    lam: float | Float[Tensor, " n"] = 0.95,
    length_adaptive_alpha: float | None = None,
    threshold: float = 0.2,
    boundary: Literal["start", "end"] = "start",
    bootstrap_n: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, "n t"]:
    r"""Compute GAE over segments: lambda counts only at unlikely tokens, where a new segment starts.

    Equation
        A[k] = r[k] + gamma V[k+1] - V[k] + gamma lam_k A[k+1], k over the trainable tokens
        lam_k = lam if p[k+1] < threshold (boundary "start": the unlikely token opens a segment)
                    or p[k] < threshold   (boundary "end": it closes one), else 1
        so that inside a segment all values cancel but V[k] and those where the later segments start

    Args:
        reward_nt, value_nt, mask_nt, gamma, bootstrap_n: as for `gae`.
        logp_nt: log-probability of each sampled token under the policy and at the temperature that sampled it.
        lam, length_adaptive_alpha: as for `gae`, at a boundary.
        threshold: tokens less probable than this are boundaries, at least 0; 0: none, above 1: all.
        boundary: which side of the cut the unlikely token lies on.

    Edge cases:
        Values and log-probabilities at masked tokens are never read: the next *trainable* token decides. No boundary: the return
        minus V. An unlikely first token changes nothing ("start"). Every token unlikely: GAE.

    Raises:
        RewardError: a log-probability that is NaN at a trainable token.
        RecipeError: a threshold below 0.

    Example:
        >>> reward_nt, value_nt = torch.tensor([[0., 0., 0., 1.]]), torch.tensor([[.4, .5, .3, .6]])
        >>> probability_nt = torch.tensor([[.9, .9, .1, .9]])
        >>> sae(reward_nt, value_nt, probability_nt.log(), torch.ones(1, 4, dtype=torch.bool), lam=0.9)
        tensor([[0.5300, 0.4300, 0.7000, 0.4000]])

    Reference:
        "Segmental Advantage Estimation" 2026 (arXiv 2601.07320). The side of the boundary and the value of lambda are not
        confirmed by its text and are options; gamma is ours (the paper has 1).
    """
    check_shapes(reward_nt=reward_nt, logp_nt=logp_nt)
    check_mask(mask_nt)
    boundary_nt = SaeSegments(threshold, boundary)._boundaries(logp_nt, mask_nt)
    decay_options: dict[str, Any] = {"gamma": gamma, "lam": lam, "alpha": length_adaptive_alpha}
    return lambda_advantage(reward_nt, value_nt, mask_nt, **decay_options, boundary_nt=boundary_nt, bootstrap_n=bootstrap_n)


@dataclass(frozen=True)
class SaeSegments:
    """The rule by which SAE cuts a completion into segments at tokens below some probability."""

    threshold: float = 0.2
    boundary: Literal["start", "end"] = "start"  # whether an unlikely token starts a segment or ends one

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise RecipeError(
                f"threshold is {self.threshold}; write 0 or more. Tokens with a lower probability than the threshold are "
                "boundaries."
            )
        check_known("boundary", self.boundary, BOUNDARIES)

    @staticmethod
    def of(method: str | None, options: Mapping[str, Any] | None) -> SaeSegments | None:
        """Return a method's rule for cutting completions into segments, given its `options`, or None if it cuts none."""
        default_options = METHODS[method].options if method is not None and method in METHODS else {}
        if not {"threshold", "boundary"} <= set(default_options):
            return None
        chosen_options = {**default_options, **(options or {})}
        return SaeSegments(float(chosen_options["threshold"]), chosen_options["boundary"])

    def _boundaries(self, logp_nt: Float[Tensor, "n t"], mask_nt: Bool[Tensor, "n t"]) -> Bool[Tensor, "n t"]:
        """Mark the tokens at which SAE applies lambda. A mark on a masked token has no effect."""
        # A sum finds a NaN faster than a search does.
        if bool(logp_nt.sum().isnan()) and (bad_entry := first_of(logp_nt.isnan() & mask_nt)):
            n, t = bad_entry
            raise RewardError(
                f"The log-probability of completion {n} is nan at trainable token {t}; give a number for every sampled token."
            )
        logp_threshold = math.log(self.threshold) if self.threshold > 0 else -math.inf
        is_unlikely_nt = logp_nt < logp_threshold
        return is_unlikely_nt if self.boundary == "start" else _move_to_next(is_unlikely_nt, mask_nt)

    def opens(self, logp_nt: Float[Tensor, "n t"], mask_nt: Bool[Tensor, "n t"]) -> Bool[Tensor, "n t"]:
        """Mark the trainable tokens that start a segment. The first token of a completion always does.

        >>> logp_nt = torch.tensor([[.9, .1, .9, .9]]).log()
        >>> mask_nt = torch.tensor([[True, True, False, True]])
        >>> [SaeSegments(boundary=side).opens(logp_nt, mask_nt).tolist() for side in ("start", "end")]
        [[[True, True, False, False]], [[True, False, False, True]]]
        """
        return mask_nt & (self._boundaries(logp_nt, mask_nt) | (mask_nt.cumsum(dim=1) == 1))


def _move_to_next(flag_nt: Bool[Tensor, "n t"], mask_nt: Bool[Tensor, "n t"]) -> Bool[Tensor, "n t"]:
    """Give each token the flag of the last trainable token before it."""
    moved_flag_nt = torch.zeros_like(flag_nt)
    position_t = torch.arange(flag_nt.shape[1], device=flag_nt.device)
    for row_slice in (slice(first_row, first_row + _ROWS) for first_row in range(0, len(flag_nt), _ROWS)):
        # the position of the last trainable token so far; -1 before the first one
        last_position_nt = torch.where(mask_nt[row_slice], position_t, -1).cummax(dim=1).values
        flag_at_last_position_nt = flag_nt[row_slice].gather(1, last_position_nt.clamp(min=0)) & (last_position_nt >= 0)
        moved_flag_nt[row_slice, 1:] = flag_at_last_position_nt[:, :-1]
    return moved_flag_nt
