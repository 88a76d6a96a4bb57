"""`methods`: list the methods with their needs, or print one preset in full."""

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
        say(console, methods_table())
        return
    method_entry = method(name)
    default_options = method_entry.of_a_run().options
    options_text = ", ".join(f"{option_name}: {value}" for option_name, value in default_options.items()) or "none"
    needs_text = f"Needs {', '.join(method_entry.needs)}. " if method_entry.needs else ""
    if method_entry.kind == "refinement":
        recipe_text = f"# Beside another method: refine: {name}."
    elif method_entry.preset is None:
        recipe_text = "# You can call this method from Python only: no engine provides its inputs."
    else:  # a preset needs a task, here the task digits
        scheme = scheme_of(load(None, {"method": name}), DIGITS_LAYOUT, 32)
        recipe_text = yaml.safe_dump(scheme.plain(), sort_keys=False)
        if not isinstance(scheme.per, str):
            needs_text += "In the recipe, `per` is the token limit of the example task digits. Your run uses its own limit. "
    say(
        console,
        f"# {method_entry.summary}",
        f"# {needs_text}{method_entry.paper}. The formula is taken from {_name_source(method_entry)}.",
        f"# spanwise.credit.{method_entry.estimator.__name__}; options: {options_text}.",
        recipe_text,
    )


def _name_source(entry: Method) -> str:
    """Name the source of a method's formula."""
    module_name = entry.estimator.__module__
    if module_name.partition(".")[0] == "spanwise" or entry.source != Method.source:
        return entry.source
    return f"the module {module_name}, which is not part of spanwise"


def methods_table() -> Table:
    """Build the table of all methods."""
    table_rows = []
    for entry in sorted(METHODS.values(), key=lambda entry: (entry.kind, entry.name)):
        facts = [entry.paper, f"formula from {_name_source(entry)}", f"needs {', '.join(entry.needs) or 'rewards only'}"]
        facts += ["beside another method"] if entry.kind == "refinement" else [] if entry.preset else ["from Python only"]
        table_rows.append([f"[bold]{entry.name}", f"{entry.kind}s", f"{entry.summary}\n[dim]{'; '.join(facts)}[/dim]"])
    return plain_table("method", "credits", "what it does", rows=table_rows)
