"""The q* test in closed form: the confidence that a baseline drives a policy to, beside the probability that would be honest."""

from __future__ import annotations

from collections.abc import Collection

import torch
from jaxtyping import Float
from torch import Tensor

from spanwise.errors import RecipeError
from spanwise.objective import BaselineName


def gradient_shares(
    p_b: Float[Tensor, " b *o"],
    *,
    group_size: int,
    baseline: BaselineName,
    leave_one_out: bool = False,
    back_off: bool | None = None,
) -> Float[Tensor, " b *v"]:
    r"""How much of the gradient of E[r | x, o] a baseline lets through, for every outcome or tuple of outcomes o; exact.

    Equation
        share[o] = E[A phi | o] / E[(r - E[r | x, o]) phi | o],  phi: any direction with mean 0 under the policy
        none, batch and group       the same for all, written as 1
        outcome                     E[(n_o - 1)+] / (G P(o)) = (G P(o) - 1 + (1 - P(o))^G) / (G P(o)),  n_o ~ Bin(G, P(o))
        outcome, leave_one_out      P(n_o >= 2 | o) = 1 - (1 - P(o))^(G-1)
        back_off                    sum over levels l of (1 - P_(l-1))^(G-1) f(w_l),  w_l = (P_l - P_(l-1)) / (1 - P_(l-1));
                                    P_l: probability of all tuples that agree with o but in the last l outcomes, P_(-1) = 0;
                                    f(P(o)) is the row above. With leave_one_out it is 1: every completion is compared, G >= 2

    Args:
        p_b: probability of outcome 1 of each prompt, for one binary outcome; or the probability of every tuple, with an axis per
            outcome, from coarse to fine, as `advantage` takes them.
        group_size: completions per prompt, G.
        baseline: none, batch, group or outcome.
        leave_one_out: strata of one still get 0.
        back_off: see `spanwise.credit.advantage`; None: where there are several outcomes.

    Returns:
        A share for every outcome or tuple: (b, 2) for one binary outcome, else the shape of `p_b`.

    Edge cases:
        An outcome of probability 0 has share 0, unless it could back off. A mean over the whole batch or group shrinks every
        advantage by the same factor, (N-1)/N or (G-1)/G, which moves no fixed point: it is left out.

    Raises:
        RecipeError: no closed form (blended), a group of one, or probabilities that do not add up to 1.

    Example:
        >>> gradient_shares(torch.tensor([.5, .2]).double(), group_size=4, baseline="outcome")
        tensor([[0.5312, 0.5312],
                [0.6880, 0.2620]], dtype=torch.float64)

        Half of the wrong answers are no answers: their strata are smaller, and back off to "wrong".

        >>> wrong_right_by_complete = torch.tensor([[[.4, .4], [.0, .2]]]).double()
        >>> gradient_shares(wrong_right_by_complete, group_size=4, baseline="outcome", back_off=False)
        tensor([[[0.4560, 0.4560],
                 [0.0000, 0.2620]]], dtype=torch.float64)

    Reference:
        Pavlenko et al. 2026 (arXiv 2602.10231) define the baselines; that their strata scale differently is our finding.
    """
    if baseline == "blended":
        raise RecipeError("The blended baseline has no closed form; use simulated_fixed_point.")
    if group_size < 2:
        raise RecipeError(f"A group of {group_size} has nobody to be compared with; group_size must be at least 2.")
    chance = tuple_chances(p_b, 1)
    if baseline != "outcome":
        return torch.ones_like(chance)
    outcomes = chance.dim() - 1
    levels = outcomes if (outcomes > 1 if back_off is None else back_off) else 0
    share, nobody = torch.zeros_like(chance), torch.ones_like(chance)  # nobody: the finer strata hold no other completion
    finer = torch.zeros_like(chance)
    for level in range(levels + 1):
        dropped = tuple(range(chance.dim() - level, chance.dim()))
        wider = chance.sum(dim=dropped, keepdim=True).clamp(max=1.0).expand_as(chance) if dropped else chance
        added = torch.where(finer < 1, (wider - finer) / torch.where(finer < 1, 1 - finer, 1.0), 0.0).clamp(0.0, 1.0)
        share = share + nobody * _compared_share(added, group_size, leave_one_out)
        finer, nobody = wider, torch.exp((group_size - 1) * torch.log1p(-wider))
    return share


def _compared_share(chance: Tensor, group_size: int, leave_one_out: bool) -> Tensor:
    """E[1 - 1/n] where n - 1 of the G - 1 others fall into a stratum of this probability; 1 for 1 - 1/n if `leave_one_out`."""
    if leave_one_out:
        return -torch.expm1((group_size - 1) * torch.log1p(-chance))
    expected = group_size * chance
    paid = (expected + torch.expm1(group_size * torch.log1p(-chance))).clamp(min=0.0)
    return torch.where(chance > 0, paid / torch.where(chance > 0, expected, 1.0), 0.0)


def fixed_point(
    p_b: Float[Tensor, " b *o"],
    *,
    group_size: int,
    baseline: BaselineName,
    leave_one_out: bool = False,
    back_off: bool | None = None,
    judged: int = 0,
    seen: Collection[int] = (),
) -> Float[Tensor, " b *s"]:
    r"""The confidence q* at which a proper score, paid through this baseline, stops moving; exact.

    Equation
        q* = p share[1] / (p share[1] + (1 - p) share[0]);  for outcome: E[(n1 - 1)+] / (E[(n1 - 1)+] + E[(n0 - 1)+])
        of tuples: sum over those with a right answer of P(o) share[o] / sum over all of P(o) share[o]

    Args:
        p_b, group_size, baseline, leave_one_out, back_off: see `gradient_shares`.
        judged: which of several outcomes the score judges the confidence by, 0 or 1.
        seen: the outcomes that the policy sees before it states a confidence (whether its own answer is complete), so that it can
            state another one for each of their values.

    Returns:
        q* of each prompt, and of each value of what is seen.

    Edge cases:
        p of 0 or 1 is its own fixed point.

    Raises:
        RecipeError: see `gradient_shares`; an outcome `judged` that is not binary, or is seen; one that is no outcome.

    Example:
        >>> p_b = torch.tensor([.1, .2, .5, .9]).double()
        >>> fixed_point(p_b, group_size=4, baseline="outcome")
        tensor([0.0211, 0.0869, 0.5000, 0.9789], dtype=torch.float64)
        >>> fixed_point(p_b, group_size=4, baseline="group")
        tensor([0.1000, 0.2000, 0.5000, 0.9000], dtype=torch.float64)

        Right with probability .2, and a second outcome that has nothing to do with it: finer strata pull further, backing off
        pulls back, and with `leave_one_out` it is honest.

        >>> both = torch.tensor([[[.4, .4], [.1, .1]]]).double()
        >>> fixed_point(both, group_size=4, baseline="outcome", back_off=False)
        tensor([0.0714], dtype=torch.float64)
        >>> fixed_point(both, group_size=4, baseline="outcome")
        tensor([0.2103], dtype=torch.float64)
        >>> fixed_point(both, group_size=4, baseline="outcome", leave_one_out=True)
        tensor([0.2000], dtype=torch.float64)

    Reference:
        See `gradient_shares`. It holds for confidences that do not depend on the outcomes given the prompt and what is seen.
    """
    chance = tuple_chances(p_b, 1)
    check_judged(chance, 1, judged)
    for axis in seen:
        if axis == judged:
            raise RecipeError(f"The outcome {axis} judges the confidence; a policy that sees it has nothing to say.")
        if not 0 <= axis < chance.dim() - 1:
            raise RecipeError(f"There is no outcome {axis} to be seen; there are {chance.dim() - 1}.")
    paid = chance * gradient_shares(
        p_b, group_size=group_size, baseline=baseline, leave_one_out=leave_one_out, back_off=back_off
    )
    unseen = tuple(axis + 1 for axis in range(chance.dim() - 1) if axis not in (*seen, judged))
    paid, there = (x.sum(dim=unseen) if unseen else x for x in (paid, chance))
    axis = 1 + sum(other < judged for other in seen)
    return odds(*(x.select(axis, c) for x in (paid, there) for c in (1, 0)))


def tuple_chances(p: Tensor, axes: int) -> Tensor:
    """The probability of every tuple; `p` without an axis per outcome is the probability of 1 of one binary outcome."""
    p = p.double()
    if p.dim() == axes:
        return torch.stack([1 - p, p], dim=-1)
    off = (p.sum(dim=tuple(range(axes, p.dim()))) - 1).abs()
    if bool((off > 1e-6).any()):
        raise RecipeError(
            f"The probabilities of all tuples of outcomes must add up to 1; they are off by {float(off.max()):.4g}."
        )
    return p


def check_judged(chance: Tensor, axes: int, judged: int) -> None:
    """Refuse to judge a confidence by what is no binary outcome."""
    values = chance.shape[axes:]
    if not 0 <= judged < len(values) or values[judged] != 2:
        raise RecipeError(f"A confidence is judged by a binary outcome; outcome {judged} of {tuple(values)} values is none.")


def odds(right: Tensor, wrong: Tensor, chance: Tensor, otherwise: Tensor) -> Tensor:
    """The maximiser of right f(q, 1) + wrong f(q, 0) for a proper score f; the honest one where nothing comes through."""
    total, there = right + wrong, chance + otherwise
    honest = torch.where(there > 0, chance / torch.where(there > 0, there, 1.0), torch.nan)
    return torch.where(total > 0, right / torch.where(total > 0, total, 1.0), honest)
