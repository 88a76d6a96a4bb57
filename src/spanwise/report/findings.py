"""The sentence at the top of a page: what was found, from the numbers, and never calmer than they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spanwise.explain import CALIBRATION, SCORE_FIGURES, alarms
from spanwise.explain.alarms import by_sentence
from spanwise.measure import ArmComparison, Difference, Interval
from spanwise.report.rows import figure, figure_name, percent
from spanwise.rollouts.schema import STOP

Lines = Sequence[Mapping[str, Any]]
#: Of these less is better; of accuracies, votes and the AUROC more is; of the others nothing can be said.
LOWER = ("ece", "brier", "refusal_rate", "malformed", "laser_ece", "laser_brier")
HIGHER = ("accuracy", "auroc", "coverage", "format_rate", "verdict_rate", "laser_auroc", "laser_coverage")


def train_finding(
    points: Lines,
    *,
    steps: int,
    intervals: Mapping[str, Interval | None] | None = None,
    unmeasured: Mapping[str, str] | None = None,
    rewards: Mapping[str, Sequence[float | None]] | None = None,
) -> str:
    """What a run ended at, and what it was before; `steps` were trained, and rewards are said where accuracy cannot be measured."""
    intervals, unmeasured = intervals or {}, unmeasured or {}
    earned = _of_rewards(rewards or {})
    if not points:
        return f"{_count(steps, 'step')} trained, nothing evaluated: whether it learned is not known.{earned}"
    last, first = points[-1], points[0] if len(points) > 1 else {}
    wrong = alarms({name: last[name] for name in last if name not in unmeasured})
    after = f"After {_count(last['step'], 'step')}" if last["step"] else "Before any training"
    if "accuracy" in unmeasured:
        return f"{after} accuracy cannot be measured: {unmeasured['accuracy']}.{earned}"
    parts = [_moved("accuracy", last, first, intervals.get("accuracy"))]
    if (refused := figure(last, "refusal_rate")) is not None:
        parts.append(f"the refusal rate {percent(refused)}")
    said = f"{after} {' and '.join(parts)}"
    if "ece" in wrong:
        said += ". Its ECE means nothing"
    elif (ece := figure(last, "ece")) is not None and "ece" not in unmeasured:
        said += f"; ECE is {ece:.3f}"
    elif "ece" not in unmeasured:
        said += "; ECE was not measured"
    causes = dict.fromkeys(wrong.values())
    alarm = f"Alarm: {' and '.join(causes)}. " if causes else ""
    alone = "" if len(points) > 1 else " There is no other evaluation to compare it with."
    return f"{alarm}{said}.{alone} This is one seed."


def _moved(name: str, last: Mapping[str, Any], first: Mapping[str, Any], interval: Interval | None) -> str:
    """A share at the end, with its interval, and what it was; "no clear change" where the interval holds that."""
    value, before = figure(last, name), figure(first, name)
    if value is None:
        return f"{figure_name(name)} was not measured"
    low, high = (math.nan, math.nan) if interval is None else (interval.low, interval.high)
    bounds = f" [{percent(low)}, {percent(high)}]" if low == low else ""
    was = "" if before is None else f" (was {percent(before)}{': no clear change' if low <= before <= high else ''})"
    return f"{figure_name(name)} is {percent(value)}{bounds}{was}"


def _of_rewards(rewards: Mapping[str, Sequence[float | None]]) -> str:
    """Mean rewards of the training batches, from the first to the last."""
    said = [
        f"{name} {means[-1]:.3f}" + (f" (was {means[0]:.3f})" if len(means) > 1 else "")
        for name, means in rewards.items()
        if means[-1] is not None
    ]
    return f" Mean rewards in the last batch: {', '.join(said)}." if said else ""


def compare_finding(comparison: ArmComparison) -> str:
    """Which arm is better in what by how much, which differences are noise, and what must not be read at all."""
    figures = [name for name in ("accuracy", "ece") if name in comparison.figures] or list(comparison.figures[:2])
    failed = [
        f"Alarm for {' and '.join(dict.fromkeys(arm for arm, _ in cells))}: {why}."
        for why, cells in by_sentence(comparison.wrong).items()
    ]
    return " ".join(filter(None, [*failed, *(_of_figure(comparison, name) for name in figures)])) or "Nothing was compared."


def _of_figure(comparison: ArmComparison, name: str) -> str:
    """What is clear in one figure, with the better arm first; else what comes nearest to it."""
    differences = [d for d in comparison.differences if d.figure == name]
    solid, called = [d for d in differences if not _hollow(comparison, d)], figure_name(name)
    clear = sorted((d for d in solid if d.verdict == "clear"), key=lambda d: -abs(d.interval.value))
    said = [_better(d) for d in clear[:2]]
    if len(clear) > 2:
        said.append(f"{len(clear) - 2} more differences in {called} are beyond the noise.")
    if len(solid) < len(differences):
        arms = dict.fromkeys(arm for d in differences for arm in (d.a, d.b) if (arm, name) in comparison.wrong)
        said.append(f"The {called} of {' and '.join(arms)} means nothing.")
    if solid and not clear:
        nearest = [d for d in solid if d.verdict == "borderline"][:2]
        if len(solid) == 1 or {d.verdict for d in solid} in ({"unknown"}, {"same"}):
            nearest = [max(solid, key=lambda d: d.interval.count)]
        said += [d.sentence() for d in nearest] or [f"In {called} all differences are inside the noise."]
    return " ".join(said)


def _hollow(comparison: ArmComparison, d: Difference) -> bool:
    """The figure of an arm means nothing; but that its accuracy is low is the finding, unless nobody could judge it."""
    why = [comparison.wrong[arm, d.figure] for arm in (d.a, d.b) if (arm, d.figure) in comparison.wrong]
    return any(d.figure in (*CALIBRATION, *SCORE_FIGURES) or said.startswith("most answers could not") for said in why)


def _better(d: Difference) -> str:
    """A clear difference, with the better arm first; where neither way is good, the higher one."""
    lower = d.figure in LOWER
    good = lower or d.figure in HIGHER or d.figure.endswith("_accuracy") or "@" in d.figure
    first, second = (d.a, d.b) if (d.interval.value > 0) != lower else (d.b, d.a)
    sides = sorted((abs(d.interval.low), abs(d.interval.high)))
    size = f"{abs(d.interval.value):.3f}" + (f" [{sides[0]:.3f}, {sides[1]:.3f}]" if sides[0] == sides[0] else "")
    word = "better" if good else "higher"
    return f"{first} is {word} than {second} in {figure_name(d.figure)} by {size} over {d.interval.count} seeds."


def credit_finding(credit: Mapping[str, Mapping[str, Tensor]], left: str, right: str) -> str:
    """In how many completions two methods push some block in opposite directions, and in which block most.

    `left` and `right` are equal where there is one. A method with one number for the completion says it of every block.
    """
    ours = {name: column_n for name, column_n in credit.get(right, {}).items() if name != STOP}
    theirs = {name: column_n for name, column_n in credit.get(left, {}).items() if name != STOP}
    if not ours or not theirs:
        return ""
    count = len(next(iter(ours.values())))
    if left == right:
        moved_n = torch.stack([column_n.nan_to_num() != 0 for column_n in credit[right].values()]).any(dim=0)
        moved = int(moved_n.sum())
        alarm = "" if moved else "Alarm: nothing would be learned. "
        return f"{alarm}{right} gives credit to {moved:,} of {count:,} completions."
    whole = next(iter(theirs.values())) if len(theirs) == 1 else None
    pairs = {name: (theirs.get(name, whole), column_n) for name, column_n in ours.items()}
    against = {name: them * us < 0 for name, (them, us) in pairs.items() if them is not None}  # never where one is NaN
    if not against:
        return ""
    opposed = int(torch.stack(list(against.values())).any(dim=0).sum())
    if not opposed:
        return f"{left} and {right} push in opposite directions in none of {count:,} completions."
    most = max(against, key=lambda name: int(against[name].sum()))
    where = f", most often in the block {most} ({int(against[most].sum()):,})" if len(against) > 1 else ""
    said = f"{opposed:,} of {count:,} completions ({percent(opposed / count)})"
    return f"{left} and {right} push in opposite directions in {said}{where}."


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
