"""The report of one training run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from spanwise.credit import METHODS
from spanwise.explain import CAUSES, LASER, alarms, batch_alarms, critic_alarms
from spanwise.measure import Curve, Interval, figure_intervals
from spanwise.report.batches import BATCH, HELD_OUT, batch_sections, figure_panel, optimiser_section
from spanwise.report.critic import critic_headlines, critic_section
from spanwise.report.findings import train_finding
from spanwise.report.page import Headline, Panel, Section, render, shown
from spanwise.report.rows import (
    batch_curve,
    figure,
    figure_name,
    figures_of,
    is_share,
    percent,
    seed_curves,
)
from spanwise.report.sections import (
    VOTES_BY_SCORE,
    attempts_section,
    calibration_section,
    credit_section,
    scores_alone,
    tokens_section,
    voting_section,
)
from spanwise.report.view import TokenView

Lines = Sequence[Mapping[str, Any]]


def train_report(
    *,
    recipe: Mapping[str, Any],
    metrics: Lines,
    summary: Mapping[str, Any],
    samples: Mapping[str, Tensor] | None = None,
    votes: Mapping[str, Mapping[str, Curve]] | None = None,
    credit: Mapping[str, Mapping[str, Tensor]] | None = None,
    view: TokenView | None = None,
    unmeasured: Mapping[str, str] | None = None,
    command: str = "",
) -> str:
    """Write the report of a training run, finished or not, as one HTML file.

    Args:
        recipe: as it was resolved.
        metrics: the lines of `metrics.jsonl`: training batches, and evaluations under `evaluation` and `final`.
        summary: what `summary.json` holds; empty while the run goes on.
        samples: of the final evaluation, one entry per completion: `confidence` and `correct` (NaN where there is none); with
            `prompt`, `well_formed` (and `refusal`) the headline has intervals. `score`: the clipped self-rewarding score, if there
            is one.
        votes: block -> curves of `measure.voting` of its answers, over the same completions; the first attempt comes first.
        credit: method -> block -> credit of each completion of the view (n,), NaN where it has no such block, and `stop` as
            `with_stop` gives it. The first method is the one that was trained with.
        view: completions for the token view, under the same methods.
        unmeasured: figures that this run cannot have, and why; the mean rewards take their place.
        command: how to train it again.

    Edge cases:
        What is not there is left out; a figure of the headline that could be there and is not is shown as "not measured".

    Example:
        >>> page = train_report(recipe={"method": "bae"}, metrics=[{"step": 0, "evaluation": {"accuracy": 0.5}}], summary={})
        >>> "not measured" in page
        True
    """
    batches = [line for line in metrics if "evaluation" not in line and "final" not in line]
    points = [{"step": line["step"], **line[kind]} for line in metrics for kind in ("evaluation", "final") if kind in line]
    attempts = list((votes or {}).items())
    sections = [
        Section(
            "Learning",
            "Calibration never stands alone: a policy that refuses everything, or always says one number, can have a beautiful "
            "ECE.",
            legend=(HELD_OUT, BATCH),
            panels=[panel for name in figures_of(points) if (panel := _figure_panel(name, points, batches))],
            asks="Did it learn? Did it collapse?",
        ),
        calibration_section({"": samples} if samples else {}),
        voting_section(
            dict(attempts if len(attempts) > 1 else [("", ways) for _, ways in attempts]),
            note=VOTES_BY_SCORE if samples and scores_alone(samples) else "",
        ),
        attempts_section(votes or {}),
        *batch_sections(batches, recipe),
        critic_section(batches),
        credit_section(list(credit or {}), credit or {}, of=f"these rollouts{_of_step(view)}"),
        optimiser_section(batches),
        tokens_section(view, note=_not_trained(view)),
    ]
    return render(
        title=f"Training {recipe.get('method', 'run')}" + (f" with {name}" if (name := _baseline(recipe)) else ""),
        lead=_lead(recipe, summary, _done(batches, points)),
        finding=train_finding(
            points,
            steps=_done(batches, points),
            intervals=_intervals(samples or {}),
            unmeasured=unmeasured or {},
            rewards={name: (means[0] if len(means) > 1 else None, means[-1]) for name, means in _rewards(batches).items()},
        ),
        command=command,
        warnings=[
            *_unfinished(recipe, summary, metrics, _done(batches, points), again=bool(command)),
            *_warnings(points, unmeasured or {}),
            *batch_alarms(batches),
            *critic_alarms(batches).values(),
        ],
        notes=unmeasured_sentences(unmeasured or {}),
        headlines=[
            *_headlines(points, samples, unmeasured or {}),
            *(_reward_headlines(batches) if unmeasured else []),
            *critic_headlines(batches),
        ],
        sections=sections,
        recipe=recipe,
    )


def _of_step(view: TokenView | None) -> str:
    steps = sorted({row.step for row in view.completions if row.step is not None}) if view else []
    return f", of step {steps[0]}" if len(steps) == 1 else ""


def _not_trained(view: TokenView | None) -> str:
    """Which methods of the view the run was not trained with."""
    trained, *others = view.methods if view else ("",)
    if not others:
        return ""
    return f"The run was trained with {trained}; beside it is what {' and '.join(others)} would have credited the same tokens with."


def _warnings(points: Lines, unmeasured: Collection[str]) -> list[str]:
    """What is wrong with the last evaluation, and the figures that show it or mean nothing because of it."""
    wrong: dict[str, list[str]] = {}
    last = points[-1] if points else {}
    for name, why in alarms({name: last[name] for name in last if name not in unmeasured}).items():
        wrong.setdefault(why, []).append(figure_name(name))
    return [f"{why[:1].upper()}{why[1:]} ({', '.join(names)}). {CAUSES[why]}" for why, names in wrong.items()]


def unmeasured_sentences(unmeasured: Mapping[str, str]) -> list[str]:
    """A sentence for each reason why figures cannot be measured.

    >>> unmeasured_sentences({"ece": "no confidence", "brier": "no confidence"})
    ['Not measured: ECE, brier; no confidence.']
    """
    names: dict[str, list[str]] = {}
    for name, why in unmeasured.items():
        names.setdefault(why, []).append({"ece": "ECE", "auroc": "AUROC"}.get(name, _spoken(name)))
    return [f"Not measured: {', '.join(listed)}; {why}." for why, listed in names.items()]


def _spoken(name: str) -> str:
    return figure_name(name) if name.startswith(LASER) else name.replace("_", " ")


def _baseline(recipe: Mapping[str, Any]) -> str:
    method = METHODS.get(str(recipe.get("method")))
    if method is not None and "baseline" not in method.inputs:
        return ""
    named = [entry.get("baseline") for entry in recipe.get("objectives") or ()]
    name = next((name for name in reversed(named) if name), None)
    return f"the {name} baseline" if name and name != "none" else ""


def _done(batches: Lines, points: Lines) -> int:
    """The last step that anything is known of."""
    return max((line["step"] for line in (*batches, *points)), default=0)


def _unfinished(
    recipe: Mapping[str, Any], summary: Mapping[str, Any], metrics: Lines, done: int, *, again: bool
) -> list[str]:
    """A run that was stopped, or still goes on: nothing on the page is its end; a command goes on with it, or only its script."""
    asked = recipe.get("steps")
    if summary or any("final" in line for line in metrics) or asked is None or done >= asked:
        return []
    on = " spanwise train --resume FOLDER goes on from its last checkpoint." if again else ""
    return [f"The run is not finished: {done} of {asked} steps are recorded. It was stopped, or it still goes on.{on}"]


def _lead(recipe: Mapping[str, Any], summary: Mapping[str, Any], done: int) -> str:
    asked = recipe.get("steps")
    steps = f"{done} steps" if asked in (None, done) else f"{done} of {asked} steps"
    size = f" of {recipe['prompts']} prompts x {recipe['group_size']} completions" if recipe.get("group_size") else ""
    task = f" on {recipe.get('model') or recipe.get('task')}" if recipe.get("task") else ""
    seconds = f", in {summary['seconds']:,.0f} s" if summary.get("seconds") else ""
    own = summary.get("spanwise_share")
    share = f"; segmenting, scoring and crediting took {percent(own)} of the steps" if own else ""
    return f"{steps}{size}{task}, seed {recipe.get('seed', 'unknown')}{seconds}{share}."


def _rewards(batches: Lines) -> dict[str, list[float | None]]:
    """Objective -> its mean reward in each training batch that has one; [None] where none has."""
    keys = dict.fromkeys(key for line in batches for key in line if key.startswith("rewards/") and key.endswith("/mean"))
    return {
        key.split("/")[1]: [value for line in batches if (value := figure(line, key)) is not None] or [None] for key in keys
    }


def _reward_headlines(batches: Lines) -> list[Headline]:
    """Mean rewards of the last training batch, with what they were in the first."""
    return [
        Headline(f"mean reward: {name}", means[-1], f"{shown(means[0])} in the first batch" if len(means) > 1 else "")
        for name, means in _rewards(batches).items()
    ]


def _headlines(points: Lines, samples: Mapping[str, Tensor] | None, unmeasured: Mapping[str, str]) -> list[Headline]:
    last, start = (points[-1], points[0]) if points else ({}, {})
    intervals = _intervals(samples or {})
    headlines, wrong = [], alarms(last)
    wrong = {**wrong, **({"malformed": wrong["format_rate"]} if "format_rate" in wrong else {})}
    for name in (
        "accuracy",
        "ece",
        "auroc",
        "brier",
        "laser_ece",
        "laser_auroc",
        "laser_brier",
        "refusal_rate",
        "malformed",
    ):
        optional = name == "refusal_rate" or name.startswith(LASER)
        never = optional and not any(figure(point, name) is not None for point in points) and name not in intervals
        if name in unmeasured or (never and (points or name.startswith(LASER))):  # only the embedded task knows refusals
            continue
        value, before, interval = figure(last, name), figure(start, name), intervals.get(name)
        show = percent if is_share(name) else shown
        value = value if interval is None else interval.value  # the samples may be more than those of the last metrics line
        notes = [f"95 %: {show(interval.low)} to {show(interval.high)}"] if interval and interval.low == interval.low else []
        notes += [f"{show(before)} at the start"] if before is not None and len(points) > 1 else []
        headlines.append(
            Headline(figure_name(name), None if value is None else show(value), "\n".join(notes), wrong.get(name, ""))
        )
    return headlines


def _intervals(samples: Mapping[str, Tensor]) -> dict[str, Interval | None]:
    """The figures of the samples, by what they state and, as `laser_<figure>`, by their score."""
    if not {"prompt", "well_formed"} <= samples.keys():
        return {}
    intervals: dict[str, Interval | None] = {}
    for kind, prefix in (("score", LASER), ("confidence", "")):
        if kind in samples:
            by_kind = figure_intervals(
                samples[kind], samples["correct"], prompts=samples["prompt"], well_formed_n=samples["well_formed"],
                refusal_n=samples.get("refusal"),
            )  # fmt: skip
            intervals |= {f"{prefix}{name}": interval for name, interval in by_kind.items()}
    return intervals


def _figure_panel(name: str, points: Lines, batches: Lines) -> Panel | None:
    held_out = seed_curves({0: points}, name, HELD_OUT)
    batch = batch_curve(batches, name, BATCH)
    rows = [{key: row[key] for key in ("series", "x", "value")} for row in (*batch, *held_out)]
    if not rows:
        return None
    return figure_panel(
        figure_name(name), rows, (HELD_OUT, BATCH), share=is_share(name), zero=name.removeprefix(LASER) in _FROM_ZERO
    )


_FROM_ZERO = ("refusal_rate", "malformed", "coverage", "ece", "brier", "sharpness")
