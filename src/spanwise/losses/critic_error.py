"""How far a critic is off, as numbers that processes can add: explained variance and the parts of its squared error."""

from __future__ import annotations

import math
from dataclasses import asdict, astuple, dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.losses.tokens import inside


@dataclass(frozen=True)
class CriticError:
    """What is known of a critic's errors on some completions; see `critic_error` for what the figures mean.

    `a + b` is the error over both sets of completions. Figures over nothing are NaN.

    Attributes:
        completions: how many have a token.
        tokens: how many tokens they have.
        mean_sum, within_sum: over completions, the sums of the two parts of the error.
        value_mean, target_mean, error_mean: over tokens, of value, target and target - value.
        value_square, target_square, error_square: over tokens, sums of squared deviations from these means.
        value_inside: over tokens, the sum of squared deviations of a value from the mean of its own completion.
    """

    completions: float
    tokens: float
    mean_sum: float
    within_sum: float
    value_mean: float
    target_mean: float
    error_mean: float
    value_square: float
    target_square: float
    error_square: float
    value_inside: float

    @property
    def mean(self) -> float:
        """Part of the error that one constant for each completion would mend."""
        return self.mean_sum / self.completions if self.completions else math.nan

    @property
    def within(self) -> float:
        """Part of the error that lies in the shape along the completion."""
        return self.within_sum / self.completions if self.completions else math.nan

    @property
    def point(self) -> float:
        """Mean squared error, each completion counted once."""
        return self.mean + self.within

    @property
    def explained_variance(self) -> float:
        """Share of the target's variance over tokens that the values explain; NaN where the target does not vary."""
        return 1 - self.error_square / self.target_square if self.target_square else math.nan

    @property
    def variation_within(self) -> float:
        """Share of the variation of the values that lies within completions: 0 for a flat critic, NaN for a constant one."""
        return self.value_inside / self.value_square if self.value_square else math.nan

    def __add__(self, other: CriticError) -> CriticError:
        """The error over the completions of both (Chan, Golub & LeVeque 1979)."""
        mine, theirs = asdict(self), asdict(other)
        both = {name: mine[name] + theirs[name] for name in mine}
        share = other.tokens / max(both["tokens"], 1.0)
        for name in ("value", "target", "error"):
            gap = theirs[f"{name}_mean"] - mine[f"{name}_mean"]
            both[f"{name}_mean"] = mine[f"{name}_mean"] + gap * share
            both[f"{name}_square"] += gap * gap * self.tokens * share
        return CriticError(**both)

    def figures(self) -> dict[str, float]:
        """What is logged of a critic: explained variance, the error and its two parts, mean value and mean target."""
        known = {name: getattr(self, name) for name in ("explained_variance", "value_mean", "target_mean")}
        return {**known, **{f"error_{name}": getattr(self, name) for name in ("point", "mean", "within")}}

    def numbers(self) -> Float[Tensor, " k"]:
        """All attributes in float64, for one gather; `joined` reads them."""
        return torch.tensor(astuple(self), dtype=torch.float64)

    @classmethod
    def joined(cls, number_pk: Float[Tensor, "p k"]) -> CriticError:
        """The error over all completions, from the `numbers` of every process.

        >>> one = critic_error(torch.tensor([[.5, .5]]), torch.tensor([[0., 1.]]), torch.ones(1, 2, dtype=torch.bool))
        >>> CriticError.joined(torch.stack([one.numbers(), one.numbers()])) == one + one
        True
        """
        first, *others = (cls(*row) for row in number_pk.double().tolist())
        return sum(others, start=first)


def critic_error(
    value_nt: Float[Tensor, "n t"], target_nt: Float[Tensor, "n t"], mask_nt: Bool[Tensor, "n t"]
) -> CriticError:
    r"""Take a critic's squared error apart: how far off it is on a completion as a whole, and how far off its shape along it is.

    Equation
        point = mean_i mean_t (v - q)^2 = mean + within
        mean = mean_i (vbar_i - qbar_i)^2;  within = mean_i mean_t ((v - vbar_i) - (q - qbar_i))^2
        explained_variance = 1 - Var(q - v) / Var(q) over all tokens
        variation_within = sum_i sum_t (v - vbar_i)^2 / sum_i sum_t (v - vbar)^2

    Args:
        value_nt: the critic's values v.
        target_nt: what they are held against, q.
        mask_nt: the tokens i, t that count; t runs over those of completion i.

    Returns:
        A `CriticError`, computed in float64; those of several processes can be added.

    Edge cases:
        A masked token is never read. A completion without a token takes no part. `point`, `mean` and `within` count every
        completion once, the two ratios every token. NaN or infinity at a token that counts makes the figures NaN.

    Example:
        >>> import torch
        >>> found = critic_error(torch.tensor([[.5, .5, .5]]), torch.tensor([[.2, .5, .8]]), torch.ones(1, 3, dtype=torch.bool))
        >>> print(f"{found.point:.2f} = {found.mean:.2f} + {found.within:.2f}")  # right on average, flat where it should rise
        0.06 = 0.00 + 0.06

    Reference:
        "Value Flattening" (SP3O) 2026 (arXiv 2609.18708): the decomposition and the variation ratio.
    """
    value_nt, target_nt = inside(mask_nt, value_nt=value_nt.detach(), target_nt=target_nt.detach())
    value_nt, target_nt = value_nt.double(), target_nt.double()
    length_n = mask_nt.sum(dim=1)
    error_nt = target_nt - value_nt
    deviation_nt = _centred(error_nt, mask_nt)
    mean_n = error_nt.sum(dim=1) / length_n.clamp(min=1)
    within_n = deviation_nt.square().sum(dim=1) / length_n.clamp(min=1)
    sums = {}
    for name, x_nt in (("value", value_nt), ("target", target_nt), ("error", error_nt)):
        sums[f"{name}_mean"], sums[f"{name}_square"] = _moments(x_nt[mask_nt])
    return CriticError(
        completions=float((length_n > 0).sum()),
        tokens=float(length_n.sum()),
        mean_sum=float(mean_n.square().sum()),
        within_sum=float(within_n.sum()),
        value_inside=float(_centred(value_nt, mask_nt).square().sum()),
        **sums,
    )


def _centred(x_nt: Tensor, mask_nt: Tensor) -> Tensor:
    """Deviations from the mean of each completion, 0 at masked tokens; exactly 0 where a completion is constant."""
    first_n1 = x_nt.gather(1, mask_nt.int().argmax(dim=1, keepdim=True)) if x_nt.shape[1] else x_nt.new_zeros(len(x_nt), 1)
    x_nt = torch.where(mask_nt, x_nt - first_n1, 0.0)
    return torch.where(mask_nt, x_nt - x_nt.sum(dim=1, keepdim=True) / mask_nt.sum(dim=1, keepdim=True).clamp(min=1), 0.0)


def _moments(x: Float[Tensor, " k"]) -> tuple[float, float]:
    """Mean and sum of squared deviations, counted from the first number: a constant has exactly itself and exactly 0."""
    if not len(x):
        return 0.0, 0.0
    from_first = x - x[0]
    mean = from_first.mean()
    return float(x[0] + mean), float((from_first - mean).square().sum())
