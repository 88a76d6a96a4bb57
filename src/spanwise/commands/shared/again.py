"""The command that each report prints: it makes what the report shows once more, in a folder beside it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

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
    for name, value in (options or {}).items():
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
