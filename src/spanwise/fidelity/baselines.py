"""Compare the advantages of reward baselines with Monte Carlo advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit import advantage
from spanwise.credit.strata import check_shapes, moments, refine
from spanwise.errors import AlignmentError, DataError, check_known

#: The proper scores of a confidence. They reward a policy most for its true belief.
ScoreName = Literal["brier", "log_score"]
#: The baselines that are compared by default, with their options.
BASELINES: Mapping[str, Mapping[str, Any]] = {
    "none": {"baseline": "none"},
    "batch": {"baseline": "batch"},
    "group": {"baseline": "group"},
    "outcome": {"baseline": "outcome"},
    "outcome (LOO)": {"baseline": "outcome", "leave_one_out": True},
    "blended": {"baseline": "blended"},
}

#: The names of the figures that `measure_fidelity` computes for each baseline; its docstring defines the figures.
FIGURES = (
    "rmse", "rmse_wrong", "rmse_right", "rmse_alone", "correlation", "ceiling", "rmse_scaled", "gradient_noise",
)  # fmt: skip


def proper_score(
    confidence: Float[Tensor, "*n"], outcome: Float[Tensor, "*n"], *, rule: ScoreName = "brier", clip: float = 0.01
) -> Float[Tensor, "*n"]:
    r"""Score stated confidences by whether the answers are right, like the rewards `brier` and `log_score`.

    Equation
        brier      -(q - c)^2
        log_score  c log q' + (1 - c) log(1 - q'), q' = q clipped to [clip, 1 - clip]

    Args:
        confidence: q in [0, 1], any shape; NaN if none was stated, which gives the score NaN.
        outcome: c, 0 or 1.
        rule: brier or log_score.
        clip: the lowest confidence that log_score tells apart.

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
    clipped_confidence = confidence.clamp(clip, 1 - clip)
    return outcome * clipped_confidence.log() + (1 - outcome) * (1 - clipped_confidence).log()


@dataclass(frozen=True)
class Rerolls:
    """Completions, and re-rolls (new samples) of their last blocks. X prompts, S samples each; D prefixes, M re-rolls each.

    Attributes:
        confidence_xs: the stated confidence; NaN if none is stated.
        outcome_xs: 1 if the first block is right, 0 if it is wrong; NaN if nobody can tell.
        prefix_xs: the index of the completion's prefix, all that comes before the last block; -1 without a last block.
        again_dm: the confidences of the fresh last blocks; NaN if none is stated.

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
        check_shapes(confidence_xs=self.confidence_xs, outcome_xs=self.outcome_xs, prefix_xs=self.prefix_xs)
        if self.prefix_xs.numel() and int(self.prefix_xs.max()) >= len(self.again_dm):
            raise AlignmentError(
                f"prefix_xs points to row {int(self.prefix_xs.max())} of again_dm, which has only {len(self.again_dm)} "
                "rows. Give again_dm a row of re-rolls for every prefix."
            )


@dataclass(frozen=True)
class Fidelity:
    """How close each baseline comes to Monte Carlo advantages, by group size. The figures are `FIGURES`.

    Attributes:
        baselines, group_sizes: the names along the first two axes; the third axis has the names `FIGURES`.
        value_bgf: the figures.
        draw_rbgf: the figures of R bootstrap draws of prompts, the same draws for every baseline and group size.
        share: how many of the completions could be used: those that state a confidence, as two of their re-rolls do.

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
        """Return a baseline's figure with its interval over prompts. `minus` names a baseline whose figure is subtracted."""
        size_index = index_of("group size", self.group_sizes, group_size)
        figure_index = index_of("figure", FIGURES, figure)
        figure_rb = torch.cat([self.value_bgf[None], self.draw_rbgf])[:, :, size_index, figure_index]
        figure_r = figure_rb[:, index_of("baseline", self.baselines, baseline)]
        if minus is not None:
            figure_r = figure_r - figure_rb[:, index_of("baseline", self.baselines, minus)]
        quantile_levels = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
        lower_bound, upper_bound = figure_r[1:].nanquantile(quantile_levels).tolist()
        return float(figure_r[0]), lower_bound, upper_bound


def index_of(kind: str, known_values: Sequence[Any], name: Any) -> int:
    """Return the index of a name in a list of known names. For an unknown name, the error lists the known ones."""
    check_known(kind, str(name), known_names := [str(entry) for entry in known_values])
    return known_names.index(str(name))


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
    r"""Measure how close baselines come to Monte Carlo advantages. These come from re-rolled last blocks.

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
        rerolls: completions and their re-rolls.
        baselines: name -> options of `spanwise.credit.advantage`.
        group_sizes: completions of a prompt in a batch, at least 2 and at most S.
        rule: the score, brier or log_score.
        batch: completions in a batch, of as many prompts as fit; fewer if there are too few prompts.
        resamples: batches per group size.
        draws: the number of bootstrap draws of prompts.
        seed: the seed of batches and draws.

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
    prompt_count, samples = rerolls.prefix_xs.shape
    for size in group_sizes:
        if not 2 <= size <= samples:
            raise DataError(f"A group of {size} cannot be drawn from {samples} samples per prompt; choose 2 to {samples}.")
        if min(prompt_count, batch // size) < 1:
            raise DataError(
                f"A batch of {batch} completions of {prompt_count} prompts holds no group of {size} completions; raise batch."
            )
    completion_columns = _prepare_columns(rerolls, rule)
    if not bool(completion_columns["usable_n"].any()):
        raise DataError(
            "Nothing can be compared. A comparison needs a completion with a confidence, a judged answer, and at least 2 new "
            "samples of its last block that state a confidence."
        )
    generator = torch.Generator().manual_seed(seed)
    terms_bgxk = torch.zeros(len(baselines), len(group_sizes), prompt_count, _SUMS, dtype=torch.float64)
    for (g, size), _ in product(enumerate(group_sizes), range(resamples)):
        drawn_prompt_p = torch.randperm(prompt_count, generator=generator)[: batch // size]
        drawn_sample_pg = torch.rand(len(drawn_prompt_p), samples, generator=generator).argsort(dim=1)[:, :size]
        row_n = (drawn_prompt_p[:, None] * samples + drawn_sample_pg).flatten()
        batch_columns = {name: column[row_n] for name, column in completion_columns.items()}
        reward_n, prompt_n = batch_columns["reward_n"], batch_columns["prompt_n"]
        outcome_options = {"outcome_no": batch_columns["outcome_n"], "by_outcome_n2": batch_columns["by_outcome_n2"]}
        for b, options in enumerate(baselines.values()):
            advantage_n = advantage(reward_n, prompt_n, **outcome_options, **options).advantage_n
            terms_bgxk[b, g].index_add_(0, prompt_n, _terms(batch_columns, advantage_n))
    drawn_prompt_rx = torch.multinomial(
        torch.ones(prompt_count), draws * prompt_count, replacement=True, generator=generator
    ).view(draws, -1)
    weight_rx = torch.stack([drawn_prompt_x.bincount(minlength=prompt_count) for drawn_prompt_x in drawn_prompt_rx]).double()
    figure_rbgf = _figures_of_sums(torch.einsum("rx,bgxk->rbgk", weight_rx, terms_bgxk))
    usable_share = float(completion_columns["usable_n"].double().mean())
    return Fidelity(tuple(baselines), tuple(group_sizes), _figures_of_sums(terms_bgxk.sum(dim=2)), figure_rbgf, usable_share)


def _prepare_columns(rerolls: Rerolls, rule: ScoreName) -> dict[str, Tensor]:
    """Compute the rewards, outcomes and Monte Carlo advantages of the completions from which batches are drawn."""
    prompt_count, sample_count = rerolls.prefix_xs.shape
    confidence_n = rerolls.confidence_xs.double().flatten()
    outcome_n = rerolls.outcome_xs.double().flatten()
    score_pair = [proper_score(confidence_n, torch.full_like(confidence_n, outcome), rule=rule) for outcome in (0.0, 1.0)]
    reward_n = proper_score(confidence_n, outcome_n, rule=rule)
    no_rerolls_1m = torch.full((1, rerolls.again_dm.shape[1]), torch.nan)  # index -1: completions without a last block
    rerolled_confidence_nm = torch.cat([rerolls.again_dm.double(), no_rerolls_1m])[rerolls.prefix_xs.flatten()]
    rerolled_score_nm = proper_score(rerolled_confidence_nm, outcome_n[:, None].expand_as(rerolled_confidence_nm), rule=rule)
    mc_value_n, noise_n = mean_and_noise(rerolled_score_nm)
    return {
        "prompt_n": torch.arange(prompt_count).repeat_interleave(sample_count), "reward_n": reward_n, "outcome_n": outcome_n,
        "by_outcome_n2": torch.stack(score_pair, dim=1), "usable_n": ~reward_n.isnan() & ~noise_n.isnan(),
        "mc_n": reward_n - mc_value_n, "noise_n": noise_n,  # the variance of the noise in each Monte Carlo advantage
        "phi_square_n": (confidence_n - rerolled_confidence_nm.nanmean(dim=1)).square(),
    }  # fmt: skip


#: The number of columns of the table that `_terms` returns.
_SUMS = 18


def _terms(batch: Mapping[str, Tensor], adv_n: Float[Tensor, " n"]) -> Float[Tensor, "n k"]:
    """Compute the numbers of each completion, such as its squared error, for the sums that `_figures_of_sums` reads."""
    outcome_n, is_usable_n = batch["outcome_n"], batch["usable_n"]
    same_outcome_count_n = moments(batch["reward_n"], refine(batch["prompt_n"], outcome_n)).count_n()
    selection_masks = (is_usable_n, outcome_n == 0, outcome_n == 1, same_outcome_count_n == 1)
    mc_adv_n, noise_n, gradient_weight_n = batch["mc_n"], batch["noise_n"], batch["phi_square_n"]
    squared_error_n = (adv_n - mc_adv_n).square() - noise_n
    completion_terms = [term for mask_n in selection_masks for term in (mask_n.double(), mask_n * squared_error_n)]
    completion_terms += [adv_n, mc_adv_n, adv_n * adv_n, mc_adv_n * mc_adv_n, adv_n * mc_adv_n, noise_n]
    completion_terms += [gradient_weight_n * adv_n * adv_n, gradient_weight_n * adv_n * mc_adv_n]
    completion_terms += [gradient_weight_n * mc_adv_n * mc_adv_n, gradient_weight_n * noise_n]
    return torch.where(is_usable_n[:, None], torch.stack(completion_terms, dim=1), 0.0)


def _figures_of_sums(sums: Float[Tensor, "*r k"]) -> Float[Tensor, "*r f"]:
    """Compute the numbers named in `FIGURES` from the results of `_terms`, added up over completions."""
    term_sums = sums.unbind(-1)
    # The first eight sums are four pairs: the size of a set of completions, and the set's sum of squared errors.
    rmses = [root_ratio(error_sum, count) for count, error_sum in zip(term_sums[0:8:2], term_sums[1:8:2], strict=True)]
    weighted_adv_square_sum, weighted_product_sum, weighted_mc_square_sum, weighted_noise_sum = term_sums[14:]
    exact_square_sum = weighted_mc_square_sum - weighted_noise_sum
    explained_sum = torch.where(weighted_adv_square_sum > 0, weighted_product_sum.square() / weighted_adv_square_sum, 0.0)
    gradient_noise = root_ratio(exact_square_sum - explained_sum, exact_square_sum)
    return torch.stack([*rmses, *agreement(term_sums[0], *term_sums[8:14]), gradient_noise], dim=-1)


def agreement(
    count: Tensor, adv_sum: Tensor, mc_sum: Tensor, adv_square_sum: Tensor, mc_square_sum: Tensor, product_sum: Tensor,
    noise_sum: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the Monte Carlo correlation, the value that exact advantages would have, and the RMSE after best scaling."""
    adv_variation = adv_square_sum - adv_sum * adv_sum / count
    mc_variation = mc_square_sum - mc_sum * mc_sum / count
    covariation = product_sum - adv_sum * mc_sum / count
    # Rounding gives even constant advantages a tiny variance.
    is_varying = (adv_variation > 1e-12 * adv_square_sum) & (mc_variation > 1e-12 * mc_square_sum)
    correlation = torch.where(is_varying, covariation / (adv_variation * mc_variation).sqrt(), torch.nan)
    explained_square_sum = torch.where(adv_square_sum > 0, product_sum * product_sum / adv_square_sum, 0.0)
    scaled_rmse = root_ratio(mc_square_sum - noise_sum - explained_square_sum, count)
    return correlation, root_ratio(mc_variation - noise_sum, mc_variation), scaled_rmse


def mean_and_noise(reward_dm: Float[Tensor, "d m"]) -> tuple[Tensor, Tensor]:
    """Return the mean of each row's known rewards, and the mean's variance, which is NaN for fewer than two rewards."""
    reward_count_d = (~reward_dm.isnan()).sum(dim=1)
    mean_reward_d = reward_dm.nanmean(dim=1)
    variance_of_mean_d = (reward_dm - mean_reward_d[:, None]).square().nansum(dim=1) / (reward_count_d - 1) / reward_count_d
    return mean_reward_d, torch.where(reward_count_d > 1, variance_of_mean_d, torch.nan)


def root_ratio(top: Tensor, below: Tensor) -> Tensor:
    """Return the square root of a ratio. A negative ratio gives 0, a denominator of 0 gives NaN."""
    return torch.where(below > 0, (top / torch.where(below > 0, below, 1.0)).clamp(min=0.0).sqrt(), torch.nan)
