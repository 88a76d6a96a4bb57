"""Token fidelity: how close GAE, SAE and GRPO's broadcast come to Monte Carlo advantages token by token, for a given critic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.errors import AlignmentError, DataError, RecipeError, unknown
from spanwise.measure.bootstrap import Weighted, bootstrap
from spanwise.measure.intervals import Interval
from spanwise.measure.trajectories import TOKEN_ESTIMATORS, TokenEstimator, Trajectories

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
        prompt_n: the prompt of each completion.
        draws, seed: of the bootstrap; all figures see the same draws.
    """

    critics: tuple[str, ...]
    estimators: tuple[str, ...]
    sum_cesnk: Float[Tensor, "c e s n k"]
    value_sum_csnk: Float[Tensor, "c s n k"]
    prompt_n: Int[Tensor, " n"]
    draws: int
    seed: int

    def count(self, kind: str = "all") -> int:
        """How many tokens of a kind were compared."""
        return int(self.value_sum_csnk[0, _index("kind of token", TOKEN_KINDS, kind), :, 0].sum())

    def interval(self, critic: str, estimator: str, figure: str, *, kind: str = "all", level: float = 0.95) -> Interval:
        """One figure of one estimator."""
        return self._bootstrap(self._figure(critic, estimator, figure, kind), level)

    def critic_interval(self, critic: str, figure: str, *, kind: str = "all", level: float = 0.95) -> Interval:
        """One figure of the critic's values themselves, held against the Monte Carlo values."""
        c, s = _index("critic", self.critics, critic), _index("kind of token", TOKEN_KINDS, kind)
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
        stands for itself: `lead("critic", "SAE 0.5, 0", "GAE")` holds one SAE against the best GAE, which favours GAE.
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
        c, e = _index("critic", self.critics, critic), _index("estimator", self.estimators, estimator)
        return _figure_of(self.sum_cesnk[c, e, _index("kind of token", TOKEN_KINDS, kind)], figure)

    def _bootstrap(self, figure: Weighted, level: float) -> Interval:
        return bootstrap(figure, self.prompt_n, resamples=self.draws, level=level, seed=self.seed)


def token_fidelity(
    trajectories: Trajectories,
    critics: Mapping[str, Tensor],
    *,
    estimators: Mapping[str, TokenEstimator] = TOKEN_ESTIMATORS,
    decision: float = 0.97,
    draws: int = 1000,
    seed: int = 0,
) -> TokenFidelity:
    r"""Hold token advantages against Monte Carlo.

    Equation
        A_MC[k] = V[k+1] - V[k] over the tokens k that count, the reward in place of V after the last one
        s2[k] = noise[k+1] + noise[k], none after the last one
        correlation  of A and A_MC;  ceiling = sqrt(1 - mean s2 / var A_MC): what the exact advantage would get
        rmse         sqrt(mean (A - A_MC)^2 - s2);  rmse_scaled = sqrt(min over a of mean (a A - A_MC)^2 - s2)

    All of them over tokens, once over all and once over decision tokens. RMSE rewards an estimator for being small.

    Args:
        trajectories: completions with Monte Carlo values.
        critics: name -> values (N, T) before each token. Values that share re-rolls with `trajectories.value_nt` share its noise
            and look better than they are: give a Monte Carlo critic re-rolls of its own.
        estimators: name -> function of trajectories and a critic's values.
        decision: tokens less probable than this are decisions.
        draws, seed: of the bootstrap over prompts.

    Edge cases:
        A completion without a reward, or with a critic's value that is not finite, is in no figure. A token with an unknown value
        on either side is left out for every estimator alike. A figure over nothing is NaN; a square below 0 gives 0. An estimator
        that never varies has no correlation (NaN).

    Raises:
        AlignmentError: a critic's values have another shape than the tokens.
        DataError: no token can be compared.

    Example:
        >>> trajectories = Trajectories(
        ...     prompt_n=torch.tensor([0, 1]), reward_n=torch.tensor([1., 0.]),
        ...     value_nt=torch.tensor([[.5, .5, 1.], [.5, .25, 0.]]), noise_nt=torch.zeros(2, 3),
        ...     logp_nt=torch.tensor([[.9, .5, 1.], [.5, .4, 1.]]).log(), mask_nt=torch.ones(2, 3, dtype=torch.bool),
        ... )  # A_MC is 0, .5, 0 and -.25, -.25, 0
        >>> found = token_fidelity(trajectories, {"half": torch.full((2, 3), 0.5)}, draws=10)
        >>> for name in ("GAE 0", "GAE 1", "SAE 0.95, 0"):  # 0, 0, .5 and 0, 0, -.5; then +-.5; then 0, .5, .5 and 0, -.5, -.5
        ...     print(f"{found.interval('half', name, 'correlation').value:.3f}")
        0.000
        0.667
        0.612

    Reference:
        After the advantage-quality protocol of "Segmental Advantage Estimation" 2026 (arXiv 2601.07320), with a reference for every
        token instead of one for each of SAE's own segments, which favours SAE.
    """
    for name, value_nt in critics.items():
        if value_nt.shape != trajectories.mask_nt.shape:
            raise AlignmentError(
                f"The values of critic '{name}' are {tuple(value_nt.shape)}, the tokens {tuple(trajectories.mask_nt.shape)}."
            )
    mask_nt = trajectories.mask_nt
    known_n = ~trajectories.reward_n.isnan()
    for value_nt in critics.values():
        known_n = known_n & (value_nt.isfinite() | ~mask_nt).all(dim=1)
    target_nt, noise_nt = monte_carlo_advantage(trajectories)
    use_nt = mask_nt & known_n[:, None] & target_nt.isfinite() & noise_nt.isfinite()
    if not critics or not bool(use_nt.any()):
        raise DataError(
            "No token has a reward, a critic's value and Monte Carlo values on both sides; nothing can be compared."
        )
    use_snt = torch.stack([use_nt, use_nt & (trajectories.logp_nt.double().exp() < decision)])
    clean = {name: torch.where(mask_nt & known_n[:, None], value_nt.double(), 0.0) for name, value_nt in critics.items()}
    sums = [
        torch.stack(
            [_sums(estimate(trajectories, value_nt), target_nt, noise_nt, use_snt) for estimate in estimators.values()]
        )
        for value_nt in clean.values()
    ]
    value_sums = [_sums(v, trajectories.value_nt, trajectories.noise_nt, use_snt) for v in clean.values()]
    return TokenFidelity(
        tuple(critics), tuple(estimators), torch.stack(sums), torch.stack(value_sums), trajectories.prompt_n, draws, seed
    )


def monte_carlo_advantage(trajectories: Trajectories) -> tuple[Float[Tensor, "n t"], Float[Tensor, "n t"]]:
    """A_MC of each token that counts and the variance of its noise, as in `token_fidelity`; NaN where unknown, and elsewhere.

    >>> one = Trajectories(torch.tensor([0]), torch.tensor([1.]), torch.tensor([[.5, .25, .75]]), torch.tensor([[.01, .02, .03]]),
    ...                    torch.zeros(1, 3), torch.tensor([[True, False, True]]))
    >>> monte_carlo_advantage(one)
    (tensor([[0.2500,    nan, 0.2500]], dtype=torch.float64), tensor([[0.0400,    nan, 0.0300]], dtype=torch.float64))
    """
    value_nt, own_nt, mask_nt = trajectories.value_nt.double(), trajectories.noise_nt.double(), trajectories.mask_nt
    target_nt, noise_nt = torch.full_like(value_nt, torch.nan), torch.full_like(value_nt, torch.nan)
    after_n, noise_n = trajectories.reward_n.double(), torch.zeros(len(mask_nt), dtype=torch.float64)
    for t in reversed(range(mask_nt.shape[1])):
        here_n = mask_nt[:, t]
        target_nt[:, t] = torch.where(here_n, after_n - value_nt[:, t], torch.nan)
        noise_nt[:, t] = torch.where(here_n, noise_n + own_nt[:, t], torch.nan)
        after_n, noise_n = torch.where(here_n, value_nt[:, t], after_n), torch.where(here_n, own_nt[:, t], noise_n)
    return target_nt, noise_nt


def _sums(estimate_nt: Tensor, target_nt: Tensor, noise_nt: Tensor, use_snt: Tensor) -> Float[Tensor, "s n k"]:
    """By kind of token and completion: count, A, A_MC, their products, noise."""
    a, m, noise = estimate_nt.double(), target_nt.double(), noise_nt.double()
    term_ntk = torch.stack([torch.ones_like(m), a, m, a * a, m * m, a * m, noise], dim=-1)
    return torch.where(use_snt[..., None], term_ntk, 0.0).sum(dim=2)


def _figure_of(sum_nk: Tensor, figure: str) -> Weighted:
    place = _index("figure", TOKEN_FIGURES, figure)
    return lambda weight_rn: _figures(weight_rn @ sum_nk)[:, place]


def _figures(sums: Float[Tensor, "*r k"]) -> Float[Tensor, "*r f"]:
    """The figures, in the order of `TOKEN_FIGURES`."""
    n, a, m, aa, mm, am, noise = sums.unbind(-1)
    var_a, var_m, cov = aa - a * a / n, mm - m * m / n, am - a * m / n
    varies = (var_a > 1e-12 * aa) & (var_m > 1e-12 * mm)  # what rounding leaves of a constant is no variance
    return torch.stack([
        torch.where(varies, cov / (var_a * var_m).sqrt(), torch.nan),
        _root(var_m - noise, var_m),
        _root(aa - 2 * am + mm - noise, n),
        _root(mm - noise - torch.where(aa > 0, am * am / aa, 0.0), n),
    ], dim=-1)  # fmt: skip


def _root(top: Tensor, below: Tensor) -> Tensor:
    return torch.where(below > 0, (top / torch.where(below > 0, below, 1.0)).clamp(min=0.0).sqrt(), torch.nan)


def _sign(figure: str) -> float:
    return -1.0 if figure.startswith("rmse") else 1.0


def _index(kind: str, known: Sequence[str], name: str) -> int:
    if name not in known:
        raise RecipeError(unknown(kind, name, known))
    return list(known).index(name)
