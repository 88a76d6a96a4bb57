"""Baseline fidelity: how close a baseline's advantages come to Monte Carlo advantages, which re-roll the last blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit import advantage
from spanwise.credit.strata import moments, refine
from spanwise.errors import AlignmentError, DataError, check_known

#: The scores that a policy maximises by stating its true belief.
ScoreName = Literal["brier", "log_score"]
#: The baselines compared by default: name -> options of `spanwise.credit.advantage`.
BASELINES: Mapping[str, Mapping[str, Any]] = {
    "none": {"baseline": "none"},
    "batch": {"baseline": "batch"},
    "group": {"baseline": "group"},
    "outcome": {"baseline": "outcome"},
    "outcome (LOO)": {"baseline": "outcome", "leave_one_out": True},
    "blended": {"baseline": "blended"},
}

#: The figures of every baseline and group size, see `measure_fidelity`.
FIGURES = (
    "rmse", "rmse_wrong", "rmse_right", "rmse_alone", "correlation", "ceiling", "rmse_scaled", "gradient_noise",
)  # fmt: skip


def proper_score(
    confidence: Float[Tensor, "*n"], outcome: Float[Tensor, "*n"], *, rule: ScoreName = "brier", clip: float = 0.01
) -> Float[Tensor, "*n"]:
    r"""Score confidences by their outcomes: the rewards `brier` and `log_score`, without their text.

    Equation
        brier      -(q - c)^2
        log_score  c log q' + (1 - c) log(1 - q'), q' = q clipped to [clip, 1 - clip]

    Args:
        confidence: q in [0, 1], any shape; NaN where none was stated (its score is NaN).
        outcome: c, 0 or 1.
        rule: which score.
        clip: least confidence that counts; of log_score.

    Raises:
        RecipeError: there is no such rule.

    Example:
        >>> import torch
        >>> q, c = torch.tensor([.7, .7]), torch.tensor([1., 0.])
        >>> proper_score(q, c), proper_score(q, c, rule="log_score")
        (tensor([-0.0900, -0.4900]), tensor([-0.3567, -1.2040]))
    """
    check_known("score of a confidence", rule, ("brier", "log_score"))
    if rule == "brier":
        return -(confidence - outcome).square()
    clipped = confidence.clamp(clip, 1 - clip)
    return outcome * clipped.log() + (1 - outcome) * (1 - clipped).log()


@dataclass(frozen=True)
class Rerolls:
    """S completions of each of X prompts, and M fresh last blocks from each of the D distinct prefixes among them.

    Attributes:
        confidence_xs: the stated confidence; NaN where none is stated.
        outcome_xs: 1 where the first block is right, 0 where it is wrong; NaN where nobody can tell.
        prefix_xs: which prefix (everything before the last block) the completion has; -1 where it has no last block.
        again_dm: the confidences of the fresh last blocks; NaN where none is stated.

    Raises:
        AlignmentError: arrays of different shapes, or a prefix without fresh blocks.

    Example:
        >>> stated, right = torch.tensor([[0.8, 0.4]]), torch.tensor([[1.0, 0.0]])
        >>> Rerolls(stated, right, torch.tensor([[0, 1]]), again_dm=torch.rand(2, 8)).again_dm.shape
        torch.Size([2, 8])
    """

    confidence_xs: Float[Tensor, "x s"]
    outcome_xs: Float[Tensor, "x s"]
    prefix_xs: Int[Tensor, "x s"]
    again_dm: Float[Tensor, "d m"]

    def __post_init__(self) -> None:
        check_shapes("Confidences, outcomes and prefixes", self.confidence_xs, self.outcome_xs, self.prefix_xs)
        if self.prefix_xs.numel() and int(self.prefix_xs.max()) >= len(self.again_dm):
            raise AlignmentError(
                f"A completion has prefix {int(self.prefix_xs.max())}, but only {len(self.again_dm)} prefixes were re-rolled."
            )


def check_shapes(what: str, *tables: Tensor | None) -> None:
    """Refuse tables of different shapes; None is skipped."""
    sizes = {tuple(table.shape) for table in tables if table is not None}
    if len(sizes) > 1:
        raise AlignmentError(f"{what} have the shapes {', '.join(map(str, sorted(sizes)))}.")


@dataclass(frozen=True)
class Fidelity:
    """Figures of every baseline and group size.

    Attributes:
        baselines, group_sizes: what the first two axes stand for; the third is `FIGURES`.
        value_bgf: the figures.
        draw_rbgf: the figures of R bootstrap draws of prompts, the same draws for every baseline and group size.
        share: of the completions that could be used: they state a confidence, and so do two of their re-rolls.

    Example:
        >>> value_bgf = torch.zeros(2, 1, len(FIGURES), dtype=torch.float64)
        >>> value_bgf[1, 0, FIGURES.index("rmse")] = 0.25
        >>> fidelity = Fidelity(("group", "outcome"), (4,), value_bgf, value_bgf[None], share=1.0)
        >>> fidelity.interval("outcome", 4, "rmse", minus="group")
        (0.25, 0.25, 0.25)
    """

    baselines: tuple[str, ...]
    group_sizes: tuple[int, ...]
    value_bgf: Float[Tensor, "b g f"]
    draw_rbgf: Float[Tensor, "r b g f"]
    share: float

    def interval(
        self, baseline: str, group_size: int, figure: str, *, minus: str | None = None, level: float = 0.95
    ) -> tuple[float, float, float]:
        """Return one figure, or its difference to another baseline's, with its percentile interval over prompts."""
        g, f = place_of("group size", self.group_sizes, group_size), place_of("figure", FIGURES, figure)
        with_value = torch.cat([self.value_bgf[None], self.draw_rbgf])[:, :, g, f]
        figure_r = with_value[:, place_of("baseline", self.baselines, baseline)]
        if minus is not None:
            figure_r = figure_r - with_value[:, place_of("baseline", self.baselines, minus)]
        bounds = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
        low, high = figure_r[1:].nanquantile(bounds).tolist()
        return float(figure_r[0]), low, high


def place_of(kind: str, known: Sequence[Any], name: Any) -> int:
    """Return the index of a name; raise a RecipeError with the known names for an unknown name."""
    check_known(kind, str(name), names := [str(entry) for entry in known])
    return names.index(str(name))


def measure_fidelity(
    rerolls: Rerolls,
    *,
    baselines: Mapping[str, Mapping[str, Any]] = BASELINES,
    group_sizes: Sequence[int] = (4, 8, 16, 32),
    rule: ScoreName = "brier",
    batch: int = 512,
    resamples: int = 40,
    draws: int = 1000,
    seed: int = 0,
) -> Fidelity:
    r"""Compare baselines with Monte Carlo advantages at fixed prefixes.

    Equation
        A_MC = r - V,  V = mean over re-rolls of f(q', c),  e2 = (A - A_MC)^2 - s2,  s2 = var(f(q', c)) / M
        rmse            sqrt(mean e2); rmse_wrong and rmse_right over wrong and right answers, rmse_alone over completions that
                        have the only reward of their prompt and outcome in their group
        correlation     of A and A_MC;  ceiling = sqrt(1 - mean s2 / var A_MC): what the exact advantage would get
        rmse_scaled     sqrt(min over a of mean (a A - A_MC)^2 - s2): rmse without the scale
        gradient_noise  sqrt(min over a of mean phi^2 ((a A - A_MC)^2 - s2) / mean phi^2 (A_MC^2 - s2)),  phi = q - mean q':
                        what a wrong baseline adds to a completion's gradient along "report higher", relative to the gradient
                        of the exact advantage; 0 is exact, 1 no better than no gradient at all

    r = f(q, c) is the score of the stated confidence. s2, the noise of V, is subtracted wherever V is squared. Batches are drawn
    by prompt and then by completion, without replacement, the same for all baselines.

    Args:
        rerolls: what was sampled.
        baselines: name -> options of `spanwise.credit.advantage`.
        group_sizes: completions of a prompt in a batch, at least 2 and at most S.
        rule: the score, brier or log_score.
        batch: completions in a batch (fewer where the prompts do not suffice), as many prompts as fit.
        resamples: batches per group size.
        draws: of the bootstrap over prompts.
        seed: of batches and draws.

    Edge cases:
        A completion without a confidence, or whose prefix has fewer than two re-rolls with one, has no A_MC and is in no figure;
        its reward, if there is one, still counts in baselines. A figure over nothing is NaN; a square below 0 gives 0.

    Raises:
        DataError: the completions do not suffice for a group size, or none can be used.

    Example:
        >>> confidence_xs = 0.7 + 0.3 * torch.rand(64, 8, generator=torch.Generator().manual_seed(0))
        >>> outcome_xs = (torch.arange(8) % 2).float().expand(64, 8)
        >>> prefix_xs = 2 * torch.arange(64)[:, None] + outcome_xs.long()  # one first block per prompt and outcome
        >>> again_dm = 0.7 + 0.3 * torch.rand(128, 32, generator=torch.Generator().manual_seed(1))
        >>> rerolls = Rerolls(confidence_xs, outcome_xs, prefix_xs, again_dm)
        >>> fidelity = measure_fidelity(rerolls, group_sizes=[4], resamples=4, draws=10)
        >>> [round(fidelity.interval(name, 4, "rmse")[0], 2) for name in ("none", "batch", "group", "outcome", "blended")]
        [0.51, 0.34, 0.32, 0.08, 0.02]

    Reference:
        Pavlenko et al. 2026, "Blockwise Advantage Estimation" (arXiv 2602.10231), Figure 1 (RMSE by outcome). RMSE alone rewards
        a baseline for including the sample itself, which shrinks its advantages: read it with the scale-free figures and q*.
    """
    x, s = rerolls.prefix_xs.shape
    for size in group_sizes:
        if not 2 <= size <= s:
            raise DataError(f"A group of {size} cannot be drawn from {s} completions per prompt; choose 2 to {s}.")
        if min(x, batch // size) < 1:
            raise DataError(f"A batch of {batch} completions of {x} prompts holds no group of {size}.")
    data = _prepare(rerolls, rule)
    if not bool(data["usable_n"].any()):
        raise DataError("No completion states a confidence that was also re-rolled; there is nothing to compare with.")
    generator = torch.Generator().manual_seed(seed)
    sums = torch.zeros(len(baselines), len(group_sizes), x, _SUMS, dtype=torch.float64)
    for (g, size), _ in product(enumerate(group_sizes), range(resamples)):
        prompt_p = torch.randperm(x, generator=generator)[: batch // size]
        member_pg = torch.rand(len(prompt_p), s, generator=generator).argsort(dim=1)[:, :size]
        row_n = (prompt_p[:, None] * s + member_pg).flatten()
        columns = {name: column[row_n] for name, column in data.items()}
        reward_n, prompt_n = columns["reward_n"], columns["prompt_n"]
        for b, options in enumerate(baselines.values()):
            outcomes = {"outcome_no": columns["outcome_n"], "by_outcome_n2": columns["by_outcome_n2"]}
            advantage_n = advantage(reward_n, prompt_n, **outcomes, **options).advantage_n
            sums[b, g].index_add_(0, prompt_n, _terms(columns, advantage_n))
    drawn_rx = torch.multinomial(torch.ones(x), draws * x, True, generator=generator).reshape(draws, -1)
    weight_rx = torch.nn.functional.one_hot(drawn_rx, x).sum(dim=1).double()
    draw_rbgf = _figures(torch.einsum("rx,bgxk->rbgk", weight_rx, sums))
    share = float(data["usable_n"].double().mean())
    return Fidelity(tuple(baselines), tuple(group_sizes), _figures(sums.sum(dim=2)), draw_rbgf, share)


def _prepare(rerolls: Rerolls, rule: ScoreName) -> dict[str, Tensor]:
    """Compute all that does not depend on the batches: columns of the X * S completions, prompt by prompt."""
    x, s = rerolls.prefix_xs.shape
    report_n, outcome_n = rerolls.confidence_xs.double().flatten(), rerolls.outcome_xs.double().flatten()
    by_outcome_n2 = torch.stack([proper_score(report_n, torch.full_like(report_n, o), rule=rule) for o in (0.0, 1.0)], dim=1)
    reward_n = proper_score(report_n, outcome_n, rule=rule)
    again_dm = torch.cat([rerolls.again_dm.double(), torch.full((1, rerolls.again_dm.shape[1]), torch.nan)])
    again_nm = again_dm[rerolls.prefix_xs.flatten()]  # prefix -1 (none) reads the last row
    value_n, noise_n = mean_and_noise(proper_score(again_nm, outcome_n[:, None].expand_as(again_nm), rule=rule))
    return {
        "prompt_n": torch.arange(x).repeat_interleave(s), "reward_n": reward_n, "outcome_n": outcome_n,
        "by_outcome_n2": by_outcome_n2, "usable_n": ~reward_n.isnan() & ~noise_n.isnan(),
        "exact_n": reward_n - value_n, "noise_n": noise_n,  # A_MC, NaN where unknown, and s2
        "square_n": (report_n - again_nm.nanmean(dim=1)).square(),  # phi^2
    }  # fmt: skip


_SUMS = 18


def _terms(batch: Mapping[str, Tensor], a: Float[Tensor, " n"]) -> Float[Tensor, "n k"]:
    """Compute the sums behind the figures from a batch's advantages `a`."""
    outcome_n, usable_n = batch["outcome_n"], batch["usable_n"]
    count_n = moments(batch["reward_n"], refine(batch["prompt_n"], outcome_n)).count_n()
    selections = (usable_n, outcome_n == 0, outcome_n == 1, count_n == 1)
    m, noise, square = batch["exact_n"], batch["noise_n"], batch["square_n"]
    error = (a - m).square() - noise
    terms = [term for selection in selections for term in (selection.double(), selection * error)]
    terms += [a, m, a * a, m * m, a * m, noise]
    terms += [square * a * a, square * a * m, square * m * m, square * noise]
    return torch.where(usable_n[:, None], torch.stack(terms, dim=1), 0.0)


def _figures(sums: Float[Tensor, "*r k"]) -> Float[Tensor, "*r f"]:
    """Compute the figures, in the order of `FIGURES`, from sums over completions."""
    n, error, n0, error0, n1, error1, n_alone, error_alone, a, m, aa, mm, am, noise, paa, pam, pmm, pnoise = sums.unbind(-1)
    rmses = [root(total, count) for total, count in ((error, n), (error0, n0), (error1, n1), (error_alone, n_alone))]
    gradient_noise = root(pmm - pnoise - torch.where(paa > 0, pam * pam / paa, 0.0), pmm - pnoise)
    return torch.stack([*rmses, *agreement(n, a, m, aa, mm, am, noise), gradient_noise], dim=-1)


def agreement(
    n: Tensor, a: Tensor, m: Tensor, aa: Tensor, mm: Tensor, am: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the correlation of A and A_MC, that of the exact advantage, and the RMSE at the best scale."""
    var_a, var_m, cov = aa - a * a / n, mm - m * m / n, am - a * m / n
    varies = (var_a > 1e-12 * aa) & (var_m > 1e-12 * mm)  # the rounding error of a constant must not count as variance
    correlation = torch.where(varies, cov / (var_a * var_m).sqrt(), torch.nan)
    return correlation, root(var_m - noise, var_m), root(mm - noise - torch.where(aa > 0, am * am / aa, 0.0), n)


def mean_and_noise(reward_dm: Float[Tensor, "d m"]) -> tuple[Tensor, Tensor]:
    """Return the mean of the known rewards of each row, and that mean's variance; NaN for fewer than two."""
    count_d = (~reward_dm.isnan()).sum(dim=1)
    value_d = reward_dm.nanmean(dim=1)
    noise_d = (reward_dm - value_d[:, None]).square().nansum(dim=1) / (count_d - 1) / count_d
    return value_d, torch.where(count_d > 1, noise_d, torch.nan)


def root(top: Tensor, below: Tensor) -> Tensor:
    """Return the square root of a ratio: 0 if it is negative, NaN if the denominator is 0."""
    return torch.where(below > 0, (top / torch.where(below > 0, below, 1.0)).clamp(min=0.0).sqrt(), torch.nan)
