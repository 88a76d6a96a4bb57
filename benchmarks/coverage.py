"""How often intervals hold the true ECE, the true difference of two, and the other figures: the tables of docs/intervals.md.

    python benchmarks/coverage.py                # all of them, about half an hour on one core
    python benchmarks/coverage.py --cells        # every cell of the grid on a line of its own
    python benchmarks/coverage.py --figures      # the other figures alone, some minutes

The truth is known: confidences are drawn from atoms at .0, .1, ..., 1, from a beta density, or are nearly always .9; answers are
right with a probability that misses the confidence by the same amount everywhere, by turns up and down, or in one bin only, such
that the ECE (eleven bins) is what is asked for. Completions of a prompt are correlated by .4 in what they claim and in what they
get right; two runs share what belongs to the prompt. Policies that are nearly certain say one of few confidences and are right
almost always (or almost never); the completions of a prompt agree in both, or are correlated by .4 as well.

The other figures are those of `figure_intervals`, of policies that are right with probability p (`POLICIES`). The completions of a
prompt agree in what they claim and in what they get right, or are independent. All trials share the weights of the prompts; the
bounds of each cell's first trial are compared with those of `spanwise`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from spanwise.measure.evaluation import bounds, build_figures
from spanwise.measure.intervals import draw_weights, unseen_interval

BINS, LEVEL, WITHIN = 11, 0.95, 0.4
PROMPTS, SAMPLES, TRUTHS = (30, 100, 400), (1, 4, 16), (0.0, 0.03, 0.1, 0.2)
ATOMS = (0.01, 0.02, 0.03, 0.04, 0.06, 0.10, 0.12, 0.17, 0.20, 0.20, 0.05)
RARE = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.01, 0.03, 0.93, 0.03)
#: Nearly certain policies: how often which confidence is said, and how often it is right.
CERTAIN = {
    "says 1, right .995": ((1.0, 1.0, 0.995),),
    "says 1, right .99": ((1.0, 1.0, 0.99),),
    "says 1, right .97": ((1.0, 1.0, 0.97),),
    "says 1, right 1": ((1.0, 1.0, 1.0),),
    "says .9, right .99": ((0.9, 1.0, 0.99),),
    "says .9, right .975": ((0.9, 1.0, 0.975),),
    "says .9, right .9": ((0.9, 1.0, 0.9),),
    "says .9 or 1, right .95 or 1": ((0.9, 0.5, 0.95), (1.0, 0.5, 1.0)),
    "says .9 or 1, right .85 or .99": ((0.9, 0.3, 0.85), (1.0, 0.7, 0.99)),
    "says 0, right .03": ((0.0, 1.0, 0.03),),
    "says 0 or 1, right .01 or .99": ((0.0, 0.3, 0.01), (1.0, 0.7, 0.99)),
}
CERTAIN_PAIRS = (
    ("says 1, right .99", "says 1, right .99"),
    ("says 1, right .97", "says 1, right .995"),
    ("says 1, right .99", "says .9, right .975"),
    ("says 0, right .03", "says 1, right .99"),
    ("says .9 or 1, right .95 or 1", "says 1, right 1"),
)
#: What a policy that is right with probability p says: (confidence, how often, how often it is right then).
POLICIES: dict[str, Callable[[float], tuple[tuple[float, float, float], ...]]] = {
    "says 1": lambda p: ((1.0, 1.0, p),),
    "says p": lambda p: ((p, 1.0, p),),
    "says less or more than p, and is right as often": lambda p: (
        (p - 0.8 * (1 - p), 0.5, p - 0.8 * (1 - p)),
        (p + 0.8 * (1 - p), 0.5, p + 0.8 * (1 - p)),
    ),
    "says .9 or 1, and is right p": lambda p: ((0.9, 0.5, p), (1.0, 0.5, p)),
    "says .5 in 2 %, and is right half the time there, else 1": lambda p: ((0.5, 0.02, 0.5), (1.0, 0.98, (p - 0.01) / 0.98)),
}
RIGHT, FEW_PROMPTS = (0.5, 0.8, 0.9, 0.95, 0.97, 0.99), (50, 100, 300)
FIGURES = ("accuracy", "brier", "mean_confidence", "sharpness", "auroc")
METHODS = ("percentile", "basic", "BCa", "debiased", "m of n", "bins")


@dataclass(frozen=True)
class World:
    """Confidences with their probabilities, their bins, how often each is right, and how alike the completions of a prompt are."""

    q_v: Tensor
    weight_v: Tensor
    bin_v: Tensor
    right_v: Tensor
    within: float = WITHIN

    @property
    def ece(self) -> float:
        """The true ECE."""
        gap_v = self.weight_v * (self.right_v - self.q_v)
        return float(torch.zeros(BINS, dtype=torch.float64).index_add_(0, self.bin_v, gap_v).abs().sum())


def certain(name: str, within: float) -> World:
    """A nearly certain policy, of `CERTAIN`."""
    q_v, weight_v, right_v = torch.tensor(CERTAIN[name], dtype=torch.float64).T
    return World(q_v, weight_v, (q_v * 10 + 1e-9).long(), right_v, within=within)


def world(says: str, misses: str, truth: float) -> World | None:
    """A world with this ECE; None if there is none."""
    if says == "beta":
        q_v = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
        weight_v = q_v**3 * (1 - q_v)
    else:
        q_v = torch.arange(11, dtype=torch.float64) / 10
        weight_v = torch.tensor(ATOMS if says == "atoms" else RARE, dtype=torch.float64)
    weight_v, bin_v = weight_v / weight_v.sum(), (q_v * 10 + 1e-9).long()
    mass_b = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bin_v, weight_v)
    side_v = {
        "over": -torch.ones_like(q_v),
        "by turns": 1.0 - 2.0 * (bin_v % 2 == 0).double(),
        "one bin": -(bin_v == mass_b.argmax()).double(),
    }[misses]

    def of(shift: float) -> World:
        return World(q_v, weight_v, bin_v, (q_v + shift * side_v).clamp(0, 1))

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if of(middle).ece < truth else (low, middle)
    nearest = of(high if truth else 0.0)
    return nearest if abs(nearest.ece - truth) < 1e-9 else None


def gaps_of(
    worlds: list[World], prompts: int, samples: int, trials: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Per trial and prompt what it adds to the gap of each bin, world after world: (trials, P, B).

    The second tensor is what one more prompt with a trial's confidences would add to its gaps, as `spanwise` works it out: if all
    answers contradicted their confidence, and if all agreed with it, the other way round in a second world: (trials, 2, B).

    All worlds share the part of the dice that belongs to the prompt.
    """

    def dice(completions: int) -> Tensor:
        return torch.randn(trials, prompts, completions, generator=generator, dtype=torch.float64)

    claim_xp1, luck_xp1, parts, unseen = dice(1), dice(1), [], []
    for one in worlds:
        claim_xpk, luck_xpk = (
            torch.special.ndtr(math.sqrt(one.within) * shared_xp1 + math.sqrt(1 - one.within) * dice(samples))
            for shared_xp1 in (claim_xp1, luck_xp1)
        )
        v_xpk = torch.searchsorted(one.weight_v.cumsum(0), claim_xpk).clamp(max=len(one.q_v) - 1)
        miss_xpk = (luck_xpk < one.right_v[v_xpk]).double() - one.q_v[v_xpk]
        empty_xpb = torch.zeros(trials, prompts, BINS, dtype=torch.float64)
        parts.append(empty_xpb.scatter_add_(2, one.bin_v[v_xpk], miss_xpk) / samples)
        v_xn = v_xpk.flatten(1)
        low_xn = (one.q_v[v_xn] < 0.5).double()  # right where the confidence says wrong
        ends = (low_xn, 1 - low_xn) if not unseen else (1 - low_xn, low_xn)
        alike = [
            torch.zeros(trials, BINS, dtype=torch.float64).scatter_add_(1, one.bin_v[v_xn], right_xn - one.q_v[v_xn])
            for right_xn in ends
        ]
        unseen.append(torch.stack(alike, dim=1) / (samples * prompts**2))
    return torch.cat(parts, dim=2), torch.cat(unseen, dim=2)


def draws(prompts: int, size: int, resamples: int, generator: torch.Generator) -> Tensor:
    """How often each prompt is drawn when `size` are, as shares: (R, P)."""
    drawn_rp = torch.randint(prompts, (resamples, size), generator=generator)
    return (
        torch.zeros(resamples, prompts, dtype=torch.float64).scatter_add_(1, drawn_rp, torch.ones_like(drawn_rp).double())
        / size
    )


def intervals(
    gap_pb: Tensor, unseen_jb: Tensor, side_b: Tensor, share_rp: Tensor, fewer_rp: Tensor
) -> Iterator[tuple[float, float]]:
    """The interval of each of `METHODS` from one trial."""
    prompts, tail = len(gap_pb), (1 - LEVEL) / 2
    gap_b, gap_rb = gap_pb.mean(dim=0), share_rp @ gap_pb

    def size(some_rb: Tensor) -> Tensor:
        return (side_b * some_rb.abs()).sum(dim=-1)

    value, value_r = float(size(gap_b)), size(gap_rb)
    low, high = (float(value_r.quantile(q)) for q in (tail, 1 - tail))
    yield low, high
    yield 2 * value - high, 2 * value - low
    yield _bca(value, value_r, size((prompts * gap_b - gap_pb) / (prompts - 1)), tail)
    normal = torch.distributions.Normal(0.0, 1.0)
    middle, half = 2 * value - float(value_r.mean()), float(normal.icdf(torch.tensor(1 - tail)) * value_r.std())
    yield middle - half, middle + half
    root_r = math.sqrt(round(prompts ** (2 / 3)) / prompts) * (size(fewer_rp @ gap_pb) - value)
    yield value - float(root_r.quantile(1 - tail)), value - float(root_r.quantile(tail))
    yield bounds(gap_b, gap_rb - gap_b, unseen_jb, side_b, count=prompts, level=LEVEL, seed=0)


def _bca(value: float, value_r: Tensor, left_out_p: Tensor, tail: float) -> tuple[float, float]:
    """Efron's interval, corrected for bias and skew."""
    normal, least = torch.distributions.Normal(0.0, 1.0), 1 / len(value_r)
    shift = normal.icdf((value_r < value).double().mean().clamp(least, 1 - least))
    skew_p = left_out_p.mean() - left_out_p
    skew = (skew_p**3).sum() / (6 * (skew_p**2).sum() ** 1.5).clamp(min=1e-300)

    def bound(q: float) -> float:
        wide = shift + normal.icdf(torch.tensor(q, dtype=torch.float64))
        return float(value_r.quantile(normal.cdf(shift + wide / (1 - skew * wide)).clamp(0, 1)))

    return bound(tail), bound(1 - tail)


@dataclass(frozen=True)
class Cell:
    """One cell of the grid: where it is, and how often each method held the truth, and how wide it was."""

    where: dict[str, str | int | float]
    held_m: Tensor
    width_m: Tensor


def cell(
    worlds: list[World], truth: float, where: dict[str, str | int | float], trials: int, resamples: int, seed: int
) -> Cell:
    """Measure one cell; bounds are cut to where the figure can lie."""
    generator = torch.Generator().manual_seed(seed)
    prompts, samples = int(where["prompts"]), int(where["samples"])
    share_rp, fewer_rp = (draws(prompts, m, resamples, generator) for m in (prompts, round(prompts ** (2 / 3))))
    side_b = torch.cat(
        [torch.full((BINS,), side, dtype=torch.float64) for side, _ in zip((1.0, -1.0), worlds, strict=False)]
    )
    hits, width = torch.zeros(len(METHODS)), torch.zeros(len(METHODS))
    least = 0.0 if len(worlds) == 1 else -1.0
    for gap_pb, unseen_jb in zip(*gaps_of(worlds, prompts, samples, trials, generator), strict=True):
        for m, (low, high) in enumerate(intervals(gap_pb, unseen_jb, side_b, share_rp, fewer_rp)):
            low, high = min(max(low, least), 1.0), min(max(high, least), 1.0)
            hits[m] += low - 1e-9 <= truth <= high + 1e-9
            width[m] += high - low
    return Cell(where, hits / trials, width / trials)


def single(trials: int, resamples: int, seed: int) -> Iterator[Cell]:
    """The grid for one ECE."""
    for prompts in PROMPTS:
        for samples in SAMPLES:
            for says in ("atoms", "beta", "nearly constant"):
                for truth in TRUTHS:
                    for misses in ("over", "by turns", "one bin") if truth else ("over",):
                        one = world(says, misses, truth)
                        if one is not None:
                            where = {"prompts": prompts, "samples": samples, "says": says, "ECE": truth, "misses": misses}
                            yield cell([one], truth, where, trials, resamples, seed)


def certain_cells() -> Iterator[tuple[float, dict[str, str | int | float]]]:
    """How many prompts and samples, and how alike the samples are; of samples that all agree the number does not matter."""
    for prompts in PROMPTS:
        for samples, within, alike in ((4, 1.0, ", all agree"), (4, WITHIN, ""), (16, WITHIN, "")):
            yield within, {"prompts": prompts, "samples": samples, "alike": alike}


def single_certain(trials: int, resamples: int, seed: int) -> Iterator[Cell]:
    """The grid for one ECE of nearly certain policies."""
    for within, where in certain_cells():
        for says in CERTAIN:
            one = certain(says, within)
            there = where | {"says": says, "ECE": f"{one.ece:.3g}"}
            yield cell([one], one.ece, there, trials, resamples, seed)


def paired_certain(trials: int, resamples: int, seed: int) -> Iterator[Cell]:
    """The grid for the difference of two nearly certain runs."""
    for within, where in certain_cells():
        for a, b in CERTAIN_PAIRS:
            left, right = certain(a, within), certain(b, within)
            there = where | {"says": f"{a} - {b}", "ECE": f"{left.ece:.3g} - {right.ece:.3g}"}
            yield cell([left, right], left.ece - right.ece, there, trials, resamples, seed)


def paired(trials: int, resamples: int, seed: int) -> Iterator[Cell]:
    """The grid for the difference of two: ECE `a` minus ECE `b`, of runs that claim alike or differently."""
    for prompts in PROMPTS:
        for samples in SAMPLES:
            for says, other in (("atoms", "atoms"), ("atoms", "nearly constant"), ("beta", "atoms")):
                for a, b in ((0.0, 0.0), (0.03, 0.03), (0.1, 0.03), (0.03, 0.1), (0.2, 0.1), (0.1, 0.1)):
                    worlds = [world(says, "over", a), world(other, "over", b)]
                    where = {"prompts": prompts, "samples": samples, "says": f"{says} - {other}", "ECE": f"{a} - {b}"}
                    yield cell([one for one in worlds if one is not None], a - b, where, trials, resamples, seed)


def table(cells: list[Cell], by: Callable[[Cell], str]) -> str:
    """Per row the mean and the least coverage of each method, and its mean width."""
    rows = dict.fromkeys(by(one) for one in cells)
    lines = ["| | " + " | ".join(METHODS) + " |", "|---|" + "---|" * len(METHODS)]
    for row in rows:
        some = [one for one in cells if by(one) == row]
        hits, width = torch.stack([one.held_m for one in some]), torch.stack([one.width_m for one in some])
        columns = zip(hits.mean(0).tolist(), hits.amin(0).tolist(), width.mean(0).tolist(), strict=True)
        lines.append(
            f"| {row} | " + " | ".join(f"{mean:.2f} ({least:.2f}), {wide:.2f}" for mean, least, wide in columns) + " |"
        )
    return "\n".join(lines).replace("0.", ".").replace("1.00", "1")


def true_figures(says_v3: Tensor) -> dict[str, float]:
    """The figures of a policy, by hand; without wrong answers there is no AUROC."""
    q_v, share_v, right_v = says_v3.T
    mean = (share_v * q_v).sum()
    right_v, wrong_v = share_v * right_v, share_v * (1 - right_v)
    above_vv = (q_v[:, None] > q_v).double() + (q_v[:, None] == q_v).double() / 2
    return {
        "accuracy": float(right_v.sum()),
        "brier": float((right_v * (1 - q_v) ** 2 + wrong_v * q_v**2).sum()),
        "mean_confidence": float(mean),
        "sharpness": float((share_v * (q_v - mean) ** 2).sum()),
        "auroc": float(right_v @ above_vv @ wrong_v / (right_v.sum() * wrong_v.sum())),
    }


def bounds_of(
    q_xpk: Tensor, right_xpk: Tensor, says_v3: Tensor, resamples: int, seed: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """The bounds of `unseen_interval` in every trial; those of the AUROC are NaN where a kind of answer is missing."""
    prompts, samples = q_xpk.shape[1:]
    (seen_pr, last_r), (first_pr, end_2r) = (
        torch.cat(list(draw_weights(prompts + more, (prompts + more) * samples, resamples, seed, smooth=True))).T.split(
            [prompts, more]
        )
        for more in (1, 2)
    )

    def mean(value_xpk: Tensor, end_x1: Tensor | float) -> Tensor:
        return (value_xpk.mean(dim=2) @ seen_pr + end_x1 * last_r) / (seen_pr.sum(dim=0) + last_r)

    def variance(end_x1: Tensor) -> Tensor:
        return mean(q_xpk.square(), end_x1.square()) - mean(q_xpk, end_x1).square()

    said_v = torch.cat([says_v3[:, 0], torch.tensor([0.0, 1.0], dtype=torch.float64)]).unique()
    one_hot_xpkv = (q_xpk[..., None] == said_v).double()
    by_kind = {
        kind: torch.einsum("xpkv,pr->xrv", one_hot_xpkv * is_xpk[..., None], first_pr) / samples
        for kind, is_xpk in (("right", right_xpk), ("wrong", 1 - right_xpk))
    }

    def auroc(right_2v: Tensor, wrong_2v: Tensor) -> Tensor:
        right_xrv, wrong_xrv = by_kind["right"] + end_2r.T @ right_2v, by_kind["wrong"] + end_2r.T @ wrong_2v
        below_xrv = wrong_xrv.cumsum(dim=2) - wrong_xrv / 2
        return (right_xrv * below_xrv).sum(dim=2) / (right_xrv.sum(dim=2) * wrong_xrv.sum(dim=2))

    lowest, highest = (torch.nn.functional.one_hot(torch.tensor(v), len(said_v)).double() for v in (0, len(said_v) - 1))
    none, middle_x1 = torch.zeros(len(said_v), dtype=torch.float64), q_xpk.mean(dim=(1, 2))[:, None]
    draws = {
        "accuracy": [mean(right_xpk, end) for end in (0.0, 1.0)],
        "brier": [mean((q_xpk - right_xpk).square(), end) for end in (0.0, 1.0)],
        "mean_confidence": [mean(q_xpk, end) for end in (0.0, 1.0)],
        "sharpness": [variance(middle_x1), variance((middle_x1 < 0.5).double())],
        "auroc": [
            auroc(torch.stack([none, lowest]), torch.stack([highest, none])),
            auroc(torch.stack([highest, none]), torch.stack([none, lowest])),
        ],
    }
    tail = (1 - LEVEL) / 2
    bounds = {
        name: (low_xr.quantile(tail, dim=1), high_xr.quantile(1 - tail, dim=1)) for name, (low_xr, high_xr) in draws.items()
    }
    both_x = (right_xpk.amin(dim=(1, 2)) == 0) & (right_xpk.amax(dim=(1, 2)) == 1)
    return bounds | {"auroc": tuple(torch.where(both_x, bound_x, torch.nan) for bound_x in bounds["auroc"])}


def compare_first(
    found: dict[str, tuple[Tensor, Tensor]], q_n: Tensor, right_n: Tensor, ids: Tensor, **options: int
) -> None:
    """Refuse bounds of the first trial that are not those of `spanwise`."""
    for name, figure in build_figures(q_n, right_n, right_n > 0, None).items():
        either = name == "sharpness" and abs(float(q_n.mean()) - 0.5) < 1e-9  # rounding says which end is the far one
        if name not in FIGURES or figure is None or either or bool(found[name][0][0].isnan()):
            continue
        ours, theirs = (
            [float(bound_x[0]) for bound_x in found[name]],
            unseen_interval(*figure[:2], figure.ends, ids, **options),
        )
        if not all(math.isclose(a, b, abs_tol=1e-9) for a, b in zip(ours, (theirs.low, theirs.high), strict=True)):
            raise AssertionError(f"{name}: {ours} here, {theirs} in spanwise")


def other_figures(trials: int, resamples: int, seed: int) -> Iterator[tuple[dict[str, str | int | float], Tensor, Tensor]]:
    """By cell of the grid and figure: how often the interval held, and how wide it was, over the trials that have the figure."""
    cells = count(seed * 1000)  # each has draws of its own
    for prompts in FEW_PROMPTS:
        for samples in (1, 4):  # one stands for any number of completions that agree
            for p in RIGHT:
                for policy, says in POLICIES.items():
                    says_v3 = torch.tensor(says(p), dtype=torch.float64)
                    truth, cell_seed = true_figures(says_v3), next(cells)
                    generator = torch.Generator().manual_seed(cell_seed)
                    v_n = torch.multinomial(says_v3[:, 1], trials * prompts * samples, replacement=True, generator=generator)
                    q_xpk, _, chance_xpk = says_v3[v_n].reshape(trials, prompts, samples, 3).unbind(dim=3)
                    right_xpk = (torch.rand(q_xpk.shape, generator=generator, dtype=torch.float64) < chance_xpk).double()
                    bounds = bounds_of(q_xpk, right_xpk, says_v3, resamples, cell_seed)
                    ids = torch.arange(prompts).repeat_interleave(samples)
                    compare_first(
                        bounds, q_xpk[0].flatten(), right_xpk[0].flatten(), ids, resamples=resamples, seed=cell_seed
                    )
                    hits, width = [], []
                    for name in FIGURES:
                        low_x, high_x = (bound_x[~bound_x.isnan()] for bound_x in bounds[name])
                        inside_x = (low_x - 1e-9 <= truth[name]) & (truth[name] <= high_x + 1e-9)
                        hits.append(inside_x.double().mean())
                        width.append((high_x - low_x).mean())
                    where = {"prompts": prompts, "agree": "all agree" if samples == 1 else "x 4 independent", "right": p}
                    yield {**where, "says": policy}, torch.stack(hits), torch.stack(width)


def figure_table(cells: list[tuple[dict[str, str | int | float], Tensor, Tensor]], by: str) -> str:
    """Per row the mean and the least coverage of each figure, and its mean width."""
    lines = ["| | " + " | ".join(name.replace("_", " ") for name in FIGURES) + " |", "|---|" + "---|" * len(FIGURES)]
    for row in dict.fromkeys(by.format(**where) for where, *_ in cells):
        some = [(hits, width) for where, hits, width in cells if by.format(**where) == row]
        hits, width = (torch.stack(parts) for parts in zip(*some, strict=True))
        least = hits.nan_to_num(nan=1.0).amin(0).tolist()
        entries = zip(hits.nanmean(0).tolist(), least, width.nanmean(0).tolist(), strict=True)
        lines.append(f"| {row} | " + " | ".join(f"{mean:.2f} ({low:.2f}), {wide:.2f}" for mean, low, wide in entries) + " |")
    return "\n".join(lines).replace("0.", ".").replace("1.00", "1")


def print_figures(trials: int, resamples: int, seed: int, *, every: bool) -> None:
    """Print the tables of the other figures."""
    cells = []
    for where, hits, width in other_figures(trials, resamples, seed):
        cells.append((where, hits, width))
        if every:
            entries = zip(FIGURES, hits.tolist(), width.tolist(), strict=True)
            print(*where.values(), *(f"{name} {share:.3f} ({wide:.3f})" for name, share, wide in entries), flush=True)
    print(f"\nOther figures: mean (least) coverage, mean width; {trials} trials in each of {len(cells)} cells\n")
    for by in ("{prompts} prompts, {agree}", "right {right}", "{says}"):
        print(figure_table(cells, by), end="\n\n", flush=True)


def main() -> None:
    """Print the tables; with --cells every cell as well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cells", action="store_true")
    parser.add_argument("--figures", action="store_true", help="accuracy, Brier, mean confidence, sharpness, AUROC alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_figures(options.trials, options.resamples, options.seed, every=options.cells)
    if options.figures:
        return
    grids = {
        "ECE": single,
        "ECE, nearly certain": single_certain,
        "Difference of two ECEs, the same prompts": paired,
        "Difference of two ECEs, nearly certain": paired_certain,
    }
    for title, grid in grids.items():
        cells = []
        for one in grid(options.trials, options.resamples, options.seed):
            cells.append(one)
            if options.cells:
                shares = "  ".join(
                    f"{n} {h:.3f} ({w:.3f})" for n, h, w in zip(METHODS, one.held_m, one.width_m, strict=True)
                )
                print(" ".join(f"{name} {value}," for name, value in one.where.items()), shares, flush=True)
        print(f"\n{title}: mean (least) coverage, mean width; {options.trials} trials in each of {len(cells)} cells\n")
        print(
            table(cells, by=lambda one: "{prompts} prompts x {samples}{alike}".format(**{"alike": ""} | one.where)),
            flush=True,
        )
        print()
        print(table(cells, by=lambda one: f"{one.where['says']}, true {one.where['ECE']}"), flush=True)


if __name__ == "__main__":
    main()
