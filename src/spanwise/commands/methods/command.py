"""`spanwise methods` on the command line."""

from __future__ import annotations


def command(name: str | None = None, /) -> None:
    """List the methods with their needs and papers, or print one preset in full.

    Args:
        name: a method.
    """
    from spanwise.commands.methods.methods import show_methods

    show_methods(name)
