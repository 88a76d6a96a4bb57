"""Folders of the command line: where runs go, the files that reports are made of, and the command that makes a report again."""

from __future__ import annotations

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
from spanwise.errors import DataError
from spanwise.recipe import EMBEDDED, HUB, Recipe
from spanwise.rollouts.folder import hidden, is_run

#: Where runs go that name no folder.
RUNS = Path("runs")


def new_folder(name: str) -> Path:
    """`runs/<name>-<n>` with the smallest n that is not there yet."""
    return next(place for n in count(1) if not (place := RUNS / f"{name}-{n}").exists())


def newest_folder(name: str) -> Path | None:
    """The `runs/<name>-<n>` of the largest n; None if there is none."""
    suffixes = {place: place.name.removeprefix(f"{name}-") for place in RUNS.glob("*") if place.name.startswith(f"{name}-")}
    numbered = [place for place, number in suffixes.items() if number.isdecimal() and place.is_dir()]
    return max(numbered, key=lambda place: int(suffixes[place]), default=None)


def check_no_run(path: str | Path) -> None:
    """Refuse the folder of a run to what would write its own `summary.json` or `report.html` over that of the run."""
    if is_run(Path(path)):
        raise DataError(f"'{path}' holds a run, whose summary and report would be written over; give another --output.")


def write_page(folder: Path, html: str) -> Path:
    """Write `report.html` into a folder; where it lies."""
    target = folder / "report.html"
    write_text(target, html)
    return target


#: The file of `spanwise credit`.
EXPORT = "credit.parquet"
FIDELITY = "fidelity.json"


def read_fields(file: Path) -> dict[str, Any]:
    """Read the fields of a JSON or YAML file; a DataError if it cannot be read."""
    is_json = file.suffix == ".json"
    try:
        text = file.read_text(encoding="utf-8")
        return dict((json.loads if is_json else yaml.safe_load)(text) or {})
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{file}' cannot be read: {error}.") from error
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        kind = "a JSON object" if is_json else "YAML"
        raise DataError(f"'{file}' is not {kind}: {str(error).splitlines()[0]}.") from error


#: The variable by which a comparison hands a run the fields that hold secrets, which its recipe file does not.
SECRETS = "SPANWISE_RECIPE_SECRETS"


def secret_fields() -> dict[str, Any]:
    """Take the fields that hold secrets out of the environment, which other processes inherit."""
    return json.loads(os.environ.pop(SECRETS, "{}"))


def changed(written: Path | Mapping[str, Any], asked: Mapping[str, Any], *, but: Collection[str] = MAY_CHANGE) -> list[str]:
    """What a recipe, or its file, says otherwise than it is asked for now, but for some fields; nothing if there is no file."""
    if isinstance(written, Path):
        if not written.is_file():
            return []
        written = read_fields(written)
    plain = {name: field.get_default(call_default_factory=True) for name, field in Recipe.model_fields.items()}
    return changes({**plain, **({} if written.get("task", EMBEDDED[0]) in EMBEDDED else HUB), **written}, asked, but=but)


def without_nan(value: Any) -> Any:
    """The same with null for NaN, which JSON does not know."""
    return json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)


#: Most completions in a token view, if nothing else is asked for.
MOST = 500


def again_command(command: str, *places: str | Path, folder: Path, options: Mapping[str, Any] | None = None) -> str:
    """A command of ours on some files with options as they were asked for: what is None, False or empty was not given.

    Example:
        >>> options = {"methods": ["bae"], "reward": {"correct": "acc"}, "overrides": {"prefilled": None}}
        >>> again_command("credit", "1.jsonl", folder=Path("runs/credit"), options=options)
        'spanwise credit 1.jsonl --methods bae --reward correct=acc --set prefilled=null --output runs/credit-again'
    """
    words = [str(place) for place in places]
    for name, value in hidden(options or {}).items():
        option = "--set" if name == "overrides" else f"--{name.replace('_', '-')}"
        if isinstance(value, Mapping):
            pairs = {key: _yaml(field) if name == "overrides" else field for key, field in value.items()}
            words += [word for key, field in pairs.items() for word in (option, f"{key}={field}")]
        elif isinstance(value, list):
            words += [option, ",".join(map(str, value))] if value else []
        elif value is not None and value is not False:
            words += [option] if value is True else [option, str(value)]
    return shlex.join(["spanwise", command, *words, "--output", f"{folder}-again" if folder.name else "again"])


def _yaml(value: Any) -> str:
    """A value in one line that `--set` reads back as the same."""
    return yaml.safe_dump([value], default_flow_style=True, sort_keys=False, allow_unicode=True, width=2**31).strip()[1:-1]
