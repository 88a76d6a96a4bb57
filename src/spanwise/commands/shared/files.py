"""The files that reports are made of: readers whose errors name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from spanwise.errors import DataError

FIDELITY = "fidelity.json"


def read_yaml(file: Path) -> dict[str, Any]:
    """Read a YAML file of fields; a DataError if it cannot be read."""
    try:
        recipe = yaml.safe_load(read_text(file))
    except yaml.YAMLError as error:
        raise DataError(f"'{file}' is not YAML: {str(error).splitlines()[0]}.") from error
    return recipe if isinstance(recipe, dict) else {}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a DataError if it cannot be read."""
    try:
        return dict(json.loads(read_text(path)))
    except (ValueError, TypeError) as error:
        raise DataError(f"'{path}' is not a JSON object: {error}.") from error


def read_text(path: Path) -> str:
    """Read a text file; a DataError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{path}' cannot be read: {error}.") from error


def without_nan(value: Any) -> Any:
    """The same with null for NaN, which JSON does not know."""
    if isinstance(value, dict):
        return {key: without_nan(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and value != value else value
