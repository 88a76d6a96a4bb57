"""Token fidelity: how close GAE, SAE and GRPO's broadcast come to Monte Carlo advantages token by token, for a given critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.errors import AlignmentError, DataError, RecipeError, unknown
from spanwise.fidelity.baselines import place_of, root
from spanwise.fidelity.trajectories import TOKEN_ESTIMATORS, SaeSegments, TokenEstimator, Trajectories, monte_carlo_advantage
from spanwise.measure.intervals import Interval, Weighted, bootstrap

#: What is said of every critic, estimator and kind of token, see `token_fidelity`.
TOKEN_FIGURES = ("correlation", "ceiling", "rmse", "rmse_scaled")
#: All tokens, and those at which the policy really chose.
TOKEN_KINDS = ("all", "decision")


@dataclass(frozen=True)
class TokenFidelity:
    """Figures of every critic (c), estimator (e) and kind of token (s), with bootstrap intervals by prompt.

    Attributes:
        critics, estimators: what the first two axes stand for; the third is `TOKEN_KINDS`.
        sum_cesnk: by completion, what the figures are made of.
        value_sum_csnk: the same for the critic's values against those of Monte Carlo.
        count_s: how many tokens of each kind were compared.
        prompt_n: the prompt of each completion.
        draws, seed: of the bootstrap; all figures see the same draws.

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
    value_sum_csnk: Float[Tensor, "c s n k"]
    count_s: Int[Tensor, " s"]
    prompt_n: Int[Tensor, " n"]
    draws: int
    seed: int

    def count(self, kind: str = "all") -> int:
        """How many tokens of a kind were compared."""
        return int(self.count_s[place_of("kind of token", TOKEN_KINDS, kind)])

    @property
    def counts(self) -> dict[str, int]:
        """How many completions and prompts there are."""
        return {"completions": len(self.prompt_n), "prompts": len(self.prompt_n.unique())}

    def interval(self, critic: str, estimator: str, figure: str, *, kind: str = "all", level: float = 0.95) -> Interval:
        """One figure of one estimator."""
        return self._bootstrap(self._figure(critic, estimator, figure, kind), level)

    def critic_interval(self, critic: str, figure: str, *, kind: str = "all", level: float = 0.95) -> Interval:
        """One figure of the critic's values themselves, held against the Monte Carlo values."""
        c, s = place_of("critic", self.critics, critic), place_of("kind of token", TOKEN_KINDS, kind)
        return self._bootstrap(_figure_of(self.value_sum_csnk[c, s], figure), level)

    def best(self, critic: str, among: str, figure: str = "correlation", *, kind: str = "all") -> str:
        """The best of the estimators whose name starts with `among`: most correlated, or of the smallest error."""
        names = self._family(among)
        one = torch.ones(1, len(self.prompt_n), dtype=torch.float64)
        value_e = torch.cat([self._figure(critic, name, figure, kind)(one) for name in names])
        return names[int((_sign(figure) * value_e.nan_to_num(nan=-torch.inf)).argmax())]

    def lead(
        self,
        critic: str,
        one: str,
        other: str,
        figure: str = "correlation",
        *,
        kind: str = "all",
        level: float = 0.95,
    ) -> Interval:
        """The figure of the best estimator called `one...` minus that of the best called `other...`, over the same prompts.

        The best is chosen anew in every bootstrap draw, so that the luck of choosing among many is in the interval. A full name
        stands for itself: `lead("critic", "SAE end 0.2, 0", "GAE")` holds one SAE against the best GAE, which favours GAE.
        """
        sign, families = _sign(figure), (self._family(one), self._family(other))

        def difference(weight_rn: Tensor) -> Tensor:
            best_2r = []
            for names in families:
                value_er = torch.stack([sign * self._figure(critic, name, figure, kind)(weight_rn) for name in names])
                known_er = ~value_er.isnan()  # one that never varies has no correlation, and leads nobody
                best_r = value_er.masked_fill(~known_er, -torch.inf).amax(dim=0)
                best_2r.append(best_r.masked_fill(~known_er.any(dim=0), torch.nan))
            return sign * (best_2r[0] - best_2r[1])

        return self._bootstrap(difference, level)

    def _family(self, start: str) -> list[str]:
        names = [name for name in self.estimators if name == start] or [e for e in self.estimators if e.startswith(start)]
        if not names or not start:
            raise RecipeError(unknown("estimator", start, self.estimators))
        return names

    def _figure(self, critic: str, estimator: str, figure: str, kind: str) -> Weighted:
        c, e = place_of("critic", self.critics, critic), place_of("estimator", self.estimators, estimator)
        return _figure_of(self.sum_cesnk[c, e, place_of("kind of token", TOKEN_KINDS, kind)], figure)

    def _bootstrap(self, figure: Weighted, level: float) -> Interval:
        return bootstrap(figure, self.prompt_n, resamples=self.draws, level=level, seed=self.seed)


def token_fidelity(
    trajectories: Trajectories,
    critics: Mapping[str, Tensor],
    *,
    estimators: Mapping[str, TokenEstimator] = TOKEN_ESTIMATORS,
    segments: SaeSegments | None = None,
    decision: float = 0.97,
    draws: int = 1000,
    seed: int = 0,
) -> TokenFidelity:
    r"""Hold token advantages against Monte Carlo.

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
        estimators: name -> function of trajectories and a critic's values.
        segments: the reference is the change of V over each of these segments, broadcast to its tokens, instead of that over each
            token. It favours the SAE that has the same segments: what tells the tokens of a segment apart is not asked for.
        decision: tokens less probable than this are decisions.
        draws, seed: of the bootstrap over prompts.

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
    mask_nt, known_n = trajectories.mask_nt, ~trajectories.reward_n.isnan()
    for name, value_nt in critics.items():
        if value_nt.shape != mask_nt.shape:
            raise AlignmentError(
                f"The values of critic '{name}' are {tuple(value_nt.shape)}, the tokens {tuple(mask_nt.shape)}."
            )
        known_n = known_n & (value_nt.isfinite() | ~mask_nt).all(dim=1)
    target_nt, noise_nt = monte_carlo_advantage(trajectories)
    every_nt = torch.ones_like(target_nt)
    picked_nt = every_nt if trajectories.weight_nt is None else trajectories.weight_nt.double()
    picked_snt = weight_snt = _weights(trajectories, picked_nt, known_n, target_nt, noise_nt, decision)
    if segments is not None:
        target_nt, noise_nt = monte_carlo_advantage(trajectories, segments)
        weight_snt = _weights(trajectories, every_nt, known_n, target_nt, noise_nt, decision)
    if not critics or not bool((weight_snt > 0).any()):
        raise DataError(
            "No token has a reward, a critic's value and Monte Carlo values on both sides; nothing can be compared."
        )
    sums, value_sums = [], []
    for value_nt in critics.values():
        clean_nt = torch.where(mask_nt & known_n[:, None], value_nt.double(), 0.0)
        estimates = (estimate(trajectories, clean_nt) for estimate in estimators.values())
        sums.append(torch.stack([_sums(advantage_nt, target_nt, noise_nt, weight_snt) for advantage_nt in estimates]))
        value_sums.append(_sums(clean_nt, trajectories.value_nt, trajectories.noise_nt, picked_snt))
    return TokenFidelity(
        tuple(critics), tuple(estimators), torch.stack(sums), torch.stack(value_sums), (weight_snt > 0).sum(dim=(1, 2)),
        trajectories.prompt_n, draws, seed,
    )  # fmt: skip


def _weights(
    trajectories: Trajectories, weight_nt: Tensor, known_n: Tensor, target_nt: Tensor, noise_nt: Tensor, decision: float
) -> Float[Tensor, "s n t"]:
    """How much each token counts, over all and over decision tokens; 0 where anything is unknown."""
    use_nt = trajectories.mask_nt & known_n[:, None] & target_nt.isfinite() & noise_nt.isfinite()
    choice_nt = trajectories.logp_nt.double().exp() < decision
    return torch.stack([torch.where(use, weight_nt, 0.0) for use in (use_nt, use_nt & choice_nt)])


def _sums(estimate_nt: Tensor, target_nt: Tensor, noise_nt: Tensor, weight_snt: Tensor) -> Float[Tensor, "s n k"]:
    """By kind of token and completion, weighted: count, A, A_MC, their products, noise."""
    a, m, noise = estimate_nt.double(), target_nt.double(), noise_nt.double()
    term_ntk = torch.stack([torch.ones_like(m), a, m, a * a, m * m, a * m, noise], dim=-1)
    return torch.where(weight_snt[..., None] > 0, weight_snt[..., None] * term_ntk, 0.0).sum(dim=2)


def _figure_of(sum_nk: Tensor, figure: str) -> Weighted:
    place = place_of("figure", TOKEN_FIGURES, figure)
    return lambda weight_rn: _figures(weight_rn @ sum_nk)[:, place]


def _figures(sums: Float[Tensor, "*r k"]) -> Float[Tensor, "*r f"]:
    """The figures, in the order of `TOKEN_FIGURES`."""
    n, a, m, aa, mm, am, noise = sums.unbind(-1)
    var_a, var_m, cov = aa - a * a / n, mm - m * m / n, am - a * m / n
    varies = (var_a > 1e-12 * aa) & (var_m > 1e-12 * mm)  # what rounding leaves of a constant is no variance
    return torch.stack([
        torch.where(varies, cov / (var_a * var_m).sqrt(), torch.nan),
        root(var_m - noise, var_m),
        root(aa - 2 * am + mm - noise, n),
        root(mm - noise - torch.where(aa > 0, am * am / aa, 0.0), n),
    ], dim=-1)  # fmt: skip


def _sign(figure: str) -> float:
    return -1.0 if figure.startswith("rmse") else 1.0
