"""Losses per token for trainers that lack them. They never read a masked token.

Every policy loss takes log-probabilities, advantages and a mask, every value loss values (or scores of bins), targets and a mask.
They return loss_nt. A masked token has loss 0 and gradient 0, whatever it holds (NaN). Gradients flow through the first argument
only. `critic_error` says how far off a critic is.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.credit.strata import check_mask
from spanwise.errors import AlignmentError, RecipeError, RewardError, check_known, refuse

__all__ = ["aspo", "categorical_value", "categorical_value_loss", "critic_error", "dppo", "hl_gauss", "value_loss"]

SIGMA_RATIO = 0.75  # The standard deviation of HL-Gauss in bin widths, after Farebrother et al.
_ROUNDING = 1e-3  # A target may lie outside the bins by this share of a bin's width, because of rounding.


def zero_masked(mask_nt: Tensor, **inputs: Tensor) -> list[Tensor]:
    """Put 0 at the masked tokens of the inputs, to remove any NaN there. Only the first input keeps its gradient."""
    for name, value in inputs.items():
        if value.shape != mask_nt.shape:
            raise AlignmentError(f"mask_nt has shape {tuple(mask_nt.shape)}, but {name} has shape {tuple(value.shape)}.")
    check_mask(mask_nt)
    first_input, *other_inputs = (torch.where(mask_nt, value, 0.0) for value in inputs.values())
    return [first_input, *(other_input.detach() for other_input in other_inputs)]


def aspo(
    logp_nt: Float[Tensor, "n t"],
    logp_old_nt: Float[Tensor, "n t"],
    adv_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float = 3.0,
) -> Float[Tensor, "n t"]:
    r"""Compute the ASPO loss, which inverts the probability ratio at positive advantages.

    Equation
        drop where A > 0 and rho > 1 + clip_high, or A < 0 and rho < 1 - clip_low
        A > 0: loss = -sg(min(1 / rho, cap)) A pi / sg(pi);   A < 0: loss = -A min(rho, cap)

    Args:
        logp_nt, logp_old_nt: log-probabilities under the policy that is trained, and under the one that sampled.
        adv_nt, mask_nt: advantages, and the tokens that count.
        clip_low, clip_high: of the usual ratio, from which tokens are dropped.
        cap: largest weight; where A > 0 the gradient stays, where A < 0 it ends there.

    Edge cases:
        The drop looks at rho, the weight is 1 / rho. It is no importance-sampling estimator any more.

    Example:
        >>> ratio = torch.tensor([[.5, 1.1, 1.5, .1]])
        >>> aspo(ratio.log(), torch.zeros(1, 4), torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bool))
        tensor([[-2.0000, -0.9091,  0.0000, -3.0000]])

    Reference:
        "ASPO" 2025 (arXiv 2510.06062). The values of clip_low, clip_high and cap are not confirmed by its text.
    """
    logp_nt, logp_old_nt, adv_nt = zero_masked(mask_nt, logp_nt=logp_nt, logp_old_nt=logp_old_nt, adv_nt=adv_nt)
    log_ratio_nt = (logp_nt - logp_old_nt).clamp(-20.0, 20.0)
    ratio_nt = log_ratio_nt.detach().exp()
    is_dropped_nt = torch.where(adv_nt > 0, ratio_nt > 1 + clip_high, ratio_nt < 1 - clip_low)
    inverted_weight_nt = (-log_ratio_nt.detach()).exp().clamp(max=cap) * (logp_nt - logp_nt.detach()).exp()
    weight_nt = torch.where(adv_nt > 0, inverted_weight_nt, log_ratio_nt.exp().clamp(max=cap))
    return torch.where(mask_nt & ~is_dropped_nt, -adv_nt * weight_nt, 0.0)


def dppo(
    logp_nt: Float[Tensor, "n t"],
    logp_old_nt: Float[Tensor, "n t"],
    adv_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    delta_low: float = 0.2,
    delta_high: float = 0.2,
    divergence: Literal["tv", "kl"] = "tv",
    cap: float = 20.0,
    eps: float = 1e-8,
) -> Float[Tensor, "n t"]:
    r"""Compute the DPPO loss, which trains a token only while its probability is close to the old one.

    Equation
        tv: keep where (A > 0: p - p_old <= delta_high), (A < 0: p_old - p <= delta_low)
        kl: d = p_old (log p_old - log p) + (1 - p_old) log((1 - p_old + eps) / (1 - p + eps)); keep where d <= delta of A's sign,
            or where the step leads back towards p_old
        loss = -keep sg(min(rho, cap)) A pi / sg(pi)

    Args:
        logp_nt, adv_nt, mask_nt: as for `aspo`.
        logp_old_nt: log-probabilities from the sampler itself; recomputed ones hide the mismatch this is to bound.
        delta_low, delta_high: largest divergence where A < 0 and where A > 0 (verl, SkyRL .2 for tv; .05 suggested for kl).
        divergence: of the two-way distribution "this token or another".
        cap: largest importance weight.
        eps: inside the logarithm of kl.

    Example:
        >>> p_old, p = torch.tensor([[.01, .01, .9, .5]]), torch.tensor([[.05, .2, .6, .36]])
        >>> adv_nt, mask_nt = torch.tensor([[1., 1., -1., -1.]]), torch.ones(1, 4, dtype=torch.bool)
        >>> dppo(p.log(), p_old.log(), adv_nt, mask_nt, delta_low=.15, delta_high=.15)
        tensor([[-5.0000,  0.0000,  0.0000,  0.7200]])

    Reference:
        "Rethinking the Trust Region in LLM RL" 2026 (arXiv 2602.04879), from three implementations; its deltas are not confirmed.
    """
    check_known("divergence", divergence, ("tv", "kl"))
    logp_nt, logp_old_nt, adv_nt = zero_masked(mask_nt, logp_nt=logp_nt, logp_old_nt=logp_old_nt, adv_nt=adv_nt)
    detached_logp_nt = logp_nt.detach()
    dtype = torch.promote_types(logp_nt.dtype, torch.float32)  # in 16 bits, 1 - p would be 0 for p close to 1
    exact_logp_nt, exact_logp_old_nt = detached_logp_nt.to(dtype), logp_old_nt.to(dtype)
    prob_nt = exact_logp_nt.exp()
    prob_old_nt = exact_logp_old_nt.exp()
    change_limit_nt = torch.where(adv_nt > 0, delta_high, delta_low)
    gain_nt = (prob_nt - prob_old_nt) * adv_nt.sign()  # positive if the probability moved in the direction of the advantage
    if divergence == "tv":
        is_kept_nt = gain_nt <= change_limit_nt
    else:
        other_tokens_kl_nt = (1 - prob_old_nt) * ((1 - prob_old_nt + eps) / (1 - prob_nt + eps)).log()
        kl_nt = prob_old_nt * (exact_logp_old_nt - exact_logp_nt) + other_tokens_kl_nt
        is_kept_nt = (kl_nt <= change_limit_nt) | (gain_nt < 0)
    weight_nt = (detached_logp_nt - logp_old_nt).exp().clamp(max=cap)
    return torch.where(mask_nt & is_kept_nt, -adv_nt * (weight_nt * (logp_nt - detached_logp_nt).exp()), 0.0)


def value_loss(
    value_nt: Float[Tensor, "n t"],
    target_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    old_value_nt: Float[Tensor, "n t"] | None = None,
    clip: float | None = None,
) -> Float[Tensor, "n t"]:
    r"""Compute the squared error of a critic.

    Equation
        loss = (V - R)^2
        with clip: loss = max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2)

    Args:
        value_nt: the critic's values.
        target_nt: what they should be (`spanwise.credit.value_target`).
        mask_nt: the trainable tokens.
        old_value_nt: the values before the fit, needed by `clip`.
        clip: how far a value may move and still be followed, above 0; None: any distance.

    Edge cases:
        NaN or infinity at a trainable token stays in the loss.

    Raises:
        RecipeError: `clip` without `old_value_nt` or the reverse; a `clip` that is not above 0.
        AlignmentError: two shapes differ.

    Example:
        >>> value_nt, target_nt = torch.tensor([[.5, .9, 9.]]), torch.tensor([[1., 1., 1.]])
        >>> mask_nt, old_value_nt = torch.tensor([[True, True, False]]), torch.tensor([[.5, .5, .5]])
        >>> value_loss(value_nt, target_nt, mask_nt)
        tensor([[0.2500, 0.0100, 0.0000]])
        >>> value_loss(value_nt, target_nt, mask_nt, old_value_nt=old_value_nt, clip=0.2)  # .9 counts as .7, the worse of both
        tensor([[0.2500, 0.0900, 0.0000]])

    Reference:
        Schulman et al. 2017 (arXiv 1707.06347) for the square, without a factor, as here. verl, SkyRL, OpenRLHF and TRL's former
        PPO trainer multiply it by 1/2: their loss is half of ours, and one bound on the gradient's norm cuts ours earlier.
        The clipped form is that of OpenAI's baselines.
    """
    possible_faults = {
        "Pass both clip and old_value_nt (a clipped value loss), or neither.": (clip is None) != (old_value_nt is None),
        f"clip is {clip}; it is how far a value may move, so it must be above 0.": clip is not None and not clip > 0,
    }
    refuse(possible_faults)
    value_nt, target_nt = zero_masked(mask_nt, value_nt=value_nt, target_nt=target_nt)
    loss_nt = (value_nt - target_nt).square()
    if old_value_nt is not None and clip is not None:
        (old_value_nt,) = zero_masked(mask_nt, old_value_nt=old_value_nt.detach())
        clipped_value_nt = torch.clamp(value_nt, old_value_nt - clip, old_value_nt + clip)
        loss_nt = torch.maximum(loss_nt, (clipped_value_nt - target_nt).square())
    return torch.where(mask_nt, loss_nt, 0.0)


def hl_gauss(target_nt: Float[Tensor, "n t"], *, bins: int, value_range: tuple[float, float]) -> Float[Tensor, "n t b"]:
    r"""Turn a critic's targets into probabilities of bins, from a normal distribution around each target.

    Equation
        p[b] = (Phi((e[b+1] - y) / sigma) - Phi((e[b] - y) / sigma)) / (Phi((e[B] - y) / sigma) - Phi((e[0] - y) / sigma))
        e[0..B]: the edges of B bins of one width over the range,  sigma = .75 of that width

    Args:
        target_nt: y.
        bins: B, 2 or more.
        value_range: the outer edges of the first and the last bin.

    Returns:
        (N, T, B), each row of sum 1; in the dtype of the target, float32 for smaller ones.

    Edge cases:
        The expectation over bin centres (`categorical_value`) is y to .0002 bin widths if y is 3 bin widths or more away from
        both ends of the range. Nearer it is pulled inwards, at an end by .69 bin widths (.014 for 51 bins over 0 to 1): if that
        matters, let the range reach 3 bin widths beyond the targets. Up to a thousandth of a bin outside counts as the end.

    Raises:
        RewardError: a target is outside the range or not finite.
        RecipeError: fewer than 2 bins, an empty range.

    Example:
        >>> hl_gauss(torch.tensor([[.5]]), bins=5, value_range=(0., 1.))
        tensor([[[0.0223, 0.2299, 0.4954, 0.2299, 0.0223]]])
        >>> probability_ntb = hl_gauss(torch.tensor([[.5, 1.]]), bins=5, value_range=(0., 1.))
        >>> categorical_value(probability_ntb.log(), value_range=(0., 1.))  # 1 is an end of the range
        tensor([[0.5000, 0.8620]])

    Reference:
        Imani & White 2018 (arXiv 1806.04613); Farebrother et al. 2024, "Stop Regressing" (arXiv 2403.03950), for the ratio .75.
        Critics of language models: arXiv 2608.02181.
    """
    bin_edge_e, bin_width = _edges(bins, value_range, target_nt)
    value_min, value_max = value_range
    rounding_tolerance = _ROUNDING * bin_width
    is_in_range_nt = (target_nt >= value_min - rounding_tolerance) & (target_nt <= value_max + rounding_tolerance)
    if not bool(is_in_range_nt.all()):
        n, t = (~is_in_range_nt).nonzero()[0].tolist()
        raise RewardError(
            f"The value target of completion {n} at token {t} is {float(target_nt[n, t]):g}, outside value_range "
            f"({value_min:g}, {value_max:g}). Set value_range so that it holds every possible return."
        )
    target_nt1 = target_nt.to(bin_edge_e.dtype).clamp(value_min, value_max).unsqueeze(-1)
    probability_below_nte = torch.special.ndtr((bin_edge_e - target_nt1) / (SIGMA_RATIO * bin_width))
    return probability_below_nte.diff(dim=-1) / (probability_below_nte[..., -1:] - probability_below_nte[..., :1])


def categorical_value(logits_ntb: Float[Tensor, "*n b"], *, value_range: tuple[float, float]) -> Float[Tensor, "*n"]:
    r"""Return a categorical critic's value: the mean of the bin centres under its probabilities.

    Equation
        V = sum over b of softmax(logits)[b] centre[b]

    Args:
        logits_ntb: (..., B), one score for each of B bins of one width; any number of streams stands before them.
        value_range: as for `hl_gauss`, with the same errors.

    Returns:
        (...), between the centres of the first and the last bin; in the dtype of the logits, float32 for smaller ones.

    Example:
        >>> categorical_value(torch.tensor([[[0., 0., 0., 0.], [9., 0., 0., 0.]]]), value_range=(0., 1.))
        tensor([[0.5000, 0.1252]])

    Reference:
        Farebrother et al. 2024 (arXiv 2403.03950).
    """
    bin_edge_e, bin_width = _edges(logits_ntb.shape[-1], value_range, logits_ntb)
    return logits_ntb.to(bin_edge_e.dtype).softmax(dim=-1) @ (bin_edge_e[:-1] + bin_width / 2)


def categorical_value_loss(
    logits_ntb: Float[Tensor, "n t b"],
    target_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    value_range: tuple[float, float],
) -> Float[Tensor, "n t"]:
    r"""Compute the cross entropy of a categorical critic against HL-Gauss targets.

    Equation
        loss = - sum over b of p[b] log softmax(logits)[b],  p = hl_gauss(target)

    Args:
        logits_ntb: the critic's scores of B bins.
        target_nt, mask_nt: as for `value_loss`.
        value_range: as for `hl_gauss`.

    Edge cases:
        The target of a masked token may lie anywhere. The least loss is the entropy of the target's distribution, above 0.

    Raises:
        RewardError: the target of a trainable token is outside the range or not finite.
        AlignmentError: two shapes differ.

    Example:
        >>> mask_nt = torch.tensor([[True, False]])
        >>> categorical_value_loss(torch.zeros(1, 2, 5), torch.tensor([[.5, 7.]]), mask_nt, value_range=(0., 1.))  # log 5
        tensor([[1.6094, 0.0000]])

    Reference:
        Imani & White 2018 (arXiv 1806.04613); Farebrother et al. 2024 (arXiv 2403.03950).
    """
    if logits_ntb.shape[:-1] != mask_nt.shape:
        raise AlignmentError(
            f"mask_nt has shape {tuple(mask_nt.shape)}, but logits_ntb has shape {tuple(logits_ntb.shape)}."
        )
    (target_nt,) = zero_masked(mask_nt, target_nt=target_nt.detach())
    target_nt = torch.where(mask_nt, target_nt, sum(value_range) / 2)  # masked targets (0) may lie outside `value_range`
    dtype = torch.promote_types(logits_ntb.dtype, torch.float32)
    bin_logit_ntb = torch.where(mask_nt.unsqueeze(-1), logits_ntb.to(dtype), 0.0)
    target_probability_ntb = hl_gauss(target_nt.to(dtype), bins=logits_ntb.shape[-1], value_range=value_range)
    return torch.where(mask_nt, -(target_probability_ntb * bin_logit_ntb.log_softmax(dim=-1)).sum(dim=-1), 0.0)


def _edges(bins: int, value_range: tuple[float, float], like: Tensor) -> tuple[Tensor, float]:
    """Return the bin edges and the bin width of a categorical critic."""
    value_min, value_max = value_range
    if bins < 2:
        raise RecipeError(f"The number of bins is {bins}; a distribution over values needs 2 or more.")
    if not -math.inf < value_min < value_max < math.inf:
        raise RecipeError(f"value_range is ({value_min:g}, {value_max:g}); write two finite numbers, the smaller one first.")
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.linspace(value_min, value_max, bins + 1, dtype=dtype, device=like.device), (value_max - value_min) / bins


def critic_error(
    value_nt: Float[Tensor, "n t"], target_nt: Float[Tensor, "n t"], mask_nt: Bool[Tensor, "n t"]
) -> dict[str, float]:
    r"""Split a critic's squared error into the error of completion means and the error within completions.

    Equation
        error_point = mean_i mean_t (v - q)^2 = error_mean + error_within
        error_mean = mean_i (vbar_i - qbar_i)^2;  error_within = mean_i mean_t ((v - vbar_i) - (q - qbar_i))^2
        explained_variance = 1 - Var(q - v) / Var(q) over all tokens

    Args:
        value_nt: the critic's values v.
        target_nt: what they are held against, q.
        mask_nt: the tokens i, t that count; t runs over those of completion i.

    Returns:
        These figures and the means over tokens, `value_mean` and `target_mean`, computed in float64.

    Edge cases:
        A masked token is never read. A completion without a token takes no part. The errors count every completion once, the other
        figures every token. NaN or infinity at a token that counts makes them NaN, and so does a batch without tokens. Targets
        that do not vary have no explained variance (NaN).

    Example:
        >>> errors = critic_error(torch.tensor([[.5, .5, .5]]), torch.tensor([[.2, .5, .8]]), torch.ones(1, 3, dtype=torch.bool))
        >>> point, mean, within = (errors[f"error_{name}"] for name in ("point", "mean", "within"))
        >>> print(f"{point:.2f} = {mean:.2f} + {within:.2f}")  # right on average, flat where it should rise
        0.06 = 0.00 + 0.06

    Reference:
        "Value Flattening" (SP3O) 2026 (arXiv 2609.18708): the decomposition.
    """
    value_nt, target_nt = zero_masked(mask_nt, value_nt=value_nt.detach().double(), target_nt=target_nt.double())
    error_nt = target_nt - value_nt
    token_count_n = mask_nt.sum(dim=1)
    mean_error_n = error_nt.sum(dim=1) / token_count_n.clamp(min=1)
    deviation_nt = torch.where(mask_nt, error_nt - mean_error_n[:, None], 0.0)
    within_row_error_n = deviation_nt.square().sum(dim=1) / token_count_n.clamp(min=1)
    between_row_error = float(mean_error_n.square()[token_count_n > 0].mean())
    within_row_error = float(within_row_error_n[token_count_n > 0].mean())

    def moments(number_nt: Tensor) -> tuple[float, float]:
        """Return the mean and the variance of the numbers at unmasked tokens. Equal numbers have a variance of exactly 0."""
        unmasked_number_u = number_nt[mask_nt]
        number_minus_first_u = unmasked_number_u - unmasked_number_u[:1]
        number_variance = (number_minus_first_u - number_minus_first_u.mean()).square().mean()
        return float((unmasked_number_u[:1] + number_minus_first_u.mean()).mean()), float(number_variance)

    value_mean, _ = moments(value_nt)
    target_mean, target_variance = moments(target_nt)
    _, error_variance = moments(error_nt)
    return {
        "explained_variance": 1 - error_variance / target_variance if target_variance else math.nan,
        "value_mean": value_mean,
        "target_mean": target_mean,
        "error_point": between_row_error + within_row_error,
        "error_mean": between_row_error,
        "error_within": within_row_error,
    }
