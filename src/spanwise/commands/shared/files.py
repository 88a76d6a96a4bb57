"""The files that reports are made of: readers whose errors name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from spanwise.errors import DataError

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
    except (ValueError, TypeError, yaml.YAMLError) as error:
        kind = "a JSON object" if is_json else "YAML"
        raise DataError(f"'{file}' is not {kind}: {str(error).splitlines()[0]}.") from error


def without_nan(value: Any) -> Any:
    """The same with null for NaN, which JSON does not know."""
    return json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
