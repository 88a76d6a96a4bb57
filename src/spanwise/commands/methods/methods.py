"""`methods`: list the methods with their needs, or print one preset in full."""

from __future__ import annotations

import yaml
from rich.console import Console
from rich.table import Table

from spanwise.commands.shared.fitted import plain_table, say
from spanwise.credit import METHODS, Method, method
from spanwise.recipe import load, scheme_of
from spanwise.tasks import DIGITS_LAYOUT


def show_methods(name: str | None = None) -> None:
    """List the methods with their needs, papers and sources, or print one preset in full."""
    console = Console()
    if name is None:
        METHODS.load_plugins()
        say(console, _table())
        return
    entry = method(name)
    options = ", ".join(f"{option}: {value}" for option, value in entry.of_a_run().options.items()) or "none"
    needs = f"Needs {', '.join(entry.needs)}. " if entry.needs else ""
    if entry.kind == "refinement":
        preset = f"# Beside another method: refine: {name}."
    elif entry.preset is None:
        preset = "# Callable from Python only: no engine provides its inputs."
    else:  # with the blocks and the longest completion of the embedded task
        preset = yaml.safe_dump(scheme_of(load(None, {"method": name}), DIGITS_LAYOUT, 32).plain(), sort_keys=False)
    say(
        console,
        f"# {entry.summary}",
        f"# {needs}{entry.paper}. Taken from {_source(entry)}.",
        f"# spanwise.credit.{entry.estimator.__name__}; options: {options}.",
        preset,
    )


def _source(entry: Method) -> str:
    """Return the source of the formula: of a plug-in that names none, the module of its function."""
    module = entry.estimator.__module__
    is_ours = module.partition(".")[0] == "spanwise" or entry.source != Method.source
    return entry.source if is_ours else f"{module}, which is no part of spanwise"


def _table() -> Table:
    rows = []
    for entry in sorted(METHODS.values(), key=lambda entry: (entry.kind, entry.name)):
        facts = [entry.paper, f"from {_source(entry)}", f"needs {', '.join(entry.needs) or 'rewards only'}"]
        facts += ["beside another method"] if entry.kind == "refinement" else [] if entry.preset else ["from Python only"]
        rows.append([f"[bold]{entry.name}", f"{entry.kind}s", f"{entry.summary}\n[dim]{'; '.join(facts)}[/dim]"])
    return plain_table("method", "credits", "what it does", rows=rows)
