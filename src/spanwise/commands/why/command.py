"""`spanwise why` on the command line."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from spanwise.commands.shared.options import Fields, check_sizes, read_options

#: The extra of pip that brings what this command needs.
EXTRA = "report"


def command(
    rollouts: Path,
    /,
    *,
    recipe: Path | None = None,
    methods: str | None = None,
    tokenizer: Path | None = None,
    columns: list[str] | None = None,
    reward: list[str] | None = None,
    completion: int | None = None,
    examples: int = 3,
    set_: Fields = None,
) -> None:
    """Say why tokens of rollouts train with 0: masked, all right or all wrong, alone, absent, failed, ... with counts that add up.

    Reads what `spanwise credit` reads, under the same methods; writes nothing.

    Args:
        rollouts: a file, a folder of files, or the run folder they lie in.
        recipe: see `spanwise credit`.
        methods: see `spanwise credit`; default: of a run of ours its own method, else those of `spanwise credit`.
        tokenizer: see `spanwise credit`.
        columns: see `spanwise credit`.
        reward: see `spanwise credit`.
        completion: show this completion token by token, counted from 0 in the order of the file.
        examples: rows that are named for each reason.
        set_: any recipe field, as field=value (spanwise train --help lists them); may be repeated.
    """
    from spanwise.commands.shared.display import quiet
    from spanwise.commands.why.why import why as run

    quiet()
    check_sizes(examples=examples)
    options = read_options(recipe, methods, tokenizer, columns, reward, set_)
    run(rollouts, completion=completion, examples=examples, console=Console(), **options)
