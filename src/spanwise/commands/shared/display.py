"""Print progress during a run, and its figures at the end."""

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
#: From how many bytes or tokens on a file has a progress line.
_LARGE = 20_000_000


class Live:
    """A progress line that moves on a terminal; a log file gets a line every tenth step."""

    def __init__(self, console: Console, title: str, steps: int) -> None:
        self.console, self.title, self.steps = console, title, steps
        self._started = time.perf_counter()
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task(title, total=steps, figures="")
        self._progress.start()

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Show the figures of a step; None and absent values are left out, and the parts of one reward have one mean."""
        line = "  ".join(f"{name} {_short(value)}" for name, value in _families(values).items() if value is not None)
        self._progress.update(self._task, completed=step, figures=line)
        if not self.console.is_terminal and (step % 10 == 0 or step == self.steps):
            seconds_left = (time.perf_counter() - self._started) / max(step, 1) * (self.steps - step)
            self.console.print(
                f"{self.title} {step}/{self.steps}  {line}  left {seconds_left:.0f} s", soft_wrap=True, highlight=False
            )

    def close(self) -> None:
        """Remove the moving line."""
        self._progress.stop()


@contextmanager
def large_files_shown(console: Console) -> Iterator[None]:
    """Show a progress line while large files are read and their blocks found."""
    bar: Live | None = None
    shown = ("", 0)

    def show(work: str, done: int, total: int) -> None:
        nonlocal bar, shown
        if total < _LARGE or (work, percent := 100 * done // total) == shown:
            return
        if bar is None or work != shown[0]:
            if bar is not None:
                bar.close()
            bar = Live(console, work, 100)
        shown = (work, percent)
        bar.step(percent, {})

    token = REPORT.set(show)
    try:
        yield
    finally:
        REPORT.reset(token)
        if bar is not None:
            bar.close()


def quiet() -> None:
    """Keep other libraries' bars and deprecation notes out of the progress display; their errors still show."""
    from transformers.utils import logging

    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers(\..*)?")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def warm_up_progress(console: Console) -> Any:
    """Return a callback `(step, total, loss)` that shows the progress of the warm start."""
    bar: Live | None = None

    def show(step: int, total: int, loss: float) -> None:
        nonlocal bar
        bar = bar or Live(console, "warm start (once, then cached)", total)
        if console.is_terminal or step % 100 == 0 or step == total:
            bar.step(step, {"loss": loss})
        if step >= total:
            bar.close()
            bar = None

    return show


def figure_table(
    title: str, columns: Mapping[str, Mapping[str, Any]], *, absent: Collection[str] = ()
) -> Iterator[RenderableType]:
    """Build a table with one row per figure and one column per run, narrow enough for 80 characters."""
    names = [name for name in dict.fromkeys(name for figures in columns.values() for name in figures) if name not in absent]
    alarms_of = {
        run: alarms({name: figures.get(name) for name in names if not isinstance(figures.get(name), str)})
        for run, figures in columns.items()
    }

    def cell(run: str, name: str) -> str:
        return _short(columns[run].get(name)) + " !" * (name in alarms_of[run])

    rows = [
        [name.replace("_", " ").replace(OF_REWARD, "mean reward, "), *(cell(run, name) for run in columns)] for name in names
    ]
    yield Text(title, style="italic")
    # A "!" beside a figure refers to a sentence under the table (`explain.alarms`).
    yield plain_table("", *columns, rows=rows, right=range(1, len(columns) + 1))
    for run, sentences in alarms_of.items():
        of_run = f"{run}: " if run and len(columns) > 1 else ""
        for sentence, figures in by_sentence(sentences).items():
            yield Text(f"! {of_run}{sentence} ({', '.join(figures).replace('_', ' ')})", style="bold red")
    if any(name.startswith(OF_SCORE) for name in names):
        yield Text(_OF_SCORE)


def interval_table(
    title: str, intervals: Mapping[str, Interval | None], *, absent: Collection[str] = ()
) -> Iterator[RenderableType]:
    """Build a table with one row per figure: its value and its interval."""
    values = {name: None if interval is None else interval.value for name, interval in intervals.items()}
    bounds = {name: bounds_text(interval, "{:.3f}".format) for name, interval in intervals.items()}
    return figure_table(title, {"": values, "95 %": bounds}, absent=absent)


#: The line under a table that explains the figures of a score.
_OF_SCORE = "laser: the model's score for its own answer, read from one reserved token after its end and clipped to 0 to 1"


def vote_table(title: str, votes: Mapping[str, Curve]) -> Table:
    """Build a table with one row per way of voting and one column per number of samples (1, 2, 4, ...)."""
    budgets = next(iter(votes.values())).budgets
    places = [index for index, budget in enumerate(budgets) if budget & (budget - 1) == 0 or budget == budgets[-1]]
    rows = [
        [
            f"{name.removeprefix(OF_SCORE)} by score" if name.startswith(OF_SCORE) else name,
            *(f"{curve.intervals[index].value:.3f}±{curve.intervals[index].sem:.3f}" for index in places),
        ]
        for name, curve in votes.items()
    ]
    headings = (Column(name, no_wrap=True) for name in ("n", *(str(budgets[index]) for index in places)))
    return plain_table(*headings, rows=rows, title=title, padding=(0, 1, 0, 0))


def gain_table(title: str, gain: Curve) -> Table:
    """Build a table with one row per number of samples: the difference of two curves and its interval."""
    points = zip(gain.budgets, gain.intervals, strict=True)
    rows = ([str(n), f"{i.value:+.3f}", f"{i.low:+.3f} to {i.high:+.3f}"] for n, i in points)
    return plain_table("n", "", "95 %", rows=rows, title=title)


def pull_note(scheme: Scheme, *, group_size: int) -> str | None:
    """Say how far the outcome baseline pulls a confidence in small groups; None if it moves .70 by less than .05."""
    scored_objectives = (objective for objective in scheme.objectives if objective.reward in get_args(ScoreName))
    if not any(objective.baseline == "outcome" and len(objective.given) == 1 for objective in scored_objectives):
        return None
    p_b = torch.tensor([0.7], dtype=torch.float64)
    leave_one_out = scheme.options.get("leave_one_out", False)
    point = float(fixed_point(p_b, group_size=group_size, baseline="outcome", leave_one_out=leave_one_out))
    if abs(point - 0.7) < 0.05:
        return None
    return (
        f"In groups of {group_size} that hold right and wrong answers the outcome baseline drives a confidence of .70 to "
        f"{point:.2f}".replace(" 0.", " .")
        + "; larger groups do it less, the baselines blended and group do not (docs/fidelity.md)."
    )


def text_plot(series: Mapping[str, Sequence[float | None]], *, height: int = 4) -> str:
    """Plot curves between 0 and 1 as text, one under the other, each `height` rows high."""
    width = max(len(name) for name in series)
    lines = []
    for name, values in series.items():
        for row in range(height - 1, -1, -1):
            eighths = (0 if value is None else round(min(max(value * height - row, 0.0), 1.0) * 8) for value in values)
            label = name if row == height - 1 else ""
            mark = {height - 1: "1", 0: "0"}.get(row, " ")
            lines.append(f"{label:<{width}}  {mark} |{''.join(_LEVELS[n] for n in eighths)}".rstrip())
    return "\n".join(lines)


def _families(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the figures of many parts of one reward by their mean; of a list its first element counts, as lists may be short.

    >>> _families({"equals.a": 1.0, "equals.b": 0.0, "equals.c[0]": 0.5, "equals.c[1]": 0.0, "equals.d": None, "form": 1.0})
    {'equals (4 parts)': 0.5, 'form': 1.0}
    """
    joined, later = dict[str, Any](), later_elements(values)
    for label, names in families(name for name in values if name not in later).items():
        numbers = [values[name] for name in names if values[name] is not None]
        joined[label] = values[label] if label in values else sum(numbers) / len(numbers) if numbers else None
    return joined


def _short(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)
