"""Compare the token advantages of GAE, SAE and GRPO with Monte Carlo advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit import advantage, gae, sae
from spanwise.credit.methods._gae import BOUNDARIES, SaeSegments
from spanwise.credit.strata import check_shapes
from spanwise.errors import AlignmentError, DataError, RecipeError, unknown
from spanwise.fidelity.baselines import agreement, index_of, root_ratio
from spanwise.measure.intervals import Interval, Weighted, bootstrap

#: The names of the figures of an estimator, as `token_fidelity` defines them.
TOKEN_FIGURES = ("correlation", "ceiling", "rmse", "rmse_scaled")
#: The kinds of tokens: all, and decisions (improbable tokens).
TOKEN_KINDS = ("all", "decision")
DECISION = 0.97
#: Stands for a critic's values in the list of estimators that are compared with Monte Carlo.
VALUES = "values of the critic"


@dataclass(frozen=True)
class Trajectories:
    """N completions with the Monte Carlo value of the state before each token.

    Attributes:
        prompt_n: the prompt of each completion.
        reward_n: the reward at the end of each completion; NaN if absent.
        value_nt: mean reward of fresh continuations from before each token; NaN if unknown.
        noise_nt: the variance of that mean.
        logp_nt: log-probability of each sampled token under the policy.
        mask_nt: the tokens that count; nothing is read at other tokens.
        weight_nt: how many counted tokens each token represents, if only a sample has Monte Carlo values; 0 for tokens outside
            the sample, even if their value is known for a neighbour's sake. None: all tokens are in the sample.

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
        check_shapes(
            value_nt=self.value_nt, noise_nt=self.noise_nt, logp_nt=self.logp_nt, mask_nt=self.mask_nt,
            weight_nt=self.weight_nt, prompt_n=self.prompt_n, reward_n=self.reward_n,
        )  # fmt: skip

    @property
    def reward_nt(self) -> Float[Tensor, "n t"]:
        """The reward of each completion at its last trainable token. All other tokens have 0."""
        is_last_token_nt = self.mask_nt & (self.mask_nt.cumsum(dim=1) == self.mask_nt.sum(dim=1, keepdim=True))
        return torch.where(is_last_token_nt, self.reward_n.double()[:, None], 0.0)


def monte_carlo_advantage(
    trajectories: Trajectories, segments: SaeSegments | None = None
) -> tuple[Float[Tensor, "n t"], Float[Tensor, "n t"]]:
    r"""Compute how much the expected reward changes over each token or segment. Return the estimate's variance, too.

    Equation
        A_MC[k] = V[b] - V[a], a the start of the segment of token k and b that of the next one; the reward in place of V after the
        last segment. Without segments every token that counts is one of its own: V[k+1] - V[k].
        s2[k] = noise[b] + noise[a], none after the last segment

    Args:
        trajectories: completions with Monte Carlo values.
        segments: how completions are cut into segments; None: token by token.

    Returns:
        Both (N, T), float64.

    Edge cases:
        NaN at tokens that do not count, and if a value is unknown.

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
    opens_segment_nt = mask_nt if segments is None else segments.opens(trajectories.logp_nt, mask_nt)
    width = mask_nt.shape[1]
    position_t = torch.arange(width)
    segment_start_nt = torch.where(opens_segment_nt, position_t, 0).cummax(dim=1).values
    opening_position_nt = torch.where(opens_segment_nt, position_t, width)
    next_opening_nt = opening_position_nt.flip(1).cummin(dim=1).values.flip(1)
    next_segment_start_nt = torch.nn.functional.pad(next_opening_nt[:, 1:], (0, 1), value=width)
    end_value_n1 = trajectories.reward_n.double()[:, None]
    value_nt = torch.cat([trajectories.value_nt.double(), end_value_n1], dim=1)
    noise_nt = torch.cat([trajectories.noise_nt.double(), torch.zeros_like(end_value_n1)], dim=1)
    value_change_nt = value_nt.gather(1, next_segment_start_nt) - value_nt.gather(1, segment_start_nt)
    noise_sum_nt = noise_nt.gather(1, next_segment_start_nt) + noise_nt.gather(1, segment_start_nt)
    return torch.where(mask_nt, value_change_nt, torch.nan), torch.where(mask_nt, noise_sum_nt, torch.nan)


def _gae(trajectories: Trajectories, value_nt: Tensor, **options: Any) -> Tensor:
    return gae(trajectories.reward_nt, value_nt, trajectories.mask_nt, **options)


def _sae(trajectories: Trajectories, value_nt: Tensor, **options: Any) -> Tensor:
    return sae(trajectories.reward_nt, value_nt, trajectories.logp_nt.double(), trajectories.mask_nt, **options)


def _group_mean(trajectories: Trajectories, value_nt: Tensor) -> Tensor:
    credit_n = advantage(trajectories.reward_n.double(), trajectories.prompt_n, baseline="group").advantage_n
    return credit_n[:, None].expand_as(value_nt)


def _prompt_value(trajectories: Trajectories, value_nt: Tensor) -> Tensor:
    first_token_index_n1 = trajectories.mask_nt.long().argmax(dim=1, keepdim=True)
    return (trajectories.reward_n.double()[:, None] - value_nt.gather(1, first_token_index_n1)).expand_as(value_nt)


#: Maps names, made from settings, to the compared estimators of token advantages.
TOKEN_ESTIMATORS: Mapping[str, Callable[[Trajectories, Tensor], Tensor]] = {
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


@dataclass(frozen=True)
class TokenFidelity:
    """How well token estimators agree with Monte Carlo. By critic (c), estimator (e) and kind of token (s).

    Attributes:
        critics, estimators: the names along the first two axes; the third axis has the names `TOKEN_KINDS`.
        sum_cesnk: the sums of each completion, from which the figures are computed; after the estimators, those of the critic's
            values against Monte Carlo values (`VALUES`).
        count_s: how many tokens of each kind were compared.
        prompt_n: the prompt of each completion.
        draws, seed: the number and the seed of the bootstrap draws, which are the same for all figures.

    Example:
        Two completions of two tokens, each compared with a critic that always says .5.

        >>> trajectories = Trajectories(
        ...     prompt_n=torch.tensor([0, 1]), reward_n=torch.tensor([1.0, 0.0]), value_nt=torch.tensor([[0.5, 1.0], [0.5, 0.0]]),
        ...     noise_nt=torch.zeros(2, 2), logp_nt=torch.zeros(2, 2), mask_nt=torch.ones(2, 2).bool(),
        ... )
        >>> fidelity = token_fidelity(trajectories, {"half": torch.full((2, 2), 0.5)}, draws=10)
        >>> fidelity.critics, fidelity.count()
        (('half',), 4)
    """

    critics: tuple[str, ...]
    estimators: tuple[str, ...]
    sum_cesnk: Float[Tensor, "c e s n k"]
    count_s: Int[Tensor, " s"]
    prompt_n: Int[Tensor, " n"]
    draws: int
    seed: int

    def count(self, kind: str = "all") -> int:
        """Return how many tokens of a kind (all, or improbable ones) were compared with Monte Carlo."""
        return int(self.count_s[index_of("kind of token", TOKEN_KINDS, kind)])

    def interval(self, critic: str, estimator: str, figure: str, *, kind: str = "all") -> Interval:
        """Return a figure, such as a correlation, with its interval, for an estimator that uses a critic."""
        return bootstrap(self._figure(critic, estimator, figure, kind), self.prompt_n, resamples=self.draws, seed=self.seed)

    def best(self, critic: str, among: str, *, kind: str = "all") -> str:
        """Return the estimator with the best Monte Carlo correlation among those whose names start with `among`."""
        family_names = self._family(among)
        correlations = self._correlations(critic, family_names, kind)(torch.ones(1, len(self.prompt_n)).double())
        return family_names[int(correlations.argmax())]

    def lead(self, critic: str, one: str, other: str, *, kind: str = "all") -> Interval:
        """Return how much the best estimator named `one...` exceeds the best named `other...` in Monte Carlo correlation.

        The best is chosen anew in every bootstrap draw, so that the luck of choosing among many is in the interval. A full name
        stands for itself: `lead("critic", "SAE end 0.2, 0", "GAE")` holds one SAE against the best GAE, which favours GAE.
        """
        correlate_one, correlate_other = (self._correlations(critic, self._family(name), kind) for name in (one, other))

        def difference(weight_rn: Tensor) -> Tensor:
            correlation_lead_r = correlate_one(weight_rn).amax(dim=0) - correlate_other(weight_rn).amax(dim=0)
            return correlation_lead_r.masked_fill(correlation_lead_r.isinf(), torch.nan)

        return bootstrap(difference, self.prompt_n, resamples=self.draws, seed=self.seed)

    def _family(self, start: str) -> list[str]:
        member_names = [start] if start in self.estimators else [name for name in self.estimators if name.startswith(start)]
        if not member_names or not start:
            raise RecipeError(unknown("estimator", start, self.estimators))
        return member_names

    def _correlations(self, critic: str, names: Sequence[str], kind: str) -> Weighted:
        """Return a function of bootstrap weights that gives each estimator's Monte Carlo correlation (-inf if undefined)."""
        figure_functions = [self._figure(critic, name, "correlation", kind) for name in names]
        return lambda weight_rn: torch.stack([figure(weight_rn) for figure in figure_functions]).nan_to_num(nan=-torch.inf)

    def _figure(self, critic: str, estimator: str, figure: str, kind: str) -> Weighted:
        table_indices = (
            index_of("critic", self.critics, critic),
            index_of("estimator", (*self.estimators, VALUES), estimator),
            index_of("kind of token", TOKEN_KINDS, kind),
        )
        figure_index = index_of("figure", TOKEN_FIGURES, figure)
        return lambda weight_rn: _figures_of_sums(weight_rn @ self.sum_cesnk[table_indices])[:, figure_index]


def token_fidelity(
    trajectories: Trajectories,
    critics: Mapping[str, Tensor],
    *,
    segments: SaeSegments | None = None,
    draws: int = 1000,
    seed: int = 0,
) -> TokenFidelity:
    r"""Compare the token advantages of GAE, SAE and GRPO with Monte Carlo advantages, for several critics.

    Equation
        A_MC and the variance s2 of its noise, token by token or segment by segment: see `monte_carlo_advantage`
        correlation  of A and A_MC;  ceiling = sqrt(1 - mean s2 / var A_MC): what the exact advantage would get
        rmse         sqrt(mean (A - A_MC)^2 - s2);  rmse_scaled = sqrt(min over a of mean (a A - A_MC)^2 - s2)

    All of them over tokens, each as often as its weight says, once over all and once over decision tokens. RMSE rewards an
    estimator for being small.

    Args:
        trajectories: completions with Monte Carlo values.
        critics: name -> values (N, T) before each token. Values that share re-rolls with `trajectories.value_nt` share its noise
            and look better than they are: give a Monte Carlo critic re-rolls of its own.
        segments: the reference is the change of V over each of these segments, broadcast to its tokens, instead of that over each
            token. It favours the SAE that has the same segments: what tells the tokens of a segment apart is not asked for.
        draws, seed: the number and the seed of the bootstrap draws of prompts.

    Edge cases:
        A completion without a reward, or with a critic's value that is not finite, is in no figure. A token with an unknown value
        on either side, or at an end of its segment, is left out for every estimator alike. Where a sample of tokens was picked
        (`weight_nt`), the others are in no figure; with segments, every token of a segment whose two values are known counts
        once. The critic's own error is over the picked tokens with either reference. A figure over nothing is NaN; a square
        below 0 gives 0. An estimator that never varies has no correlation (NaN).

    Raises:
        AlignmentError: a critic's values have another shape than the tokens.
        DataError: no token can be compared.

    Example:
        >>> trajectories = Trajectories(
        ...     prompt_n=torch.tensor([0, 1]), reward_n=torch.tensor([1., 0.]),
        ...     value_nt=torch.tensor([[.5, .5, 1.], [.5, .25, 0.]]), noise_nt=torch.zeros(2, 3),
        ...     logp_nt=torch.tensor([[.9, .5, 1.], [.5, .4, 1.]]).log(), mask_nt=torch.ones(2, 3, dtype=torch.bool),
        ... )  # A_MC is 0, .5, 0 and -.25, -.25, 0
        >>> fidelity = token_fidelity(trajectories, {"half": torch.full((2, 3), 0.5)}, draws=10)
        >>> for name in ("GAE 0", "GAE 1", "SAE start 0.9, 0"):  # 0, 0, .5 and 0, 0, -.5; then +-.5; then 0, .5, .5 and 0, -.5, -.5
        ...     print(f"{fidelity.interval('half', name, 'correlation').value:.3f}")
        0.000
        0.667
        0.612

    Reference:
        After the advantage-quality protocol of "Segmental Advantage Estimation" 2026 (arXiv 2601.07320), whose reference is that of
        `segments`, with SAE's own; without them there is a reference for every token, which favours nobody.
    """
    mask_nt = trajectories.mask_nt
    has_reward_n = ~trajectories.reward_n.isnan()
    for name, value_nt in critics.items():
        if value_nt.shape != mask_nt.shape:
            raise AlignmentError(
                f"Critic '{name}' gives values of the shape {tuple(value_nt.shape)} for tokens of the shape {tuple(mask_nt.shape)}."
            )
        has_reward_n = has_reward_n & (value_nt.isfinite() | ~mask_nt).all(dim=1)
    target_nt, noise_nt = monte_carlo_advantage(trajectories)
    unit_weight_nt = torch.ones_like(target_nt)
    token_weight_nt = unit_weight_nt if trajectories.weight_nt is None else trajectories.weight_nt.double()
    token_weight_snt = _weights(trajectories, token_weight_nt, has_reward_n, target_nt, noise_nt)
    weight_snt = token_weight_snt
    if segments is not None:
        target_nt, noise_nt = monte_carlo_advantage(trajectories, segments)
        weight_snt = _weights(trajectories, unit_weight_nt, has_reward_n, target_nt, noise_nt)
    if not critics or not bool((weight_snt > 0).any()):
        raise DataError(
            "No token's advantage can be compared. A comparison needs a reward, a critic's value, and new samples that "
            "continue the completion from before and after the token."
        )
    critic_sums = []
    for value_nt in critics.values():
        known_value_nt = torch.where(mask_nt & has_reward_n[:, None], value_nt.double(), 0.0)
        token_estimates = (estimator(trajectories, known_value_nt) for estimator in TOKEN_ESTIMATORS.values())
        estimator_sums = [_sums(advantage_nt, target_nt, noise_nt, weight_snt) for advantage_nt in token_estimates]
        estimator_sums.append(_sums(known_value_nt, trajectories.value_nt, trajectories.noise_nt, token_weight_snt))
        critic_sums.append(torch.stack(estimator_sums))
    sum_cesnk = torch.stack(critic_sums)
    count_s = (weight_snt > 0).sum(dim=(1, 2))
    return TokenFidelity(tuple(critics), tuple(TOKEN_ESTIMATORS), sum_cesnk, count_s, trajectories.prompt_n, draws, seed)


def _weights(
    trajectories: Trajectories, weight_nt: Tensor, known_n: Tensor, target_nt: Tensor, noise_nt: Tensor
) -> Float[Tensor, "s n t"]:
    """Return each token's weight among all tokens and among improbable tokens."""
    is_known_nt = trajectories.mask_nt & known_n[:, None] & target_nt.isfinite() & noise_nt.isfinite()
    is_decision_nt = trajectories.logp_nt.double().exp() < DECISION
    return torch.where(torch.stack([is_known_nt, is_known_nt & is_decision_nt]), weight_nt, 0.0)


def _sums(estimate_nt: Tensor, target_nt: Tensor, noise_nt: Tensor, weight_snt: Tensor) -> Float[Tensor, "s n k"]:
    """Return sums over each completion's tokens, from which correlations are computed."""
    adv_nt, mc_nt = estimate_nt.double(), target_nt.double()
    token_terms = [torch.ones_like(mc_nt), adv_nt, mc_nt, adv_nt * adv_nt, mc_nt * mc_nt, adv_nt * mc_nt, noise_nt.double()]
    weight_snt1 = weight_snt[..., None]
    return torch.where(weight_snt1 > 0, weight_snt1 * torch.stack(token_terms, dim=-1), 0.0).sum(dim=2)


def _figures_of_sums(sums: Float[Tensor, "*r k"]) -> Float[Tensor, "*r f"]:
    """Compute an estimator's figures (`TOKEN_FIGURES`) from what `_sums` returns, summed over completions."""
    term_sums = sums.unbind(-1)
    token_count, _, _, adv_square_sum, mc_square_sum, adv_mc_sum, noise_sum = term_sums
    correlation, ceiling, scaled_rmse = agreement(*term_sums)
    rmse = root_ratio(adv_square_sum - 2 * adv_mc_sum + mc_square_sum - noise_sum, token_count)
    return torch.stack([correlation, ceiling, rmse, scaled_rmse], dim=-1)
