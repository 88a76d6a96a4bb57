"""Run the command line `spanwise COMMAND`. Each folder in `commands` with a `command.py` is a command."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

from spanwise import commands
from spanwise.disk import refusal, unwritten
from spanwise.errors import SpanwiseError, lacking

try:
    from cyclopts import App
    from rich.console import Console
except ModuleNotFoundError as error:  # a plain `pip install spanwise` installs neither Cyclopts nor Rich
    raise SystemExit(
        f"The command line needs '{error.name}'. To train with TRL: pip install 'spanwise[train]'. To use another engine: "
        "pip install 'spanwise[cli]'. To check the installation: python -m spanwise.commands.doctor"
    ) from None

app = App(
    name="spanwise",
    help="Give every span of a completion its own credit. Without a recipe, commands run on a small embedded task.",
    result_action="return_value",
)
app.register_install_completion_command(help="Install completion of commands and options for this shell (bash, zsh, fish).")

#: Maps each command to its module, which sets `EXTRA` if it needs a pip extra other than `train`.
COMMANDS = {
    folder.name: import_module(f"{commands.__name__}.{folder.name}.command")
    for folder in iter_modules(commands.__path__)
    if find_spec(f"{commands.__name__}.{folder.name}.command")
}
for name, module in COMMANDS.items():
    app.command(module.command, name=name)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command in `words` (default: sys.argv). Print a SpanwiseError as one sentence and exit with status 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    # Print only the sentence of a warning, without the line of code that raised it.
    warnings.formatwarning = lambda message, *_: f"Warning: {message}\n"
    try:
        app(words)
    except SpanwiseError as error:
        Console(stderr=True).print(f"Error: {error}", style="red", markup=False, soft_wrap=True, highlight=False)
        sys.exit(2)
    except OSError as error:
        if refusal(error) is None:  # explain only a full or read-only disk; other errors keep their traceback
            raise
        print(f"Error: {unwritten(Path(str(error.filename or '.')), error)}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        command_name = next(iter(words or sys.argv[1:]), "")
        pip_extra = getattr(COMMANDS.get(command_name), "EXTRA", "train")
        sys.exit(f"Error: {lacking(f'spanwise {command_name}', error, extra=pip_extra)}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
