"""Print tables of figures at the end of a command."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from spanwise.commands.shared.fitted import plain_table
from spanwise.commands.shared.progress import short
from spanwise.explain.alarms import OF_REWARD, OF_SCORE, alarms, by_sentence
from spanwise.fidelity import fixed_point
from spanwise.fidelity.baselines import ScoreName
from spanwise.measure import Curve, Interval
from spanwise.measure.intervals import bounds_text
from spanwise.scheme import Scheme

_LEVELS = " ▁▂▃▄▅▆▇█"


def figure_table(
    title: str, columns: Mapping[str, Mapping[str, Any]], *, absent: Collection[str] = ()
) -> Iterator[RenderableType]:
    """Build a table with a row per figure and a column per run. It fits into 80 characters."""
    all_figure_names = dict.fromkeys(name for figures in columns.values() for name in figures)
    figure_names = [name for name in all_figure_names if name not in absent]
    alarms_by_run = {  # a figure with an alarm gets a "!"
        run: alarms({name: figures.get(name) for name in figure_names if not isinstance(figures.get(name), str)})
        for run, figures in columns.items()
    }
    table_rows = []
    for name in figure_names:
        figure_cells = (
            short(column.get(name)) + (" !" if name in alarms_by_run[run] else "") for run, column in columns.items()
        )
        table_rows.append([name.replace("_", " ").replace(OF_REWARD, "mean reward, "), *figure_cells])
    yield Text(title, style="italic")
    yield plain_table("", *columns, rows=table_rows, right=range(1, len(columns) + 1))
    for run, sentences in alarms_by_run.items():
        run_prefix = f"{run}: " if run and len(columns) > 1 else ""
        for sentence, figures in by_sentence(sentences).items():
            yield Text(f"! {run_prefix}{sentence} ({', '.join(figures).replace('_', ' ')})", style="bold red")
    if any(name.startswith(OF_SCORE) for name in figure_names):
        yield Text(
            "The figures named 'laser' show how well the model rates its own answers. A rating is computed from the probability "
            "of a token after the completion, and clipped to the range 0 to 1."
        )


def interval_table(
    title: str, intervals: Mapping[str, Interval | None], *, absent: Collection[str] = ()
) -> Iterator[RenderableType]:
    """Build a table with one row per figure, which holds the value and its interval."""
    value_by_figure = {name: None if interval is None else interval.value for name, interval in intervals.items()}
    bounds_by_figure = {name: bounds_text(interval, "{:.3f}".format) for name, interval in intervals.items()}
    return figure_table(title, {"": value_by_figure, "95 %": bounds_by_figure}, absent=absent)


def vote_table(title: str, votes: Mapping[str, Curve]) -> Table:
    """Build a table of voting accuracy: a row per way of voting, a column per number of samples."""
    budgets = next(iter(votes.values())).budgets
    # A column is shown for each power of two, and for the largest number of samples.
    budget_indices = [i for i, budget in enumerate(budgets) if budget.bit_count() == 1 or budget == budgets[-1]]
    # With one prompt, or if all prompts agree, the standard error is no measure of certainty, so it is left out.
    table_rows = [
        [
            f"{voting_rule.removeprefix(OF_SCORE)} by score" if voting_rule.startswith(OF_SCORE) else voting_rule,
            *(
                f"{interval.value:.3f}" + (f"±{interval.sem:.3f}" if interval.sem > 0 else "")
                for interval in (curve.intervals[index] for index in budget_indices)
            ),
        ]
        for voting_rule, curve in votes.items()
    ]
    sample_counts = (str(budgets[index]) for index in budget_indices)
    headings = (Column(heading, no_wrap=True) for heading in ("n", *sample_counts))
    return plain_table(*headings, rows=table_rows, title=f"{title} ± standard error", padding=(0, 1, 0, 0))


def gain_table(title: str, gain: Curve) -> Table:
    """Build a table of the difference between two voting curves."""
    budget_intervals = zip(gain.budgets, gain.intervals, strict=True)
    table_rows = ([str(budget), f"{ci.value:+.3f}", f"{ci.low:+.3f} to {ci.high:+.3f}"] for budget, ci in budget_intervals)
    return plain_table("n", "", "95 %", rows=table_rows, title=title)


def pull_note(scheme: Scheme, *, group_size: int) -> str | None:
    """Say which confidence a policy with accuracy .70 learns under the baseline `outcome`. Return None if it is near .70."""
    scored_objectives = (objective for objective in scheme.objectives if objective.reward in get_args(ScoreName))
    if not any(objective.baseline == "outcome" and len(objective.given) == 1 for objective in scored_objectives):
        return None
    accuracy_1 = torch.tensor([0.7], dtype=torch.float64)
    leave_one_out = scheme.options.get("leave_one_out", False)
    fixed_point_1 = fixed_point(accuracy_1, group_size=group_size, baseline="outcome", leave_one_out=leave_one_out)
    taught_confidence = float(fixed_point_1)
    if abs(taught_confidence - 0.7) < 0.05:
        return None
    confidence_text = f"{taught_confidence:.2f}".removeprefix("0")
    return (
        f"Suppose that a policy is right 70 % of the time. With groups of {group_size}, the baseline 'outcome' teaches it "
        f"to state the confidence {confidence_text}. Larger groups bring this confidence nearer to .70. The baselines "
        "'blended' and 'group' teach the policy to state .70 (see docs/fidelity.md)."
    )


def text_plot(series: Mapping[str, Sequence[float | None]], *, height: int = 4) -> str:
    """Plot curves between 0 and 1 as text, each `height` rows high."""
    label_width = max(len(name) for name in series)
    plot_lines = []
    for name, curve_values in series.items():
        for plot_row in range(height - 1, -1, -1):
            bar_heights = (0.0 if value is None else value * height - plot_row for value in curve_values)
            eighths = (round(min(max(bar_height, 0.0), 1.0) * 8) for bar_height in bar_heights)
            line_label = name if plot_row == height - 1 else ""
            axis_label = "0" if plot_row == 0 else "1" if plot_row == height - 1 else " "
            plot_lines.append(f"{line_label:<{label_width}}  {axis_label} |{''.join(_LEVELS[n] for n in eighths)}".rstrip())
    return "\n".join(plot_lines)
