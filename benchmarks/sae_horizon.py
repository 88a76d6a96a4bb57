"""What SAE can gain over GAE, without any model: completions needed for a gradient of the same quality.

    python benchmarks/sae_horizon.py [--completions 4000] [--charts docs/images]

A completion has K decisions with sure tokens between them. Each decision adds +1 or -1 to the reward, which comes on the last
token. The critic's value before a token is the sum of what it has seen: a decision is seen `delay` tokens after the next token
begins, or with its result, at the end of its stretch. Each value has an error (normal, in units of one decision), its own or that
of its stretch. Nothing is trained.

An estimator gives decision k the advantage A_k, and the truth is d_k. The cost is E[A^2] / E[A d]^2, over all decisions: how many
completions the gradient takes to be as good, up to a factor that all arms share. It is given relative to lambda 1. The best lambda
of a kind is chosen on draws of its own (seed 1); everything shown is seed 0, with the 95 % interval of twenty batches.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spanwise.credit import gae, sae
from spanwise.measure import mean_interval

BATCHES, GROUP = 20, 8
#: The lambdas that the best is chosen from, as horizons: 1 / (1 - lambda) steps.
HORIZONS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, math.inf)


@dataclass(frozen=True)
class Setting:
    """How decisions lie, and how well the critic sees."""

    name: str
    decisions: int
    stretch: tuple[int, int]  # the least and the largest number of tokens from one decision to the next, drawn log-uniformly
    delay: int | None = 0  # tokens until the critic sees a decision; None: until the last but one token of its stretch
    error: float = 0.0
    afresh: bool = True  # whether each token has an error of its own, or each stretch


SETTINGS = (
    Setting("16 x 8, exact", 16, (8, 8)),
    Setting("16 x 8, error 1", 16, (8, 8), 7, 1.0),
    Setting("32 x 8, seen 32 late, error 1", 32, (8, 8), 32, 1.0),
    Setting("64 x 32, seen 31 late, error 1", 64, (32, 32), 31, 1.0),
    Setting("64 x 32, seen 31 late, error 1 for each stretch", 64, (32, 32), 31, 1.0, False),
    Setting("32 uneven (2 to 60), exact", 32, (2, 60)),
    Setting("32 uneven (2 to 60), error 1", 32, (2, 60), 7, 1.0),
    Setting("32 uneven (2 to 60), seen 32 late, error 1", 32, (2, 60), 32, 1.0),
    Setting("32 uneven (2 to 60), seen 32 late, error 1 for each stretch", 32, (2, 60), 32, 1.0, False),
    Setting("32 very uneven (1 to 250), seen 32 late, error 1", 32, (1, 250), 32, 1.0),
    Setting("32 uneven (2 to 60), seen with its result, exact", 32, (2, 60), None),
    Setting("32 uneven (2 to 60), seen with its result, error 1 for each stretch", 32, (2, 60), None, 1.0, False),
    Setting("32 uneven (2 to 60), seen with its result, error 2 for each stretch", 32, (2, 60), None, 2.0, False),
    Setting("32 even (17), seen with its result, error 1 for each stretch", 32, (17, 17), None, 1.0, False),
)


@dataclass(frozen=True)
class Draw:
    """Completions with their true effects and a critic's values."""

    effect_nk: Tensor
    place_nk: Tensor
    reward_nt: Tensor
    value_nt: Tensor
    logp_nt: Tensor
    mask_nt: Tensor


def draw(setting: Setting, completions: int, seed: int) -> Draw:
    """Draw effects, places and values."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (math.log(edge) for edge in setting.stretch)
    share_nk = torch.rand(completions, setting.decisions, generator=generator, dtype=torch.float64)
    stretch_nk = (low + (high - low) * share_nk).exp().round().long()
    place_nk = torch.cat([torch.zeros(completions, 1, dtype=torch.long), stretch_nk.cumsum(dim=1)[:, :-1]], dim=1)
    length_n = place_nk[:, -1] + stretch_nk[:, -1]
    width = int(length_n.max())
    effect_nk = torch.randint(0, 2, place_nk.shape, generator=generator).double() * 2 - 1
    mask_nt = torch.arange(width) < length_n[:, None]
    seen_nt = torch.zeros(completions, width + 1, dtype=torch.float64)
    delay_nk = (stretch_nk - 2).clamp(min=0) if setting.delay is None else setting.delay
    seen_nt.scatter_add_(1, (place_nk + 1 + delay_nk).clamp(max=width), effect_nk)
    noise_nt = torch.randn(completions, width, generator=generator, dtype=torch.float64)
    if not setting.afresh:
        opened_nt = torch.zeros(completions, width, dtype=torch.long).scatter_(1, place_nk, 1)
        noise_nt = noise_nt[:, : setting.decisions].gather(1, opened_nt.cumsum(dim=1) - 1)
    value_nt = seen_nt[:, :width].cumsum(dim=1) + setting.error * noise_nt
    reward_nt = torch.zeros(completions, width, dtype=torch.float64)
    reward_nt[torch.arange(completions), length_n - 1] = effect_nk.sum(dim=1)
    logp_nt = torch.full((completions, width), math.log(0.99), dtype=torch.float64)
    logp_nt.scatter_(1, place_nk, math.log(0.1))
    return Draw(effect_nk, place_nk, reward_nt, value_nt, logp_nt, mask_nt)


Estimator = Callable[[Draw], Tensor]


def by_token(lam: float) -> Estimator:
    """GAE with this lambda."""
    return lambda one: gae(one.reward_nt, one.value_nt, one.mask_nt, lam=lam).gather(1, one.place_nk)


def by_segment(lam: float) -> Estimator:
    """SAE with this lambda; each decision opens a segment."""
    return lambda one: sae(one.reward_nt, one.value_nt, one.logp_nt, one.mask_nt, lam=lam).gather(1, one.place_nk)


def by_group(one: Draw) -> Tensor:
    """Reward minus the mean of its group, for every decision; no critic."""
    reward_gm = one.effect_nk.sum(dim=1).reshape(-1, GROUP)
    credit_n = (reward_gm - reward_gm.mean(dim=1, keepdim=True)).flatten()
    return credit_n[:, None].expand_as(one.effect_nk)


def costs(estimator: Estimator, one: Draw) -> Tensor:
    """The cost in each of the batches; infinity where the advantage does not follow the truth."""
    credit_bm = estimator(one).reshape(BATCHES, -1)
    effect_bm = one.effect_nk.reshape(BATCHES, -1)
    gain_b = (credit_bm * effect_bm).mean(dim=1)
    return torch.where(gain_b > 0, (credit_bm**2).mean(dim=1) / gain_b**2, torch.inf)


def best(kind: Callable[[float], Estimator], one: Draw) -> float:
    """The lambda with the least cost."""
    lambdas = [1 - 1 / horizon for horizon in HORIZONS]
    return min(lambdas, key=lambda lam: float(costs(kind(lam), one).mean()))


def arms(setting: Setting, tuning: Draw) -> dict[str, Estimator]:
    """The arms of a setting by name."""
    mean_stretch = float(tuning.mask_nt.sum(dim=1).double().mean()) / setting.decisions
    gae_lam, sae_lam = best(by_token, tuning), best(by_segment, tuning)
    return {
        "group mean": by_group,
        "lambda 1": by_token(1.0),
        "GAE .95": by_token(0.95),
        "GAE .95^(1/L)": by_token(0.95 ** (1 / mean_stretch)),
        "SAE .95": by_segment(0.95),
        "SAE .8": by_segment(0.8),
        f"GAE best ({gae_lam:.4g})": by_token(gae_lam),
        f"SAE best ({sae_lam:.4g})": by_segment(sae_lam),
    }


def written(ratio_b: Tensor) -> str:
    """A ratio with its interval."""
    if not ratio_b.isfinite().all():
        return "never"
    interval = mean_interval(ratio_b)
    return f"{interval.value:.3f} ({interval.low:.3f}, {interval.high:.3f})"


def show(completions: int) -> None:
    """Print the costs of all settings, and the best SAE against the best GAE."""
    for setting in SETTINGS:
        one, tuning = draw(setting, completions, 0), draw(setting, completions, 1)
        base_b = costs(by_token(1.0), one)
        print(f"\n{setting.name}")
        best_of: dict[str, Tensor] = {}
        for name, estimator in arms(setting, tuning).items():
            ratio_b = costs(estimator, one) / base_b
            best_of |= {name[:3]: ratio_b} if " best " in name else {}
            print(f"  {name:22s} {written(ratio_b)}")
        print(f"  {'best SAE / best GAE':22s} {written(best_of['SAE'] / best_of['GAE'])}")


def draw_chart(completions: int, place: Path) -> None:
    """Draw cost against horizon for GAE and SAE, on even and on uneven stretches, on white and on dark."""
    import altair as alt

    place.mkdir(parents=True, exist_ok=True)
    titled_settings: Sequence[tuple[Setting, str]] = (
        (Setting("", 32, (17, 17), 32, 1.0), "even: 17 tokens from decision to decision"),
        (Setting("", 32, (2, 60), 32, 1.0), "uneven: 2 to 60 tokens, 17 in the middle"),
    )
    kinds: Mapping[str, Callable[[float], Estimator]] = {
        "GAE: decays at each token": by_token,
        "SAE: at each decision": by_segment,
    }
    panels = []
    for setting, title in titled_settings:
        one = draw(setting, completions, 0)
        base, stretch = costs(by_token(1.0), one).mean(), float(one.mask_nt.sum(dim=1).double().mean()) / setting.decisions
        points = [
            {"estimator": kind, "horizon": horizon / (stretch if kind.startswith("GAE") else 1), "cost": float(cost)}
            for kind, make in kinds.items() for horizon in HORIZONS[:-1]
            if (cost := costs(make(1 - 1 / horizon), one).mean() / base).isfinite() and cost < 2
        ]  # fmt: skip
        panels.append((title, points))
    for name, background, ink in (("sae-horizon", "white", "#333"), ("sae-horizon-dark", "#16181d", "#ccc")):
        charts = [
            alt.Chart(alt.InlineData(values=points), title=title, width=280, height=220).mark_line(point=True).encode(
                x=alt.X("horizon:Q", title="horizon in decisions", scale=alt.Scale(type="log"), axis=alt.Axis(grid=False)),
                y=alt.Y("cost:Q", title="completions needed (lambda 1: 1)"),
                color=alt.Color("estimator:N", legend=alt.Legend(orient="bottom", title=None)),
            )
            for title, points in panels
        ]  # fmt: skip
        chart = alt.hconcat(*charts).configure(background=background).configure_view(stroke=None)
        text = {"labelColor": ink, "titleColor": ink}
        chart.configure_axis(**text).configure_legend(**text).configure_title(color=ink).save(
            str(place / f"{name}.png"), scale_factor=2
        )


def main() -> None:
    """Print everything, and draw it if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=4000)
    parser.add_argument("--charts", help="folder for the picture as PNG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = max(1, options.completions // (BATCHES * GROUP)) * BATCHES * GROUP
    show(size)
    if options.charts:
        draw_chart(size, Path(options.charts))


if __name__ == "__main__":
    main()
