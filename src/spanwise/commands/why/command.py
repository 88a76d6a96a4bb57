"""Define the options of `spanwise why`."""

from pathlib import Path

from spanwise.commands.shared.options import AS_USUAL, CreditOptions, Whole, check_sizes

#: The pip extra that installs the packages of this command.
EXTRA = "report"


def command(
    rollouts: Path, /, *, how: CreditOptions = AS_USUAL, completion: Whole | None = None, examples: Whole = 3
) -> None:
    """Say why tokens have advantage 0 (masked, group all right or all wrong, missing block, timeout, ...), with counts.

    Reads the same files as `spanwise credit`, under the same methods; writes nothing.

    Args:
        rollouts: a file, a folder of files, or the run folder of such files.
        completion: show this completion token by token, counted from 0 in the order of the file.
        examples: the number of example rows for each reason.
    """
    from spanwise.commands.shared.progress import large_files_shown
    from spanwise.commands.why.why import why as run

    check_sizes(examples=examples)
    with large_files_shown() as console:
        run(rollouts, completion=completion, examples=examples, console=console, **how.parsed())
