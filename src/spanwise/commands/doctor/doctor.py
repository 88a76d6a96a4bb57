"""`doctor`: versions, which engines work, whether the plug-in is in this verl, and what a broken one said."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spanwise.commands.doctor.examine import Finding, examine
from spanwise.commands.shared.fitted import Fitted

_STYLE = {"ok": "green", "not installed": "dim", "untested": "yellow", "broken": "red"}


def doctor(*, console: Console | None = None) -> bool:
    """Print what is installed and whether it works.

    Args:
        console: where to.

    Returns:
        Whether nothing that is installed is broken.
    """
    console = console or Console()
    found = examine()
    console.print(Fitted(findings_table(found)))
    for line in sentences(found):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    return sound(found)


def findings_table(found: Sequence[Finding]) -> Table:
    """A row for each thing that was looked at."""
    table = Table("", "version", "tested with", "", box=box.SIMPLE_HEAD)
    for one in found:
        table.add_row(escape(one.name), escape(one.version), one.window, f"[{_STYLE[one.state]}]{one.state}[/]")
    return table


def sentences(found: Sequence[Finding]) -> list[str]:
    """What there is to say beside the table."""
    return [f"{one.name}: {sentence}" for one in found for sentence in one.says]


def sound(found: Sequence[Finding]) -> bool:
    """Whether nothing is broken."""
    return all(one.state != "broken" for one in found)
