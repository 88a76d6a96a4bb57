"""Where a baseline that is given several outcomes drives a confidence, exactly and by simulation (docs/fidelity_tables.md).

    python benchmarks/fixed_points.py

prints q* where the further outcomes are fair coins that have nothing to do with being right. `fixed_point` takes what the policy
sees of its own answer, too, and `simulated_fixed_point` any baseline, and policies that see their answer's kind. The command
`spanwise fidelity` needs one outcome and no more: spanwise.fidelity has that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from spanwise.credit import advantage
from spanwise.errors import RecipeError
from spanwise.fidelity import proper_score
from spanwise.fidelity.baselines import ScoreName
from spanwise.objective import BaselineName

_FEWEST = 100


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
        raise RecipeError("No formula gives the final confidence of the baseline 'blended'. Call simulated_fixed_point.")
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


@dataclass(frozen=True)
class SimulatedFixedPoint:
    """What a simulation of B prompts, with Z contexts each, says of a baseline.

    Attributes:
        point_bz: q*.
        error_bz: one standard error of the simulation.
        share_bz2: how much of the gradient comes through where the answer is wrong and where it is right.

    Example:
        A prompt that is right half of the time: the point is .5.

        >>> result = simulated_fixed_point(torch.tensor([[0.5]]).double(), group_size=4, baseline="outcome", copies=16, batches=200)
        >>> tuple(result.point_bz.shape), bool((result.point_bz - 0.5).abs() < 0.01)
        ((1, 1), True)
    """

    point_bz: Float[Tensor, "b z"]
    error_bz: Float[Tensor, "b z"]
    share_bz2: Float[Tensor, "b z 2"]


def simulated_fixed_point(
    p_bz: Float[Tensor, " b z *o"],
    *,
    group_size: int,
    baseline: BaselineName,
    leave_one_out: bool = False,
    back_off: bool | None = None,
    judged: int = 0,
    rule: ScoreName = "brier",
    copies: int = 1,
    levels: int = 10,
    batches: int = 1000,
    rounds: int = 2,
    seed: int = 0,
) -> SimulatedFixedPoint:
    r"""q* of any baseline, from batches that go through `spanwise.credit.advantage` itself.

    Equation
        q* = p share[1] / (p share[1] + (1 - p) share[0])
        share[o] = 1 - E[(b - V_o) phi | o] / E[(r - V_o) phi | o],  phi = q - E q,  V_o = E[r | o], over completions in a context

    The policy of a context reports q = K / levels, K ~ Bin(levels, m); phi is then its REINFORCE direction, and only the
    baseline's part has to be sampled. m starts at p and moves to q* after every round, with the same random numbers. Estimates
    that ignore a completion's own report (the mean of its stratum without it, and of all others re-scored with its outcome) have
    E[estimate phi | o] = 0 and serve as control variates.

    Args:
        p_bz: probability of outcome 1 of each prompt, and of each context in it. A context is what a completion sees of its own
            answer before it reports, each as likely as the others; one column for a policy that cannot verify itself. Or the
            probability of every tuple of outcomes, with an axis per outcome after these two.
        group_size: completions per prompt, G.
        baseline, leave_one_out, back_off: as in `advantage`.
        judged: which of several outcomes the score judges the confidence by, 0 or 1.
        rule: score of the confidence.
        copies: how many prompts of each kind share a batch; a batch is B * copies * G completions.
        levels: the reports are 0, 1/levels, ..., 1; their standard deviation is sqrt(m (1 - m) / levels).
        batches: simulated in each round.
        rounds: 1 measures the direction at the honest policy; 2 suffice while q* stays near p.
        seed: of the simulation.

    Edge cases:
        m is kept within [0.001, 0.999].

    Raises:
        RecipeError: an outcome would be seen fewer than 100 times, so that its share could not be told.

    Example:
        >>> p_bz = torch.tensor([[.2], [.5]]).double()
        >>> result = simulated_fixed_point(p_bz, group_size=4, baseline="outcome", copies=16, batches=200)
        >>> bool(((result.point_bz[:, 0] - torch.tensor([.0869, .5])).abs() < 0.01).all())
        True
    """
    chance = tuple_chances(p_bz, 2)
    check_judged(chance, 2, judged)
    others = tuple(axis for axis in range(2, chance.dim()) if axis != judged + 2)
    p_bz = (chance.sum(dim=others) if others else chance)[..., 1]
    expected_count = batches * copies * group_size / p_bz.shape[1] * float(torch.minimum(p_bz, 1 - p_bz).min())
    if expected_count < _FEWEST:
        raise RecipeError(
            f"{batches} batches would show the rarest outcome {expected_count:.0f} times; raise batches, or leave out such p."
        )
    world = _World(chance.repeat(copies, *[1] * (chance.dim() - 1)), judged, group_size, rule, levels)
    options = {"baseline": baseline, "leave_one_out": leave_one_out, "back_off": back_off, "judged": judged}
    mean_bz, chance_bz2 = p_bz, torch.stack([1 - p_bz, p_bz], dim=2)
    share_bz2, error_bz2 = torch.ones(*p_bz.shape, 2), torch.zeros(*p_bz.shape, 2)
    for _ in range(rounds):
        mean_bz = mean_bz.clamp(1e-3, 1 - 1e-3)
        policy = _Policy(mean_bz.repeat(copies, 1), world)
        generator = torch.Generator().manual_seed(seed)
        sums = [_one_batch(world, policy, options, generator) for _ in range(batches)]
        sum_rcbzo = torch.stack(sums).unflatten(2, (copies, len(p_bz))).sum(dim=2)
        lost_bz2, error_bz2 = _controlled(sum_rcbzo)
        there_bz2 = chance_bz2 * copies * group_size / p_bz.shape[1] * policy.reach_bz2[: len(p_bz)]
        share_bz2, error_bz2 = 1 - lost_bz2 / there_bz2, (error_bz2 / there_bz2).abs()
        mean_bz = odds(p_bz * share_bz2[..., 1], (1 - p_bz) * share_bz2[..., 0], p_bz, 1 - p_bz)
    weight_bz2 = chance_bz2 * share_bz2
    crossed_bz = (weight_bz2 * error_bz2.flip(2) * chance_bz2.flip(2)).square().sum(dim=2).sqrt()
    return SimulatedFixedPoint(mean_bz, crossed_bz / weight_bz2.sum(dim=2).square(), share_bz2)


class _World:
    """Prompts with known probabilities of every tuple of outcomes, and how reports are scored."""

    def __init__(self, chance: Float[Tensor, " b z *o"], judged: int, group_size: int, rule: ScoreName, levels: int) -> None:
        self.group_size, self.levels = group_size, levels
        self.group_n = torch.arange(len(chance)).repeat_interleave(group_size)
        values = [torch.arange(count, dtype=torch.float64) for count in chance.shape[2:]]
        self.outcome_so = torch.cartesian_prod(*values).reshape(-1, len(values))
        self.verdict_s = self.outcome_so[:, judged].long()
        # A number below tail[s] stands for tuple s or one after it.
        self.tail_bzs = chance.flatten(2).flip(2).cumsum(dim=2).flip(2)[..., 1:]
        self.report_v = torch.arange(levels + 1, dtype=torch.float64) / levels
        outcomes = (torch.zeros_like(self.report_v), torch.ones_like(self.report_v))
        self.score_v2 = torch.stack([proper_score(self.report_v, outcome, rule=rule) for outcome in outcomes], dim=1)


class _Policy:
    """Binomial reports with means `mean_bz`, and their exact moments."""

    def __init__(self, mean_bz: Tensor, world: _World) -> None:
        count_v = torch.arange(world.levels + 1, dtype=torch.float64)
        chance_bzv = torch.distributions.Binomial(world.levels, probs=mean_bz[..., None]).log_prob(count_v).exp()
        self.mean_bz, self.cumulative_bzv = mean_bz, chance_bzv.cumsum(dim=2)
        self.value_bz2 = chance_bzv @ world.score_v2
        self.reach_bz2 = (chance_bzv * (world.report_v - mean_bz[..., None])) @ world.score_v2


def _one_batch(
    world: _World, policy: _Policy, options: Mapping[str, Any], generator: torch.Generator
) -> Float[Tensor, "4 b z 2"]:
    """Sums over each prompt, context and verdict of (b - V) phi and of three control variates."""
    (b, z, _), g = world.tail_bzs.shape, world.group_size
    context_bg = torch.randint(z, (b, g), generator=generator)
    uniform_2bg = torch.rand(2, b, g, generator=generator, dtype=torch.float64)
    rows_b1 = torch.arange(b)[:, None]
    tuple_bg = (uniform_2bg[0][..., None] < world.tail_bzs[rows_b1, context_bg]).sum(dim=2)
    outcome_bg = world.verdict_s[tuple_bg]
    level_bg = (uniform_2bg[1][..., None] > policy.cumulative_bzv[rows_b1, context_bg]).sum(dim=2).clamp(max=world.levels)
    by_outcome_bg2 = world.score_v2[level_bg]
    reward_bg = by_outcome_bg2.gather(2, outcome_bg[..., None])[..., 0]
    result = advantage(
        reward_bg.flatten(),
        world.group_n,
        outcome_no=world.outcome_so[tuple_bg.flatten()],
        by_outcome_n2=by_outcome_bg2.reshape(-1, 2),
        **options,
    )
    value_bg = policy.value_bz2[rows_b1, context_bg, outcome_bg]
    phi_bg = world.report_v[level_bg] - policy.mean_bz.gather(1, context_bg)
    same_bgg = ((tuple_bg[:, :, None] == tuple_bg[:, None, :]) & ~torch.eye(g, dtype=torch.bool)).double()
    rescored_bg2 = by_outcome_bg2.sum(dim=1, keepdim=True) - by_outcome_bg2
    terms_4bg = torch.stack([
        reward_bg - result.advantage_n.reshape(b, g) - value_bg,
        torch.ones_like(reward_bg),
        (same_bgg @ reward_bg[..., None])[..., 0] / same_bgg.sum(dim=2).clamp(min=1),  # 0 where there is no other
        rescored_bg2.gather(2, outcome_bg[..., None])[..., 0],
    ])  # fmt: skip
    cell_bg = (rows_b1 * z + context_bg) * 2 + outcome_bg
    sums = torch.zeros(4, b * z * 2, dtype=torch.float64)
    return sums.index_add_(1, cell_bg.flatten(), (terms_4bg * phi_bg).flatten(1)).reshape(4, b, z, 2)


def _controlled(sum_rcbzo: Float[Tensor, "r c b z o"]) -> tuple[Float[Tensor, "b z o"], Float[Tensor, "b z o"]]:
    """Mean over batches of the first sum, and its standard error, once the others, of mean 0, are regressed out."""
    rows_bzorc = sum_rcbzo.permute(2, 3, 4, 0, 1)
    mean_bzo1c = rows_bzorc.mean(dim=3, keepdim=True)
    target, control = (rows_bzorc - mean_bzo1c)[..., :1], (rows_bzorc - mean_bzo1c)[..., 1:]
    slope = torch.linalg.pinv(control.mT @ control, hermitian=True) @ (control.mT @ target)
    left = (target - control @ slope)[..., 0]
    batches = left.shape[-1]
    mean_bzo = (mean_bzo1c[..., :1] - mean_bzo1c[..., 1:] @ slope)[..., 0, 0]
    return mean_bzo, (left.square().sum(dim=-1) / (batches - 1) / batches).sqrt()


def coins(p_b: Tensor, outcomes: int) -> Tensor:
    """The probability of every tuple where all outcomes but the first are fair coins."""
    chance = torch.stack([1 - p_b, p_b], dim=1)
    for _ in range(outcomes - 1):
        chance = chance[..., None].expand(*chance.shape, 2) / 2
    return chance


def main() -> None:
    """Print the table of several outcomes."""
    p_b = torch.tensor([0.1, 0.2, 0.3, 0.5, 0.7, 0.9], dtype=torch.float64)
    print("| p |", " | ".join(f"{p:g}" for p in p_b.tolist()), "|")
    for size in (4, 16):
        for back_off in (False, True):
            for outcomes in (1, 2, 3):
                point_b = fixed_point(coins(p_b, outcomes), group_size=size, baseline="outcome", back_off=back_off)
                name = f"outcome, {outcomes} outcomes, G = {size}{', backing off' if back_off else ''}"
                print(f"| {name} |", " | ".join(f"{q:.3f}" for q in point_b.tolist()), "|")
    for outcomes in (2, 3):
        simulation = simulated_fixed_point(coins(p_b, outcomes)[:, None], group_size=4, baseline="blended", copies=21)
        cells = " | ".join(f"{q:.3f}" for q in simulation.point_bz[:, 0].tolist())
        print(f"| blended, {outcomes} outcomes, G = 4 (± {float(simulation.error_bz.max()):.4f}) |", cells, "|")


if __name__ == "__main__":
    main()
