"""The fields of one record: what stands there if it is what the format says, else a sentence that the reader places."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from spanwise.errors import DataError


class FieldError(DataError):
    """A record does not hold what its format says; whoever reads the file puts the file and the line before it."""


def whole(value: Any, key: str) -> int:
    """A whole number; 0 where there is none.

    >>> whole(None, "step"), whole(3.0, "step")
    (0, 3)
    """
    if value is None:
        return 0
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise FieldError(f"has {_shown(value)} as '{key}', which must be a whole number")
    return int(value)


def mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under a key; an empty one where there is none.

    >>> mapping({"task": None}, "task")
    {}
    """
    value = record.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise FieldError(f"has {_shown(value)} as '{key}', which must be an object")
    return value


def listed(record: Mapping[str, Any], key: str, kind: type | tuple[type, ...], words: str) -> list[Any]:
    """The list under a key, all of one kind; an empty one where there is none.

    >>> listed({"mask": [0, 1]}, "mask", int, "flags")
    [0, 1]

    Raises:
        FieldError: no list, or something else in it.
    """
    value = record.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise FieldError(f"has {_shown(value)} as '{key}', which must be a list of {words}")
    for entry in value:
        if not isinstance(entry, kind):
            raise FieldError(f"has {_shown(entry)} in '{key}', which must be a list of {words}")
    return value


def _shown(value: Any) -> str:
    return "null" if value is None else reprlib.repr(value)
