"""What a person sees while a run goes on, and at its end."""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

import torch
from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from spanwise.commands.shared.fitted import Fitted
from spanwise.explain import LASER, alarms
from spanwise.fidelity import ScoreName, fixed_point
from spanwise.measure import Curve, Interval
from spanwise.scheme import Scheme

_LEVELS = " ▁▂▃▄▅▆▇█"


class Live:
    """One line that moves on a terminal; every tenth step a line in a log file."""

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
        """Show the figures of a step; None and absent values are left out."""
        line = "  ".join(f"{name} {_short(value)}" for name, value in values.items() if value is not None)
        self._progress.update(self._task, completed=step, figures=line)
        if not self.console.is_terminal and (step % 10 == 0 or step == self.steps):
            left = (time.perf_counter() - self._started) / max(step, 1) * (self.steps - step)
            self.console.print(
                f"{self.title} {step}/{self.steps}  {line}  left {left:.0f} s", soft_wrap=True, highlight=False
            )

    def close(self) -> None:
        """Remove the moving line."""
        self._progress.stop()


def quiet() -> None:
    """Keep other libraries' bars and deprecation notes out of the progress display; their errors still show."""
    from transformers.utils import logging

    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers(\..*)?")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def warm_up_progress(console: Console) -> Any:
    """A callback `(step, total, loss)` for the warm start that shows a bar."""
    live: list[Live] = []

    def show(step: int, total: int, loss: float) -> None:
        if not live:
            live.append(Live(console, "warm start (once, then cached)", total))
        if console.is_terminal or step % 100 == 0 or step == total:
            live[0].step(step, {"loss": loss})
        if step >= total:
            live.pop().close()

    return show


def figure_table(title: str, columns: Mapping[str, Mapping[str, Any]], *, absent: Collection[str] = ()) -> Group:
    """A table with a row per figure and a column per run, narrow enough for a terminal of 80 characters.

    A "!" stands beside a figure that must not be read calmly (`explain.alarms`), and under the table why.
    """
    names = [name for name in dict.fromkeys(name for found in columns.values() for name in found) if name not in absent]
    wrong = {run: alarms({name: found.get(name) for name in names}) for run, found in columns.items()}
    table = Table("", *columns, box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for name in names:
        cells = (_short(found.get(name)) + (" !" if name in wrong[run] else "") for run, found in columns.items())
        table.add_row(name.replace("_", " "), *cells)
    said = (_alarms(found, run if len(columns) > 1 else "") for run, found in wrong.items())
    return Group(Text(title, style="italic"), Fitted(table), *(line for lines in said for line in lines), *_glossary(names))


def interval_table(title: str, intervals: Mapping[str, Interval | None], *, absent: Collection[str] = ()) -> Group:
    """A row per figure: the value and its interval; marks and `absent` as in `figure_table`."""
    shown = {name: i for name, i in intervals.items() if name not in absent}
    wrong = alarms({name: None if i is None else i.value for name, i in shown.items()})
    table = Table("", "", "95 %", box=box.SIMPLE_HEAD)
    for name, i in shown.items():
        mark = " !" if name in wrong else ""
        cells = ("-", "") if i is None else (f"{i.value:.3f}{mark}", f"{i.low:.3f} to {i.high:.3f}")
        table.add_row(name.replace("_", " "), *cells)
    return Group(Text(title, style="italic"), Fitted(table), *_alarms(wrong), *_glossary(shown))


def _alarms(wrong: Mapping[str, str], run: str = "") -> list[Text]:
    """A line for each thing that is wrong, with the figures that it shows in or that mean nothing because of it."""
    figures: dict[str, list[str]] = {}
    for name, why in wrong.items():
        figures.setdefault(why, []).append(name.replace("_", " "))
    who = f"{run}: " if run else ""
    return [Text(f"! {who}{why} ({', '.join(names)})", style="bold red") for why, names in figures.items()]


def _glossary(names: Collection[str]) -> list[Text]:
    """What figures of a score are of, if there are any."""
    said = "laser: of the score that the model gives its own answer, by one reserved token after its end, clipped to 0 to 1"
    return [Text(said)] if any(name.startswith(LASER) for name in names) else []


def vote_table(title: str, votes: Mapping[str, Curve]) -> Fitted:
    """A row per way of choosing among n samples, a column per n (1, 2, 4, ... of the budgets there are)."""
    budgets = next(iter(votes.values())).budgets
    shown = [i for i, n in enumerate(budgets) if n & (n - 1) == 0 or n == budgets[-1]]
    options = {"title": title, "title_justify": "left", "box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
    table = Table("n", *(str(budgets[i]) for i in shown), **options)
    for name, curve in votes.items():
        way = f"{name.removeprefix(LASER)} by score" if name.startswith(LASER) else name
        table.add_row(way, *(f"{curve.intervals[i].value:.3f}±{curve.intervals[i].sem:.3f}" for i in shown))
    for column in table.columns:
        column.no_wrap = True
    return Fitted(table)


def gain_table(title: str, gain: Curve) -> Fitted:
    """A row per budget of a difference of two curves, with its interval."""
    table = Table("n", "", "95 %", title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for n, i in zip(gain.budgets, gain.intervals, strict=True):
        table.add_row(str(n), f"{i.value:+.3f}", f"{i.low:+.3f} to {i.high:+.3f}")
    return Fitted(table)


def pull_note(scheme: Scheme, *, group_size: int) -> str | None:
    """What the outcome baseline does to a confidence in small groups; None where it moves .70 by less than .05.

    >>> from spanwise.layout import Layout
    >>> scheme = Scheme.preset("bae", Layout({"solution": ["answer"], "report": ["confidence"]}))
    >>> pull_note(scheme, group_size=4).split(";")[0]
    'In groups of 4 that hold right and wrong answers the outcome baseline drives a confidence of .70 to .80'
    >>> pull_note(scheme, group_size=16) is None
    True
    """
    scored = (o for o in scheme.objectives if o.reward in get_args(ScoreName))
    if not any(o.baseline == "outcome" and len(o.given) == 1 for o in scored):
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


def sparkline(values: Sequence[float | None]) -> str:
    """Values between 0 and 1 as a row of blocks; a dot where there is none.

    >>> sparkline([0.0, 0.5, 1.0, None])
    ' ▄█·'
    """
    return "".join("·" if v is None else _LEVELS[round(min(max(v, 0.0), 1.0) * 8)] for v in values)


def text_plot(series: Mapping[str, Sequence[float | None]], *, height: int = 4) -> str:
    """Curves between 0 and 1 under each other, `height` rows of blocks each.

    >>> print(text_plot({"accuracy": [0.0, 0.5, 1.0]}, height=2))
    accuracy  1 |  █
              0 | ██
    """
    width = max(len(name) for name in series)
    lines = []
    for name, values in series.items():
        for row in range(height - 1, -1, -1):
            cells = "".join(" " if v is None else sparkline([min(max(v * height - row, 0.0), 1.0)]) for v in values)
            label = name if row == height - 1 else ""
            mark = {height - 1: "1", 0: "0"}.get(row, " ")
            lines.append(f"{label:<{width}}  {mark} |{cells}".rstrip())
    return "\n".join(lines)


def _short(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)
