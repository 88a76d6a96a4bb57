"""`methods`: what there is, what each needs and rests on, and one preset in full."""

from __future__ import annotations

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from spanwise.commands.shared.fitted import Fitted
from spanwise.credit import METHODS, Method, method
from spanwise.recipe import load, scheme_of
from spanwise.tasks import DIGITS_LAYOUT


def show_methods(name: str | None = None, *, console: Console | None = None) -> None:
    """List the methods with what each needs, its paper and its source, or print one preset in full."""
    console = console or Console()
    if name is None:
        METHODS.load_plugins()
        console.print(Fitted(_table()))
        return
    chosen = method(name)
    options = _options(chosen.of_a_run())
    needs = f"Needs {', '.join(chosen.needs)}. " if chosen.needs else ""
    lines = [
        f"# {chosen.summary}",
        f"# {needs}{chosen.paper}. Taken from {chosen.source}.",
        f"# spanwise.credit.{chosen.estimator.__name__}; options: {options}.",
    ]
    if chosen.kind == "refinement":
        lines.append(f"# Beside another method: refine: {name}.")
    elif chosen.preset is None:
        lines.append("# Called from Python only: no engine here has what it needs.")
    else:
        # The embedded task's blocks, and its longest completion.
        scheme = scheme_of(load(None, {"method": name}), DIGITS_LAYOUT, 32)
        lines.append(yaml.safe_dump(scheme.plain(), sort_keys=False))
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _table() -> Table:
    table = Table("method", "credits", "what it does", box=box.SIMPLE_HEAD, show_lines=False)
    for entry in sorted(METHODS.values(), key=lambda entry: (entry.kind, entry.name)):
        facts = [
            entry.paper,
            f"from {entry.source}",
            f"needs {', '.join(entry.needs)}" if entry.needs else "needs rewards only",
        ]
        facts += ["beside another method"] if entry.kind == "refinement" else [] if entry.preset else ["from Python only"]
        table.add_row(f"[bold]{entry.name}", f"{entry.kind}s", f"{entry.summary}\n[dim]{'; '.join(facts)}[/dim]")
    return table


def _options(chosen: Method) -> str:
    return ", ".join(f"{name}: {value}" for name, value in chosen.options.items()) or "none"
