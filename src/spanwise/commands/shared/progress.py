"""Show the progress of a run and of reading large files."""

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from spanwise.explain.alarms import later_elements
from spanwise.objective import families
from spanwise.rollouts.files import REPORT

#: Files of at least this many bytes or tokens have a progress bar while they are read.
_LARGE = 20_000_000


class Live(Progress):
    """Shows the progress of a run, of which `first` steps are done, as a bar, or in a log file as a line at every tenth step."""

    def __init__(self, console: Console, title: str, steps: int, *, first: int = 0) -> None:
        progress_columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        super().__init__(*progress_columns, console=console, transient=True, disable=not console.is_terminal)
        self.title, self.steps, self.first, self._started = title, steps, first, time.perf_counter()
        self._task = self.add_task(title, total=steps, completed=first, figures="")
        self.start()

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Show the figures of a training step, except those that are None. Average a reward's figures over its JSON fields."""
        figures = {name: value for name, value in _average_parts(values).items() if value is not None}
        figures_text = "  ".join(f"{name} {short(value)}" for name, value in figures.items())
        self.update(self._task, completed=step, figures=figures_text)
        if not self.console.is_terminal and (step % 10 == 0 or step == self.steps):
            seconds_left = (time.perf_counter() - self._started) / max(step - self.first, 1) * (self.steps - step)
            log_line = f"{self.title} {step}/{self.steps}  {figures_text}  {seconds_left:.0f} s left"
            self.console.print(log_line, soft_wrap=True, highlight=False)


@contextmanager
def large_files_shown(on: Console | None = None) -> Iterator[Console]:
    """Yield a console that shows a progress bar while large files are read. Hide the bars of transformers."""
    quiet()
    console = on or Console()
    live_progress: Live | None = None
    last_name_and_percent = ("", 0)

    def show(work: str, done: int, total: int) -> None:
        nonlocal live_progress, last_name_and_percent
        if total < _LARGE or (work, percent := 100 * done // total) == last_name_and_percent:
            return
        if live_progress is None or work != last_name_and_percent[0]:
            if live_progress is not None:
                live_progress.stop()
            live_progress = Live(console, work, 100)
        last_name_and_percent = (work, percent)
        live_progress.step(percent, {})

    reset_handle = REPORT.set(show)
    try:
        yield console
    finally:
        REPORT.reset(reset_handle)
        if live_progress is not None:
            live_progress.stop()


def quiet() -> None:
    """Silence the progress bars and deprecation notes of transformers, if it is installed. Errors still show."""
    if find_spec("transformers") is None:
        return
    from transformers.utils import logging

    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers(\..*)?")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def warm_up_progress(console: Console) -> Any:
    """Return a function that shows the progress of the supervised warm start."""
    live_progress: Live | None = None

    def show(step: int, total: int, loss: float) -> None:
        nonlocal live_progress
        live_progress = live_progress or Live(console, "warm start (once, then cached)", total)
        if console.is_terminal or step % 100 == 0 or step == total:
            live_progress.step(step, {"loss": loss})
        if step >= total:
            live_progress.stop()
            live_progress = None

    return show


def _average_parts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Average entries such as `equals.a` and `equals.b` into `equals`. Of a list, only the first element counts."""
    metric_by_family: dict[str, Any] = {}
    hidden_names = later_elements(values)
    for family, part_names in families(name for name in values if name not in hidden_names).items():
        parts = [values[name] for name in part_names if values[name] is not None]
        metric_by_family[family] = values[family] if family in values else sum(parts) / len(parts) if parts else None
    return metric_by_family


def short(value: Any) -> str:
    """Write a figure with a few digits, and `-` for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)
