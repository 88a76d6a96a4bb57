"""The q* test of any baseline, by simulation: batches of a policy with known reports, through `advantage` itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from spanwise.credit import advantage
from spanwise.errors import RecipeError
from spanwise.fidelity.baselines import BASELINES
from spanwise.fidelity.fixed_point import check_judged, fixed_point, odds, tuple_chances
from spanwise.fidelity.proper_score import ScoreName, proper_score
from spanwise.objective import BaselineName

_FEWEST = 100


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
    seen = batches * copies * group_size / p_bz.shape[1] * float(torch.minimum(p_bz, 1 - p_bz).min())
    if seen < _FEWEST:
        raise RecipeError(
            f"{batches} batches would show the rarest outcome {seen:.0f} times; raise batches, or leave out such p."
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


def fixed_point_rows(
    *,
    group_sizes: Sequence[int] = (4, 8, 16, 32, 64),
    probabilities: Sequence[float] = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.95),
    rule: ScoreName = "brier",
    batches: int = 100,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """The q* test in rows: exact for all baselines but blended, which is simulated in batches of 512 completions."""
    p_b, rows = torch.tensor(probabilities, dtype=torch.float64), []
    for size, (name, options) in product(group_sizes, BASELINES.items()):
        if name == "blended":
            copies = max(1, 512 // (size * len(p_b)))
            simulated = simulated_fixed_point(
                p_b[:, None], group_size=size, rule=rule, copies=copies, batches=batches, seed=seed, **options
            )
            q_b, error_b = simulated.point_bz[:, 0].tolist(), simulated.error_bz[:, 0].tolist()
        else:
            q_b, error_b = fixed_point(p_b, group_size=size, **options).tolist(), [None] * len(p_b)
        columns = zip(probabilities, q_b, error_b, strict=True)
        rows += [{"baseline": name, "group_size": size, "p": p, "q": q, "error": error} for p, q, error in columns]
    return rows
