"""What a critic is fitted with, per token: the squared error, PPO's clipped form of it, HL-Gauss; and how far off a critic is."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.errors import AlignmentError, RecipeError, RewardError, refuse
from spanwise.losses.policy import inside

#: Standard deviation of HL-Gauss in bin widths: the ratio Farebrother et al. recommend.
SIGMA_RATIO = 0.75
#: A target outside the range by no more than this share of a bin is rounding.
_ROUNDING = 1e-3


def value_loss(
    value_nt: Float[Tensor, "n t"],
    target_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    old_value_nt: Float[Tensor, "n t"] | None = None,
    clip: float | None = None,
) -> Float[Tensor, "n t"]:
    r"""The squared error of a critic.

    Equation
        loss = (V - R)^2
        with clip: loss = max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2)

    Args:
        value_nt: the critic's values; gradients flow through them only.
        target_nt: what they should be (`spanwise.credit.value_target`).
        mask_nt: the trainable tokens.
        old_value_nt: the values before the fit, needed by `clip`.
        clip: how far a value may move and still be followed, above 0; None: any distance.

    Edge cases:
        A masked token has loss 0 and gradient 0, whatever it holds (NaN). NaN or infinity at a trainable token stays in the loss.

    Raises:
        RecipeError: `clip` without `old_value_nt` or the reverse; a `clip` that is not above 0.
        AlignmentError: two shapes differ.

    Example:
        >>> import torch
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
    refuse(
        {
            "A clipped value loss needs clip and old_value_nt, a plain one neither.": (clip is None)
            != (old_value_nt is None),
            f"clip is {clip}; it is a distance between values and must be above 0.": clip is not None and not clip > 0,
        }
    )
    value_nt, target_nt = inside(mask_nt, value_nt=value_nt, target_nt=target_nt.detach())
    loss_nt = (value_nt - target_nt).square()
    if old_value_nt is not None and clip is not None:
        (old_value_nt,) = inside(mask_nt, old_value_nt=old_value_nt.detach())
        near_nt = torch.clamp(value_nt, old_value_nt - clip, old_value_nt + clip)
        loss_nt = torch.maximum(loss_nt, (near_nt - target_nt).square())
    return torch.where(mask_nt, loss_nt, 0.0)


def hl_gauss(target_nt: Float[Tensor, "n t"], *, bins: int, value_range: tuple[float, float]) -> Float[Tensor, "n t b"]:
    r"""Spread each target over bins: what a normal distribution around it has in each of them.

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
        The expectation over bin centres (`categorical_value`) is y to .0002 bin widths where y is 4 sigmas (3 bin widths)
        or more away from both ends of the range. Nearer it is pulled inwards, for what lies outside is cut off: at an end by .69
        bin widths (.014 for 51 bins over 0 to 1). Where targets are 0 and 1 and that matters, let the range reach 3 bin widths
        beyond them.
        A target outside the range by less than a thousandth of a bin counts as its end: rounding.

    Raises:
        RewardError: a target is outside the range or not finite.
        RecipeError: fewer than 2 bins, an empty range.

    Example:
        >>> import torch
        >>> hl_gauss(torch.tensor([[.5]]), bins=5, value_range=(0., 1.))
        tensor([[[0.0223, 0.2299, 0.4954, 0.2299, 0.0223]]])
        >>> probability_ntb = hl_gauss(torch.tensor([[.5, 1.]]), bins=5, value_range=(0., 1.))
        >>> categorical_value(probability_ntb.log(), value_range=(0., 1.))  # 1 is an end of the range
        tensor([[0.5000, 0.8620]])

    Reference:
        Imani & White 2018 (arXiv 1806.04613); Farebrother et al. 2024, "Stop Regressing" (arXiv 2403.03950), for the ratio .75.
        Critics of language models: arXiv 2608.02181.
    """
    edge_e, width = _edges(bins, value_range, target_nt)
    low, high = value_range
    near_nt = (target_nt >= low - _ROUNDING * width) & (target_nt <= high + _ROUNDING * width)
    if not bool(near_nt.all()):
        n, t = (int(x) for x in (~near_nt).nonzero()[0])
        raise RewardError(
            f"The value target of completion {n} at token {t} is {float(target_nt[n, t]):g}, outside value_range "
            f"({low:g}, {high:g}). Let the range hold every return that can occur."
        )
    below_nte = torch.special.ndtr(
        (edge_e - target_nt.to(edge_e.dtype).clamp(low, high).unsqueeze(-1)) / (SIGMA_RATIO * width)
    )
    return below_nte.diff(dim=-1) / (below_nte[..., -1:] - below_nte[..., :1])


def categorical_value(logits_ntb: Float[Tensor, "*n b"], *, value_range: tuple[float, float]) -> Float[Tensor, "*n"]:
    r"""The value a categorical critic stands for.

    Equation
        V = sum over b of softmax(logits)[b] centre[b]

    Args:
        logits_ntb: (..., B), one score for each of B bins of one width; any number of streams stands before them.
        value_range: the outer edges of the first and the last bin.

    Returns:
        (...), between the centres of the first and the last bin; in the dtype of the logits, float32 for smaller ones.

    Raises:
        RecipeError: fewer than 2 bins, an empty range.

    Example:
        >>> import torch
        >>> categorical_value(torch.tensor([[[0., 0., 0., 0.], [9., 0., 0., 0.]]]), value_range=(0., 1.))
        tensor([[0.5000, 0.1252]])

    Reference:
        Farebrother et al. 2024 (arXiv 2403.03950).
    """
    edge_e, width = _edges(logits_ntb.shape[-1], value_range, logits_ntb)
    return logits_ntb.to(edge_e.dtype).softmax(dim=-1) @ (edge_e[:-1] + width / 2)


def categorical_value_loss(
    logits_ntb: Float[Tensor, "n t b"],
    target_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    value_range: tuple[float, float],
) -> Float[Tensor, "n t"]:
    r"""The cross entropy of a categorical critic against HL-Gauss targets.

    Equation
        loss = - sum over b of p[b] log softmax(logits)[b],  p = hl_gauss(target)

    Args:
        logits_ntb: the critic's scores of B bins; gradients flow through them only.
        target_nt: what the value should be (`spanwise.credit.value_target`).
        mask_nt: the trainable tokens.
        value_range: as for `hl_gauss`.

    Edge cases:
        A masked token has loss 0 and gradient 0, whatever it holds (NaN), and its target may lie anywhere. The least loss is not 0
        but the entropy of the target's distribution (1.19 with 5 bins and a target in the middle).

    Raises:
        RewardError: the target of a trainable token is outside the range or not finite.
        AlignmentError: two shapes differ.

    Example:
        >>> import torch
        >>> mask_nt = torch.tensor([[True, False]])
        >>> categorical_value_loss(torch.zeros(1, 2, 5), torch.tensor([[.5, 7.]]), mask_nt, value_range=(0., 1.))  # log 5
        tensor([[1.6094, 0.0000]])

    Reference:
        Imani & White 2018 (arXiv 1806.04613); Farebrother et al. 2024 (arXiv 2403.03950).
    """
    if logits_ntb.shape[:-1] != mask_nt.shape:
        raise AlignmentError(f"mask_nt is {tuple(mask_nt.shape)} but logits_ntb is {tuple(logits_ntb.shape)}.")
    (target_nt,) = inside(mask_nt, target_nt=target_nt.detach())
    target_nt = torch.where(mask_nt, target_nt, sum(value_range) / 2)
    wide = torch.promote_types(logits_ntb.dtype, torch.float32)
    score_ntb = torch.where(mask_nt.unsqueeze(-1), logits_ntb.to(wide), 0.0)
    share_ntb = hl_gauss(target_nt.to(wide), bins=logits_ntb.shape[-1], value_range=value_range)
    return torch.where(mask_nt, -(share_ntb * score_ntb.log_softmax(dim=-1)).sum(dim=-1), 0.0)


def _edges(bins: int, value_range: tuple[float, float], like: Tensor) -> tuple[Tensor, float]:
    """The edges of the bins, in float32 or better, and the width of one."""
    low, high = value_range
    if bins < 2:
        raise RecipeError(f"There are {bins} bins; a distribution over values needs 2 or more.")
    if not -math.inf < low < high < math.inf:
        raise RecipeError(f"value_range is ({low:g}, {high:g}); its first number must be below its second, both finite.")
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.linspace(low, high, bins + 1, dtype=wide, device=like.device), (high - low) / bins


def critic_error(
    value_nt: Float[Tensor, "n t"], target_nt: Float[Tensor, "n t"], mask_nt: Bool[Tensor, "n t"]
) -> dict[str, float]:
    r"""Take a critic's squared error apart: how far off it is on a completion as a whole, and how far off its shape along it is.

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
        >>> import torch
        >>> found = critic_error(torch.tensor([[.5, .5, .5]]), torch.tensor([[.2, .5, .8]]), torch.ones(1, 3, dtype=torch.bool))
        >>> point, mean, within = (found[f"error_{name}"] for name in ("point", "mean", "within"))
        >>> print(f"{point:.2f} = {mean:.2f} + {within:.2f}")  # right on average, flat where it should rise
        0.06 = 0.00 + 0.06

    Reference:
        "Value Flattening" (SP3O) 2026 (arXiv 2609.18708): the decomposition.
    """
    value_nt, target_nt = (x.double() for x in inside(mask_nt, value_nt=value_nt.detach(), target_nt=target_nt.detach()))
    error_nt, length_n = target_nt - value_nt, mask_nt.sum(dim=1)
    mean_n = error_nt.sum(dim=1) / length_n.clamp(min=1)
    within_n = torch.where(mask_nt, error_nt - mean_n[:, None], 0.0).square().sum(dim=1) / length_n.clamp(min=1)
    mean, within = (float(x[length_n > 0].mean()) for x in (mean_n.square(), within_n))

    def moments(x_nt: Tensor) -> tuple[float, float]:
        """Mean and variance over tokens, counted from the first: of a constant exactly itself and exactly 0."""
        x = x_nt[mask_nt]
        from_first = x - x[:1]
        return float((x[:1] + from_first.mean()).mean()), float((from_first - from_first.mean()).square().mean())

    (value_mean, _), (target_mean, variance), (_, left) = (moments(x_nt) for x_nt in (value_nt, target_nt, error_nt))
    return {
        "explained_variance": 1 - left / variance if variance else math.nan,
        "value_mean": value_mean,
        "target_mean": target_mean,
        "error_point": mean + within,
        "error_mean": mean,
        "error_within": within,
    }
