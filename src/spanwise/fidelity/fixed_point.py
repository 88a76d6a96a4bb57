"""Compute q*, the confidence that a baseline teaches a policy. Ideally q* is the probability that the answer is right."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from spanwise.credit import advantage
from spanwise.errors import RecipeError
from spanwise.fidelity.baselines import BASELINES, ScoreName, proper_score
from spanwise.objective import BaselineName

#: The simulated policy can state the confidences 0, 1 / LEVELS, ..., 1.
LEVELS = 10
#: The simulation needs at least this many completions with each outcome (right or wrong).
_FEWEST = 100


def fixed_point(
    p_b: Float[Tensor, " b"], *, group_size: int, baseline: BaselineName, leave_one_out: bool = False
) -> Float[Tensor, " b"]:
    r"""Compute exactly the confidence q* that a policy learns with a baseline. The reward is the Brier or the log score.

    Equation
        q* = p share[1] / (p share[1] + (1 - p) share[0]),  share[o]: the share of the gradient that is left if the outcome is o
        none, batch and group   the same for both: q* = p
        outcome                 share[o] = E[(n_o - 1)+] / (G P(o)) = (G P(o) - 1 + (1 - P(o))^G) / (G P(o)),  n_o ~ Bin(G, P(o))
        outcome, leave_one_out  share[o] = P(n_o >= 2 | o) = 1 - (1 - P(o))^(G-1)

    Args:
        p_b: the probability that a completion is right, for each prompt.
        group_size: completions per prompt, G.
        baseline: none, batch, group or outcome.
        leave_one_out: compare each completion with the others alone; strata of one still get 0.

    Edge cases:
        p of 0 or 1 is its own fixed point. A mean over the whole batch or group shrinks every advantage by the same factor, which
        moves no fixed point.

    Raises:
        RecipeError: the baseline has no closed form (blended), or the group has one completion.

    Example:
        >>> p_b = torch.tensor([.1, .2, .5, .9]).double()
        >>> fixed_point(p_b, group_size=4, baseline="outcome")
        tensor([0.0211, 0.0869, 0.5000, 0.9789], dtype=torch.float64)
        >>> fixed_point(p_b, group_size=4, baseline="group")
        tensor([0.1000, 0.2000, 0.5000, 0.9000], dtype=torch.float64)

    Reference:
        Pavlenko et al. 2026 (arXiv 2602.10231) define the baselines; that their strata scale differently is our finding. It holds
        for confidences that do not depend on the outcome given the prompt.
    """
    if baseline == "blended":
        raise RecipeError("No formula gives the final confidence of the baseline 'blended'. Call simulated_fixed_point.")
    if group_size < 2:
        raise RecipeError(f"A group of {group_size} has no other completion to compare with; set group_size to 2 or more.")
    p_b = p_b.double()
    if baseline != "outcome":
        return p_b
    outcome_probability_b2 = torch.stack([1 - p_b, p_b], dim=1)
    if leave_one_out:
        gradient_share_b2 = -torch.expm1((group_size - 1) * torch.log1p(-outcome_probability_b2))
    else:
        expected_count_b2 = group_size * outcome_probability_b2
        occurrence_probability_b2 = -torch.expm1(group_size * torch.log1p(-outcome_probability_b2))
        expected_surplus_b2 = (expected_count_b2 - occurrence_probability_b2).clamp(min=0.0)
        gradient_share_b2 = (expected_surplus_b2 / expected_count_b2).nan_to_num(nan=0.0)  # a probability of 0 gives 0 / 0
    wrong_weight_b, right_weight_b = (outcome_probability_b2 * gradient_share_b2).unbind(dim=1)
    return right_weight_b / (right_weight_b + wrong_weight_b)


def simulated_fixed_point(
    p_b: Float[Tensor, " b"],
    *,
    group_size: int,
    baseline: BaselineName,
    leave_one_out: bool = False,
    rule: ScoreName = "brier",
    copies: int = 1,
    batches: int = 1000,
    seed: int = 0,
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    r"""Simulate the confidence q* that a policy learns under any baseline of `credit.advantage`.

    Equation
        q* = p share[1] / (p share[1] + (1 - p) share[0])
        share[o] = 1 - E[(b - V_o) phi | o] / E[(r - V_o) phi | o],  phi = q - E q,  V_o = E[r | o], over completions of a prompt

    The policy reports q = K / 10, K ~ Bin(10, m); phi is then its REINFORCE direction, and only the baseline's part has to be
    sampled. m starts at p and moves to q* once, with the same random numbers. Estimates that ignore a completion's own report (the
    mean of its stratum without it, and of all others re-scored with its outcome) have E[estimate phi | o] = 0 and serve as control
    variates.

    Args:
        p_b: the probability that a completion is right, for each prompt.
        group_size: completions per prompt, G.
        baseline, leave_one_out: as in `advantage`.
        rule: the score of the confidence.
        copies: how many prompts of each kind share a batch; a batch is B * copies * G completions.
        batches: the number of batches in each of the two rounds.
        seed: the seed of the simulation.

    Edge cases:
        m is kept within [0.001, 0.999].

    Raises:
        RecipeError: an outcome would occur fewer than 100 times, which is too rare to measure its share.

    Example:
        >>> q_b, error_b = simulated_fixed_point(torch.tensor([.2, .5]), group_size=4, baseline="outcome", copies=16, batches=200)
        >>> bool(((q_b - torch.tensor([.0869, .5])).abs() < 0.01).all())
        True
    """
    p_b = p_b.double()
    outcome_probability_b2 = torch.stack([1 - p_b, p_b], dim=1)
    completion_count = batches * copies * group_size
    if (rarer_outcome_count := completion_count * float(outcome_probability_b2.min())) < _FEWEST:
        raise RecipeError(
            f"In {batches} batches only {rarer_outcome_count:.0f} completions have the rarer outcome (right or wrong); "
            "raise batches, or set p nearer 0.5."
        )
    level_v = torch.arange(LEVELS + 1, dtype=torch.float64)
    confidence_v = level_v / LEVELS
    score_pair = [proper_score(confidence_v, torch.full_like(confidence_v, outcome), rule=rule) for outcome in (0.0, 1.0)]
    score_v2 = torch.stack(score_pair, dim=1)
    adv_options = {"baseline": baseline, "leave_one_out": leave_one_out}
    learned_confidence_b = p_b
    weight_b2, weight_error_b2 = outcome_probability_b2, torch.zeros_like(outcome_probability_b2)
    for _ in range(2):
        mean_confidence_b = learned_confidence_b.clamp(1e-3, 1 - 1e-3)
        level_probability_bv = torch.distributions.Binomial(LEVELS, probs=mean_confidence_b[:, None]).log_prob(level_v).exp()
        generator = torch.Generator().manual_seed(seed)
        prompt_kind_columns = (p_b[:, None], mean_confidence_b[:, None], level_probability_bv)
        prompt_columns = [column.repeat(copies, 1) for column in prompt_kind_columns]
        batch_sums = [_simulate_batch(prompt_columns, score_v2, group_size, adv_options, generator) for _ in range(batches)]
        term_sum_rcb2 = torch.stack(batch_sums).unflatten(2, (copies, len(p_b))).sum(dim=2)
        baseline_gradient_b2, baseline_gradient_error_b2 = _remove_explained_noise(term_sum_rcb2)
        deviation_bv = confidence_v - mean_confidence_b[:, None]
        full_gradient_b2 = outcome_probability_b2 * copies * group_size * ((level_probability_bv * deviation_bv) @ score_v2)
        weight_b2 = outcome_probability_b2 * (1 - baseline_gradient_b2 / full_gradient_b2)
        weight_error_b2 = (baseline_gradient_error_b2 / full_gradient_b2).abs()
        learned_confidence_b = weight_b2[:, 1] / weight_b2.sum(dim=1)
    error_terms_b2 = weight_b2 * weight_error_b2.flip(1) * outcome_probability_b2.flip(1)
    return learned_confidence_b, error_terms_b2.square().sum(dim=1).sqrt() / weight_b2.sum(dim=1).square()


def _simulate_batch(
    prompts: Sequence[Tensor], score_v2: Tensor, g: int, options: dict[str, Any], generator: torch.Generator
) -> Float[Tensor, "4 b 2"]:
    """Simulate a batch, and sum its gradient terms by prompt and outcome."""
    right_probability_b1, mean_confidence_b1, level_probability_bv = prompts
    prompt_count = len(right_probability_b1)
    # Draw numbers that nothing uses, so that all later random numbers stay those of published results.
    torch.randint(1, (prompt_count, g), generator=generator)
    random_number_2bg = torch.rand(2, prompt_count, g, generator=generator, dtype=torch.float64)
    outcome_bg = (random_number_2bg[0] < right_probability_b1).long()
    cumulative_probability_bv = level_probability_bv.cumsum(dim=1)
    level_bg = (random_number_2bg[1][..., None] > cumulative_probability_bv[:, None]).sum(dim=2).clamp(max=LEVELS)
    score_by_outcome_bg2 = score_v2[level_bg]
    reward_bg = score_by_outcome_bg2.gather(2, outcome_bg[..., None])[..., 0]
    credit_n = advantage(
        reward_bg.flatten(), torch.arange(prompt_count).repeat_interleave(g), outcome_no=outcome_bg.flatten().double(),
        by_outcome_n2=score_by_outcome_bg2.reshape(-1, 2), **options,
    ).advantage_n  # fmt: skip
    expected_score_bg = (level_probability_bv @ score_v2).gather(1, outcome_bg)
    is_other_gg = ~torch.eye(g, dtype=torch.bool)
    same_outcome_bgg = ((outcome_bg[:, :, None] == outcome_bg[:, None, :]) & is_other_gg).double()
    score_sum_of_others_bg2 = score_by_outcome_bg2.sum(dim=1, keepdim=True) - score_by_outcome_bg2
    gradient_terms_4bg = torch.stack([
        reward_bg - credit_n.reshape(prompt_count, g) - expected_score_bg,
        torch.ones_like(reward_bg),
        (same_outcome_bgg @ reward_bg[..., None])[..., 0] / same_outcome_bgg.sum(dim=2).clamp(min=1),
        score_sum_of_others_bg2.gather(2, outcome_bg[..., None])[..., 0],
    ])  # fmt: skip
    stratum_number_bg = torch.arange(prompt_count)[:, None] * 2 + outcome_bg
    excess_confidence_bg = level_bg.double() / LEVELS - mean_confidence_b1
    term_sum_4c = torch.zeros(4, prompt_count * 2, dtype=torch.float64)
    term_sum_4c.index_add_(1, stratum_number_bg.flatten(), (gradient_terms_4bg * excess_confidence_bg).flatten(1))
    return term_sum_4c.reshape(4, prompt_count, 2)


def _remove_explained_noise(sum_rcb2: Float[Tensor, "r c b 2"]) -> tuple[Float[Tensor, "b 2"], Float[Tensor, "b 2"]]:
    """Return the mean gradient and its standard error, after removing noise that control variates explain."""
    term_sum_b2rc = sum_rcb2.permute(2, 3, 0, 1)
    mean_sum_b21c = term_sum_b2rc.mean(dim=2, keepdim=True)
    gradients, controls = (term_sum_b2rc - mean_sum_b21c).split([1, 3], dim=3)
    coefficients = torch.linalg.pinv(controls.mT @ controls, hermitian=True) @ (controls.mT @ gradients)
    gradient_residuals = (gradients - controls @ coefficients)[..., 0]
    batch_count = len(sum_rcb2)
    mean_gradient, mean_control_variates = mean_sum_b21c.split([1, 3], dim=3)
    mean_residual_b2 = (mean_gradient - mean_control_variates @ coefficients)[..., 0, 0]
    return mean_residual_b2, (gradient_residuals.square().sum(dim=-1) / (batch_count - 1) / batch_count).sqrt()


def fixed_point_rows(
    *,
    group_sizes: Sequence[int] = (4, 8, 16, 32, 64),
    probabilities: Sequence[float] = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.95),
    rule: ScoreName = "brier",
    batches: int = 100,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return a table of the confidence q* that a policy learns with each baseline, by group size and probability."""
    p_b = torch.tensor(probabilities, dtype=torch.float64)
    table_rows: list[dict[str, Any]] = []
    for size, (name, options) in product(group_sizes, BASELINES.items()):
        if name == "blended":
            simulation_options = {"copies": max(1, 512 // (size * len(p_b))), "batches": batches, "seed": seed, "rule": rule}
            confidence_b, standard_error_b = simulated_fixed_point(p_b, group_size=size, **simulation_options, **options)
            standard_errors = standard_error_b.tolist()
        else:
            confidence_b, standard_errors = fixed_point(p_b, group_size=size, **options), [None] * len(p_b)
        points = zip(probabilities, confidence_b.tolist(), standard_errors, strict=True)
        table_rows += [{"baseline": name, "group_size": size, "p": p, "q": q, "error": error} for p, q, error in points]
    return table_rows
