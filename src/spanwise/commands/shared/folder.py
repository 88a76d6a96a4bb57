"""Output folders of commands: their names, their files, and the command line that repeats a command in a new folder."""

import json
import os
import shlex
from collections.abc import Collection, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from spanwise.disk import write_text
from spanwise.engines.changes import MAY_CHANGE, changes
from spanwise.errors import DataError, first_line
from spanwise.rollouts.folder import hidden, is_run

#: The folder under which runs are written if the user names no output folder.
RUNS = Path("runs")


def new_folder(name: str) -> Path:
    """Return `runs/<name>-<n>` with the smallest unused n."""
    return next(folder for n in count(1) if not (folder := RUNS / f"{name}-{n}").exists())


def newest_folder(name: str) -> Path | None:
    """Return the `runs/<name>-<n>` with the largest n; None if there is none."""
    number_by_folder = {}
    for folder in RUNS.glob("*"):
        command_name, _, number_text = folder.name.rpartition("-")
        if folder.is_dir() and command_name == name and number_text.isdecimal():
            number_by_folder[folder] = int(number_text)
    return max(number_by_folder, key=number_by_folder.__getitem__, default=None)


def check_no_run(path: str | Path) -> None:
    """Refuse an output folder that holds a training run. The run's summary and report would be overwritten."""
    if is_run(Path(path)):
        raise DataError(f"'{path}' holds a run, whose summary and report would be overwritten; give another --output.")


def write_page(folder: Path, html: str) -> Path:
    """Write `report.html` into a folder, and return its path."""
    write_text(folder / "report.html", html)
    return folder / "report.html"


#: The file of `spanwise credit`, which holds every completion with its credit.
EXPORT = "credit.parquet"
#: The file of `spanwise fidelity`, which holds its figures and options.
FIDELITY = "fidelity.json"


def read_fields(file: Path) -> dict[str, Any]:
    """Read the fields of a JSON or YAML file; raise a DataError if it cannot be read."""
    is_json = file.suffix == ".json"
    try:
        file_text = file.read_text(encoding="utf-8")
        return dict((json.loads if is_json else yaml.safe_load)(file_text) or {})
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The file '{file}' cannot be read: {error}.") from error
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        format_name = "a JSON object" if is_json else "YAML"
        raise DataError(f"The file '{file}' is not {format_name}: {first_line(error)}.") from error


#: The environment variable in which `compare` passes secrets to its runs.
SECRETS = "SPANWISE_RECIPE_SECRETS"


def secret_fields() -> dict[str, Any]:
    """Return the secret recipe fields from the environment. Remove them there, so that no child process gets them."""
    return json.loads(os.environ.pop(SECRETS, "{}"))


def changed(file: Path, asked: Mapping[str, Any], *, but: Collection[str] = MAY_CHANGE) -> list[str]:
    """List the fields in which the recipe `asked` differs from the recipe in a file."""
    return changes(read_fields(file), asked, but=but) if file.is_file() else []


def without_nan(value: Any) -> Any:
    """Return data as JSON stores it, with None for NaN."""
    return json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)


#: How many completions a report shows at most, by default.
MOST = 500


def again_command(command: str, *places: str | Path, folder: Path, options: Mapping[str, Any] | None = None) -> str:
    """Return the command line that repeats a command in a new folder."""
    command_words = [str(path) for path in places]
    for name, value in hidden(options or {}).items():
        option_name = "--set" if name == "overrides" else f"--{name.replace('_', '-')}"
        if isinstance(value, Mapping):
            for field_name, field in value.items():  # `--set` takes a value as one line of YAML
                one_line = yaml.safe_dump([field], default_flow_style=True, sort_keys=False, allow_unicode=True, width=2**31)
                command_words += [option_name, f"{field_name}={one_line.strip()[1:-1] if name == 'overrides' else field}"]
        elif isinstance(value, list):
            command_words += [option_name, ",".join(map(str, value))] if value else []
        elif value is not None and value is not False:
            command_words += [option_name] if value is True else [option_name, str(value)]
    return shlex.join(["spanwise", command, *command_words, "--output", f"{folder}-again" if folder.name else "again"])
