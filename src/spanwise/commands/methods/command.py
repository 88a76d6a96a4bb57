"""Define the options of `spanwise methods`."""


def command(name: str | None = None, /) -> None:
    """List the methods with their needs and papers, or print one preset in full.

    Args:
        name: the method to print in full; default: list all methods.
    """
    from spanwise.commands.methods.methods import show_methods

    show_methods(name)
