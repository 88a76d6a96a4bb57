"""Print the progress of a training run, and tables of figures at its end."""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from spanwise.commands.shared.fitted import plain_table
from spanwise.explain.alarms import OF_REWARD, OF_SCORE, alarms, by_sentence, later_elements
from spanwise.fidelity import ScoreName, fixed_point
from spanwise.measure import Curve, Interval
from spanwise.measure.intervals import bounds_text
from spanwise.objective import families
from spanwise.rollouts.files import REPORT
from spanwise.scheme import Scheme

_LEVELS = " ▁▂▃▄▅▆▇█"
#: Files of at least this many bytes or tokens have a progress bar while they are read.
_LARGE = 20_000_000


class Live:
    """Shows the progress of a run: as a bar on a terminal, or as a line every tenth step in a log file."""

    def __init__(self, console: Console, title: str, steps: int) -> None:
        self.console, self.title, self.steps = console, title, steps
        self._started = time.perf_counter()
        progress_columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        self._progress = Progress(*progress_columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task(title, total=steps, figures="")
        self._progress.start()

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Show the figures of a training step that are not None; a reward of several parts is shown as one mean."""
        text = "  ".join(f"{name} {_short(value)}" for name, value in _average_parts(values).items() if value is not None)
        self._progress.update(self._task, completed=step, figures=text)
        if not self.console.is_terminal and (step % 10 == 0 or step == self.steps):
            seconds_left = (time.perf_counter() - self._started) / max(step, 1) * (self.steps - step)
            log_line = f"{self.title} {step}/{self.steps}  {text}  left {seconds_left:.0f} s"
            self.console.print(log_line, soft_wrap=True, highlight=False)

    def close(self) -> None:
        """Remove the progress bar."""
        self._progress.stop()


@contextmanager
def large_files_shown(console: Console) -> Iterator[None]:
    """Show a progress bar while large files are read and cut into blocks."""
    live: Live | None = None
    shown_progress = ("", 0)

    def show(work: str, done: int, total: int) -> None:
        nonlocal live, shown_progress
        if total < _LARGE or (work, percent := 100 * done // total) == shown_progress:
            return
        if live is None or work != shown_progress[0]:
            if live is not None:
                live.close()
            live = Live(console, work, 100)
        shown_progress = (work, percent)
        live.step(percent, {})

    report_token = REPORT.set(show)
    try:
        yield
    finally:
        REPORT.reset(report_token)
        if live is not None:
            live.close()


def quiet() -> None:
    """Silence the progress bars and deprecation notes of transformers; its errors still show."""
    from transformers.utils import logging

    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers(\..*)?")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def warm_up_progress(console: Console) -> Any:
    """Return a function of (step, total, loss) that shows the progress of the warm start (training before RL)."""
    live: Live | None = None

    def show(step: int, total: int, loss: float) -> None:
        nonlocal live
        live = live or Live(console, "warm start (once, then cached)", total)
        if console.is_terminal or step % 100 == 0 or step == total:
            live.step(step, {"loss": loss})
        if step >= total:
            live.close()
            live = None

    return show


def figure_table(
    title: str, columns: Mapping[str, Mapping[str, Any]], *, absent: Collection[str] = ()
) -> Iterator[RenderableType]:
    """Build a table with one row per figure and one column per run, narrow enough for 80 characters."""
    all_names = dict.fromkeys(name for figures in columns.values() for name in figures)
    figure_names = [name for name in all_names if name not in absent]
    alarms_by_run = {
        run: alarms({name: figures.get(name) for name in figure_names if not isinstance(figures.get(name), str)})
        for run, figures in columns.items()
    }

    def cell(run: str, name: str) -> str:
        return _short(columns[run].get(name)) + " !" * (name in alarms_by_run[run])

    table_rows = [
        [name.replace("_", " ").replace(OF_REWARD, "mean reward, "), *(cell(run, name) for run in columns)]
        for name in figure_names
    ]
    yield Text(title, style="italic")
    # A "!" beside a figure points to a sentence under the table (`explain.alarms`).
    yield plain_table("", *columns, rows=table_rows, right=range(1, len(columns) + 1))
    for run, sentences in alarms_by_run.items():
        run_prefix = f"{run}: " if run and len(columns) > 1 else ""
        for sentence, figures in by_sentence(sentences).items():
            yield Text(f"! {run_prefix}{sentence} ({', '.join(figures).replace('_', ' ')})", style="bold red")
    if any(name.startswith(OF_SCORE) for name in figure_names):
        yield Text(_OF_SCORE)


def interval_table(
    title: str, intervals: Mapping[str, Interval | None], *, absent: Collection[str] = ()
) -> Iterator[RenderableType]:
    """Build a table with one row per figure, which holds the value and its interval."""
    value_by_figure = {name: None if interval is None else interval.value for name, interval in intervals.items()}
    bounds_by_figure = {name: bounds_text(interval, "{:.3f}".format) for name, interval in intervals.items()}
    return figure_table(title, {"": value_by_figure, "95 %": bounds_by_figure}, absent=absent)


#: The line under a table that explains the figures of the self-rewarding score.
_OF_SCORE = "laser: the model's score for its own answer, read from one reserved token after its end and clipped to 0 to 1"


def vote_table(title: str, votes: Mapping[str, Curve]) -> Table:
    """Build a table of voting accuracy: a row per way of voting, a column per number of samples (1, 2, 4, ...)."""
    budgets = next(iter(votes.values())).budgets
    # Of the numbers of samples, only powers of two and the largest have a column.
    budget_indices = [i for i, budget in enumerate(budgets) if budget & (budget - 1) == 0 or budget == budgets[-1]]
    table_rows = [
        [
            f"{name.removeprefix(OF_SCORE)} by score" if name.startswith(OF_SCORE) else name,
            *(f"{curve.intervals[index].value:.3f}±{curve.intervals[index].sem:.3f}" for index in budget_indices),
        ]
        for name, curve in votes.items()
    ]
    headings = (Column(name, no_wrap=True) for name in ("n", *(str(budgets[index]) for index in budget_indices)))
    return plain_table(*headings, rows=table_rows, title=title, padding=(0, 1, 0, 0))


def gain_table(title: str, gain: Curve) -> Table:
    """Build a table of the difference between two curves of voting accuracy, a row per number of samples, with intervals."""
    budget_intervals = zip(gain.budgets, gain.intervals, strict=True)
    table_rows = ([str(n), f"{i.value:+.3f}", f"{i.low:+.3f} to {i.high:+.3f}"] for n, i in budget_intervals)
    return plain_table("n", "", "95 %", rows=table_rows, title=title)


def pull_note(scheme: Scheme, *, group_size: int) -> str | None:
    """Say to which value the outcome baseline drives an honest confidence of .70 in groups of this size; None if it is near .70."""
    scored_objectives = (objective for objective in scheme.objectives if objective.reward in get_args(ScoreName))
    if not any(objective.baseline == "outcome" and len(objective.given) == 1 for objective in scored_objectives):
        return None
    start_b = torch.tensor([0.7], dtype=torch.float64)
    leave_one_out = scheme.options.get("leave_one_out", False)
    driven_confidence = float(fixed_point(start_b, group_size=group_size, baseline="outcome", leave_one_out=leave_one_out))
    if abs(driven_confidence - 0.7) < 0.05:
        return None
    return (
        f"In groups of {group_size} that hold right and wrong answers the outcome baseline drives a confidence of .70 to "
        f"{driven_confidence:.2f}".replace(" 0.", " .")
        + "; larger groups do it less, the baselines blended and group do not (docs/fidelity.md)."
    )


def text_plot(series: Mapping[str, Sequence[float | None]], *, height: int = 4) -> str:
    """Plot curves between 0 and 1 as text, one below the other, each `height` rows high."""
    label_width = max(len(name) for name in series)
    plot_lines = []
    for name, values in series.items():
        for row in range(height - 1, -1, -1):
            eighths = (0 if value is None else round(min(max(value * height - row, 0.0), 1.0) * 8) for value in values)
            line_label = name if row == height - 1 else ""
            axis_label = {height - 1: "1", 0: "0"}.get(row, " ")
            plot_lines.append(f"{line_label:<{label_width}}  {axis_label} |{''.join(_LEVELS[n] for n in eighths)}".rstrip())
    return "\n".join(plot_lines)


def _average_parts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the figures of a reward's parts (`equals.a`, `equals.b`) by their mean, without later elements of lists.

    >>> _average_parts({"equals.a": 1.0, "equals.b": 0.0, "equals.c[0]": 0.5, "equals.c[1]": 0.0, "equals.d": None, "form": 1.0})
    {'equals (4 parts)': 0.5, 'form': 1.0}
    """
    value_by_label, later_names = dict[str, Any](), later_elements(values)
    for label, names in families(name for name in values if name not in later_names).items():
        numbers = [values[name] for name in names if values[name] is not None]
        value_by_label[label] = values[label] if label in values else sum(numbers) / len(numbers) if numbers else None
    return value_by_label


def _short(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)
