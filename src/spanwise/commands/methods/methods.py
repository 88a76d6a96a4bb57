"""`methods`: list the methods with what each needs, and print one preset in full."""

from __future__ import annotations

import yaml
from rich.console import Console
from rich.table import Table

from spanwise.commands.shared.fitted import plain_table, say
from spanwise.credit import METHODS, Method, method
from spanwise.recipe import load, scheme_of
from spanwise.tasks import DIGITS_LAYOUT


def show_methods(name: str | None = None) -> None:
    """List the methods with what each needs, its paper and its source, or print one preset in full."""
    console = Console()
    if name is None:
        METHODS.load_plugins()
        say(console, _table())
        return
    chosen = method(name)
    options = ", ".join(f"{option}: {value}" for option, value in chosen.of_a_run().options.items()) or "none"
    needs = f"Needs {', '.join(chosen.needs)}. " if chosen.needs else ""
    if chosen.kind == "refinement":
        preset = f"# Beside another method: refine: {name}."
    elif chosen.preset is None:
        preset = "# Called from Python only: no engine here has what it needs."
    else:  # with the blocks and the longest completion of the embedded task
        preset = yaml.safe_dump(scheme_of(load(None, {"method": name}), DIGITS_LAYOUT, 32).plain(), sort_keys=False)
    say(
        console,
        f"# {chosen.summary}",
        f"# {needs}{chosen.paper}. Taken from {_source(chosen)}.",
        f"# spanwise.credit.{chosen.estimator.__name__}; options: {options}.",
        preset,
    )


def _source(entry: Method) -> str:
    """Return the source of the formula: of a plug-in that names none, the module of its function."""
    place = entry.estimator.__module__
    ours = place.partition(".")[0] == "spanwise" or entry.source != Method.source
    return entry.source if ours else f"{place}, which is no part of spanwise"


def _table() -> Table:
    rows = []
    for entry in sorted(METHODS.values(), key=lambda entry: (entry.kind, entry.name)):
        facts = [entry.paper, f"from {_source(entry)}", f"needs {', '.join(entry.needs) or 'rewards only'}"]
        facts += ["beside another method"] if entry.kind == "refinement" else [] if entry.preset else ["from Python only"]
        rows.append([f"[bold]{entry.name}", f"{entry.kind}s", f"{entry.summary}\n[dim]{'; '.join(facts)}[/dim]"])
    return plain_table("method", "credits", "what it does", rows=rows)
