"""Write the report of a training run: evaluations, training batches, and sections of its modes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from torch import Tensor

from spanwise.credit import METHODS
from spanwise.explain import alarms
from spanwise.explain.alarms import CAUSES, OF_REWARD, OF_SCORE, batch_alarms, by_sentence, end_alarms, values_of
from spanwise.layout import any_index, together
from spanwise.measure import Curve, Interval
from spanwise.measure.intervals import bounds_text
from spanwise.metric import Metric, metrics_in
from spanwise.mode import Chart, Mode, Page
from spanwise.modes import MODES
from spanwise.report import sections as parts
from spanwise.report.page import ABSENT, Headline, Panel, Section, render, shown
from spanwise.report.sections import Row, batch_curve, figure, figure_name, figures_of, is_share, percent, seed_curves
from spanwise.report.tokens import TokenView
from spanwise.report.words import SECTIONS

Lines = Sequence[Mapping[str, Any]]
_HELD_OUT, _TRAINING = "held-out prompts", "training batches"
_HEADLINE_FIGURES = (
    "accuracy", "ece", "auroc", "brier", "laser_ece", "laser_auroc", "laser_brier", "refusal_rate", "malformed",
)  # fmt: skip
_AXIS_FROM_ZERO = ("refusal_rate", "malformed", "coverage", "ece", "brier", "sharpness")


def train_report(
    *,
    recipe: Mapping[str, Any],
    metrics: Lines,
    summary: Mapping[str, Any],
    samples: Mapping[str, Tensor] | None = None,
    intervals: Mapping[str, Interval | None] | None = None,
    votes: Mapping[str, Mapping[str, Curve]] | None = None,
    credit: Mapping[str, Mapping[str, Tensor]] | None = None,
    view: TokenView | None = None,
    one_prompt: TokenView | None = None,
    unmeasured: Mapping[str, str] | None = None,
    command: str = "",
) -> str:
    """Write the report of a training run, finished or not, as one HTML file.

    Args:
        recipe: as it was resolved.
        metrics: the lines of `metrics.jsonl`: training batches, and evaluations under `evaluation` and `final`.
        summary: what `summary.json` holds; empty while the run goes on.
        samples: of the final evaluation, one entry per completion: `confidence` and `correct` (NaN where there is none), `prompt`;
            `score`: the clipped self-rewarding score, if there is one.
        intervals: of the figures of the final evaluation; their values go before those of `metrics`.
        votes: block -> curves of `measure.voting` of its answers, over the same completions; the first attempt comes first.
        credit: method -> block -> credit of each completion of the view (n,), NaN where it has no such block, and `stop`,
            NaN where it is 0. The first method is the one that was trained with.
        view: completions for the token view, under the same methods.
        one_prompt: completions of one prompt at several steps.
        unmeasured: figures that this run cannot have, and why; the mean rewards take their place.
        command: how to train it again.

    Edge cases:
        What is not there is left out; a figure of the headline that could be there and is not is shown as "not measured".

    Example:
        >>> page = train_report(recipe={"method": "bae"}, metrics=[{"step": 0, "evaluation": {"accuracy": 0.5}}], summary={})
        >>> "not measured" in page
        True
    """
    unmeasured = unmeasured or {}
    intervals = intervals or {}
    votes = votes or {}
    credit = credit or {}
    samples_by_arm = {"": samples} if samples else {}  # the report of a single run needs no name to tell runs apart
    batch_lines = [line for line in metrics if "evaluation" not in line and "final" not in line]
    points = [{"step": line["step"], **line[kind]} for line in metrics for kind in ("evaluation", "final") if kind in line]
    last_step = max((line["step"] for line in (*batch_lines, *points)), default=0)
    objective_names = names_in(batch_lines, "rewards/<objective>/mean")
    # Values with an interval may rest on more samples, so they replace those of the last evaluation.
    interval_values = {name: interval.value for name, interval in intervals.items() if interval is not None}
    last_figures = points[-1] | interval_values if points else {}
    evaluations = [*points[:-1], last_figures] if points else []
    # A run of the user's own script has no held-out prompts. Show its training rewards instead.
    reward_names = dict.fromkeys(name for point in evaluations for name in point if name.startswith(OF_REWARD))
    rewards = {name.removeprefix(OF_REWARD): [figure(point, name) for point in evaluations] for name in reward_names}
    uses_batch_rewards = not rewards
    if uses_batch_rewards:
        rewards = {name: [figure(line, f"rewards/{name}/mean") for line in batch_lines] for name in objective_names}
    reward_headlines = []
    start_text = "in the first batch" if uses_batch_rewards else "at the start"
    for name, means in rewards.items() if unmeasured else ():
        reward_note = _note(intervals.get(OF_REWARD + name), means[0] if len(means) > 1 else None, shown, start_text)
        reward_headlines.append(Headline(f"mean reward: {name}", means[-1], reward_note))
    shown_steps = {row.step for row in view.completions if row.step is not None} if view else set()
    step_note = f", of step {shown_steps.pop()}" if len(shown_steps) == 1 else ""
    tokens_note = ""
    if view and len(view.methods) > 1:
        methods_text = " and ".join(view.methods[1:])
        tokens_note = f"The run was trained with {view.methods[0]}. Compare the credit that {methods_text} would have given."
    alarm_of_figure = alarms({name: value for name, value in last_figures.items() if name not in unmeasured})
    learning_panels: list[Panel] = []
    for name in figures_of(points):
        curves = [*batch_curve(batch_lines, name, _TRAINING), *seed_curves({0: points}, name, _HELD_OUT)]
        starts_at_zero = name.removeprefix(OF_SCORE) in _AXIS_FROM_ZERO
        learning_panels += parts.figure_panel(name, curves, (_HELD_OUT, _TRAINING), dots=(_HELD_OUT,), y_zero=starts_at_zero)
    page_sections = [
        glance_section(batch_lines, objective_names),
        parts.section("Learning", {"seeds": ""}, legend=(_HELD_OUT, _TRAINING), panels=learning_panels),
        parts.calibration_section(samples_by_arm),
        parts.voting_section(votes if len(votes) > 1 else {"": next(iter(votes.values()), {})}, samples_by_arm),
        parts.attempts_section(votes),
        _rewards_section(batch_lines, recipe, objective_names, evaluations, intervals),
        batch_section("Dropped", batch_lines, objective_names),
        _cost_section(batch_lines),
        batch_section("Credit", batch_lines, names_in(batch_lines, "credit/<block>/zero_frac")),
        batch_section("Dead strata", batch_lines, objective_names),
        *mode_sections(batch_lines),
        parts.credit_section(list(credit), credit, of=f"these rollouts{step_note}"),
        batch_section("Optimiser", batch_lines),
        parts.tokens_section(view, note=tokens_note),
        parts.tokens_section(one_prompt, title="One prompt, step by step"),
    ]
    baseline_name = _baseline(recipe)
    return render(
        title=f"Training {recipe.get('method', 'run')}" + (f" with {baseline_name}" if baseline_name else ""),
        lead=_lead(recipe, summary, last_step),
        finding=train_finding(
            evaluations,
            steps=last_step,
            intervals=intervals,
            unmeasured=unmeasured,
            rewards=rewards,
            of_batches=uses_batch_rewards,
        ),
        warnings=[
            *_unfinished(recipe, bool(summary) or any("final" in line for line in metrics), last_step, again=bool(command)),
            *(
                f"{reason[:1].upper()}{reason[1:]}. Do not rely on these figures: {', '.join(map(figure_name, figure_names))}. "
                f"{CAUSES[reason]}"
                for reason, figure_names in by_sentence(alarm_of_figure).items()
            ),
            *batch_alarms(batch_lines),
        ],
        notes=unmeasured_sentences(unmeasured),
        headlines=[
            *_headlines(evaluations, intervals, unmeasured, alarm_of_figure),
            *reward_headlines,
            *mode_headlines(batch_lines),
        ],
        sections=page_sections,
        recipe=recipe,
        command=command,
    )


def unmeasured_sentences(unmeasured: Mapping[str, str]) -> list[str]:
    """Return one sentence for each reason why some evaluation figures cannot be measured."""
    return [f"Not measured: {', '.join(map(_spoken, names))}; {cause}." for cause, names in by_sentence(unmeasured).items()]


def _spoken(name: str) -> str:
    return figure_name(name) if name in ("ece", "auroc") or name.startswith(OF_SCORE) else name.replace("_", " ")


def _baseline(recipe: Mapping[str, Any]) -> str:
    """Name the reward baselines that the objectives of a recipe set. Return "" if none is used."""
    method_entry = METHODS.get(str(recipe.get("method")))
    takes_no_baseline = method_entry is not None and "baseline" not in method_entry.inputs
    objective_baselines = (objective.get("baseline") for objective in recipe.get("objectives") or ())
    used_baselines = [name for name in dict.fromkeys(objective_baselines) if name not in (None, "none")]
    if takes_no_baseline or not used_baselines:
        return ""
    return f"the {' and '.join(used_baselines)} baseline{'s' if len(used_baselines) > 1 else ''}"


def _unfinished(recipe: Mapping[str, Any], ended: bool, done: int, *, again: bool) -> list[str]:
    """Warn that a run has not ended, and say how to resume the run."""
    planned_steps = recipe.get("steps")
    if ended or planned_steps is None or done >= planned_steps:
        return []
    resume_hint = " To resume the run from its last checkpoint: spanwise train --resume FOLDER." if again else ""
    return [
        f"The run is not finished: {done} of {planned_steps} steps are recorded. The run was stopped, or still trains.{resume_hint}"
    ]


def _lead(recipe: Mapping[str, Any], summary: Mapping[str, Any], done: int) -> str:
    """Say in one sentence what a run trained, on which task, and how long it took."""
    planned_steps = recipe.get("steps")
    steps_text = f"{done} steps" if planned_steps in (None, done) else f"{done} of {planned_steps} steps"
    batch_text = f" of {recipe['prompts']} prompts x {recipe['group_size']} completions" if recipe.get("group_size") else ""
    task_text = f" on {recipe.get('model') or recipe.get('task')}" if recipe.get("task") else ""
    duration_text = f", in {summary['seconds']:,.0f} s" if summary.get("seconds") else ""
    spanwise_share = summary.get("spanwise_share")
    share_text = f" Segmenting, scoring and crediting took {percent(spanwise_share)} of training." if spanwise_share else ""
    return f"{steps_text}{batch_text}{task_text}, seed {recipe.get('seed', 'unknown')}{duration_text}.{share_text}"


def _headlines(
    points: Lines,
    intervals: Mapping[str, Interval | None],
    unmeasured: Mapping[str, str],
    alarm_of_figure: Mapping[str, str],
) -> list[Headline]:
    first_point, last_point = (points[0], points[-1]) if points else ({}, {})
    headlines = []
    for name in _HEADLINE_FIGURES:
        is_optional = name == "refusal_rate" or name.startswith(OF_SCORE)  # not every run has refusals or LaSeR scores
        is_measured = intervals.get(name) is not None or any(figure(point, name) is not None for point in points)
        if name in unmeasured or (is_optional and not is_measured and (points or name.startswith(OF_SCORE))):
            continue
        value = figure(last_point, name)
        format_value = percent if is_share(name) else shown
        headline_note = _note(intervals.get(name), figure(first_point, name) if len(points) > 1 else None, format_value)
        alarm = alarm_of_figure.get("format_rate" if name == "malformed" else name, "")
        headlines.append(Headline(figure_name(name), None if value is None else format_value(value), headline_note, alarm))
    return headlines


def _note(interval: Interval | None, before: float | None, show: Callable[[Any], str], began: str = "at the start") -> str:
    """Return the note below a headline number: its 95 % interval, and its value at the start of training."""
    interval_text = bounds_text(interval, show)
    note_lines = [f"95 %: {interval_text}"] if interval_text else []
    return "\n".join(note_lines if before is None else [*note_lines, f"{show(before)} {began}"])


def train_finding(
    points: Lines,
    *,
    steps: int,
    intervals: Mapping[str, Interval | None] | None = None,
    unmeasured: Mapping[str, str] | None = None,
    rewards: Mapping[str, Sequence[float | None]] | None = None,
    of_batches: bool = True,
) -> str:
    """Report a run's last and first accuracy. Report rewards if the run has no evaluation or cannot measure accuracy."""
    intervals = intervals or {}
    unmeasured = unmeasured or {}
    rewards_clause = _of_rewards(rewards or {}, "in the last batch" if of_batches else "on held-out prompts")
    if not points:
        rewards_sentence = f" {rewards_clause[0].upper()}{rewards_clause[1:]}." if rewards_clause else ""
        return f"The policy trained for {_steps(steps)}, but no evaluation shows whether it learned.{rewards_sentence}"
    last_point = points[-1]
    first_point = points[0] if len(points) > 1 else {}
    alarm_of_figure = alarms({name: last_point[name] for name in last_point if name not in unmeasured})
    when_text = f"After {_steps(last_point['step'])}" if last_point["step"] else "Before any training"
    if "accuracy" in unmeasured:
        main_clause = rewards_clause or f"accuracy cannot be measured: {unmeasured['accuracy']}"
        return f"{when_text} {main_clause}."
    accuracy, old_accuracy = figure(last_point, "accuracy"), figure(first_point, "accuracy")
    interval = intervals.get("accuracy")
    accuracy_clause = "accuracy was not measured"
    if accuracy is not None:
        low_bound, high_bound = (math.nan, math.nan) if interval is None else (interval.low, interval.high)
        bounds_note = "" if math.isnan(low_bound) else f" [{percent(low_bound)}, {percent(high_bound)}]"
        no_change_note = ": no clear change" if old_accuracy is not None and low_bound <= old_accuracy <= high_bound else ""
        change_note = "" if old_accuracy is None else f" (was {percent(old_accuracy)}{no_change_note})"
        accuracy_clause = f"accuracy is {percent(accuracy)}{bounds_note}{change_note}"
    refusal_rate = figure(last_point, "refusal_rate")
    refusal_clause = "" if refusal_rate is None else f" and the refusal rate {percent(refusal_rate)}"
    main_sentence = f"{when_text} {accuracy_clause}{refusal_clause}"
    if "ece" in alarm_of_figure:
        main_sentence += ". Its ECE means nothing"
    elif (ece := figure(last_point, "ece")) is not None and "ece" not in unmeasured:
        main_sentence += f"; ECE is {ece:.3f}"
    elif "ece" not in unmeasured:
        main_sentence += "; ECE was not measured"
    alarm_texts = dict.fromkeys(alarm_of_figure.values())
    alarm_sentence = f"Alarm: {' and '.join(alarm_texts)}. " if alarm_texts else ""
    lone_evaluation_note = "" if len(points) > 1 else " There is only one evaluation, so nothing shows a change."
    return f"{alarm_sentence}{main_sentence}.{lone_evaluation_note} The run has only one seed. Other seeds may differ."


def _of_rewards(rewards: Mapping[str, Sequence[float | None]], where: str) -> str:
    """State the mean rewards at the end and at the start. Many rewards are summarised."""
    rewards = {name: means for name, means in rewards.items() if means}
    start_mean_by_reward = {name: means[0] for name, means in rewards.items() if len(means) > 1 and means[0] is not None}
    end_mean_by_reward = {name: means[-1] for name, means in rewards.items() if means[-1] is not None}
    if len(rewards) <= 4:  # name up to four rewards one by one
        start_notes = {name: f" (was {mean:.3f})" for name, mean in start_mean_by_reward.items()}
        end_texts = {name: f"{mean:.3f}" for name, mean in end_mean_by_reward.items()}
        reward_texts = (f"{name} is {end_texts.get(name, ABSENT)}{start_notes.get(name, '')}" for name in rewards)
        return f"the mean reward {where} of {', '.join(reward_texts)}" if rewards else ""
    if not end_mean_by_reward:
        return f"none of {len(rewards)} rewards {where} is measured"
    mean_at_end = math.fsum(end_mean_by_reward.values()) / len(end_mean_by_reward)
    measured_note = "" if len(end_mean_by_reward) == len(rewards) else f", of which {len(end_mean_by_reward)} are measured,"
    mean_text = f"the mean of {len(rewards)} rewards {where}{measured_note} is {mean_at_end:.3f}"
    change_by_reward = {
        name: mean - start_mean_by_reward[name] for name, mean in end_mean_by_reward.items() if name in start_mean_by_reward
    }
    if len(change_by_reward) < len(end_mean_by_reward):
        return mean_text
    top_reward = max(change_by_reward, key=change_by_reward.__getitem__)
    low_reward = min(change_by_reward, key=change_by_reward.__getitem__)
    mean_at_start = mean_at_end - math.fsum(change_by_reward.values()) / len(change_by_reward)
    change_text = f"{change_by_reward[low_reward]:+.3f} ({low_reward}) to {change_by_reward[top_reward]:+.3f} ({top_reward})"
    return f"{mean_text} (was {mean_at_start:.3f}); the rewards changed by {change_text}"


def _steps(count: int) -> str:
    return f"{count:,} step{'' if count == 1 else 's'}"


def batch_section(title: str, batches: Lines, names: Sequence[str] = ()) -> Section:
    """Build a section of charts over the training batches. `names`: objectives or blocks with a curve."""
    curve_names = names or ("",)
    panels: list[Panel] = []
    for chart in (Chart(**chart_fields) for chart_fields in SECTIONS[title]["charts"]):
        metric_labels = {key.format(name): label.format(name) for key, label in chart.series.items() for name in curve_names}
        shows_percent = chart.y.startswith("share")
        starts_at_zero = shows_percent or chart.y.startswith("mean |")
        panels += _panel(replace(chart, series=metric_labels), batches, names, y_zero=starts_at_zero, percent=shows_percent)
    return parts.section(title, legend=names, panels=panels)


def glance_section(batches: Lines, names: Sequence[str]) -> Section:
    """Build a run's three main charts: rewards, groups without learning signal, completion lengths."""
    objectives_by_family = together({name: name for name in names})
    comparisons = names_in(batches, "credit/<comparison>/dead_strata")

    def mean(lines: Lines, metric: str, objectives: Sequence[str]) -> float | None:
        metric_values = [value for name in objectives for value in values_of(lines, metric.format(name))]
        return math.fsum(metric_values) / len(metric_values) if metric_values else None

    mean_lines = []
    for batch_index, batch in enumerate(batches):
        dead_share, mean_length = mean([batch], "credit/{}/dead_strata", comparisons), batch.get("completions/mean_length")
        mean_lines.append({"step": batch["step"], "dead": dead_share, "length": mean_length})
        for family, objectives in objectives_by_family.items():
            recent_lines = batches[max(0, batch_index - 4) : batch_index + 1]
            mean_lines[-1][f"mean/{family}"] = mean(recent_lines, "rewards/{}/mean", objectives)
    reward_series = {f"mean/{family}": family for family in objectives_by_family}
    charts = (
        Chart("Reward of each objective, averaged over five batches", reward_series, "mean reward"),
        Chart("Comparisons that teach nothing", {"dead": "mean over the comparisons"}, "share of comparisons"),
        Chart("Length of a completion", {"length": "tokens"}, "tokens"),
    )
    panels: list[Panel] = []
    for chart in charts:
        panels += _panel(chart, mean_lines, percent=chart.y.startswith("share"))
    return parts.section("At a glance", panels=panels)


def _rewards_section(
    batches: Lines,
    recipe: Mapping[str, Any],
    objectives: Sequence[str],
    points: Lines,
    intervals: Mapping[str, Interval | None],
) -> Section:
    """Build the section on rewards: a curve per objective, and a table of changes."""
    curve_panels = list[Panel]()
    table_rows = list[Row]()
    objective_entries = recipe.get("objectives") or ()
    blocks_of_objective = {str(entry.get("name") or entry.get("reward")): entry.get("pays") for entry in objective_entries}
    tenth_size = max(1, len(batches) // 10)
    for name in objectives:
        metric = f"rewards/{name}/mean"
        curve_panels += _panel(Chart(f"Reward: {name}", {metric: name}, "mean reward"), batches, objectives)
        outer_tenths = (values_of(batches[:tenth_size], metric), values_of(batches[-tenth_size:], metric))
        early_mean, late_mean = (sum(tenth) / len(tenth) if tenth else None for tenth in outer_tenths)
        pays_text = ", ".join(map(str, blocks_of_objective.get(name) or ())) or "unknown"
        change = None if early_mean is None or late_mean is None else f"{late_mean - early_mean:+.3f}"
        table_rows.append(
            {"objective": name, "pays": pays_text, "first batches": early_mean, "last batches": late_mean, "change": change}
        )
        held_out_metric = f"{OF_REWARD}{any_index(name)}"
        if values_of(points, held_out_metric):
            start_mean, end_mean = figure(points[0], held_out_metric), figure(points[-1], held_out_metric)
            interval = intervals.get(held_out_metric)
            table_rows[-1] |= {"held-out start": start_mean, "held-out end": str(interval) if interval else end_mean}
    return parts.section("Rewards", legend=objectives, panels=curve_panels, tables=[table_rows] if len(batches) > 1 else [])


def _cost_section(batches: Lines) -> Section:
    """Build a table of the costs of computing rewards, such as the tokens of a judge model. It has a row per objective."""
    row_by_objective: dict[str, Row] = {}
    for cost_measure in names_in(batches, "cost/<measure>"):
        objective, _, cost_name = cost_measure.rpartition("/")
        total_cost = round(math.fsum(values_of(batches, f"cost/{cost_measure}")), 2)
        row_by_objective.setdefault(objective, {"objective": objective})[cost_name] = total_cost
    return parts.section("Cost", tables=[list(row_by_objective.values())])


def names_in(batches: Lines, metric: str) -> list[str]:
    """Return the objectives or blocks that a logged metric such as `rewards/<objective>/mean` names."""
    return [name for _, name, _ in metrics_in(batches, [Metric(metric)])]


def mode_sections(batches: Lines) -> list[Section]:
    """Build the page sections of the training modes, such as a critic."""
    sections = []
    for mode, page, output_prefixes in _pages(batches):
        panels: list[Panel] = []
        for chart in (chart for chart in page.charts if len(chart.series) == 1):
            ((metric_name, label),) = chart.series.items()
            label_of_metric = {prefix + metric_name: output_name or label for output_name, prefix in output_prefixes.items()}
            panels += _panel(replace(chart, series=label_of_metric), batches, y_zero=True)
        for value_index, (output_name, prefix) in enumerate(output_prefixes.items()):
            for chart in (chart for chart in page.charts if len(chart.series) > 1):
                title = f"{chart.title}: {output_name}" if output_name else chart.title
                chart_note = "" if value_index else chart.note
                label_of_metric = {prefix + metric_name: label for metric_name, label in chart.series.items()}
                panels += _panel(replace(chart, title=title, note=chart_note, series=label_of_metric), batches, y_zero=True)
        time_shares = values_of(batches, f"{mode.name}/share")
        time_text = f" Mode {mode.name} adds {percent(median(time_shares))} to step times (median)." if time_shares else ""
        alarm_sentences = [sentence for key, sentence in end_alarms(batches).items() if key.startswith(f"{mode.name}/")]
        sections.append(Section(page.title, page.text + time_text, warnings=alarm_sentences, panels=panels, asks=page.asks))
    return sections


def mode_headlines(batches: Lines) -> list[Headline]:
    """Build headlines with the last main metric of each mode, such as LaSeR or the critic. A critic has one per output."""
    headlines = []
    alarm_by_metric = end_alarms(batches)
    for _, page, output_prefixes in _pages(batches):
        metric_name, label, alarm = page.headline
        for output_name, prefix in output_prefixes.items():
            metric_values = values_of(batches, prefix + metric_name)
            note = f"{metric_values[0]:.2f} in the first batch" if len(metric_values) > 1 else ""
            last_value_text, alarm_text = (f"{metric_values[-1]:.2f}", alarm) if metric_values else (None, "no batch tells")
            warning = alarm_text if prefix + metric_name in alarm_by_metric else ""
            headlines.append(Headline(label + (f": {output_name}" if output_name else ""), last_value_text, note, warning))
    return headlines


def _pages(batches: Lines) -> Iterator[tuple[type[Mode], Page, dict[str, str]]]:
    """For each mode (such as LaSeR) with a report section, yield the mode, the section, and its metrics' prefixes."""
    for mode in MODES.values():
        if mode.page is not None:
            metric_name = mode.page.headline[0]
            mode_metrics = metrics_in(batches, [Metric(f"{mode.name}/[value/]{metric_name}")])
            yield mode, mode.page, {output_name: metric.removesuffix(metric_name) for metric, output_name, _ in mode_metrics}


def _panel(chart: Chart, batches: Lines, names: Sequence[str] = (), **drawn: Any) -> list[Panel]:
    """Return a panel with a chart of training metrics. No panel if no batch has these metrics."""
    curve_rows = [row for key, name in chart.series.items() for row in batch_curve(batches, key, name)]
    has_cut_values = chart.floor is not None and any(row["value"] < chart.floor for row in curve_rows)
    chart_note = chart.note + (f" Values below {chart.floor:g} are drawn at {chart.floor:g}." if has_cut_values else "")
    series_names = list(dict.fromkeys([*names, *chart.series.values()]))
    legend_names = () if names or len(series_names) == 1 else series_names
    drawn |= {"y": chart.y, "floor": chart.floor, "dots": (), "note": chart_note, "legend": legend_names}
    return parts.curve_panel(chart.title, curve_rows, series_names, **drawn)
