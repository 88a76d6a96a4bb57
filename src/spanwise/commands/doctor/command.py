"""`spanwise doctor` on the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spanwise.commands.doctor.examine import Finding, examine
from spanwise.commands.shared.fitted import Fitted

_STYLE = {"ok": "green", "not installed": "dim", "untested": "yellow", "broken": "red"}


def command() -> None:
    """Say which engines are installed and work: versions, the plug-in in this verl, which trainer it uses, what broke.

    Exit status 1 if something that is installed is broken.
    """
    console, found = Console(), examine()
    console.print(Fitted(findings_table(found)))
    for one in found:
        for sentence in one.says:
            console.print(f"{one.name}: {sentence}", highlight=False, soft_wrap=True, markup=False)
    if any(one.state == "broken" for one in found):
        sys.exit(1)


def findings_table(found: Sequence[Finding]) -> Table:
    """A row for each thing that was looked at."""
    table = Table("", "version", "tested with", "", box=box.SIMPLE_HEAD)
    for one in found:
        table.add_row(escape(one.name), escape(one.version), one.window, f"[{_STYLE[one.state]}]{one.state}[/]")
    return table
